"""The resources that the router reads, as far as it reads them.

Pod: Kubernetes core/v1. InferencePool: inference.networking.k8s.io/v1, of the Gateway API Inference Extension (api/v1/
inferencepool_types.go, release 1.5). InferenceObjective and InferenceModelRewrite: v1alpha2 of llm-d.ai (llm-d-router,
config/crd/bases) and, before they moved there, of inference.networking.x-k8s.io, with the same fields.
"""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec

_Name = Annotated[str, msgspec.Meta(min_length=1, max_length=253)]
_PortNumber = Annotated[int, msgspec.Meta(ge=1, le=65_535)]
_Weight = Annotated[int, msgspec.Meta(ge=1, le=1_000_000)]
_Priority = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]


class _Camel(msgspec.Struct, rename="camel", frozen=True):
    """Fields are written in camelCase; those that are not listed are not read."""


class Metadata(_Camel, frozen=True):
    """What every object has. Times are RFC 3339 in UTC, which sort as text."""

    name: _Name
    namespace: str = ""
    uid: str = ""
    labels: dict[str, str] | None = None
    annotations: dict[str, str] | None = None
    creation_timestamp: str | None = None
    deletion_timestamp: str | None = None


class Condition(_Camel, frozen=True):
    """One of an object's conditions; status is "True", "False" or "Unknown"."""

    type: str
    status: str


class PodStatus(_Camel, frozen=True):
    """pod_ip: None until the pod has one. IPv6 has no brackets."""

    pod_ip: str | None = msgspec.field(default=None, name="podIP")
    conditions: list[Condition] | None = None


class Pod(_Camel, frozen=True):
    """A pod."""

    metadata: Metadata
    status: PodStatus = PodStatus()

    @property
    def is_leaving(self) -> bool:
        """Whether it was told to stop."""
        return self.metadata.deletion_timestamp is not None

    @property
    def is_ready(self) -> bool:
        """Whether its readiness probes succeed."""
        return any(c.type == "Ready" and c.status == "True" for c in self.status.conditions or ())


class LabelSelector(_Camel, frozen=True):
    """All of the labels."""

    match_labels: dict[str, str] = {}

    @property
    def query(self) -> str:
        """The selector as the API takes it."""
        return ",".join(f"{name}={value}" for name, value in sorted(self.match_labels.items()))


class Port(_Camel, frozen=True):
    """A port."""

    number: _PortNumber


class PoolSpec(_Camel, frozen=True):
    """Each pod that the selector finds serves at each of the ports: the ranks of a data-parallel engine."""

    selector: LabelSelector
    target_ports: Annotated[list[Port], msgspec.Meta(min_length=1, max_length=8)]
    app_protocol: str = "http"


class InferencePool(_Camel, frozen=True):
    """A fleet, as gateways see it."""

    metadata: Metadata
    spec: PoolSpec


class PoolRef(_Camel, frozen=True):
    """The pool that a resource is about, in its own namespace."""

    name: _Name
    group: str = "inference.networking.k8s.io"
    kind: str = "InferencePool"


class ObjectiveSpec(_Camel, frozen=True):
    """priority: higher is more important; below 0 is shed when the pool is saturated. None means 0."""

    pool_ref: PoolRef
    priority: _Priority | None = None


class InferenceObjective(_Camel, frozen=True):
    """How important some requests are, which name it in a header."""

    metadata: Metadata
    spec: ObjectiveSpec


class ModelMatch(_Camel, frozen=True):
    """The body's `model`."""

    value: Annotated[str, msgspec.Meta(min_length=1)]
    type: Literal["Exact"] = "Exact"


class RewriteMatch(_Camel, frozen=True):
    """What a rule is about."""

    model: ModelMatch


class RewriteTarget(_Camel, frozen=True):
    """A model name for the replica, and its share."""

    model_rewrite: Annotated[str, msgspec.Meta(min_length=1)]
    weight: _Weight | None = None


class RewriteRule(_Camel, frozen=True):
    """One of the matches suffices; without any, every model matches."""

    targets: Annotated[list[RewriteTarget], msgspec.Meta(min_length=1)]
    matches: list[RewriteMatch] = []


class RewriteSpec(_Camel, frozen=True):
    """Rules for requests to one pool."""

    pool_ref: PoolRef
    rules: list[RewriteRule]


class InferenceModelRewrite(_Camel, frozen=True):
    """Model names that become others on their way to a replica."""

    metadata: Metadata
    spec: RewriteSpec

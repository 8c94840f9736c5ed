"""The Ray Serve application: engines behind prefix routing, and OpenAI's API in front of them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.config import RequestRouterConfig

from anaphora.integrations.ray_serve.engine import DEFAULT_MAX_RUNNING, EngineReplica
from anaphora.integrations.ray_serve.ingress import OpenAIIngress
from anaphora.integrations.ray_serve.router import DEFAULT_MODEL, PrefixRouter

if TYPE_CHECKING:
    from collections.abc import Mapping

    from ray.serve import Application

    from anaphora.engine.build import EngineOptions

_INGRESS_ONGOING = 1000
_QUEUE_DEPTH = 4
"""Calls on a replica for each that its engine runs: its own queue knows prefixes, Ray's does not."""


def openai_app(
    model: str | None = None,
    *,
    engine: EngineOptions | None = None,
    num_replicas: int = 2,
    num_ingress_replicas: int = 1,
    publishes: bool = True,
    router: Mapping[str, Any] | None = None,
    replica_options: Mapping[str, Any] | None = None,
    ingress_options: Mapping[str, Any] | None = None,
) -> Application:
    """Return an application for `serve.run`.

    model: path or hub name, which every node can read; None for the default model. engine: options of `build_engine`.
    num_ingress_replicas: each routes by itself, and knows of all replicas what their events tell.
    publishes: whether engines publish KV events. router: `PrefixRouter.initialize_state`'s arguments; exact tokens of
    `model` unless said otherwise. replica_options, ingress_options: of Ray's deployments (`num_cpus` goes into
    "ray_actor_options", `autoscaling_config` replaces num_replicas).
    """
    max_running = (engine or {}).get("max_num_seqs", DEFAULT_MAX_RUNNING)
    engines = serve.deployment(
        EngineReplica,
        name="engines",
        max_ongoing_requests=max_running * _QUEUE_DEPTH,
        request_router_config=RequestRouterConfig(
            request_router_class=PrefixRouter,
            request_router_kwargs={"model": model or DEFAULT_MODEL, **(router or {})},
        ),
    ).options(**{"num_replicas": num_replicas, **_scaled(replica_options)})
    ingress = serve.deployment(
        OpenAIIngress, name="openai", max_ongoing_requests=_INGRESS_ONGOING, ray_actor_options={"num_cpus": 0}
    ).options(**{"num_replicas": num_ingress_replicas, **_scaled(ingress_options)})
    return ingress.bind(engines.bind(model, engine, publishes=publishes))


def build_app(args: dict[str, Any]) -> Application:
    """Return the application for `serve run anaphora.integrations.ray_serve:build_app NAME=VALUE ...`.

    args: model, num_replicas, num_ingress_replicas, executor, kv_memory_bytes, max_num_seqs; all optional. From a
    configuration file of Serve, values may be of their own types.

    Raises ValueError for other names.
    """
    numbers = {"num_replicas", "num_ingress_replicas", "kv_memory_bytes", "max_num_seqs"}
    texts = {"model", "executor"}
    if unknown := args.keys() - numbers - texts:
        raise ValueError(f"unknown arguments {sorted(unknown)}; allowed are {sorted(numbers | texts)}")
    values: dict[str, Any] = {}
    for name, value in args.items():
        try:
            values[name] = int(value) if name in numbers else str(value)
        except (ValueError, TypeError):
            raise ValueError(f"{name}: expected a whole number, got {value!r}") from None
    own = {"executor", "kv_memory_bytes", "max_num_seqs"}
    engine: Any = {name: value for name, value in values.items() if name in own}
    rest = {name: value for name, value in values.items() if name not in own}
    return openai_app(rest.pop("model", None), engine=engine, **rest)


def _scaled(options: Mapping[str, Any] | None) -> dict[str, Any]:
    given = dict(options or {})
    return {"num_replicas": None, **given} if "autoscaling_config" in given else given

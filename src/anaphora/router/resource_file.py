"""InferenceObjective and InferenceModelRewrite from a file, for those who run no Kubernetes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec
import yaml

from anaphora.router.resources import InferenceModelRewrite, InferenceObjective

if TYPE_CHECKING:
    from pathlib import Path

OBJECTIVE_GROUPS = ("llm-d.ai", "inference.networking.x-k8s.io")
"""The API groups that define both kinds, the present one first."""
_VERSION = "v1alpha2"
_KINDS = {"InferenceObjective": InferenceObjective, "InferenceModelRewrite": InferenceModelRewrite}


class ResourceError(ValueError):
    """A file that cannot be used; the message begins with the document and the path of the field at fault."""


@dataclass(frozen=True, slots=True)
class Resources:
    """What a file holds, in its order."""

    objectives: tuple[InferenceObjective, ...] = ()
    rewrites: tuple[InferenceModelRewrite, ...] = ()


def read_resources(path: Path, pool: str | None = None) -> Resources:
    """Read a file of YAML documents; see `parse_resources`. Raises OSError, ResourceError."""
    try:
        return parse_resources(path.read_text(encoding="utf-8"), pool)
    except UnicodeDecodeError as error:
        raise ResourceError(f"not UTF-8: {error}") from None


def parse_resources(text: str, pool: str | None = None) -> Resources:
    """Read YAML documents, each an InferenceObjective or InferenceModelRewrite. Unknown fields are refused.

    pool: those for other pools are left out; None takes all.

    Raises ResourceError.
    """
    try:
        documents = list(yaml.safe_load_all(text))
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise ResourceError(f"not valid YAML: {' '.join(str(error).split())}") from None
    objectives: list[InferenceObjective] = []
    rewrites: list[InferenceModelRewrite] = []
    for number, document in enumerate(documents, 1):
        if document is None:
            continue
        resource = _read(document, f"document {number}")
        if pool is not None and resource.spec.pool_ref.name != pool:
            continue
        if isinstance(resource, InferenceObjective):
            objectives.append(resource)
        else:
            rewrites.append(resource)
    return Resources(tuple(objectives), tuple(rewrites))


def _read(document: Any, where: str) -> InferenceObjective | InferenceModelRewrite:
    if not isinstance(document, dict):
        raise ResourceError(f"{where}: expected an object with apiVersion, kind, metadata and spec")
    kind, version = document.get("kind"), document.get("apiVersion")
    versions = [f"{group}/{_VERSION}" for group in OBJECTIVE_GROUPS]
    if kind not in _KINDS:
        raise ResourceError(f"{where}: kind: expected {' or '.join(_KINDS)}, got {kind!r}")
    if version not in versions:
        raise ResourceError(f"{where}: apiVersion: expected {' or '.join(versions)}, got {version!r}")
    # YAML reads a time as one; the API has texts.
    plain = msgspec.to_builtins(document)
    try:
        resource: InferenceObjective | InferenceModelRewrite = msgspec.convert(plain, _KINDS[kind])
    except msgspec.ValidationError as error:
        message, _, path = str(error).partition(" - at `$")
        field = path.rstrip("`").removeprefix(".")
        raise ResourceError(f"{where}: {field + ': ' if field else ''}{message[:1].lower()}{message[1:]}") from None
    unknown = _unknown_field(plain["spec"], msgspec.to_builtins(resource.spec), "spec")
    if unknown is not None:
        raise ResourceError(f"{where}: {unknown}: no such field")
    return resource


def _unknown_field(given: Any, read: Any, path: str) -> str | None:
    """The path of the first field that was given and is no field of what was read, None if all are."""
    if isinstance(given, dict) and isinstance(read, dict):
        for name, value in given.items():
            inner = f"{path}.{name}"
            unknown = inner if name not in read else _unknown_field(value, read[name], inner)
            if unknown is not None:
                return unknown
    elif isinstance(given, list) and isinstance(read, list):
        for i, (value, kept) in enumerate(zip(given, read, strict=True)):
            unknown = _unknown_field(value, kept, f"{path}[{i}]")
            if unknown is not None:
                return unknown
    return None

"""Where a prefix may be shared: everything about a prompt, besides its content, that changes its keys and values."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter. Identity is the `digest` of its weights; `name`, `path` and `lora_id` are for people and for
    vLLM's keys and events.

    Two adapters with one name and different digests never share; one adapter under two names does.
    """

    digest: str
    name: str = field(default="", compare=False)
    path: str = field(default="", compare=False)
    lora_id: int | None = field(default=None, compare=False)

    def __post_init__(self) -> None:
        for name in ("digest", "name", "path"):
            _require(f"adapter.{name}", getattr(self, name), str)
        if self.lora_id is not None:
            _require("adapter.lora_id", self.lora_id, int)
        if not self.digest:
            raise ValueError("adapter.digest: expected a non-empty string that names the adapter's weights")


@dataclass(frozen=True, slots=True)
class Namespace:
    """Where a prefix may be shared: the same model, adapter, salt, weights' generation and KV layout.

    Fields are kept apart by construction, never joined as strings, so no choice of one field can imitate another.

    model: names weights and their revision. An engine that holds one model may leave it empty.
    salt: separates tenants; prefixes under different salts never match. None shares with all who have none. It is
        left out of the `repr`, so it does not reach logs.
    generation: counts weight updates of a running engine; blocks of an older one are never matched again.
    kv_layout: names dtype, layout and kernel path of the KV, where blocks leave the process that computed them.
    """

    model: str = ""
    adapter: Adapter | None = None
    salt: str | None = field(default=None, repr=False)
    generation: int = 0
    kv_layout: str = ""
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        _require("model", self.model, str)
        _require("kv_layout", self.kv_layout, str)
        _require("generation", self.generation, int)
        if self.adapter is not None:
            _require("adapter", self.adapter, Adapter)
        if self.salt is not None and not isinstance(self.salt, str):
            raise TypeError(f"salt: expected a string or None, got {type(self.salt).__name__}")
        if self.salt == "":
            raise ValueError("salt: expected a non-empty string, or None for no salt")
        object.__setattr__(self, "_hash", hash(self._fields()))

    def _fields(self) -> tuple[str, Adapter | None, str | None, int, str]:
        return (self.model, self.adapter, self.salt, self.generation, self.kv_layout)

    def __hash__(self) -> int:
        return self._hash

    def __reduce__(self) -> tuple[type[Namespace], tuple[object, ...]]:
        # The cached hash must not travel: another process hashes strings differently.
        return (Namespace, self._fields())


def _require(name: str, value: object, kind: type) -> None:
    if not isinstance(value, kind):
        raise TypeError(f"{name}: expected {_KINDS[kind]}, got {type(value).__name__}")


_KINDS = {str: "a string", int: "an integer", Adapter: "an Adapter"}

DEFAULT_NAMESPACE = Namespace()

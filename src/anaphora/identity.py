"""What makes two prefixes equal: everything that changes their keys and values.

Two prompts share KV only if their `Namespace`s are equal and their tokens are. Fields are kept apart by construction,
never joined as strings, so no choice of one field can imitate another.
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Adapter:
    """A LoRA adapter. Identity is the `digest` of its weights; `name` and `path` are for people and for vLLM's keys.

    Two adapters with one name and different digests never share; one adapter under two names does.
    """

    digest: str
    name: str = field(default="", compare=False)
    path: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not self.digest:
            raise ValueError("adapter.digest: expected a non-empty string that names the adapter's weights")


@dataclass(frozen=True, slots=True)
class Namespace:
    """Where a prefix may be shared: the same model, adapter, salt and weights' generation.

    model: names weights, revision and KV layout. An engine that holds one model may leave it empty.
    salt: separates tenants; prefixes under different salts never match. None shares with all who have none.
    generation: counts weight updates of a running engine; blocks of an older one are never matched again.
    """

    model: str = ""
    adapter: Adapter | None = None
    salt: str | None = None
    generation: int = 0
    _hash: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if self.salt is not None and not isinstance(self.salt, str):
            raise TypeError(f"salt: expected a string or None, got {type(self.salt).__name__}")
        if self.salt == "":
            raise ValueError("salt: expected a non-empty string, or None for no salt")
        object.__setattr__(self, "_hash", hash((self.model, self.adapter, self.salt, self.generation)))

    def __hash__(self) -> int:
        return self._hash


DEFAULT_NAMESPACE = Namespace()

"""What makes two prefixes equal: everything that changes their keys and values.

Two prompts share KV only if their `Namespace`s are equal and their tokens are. Fields are kept apart by construction,
never joined as strings, so no choice of one field can imitate another.
"""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field
from hashlib import blake2b

DIGEST_BYTES = 32
MIN_KEY_BYTES, MAX_KEY_BYTES = 16, 64


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


class BlockDigests:
    """Names for blocks: a chained, keyed digest over everything that makes their prefix what it is.

    A digest is a name, never proof; whoever serves a block by its name verifies what it holds. With a `key` (16 to 64
    secret bytes, shared by those who exchange blocks) nobody else can compute a block's name; without one each
    instance draws its own, so names mean nothing outside this process.

    Cost: about 0.5 us a block.
    """

    def __init__(self, key: bytes | None = None) -> None:
        if key is not None and not MIN_KEY_BYTES <= len(key) <= MAX_KEY_BYTES:
            raise ValueError(f"key: expected {MIN_KEY_BYTES} to {MAX_KEY_BYTES} bytes, got {len(key)}")
        self._key = secrets.token_bytes(32) if key is None else key

    def root(self, namespace: Namespace) -> bytes:
        """Return the digest that stands before a namespace's first block."""
        adapter = namespace.adapter.digest if namespace.adapter else None
        fields = (namespace.model, adapter, namespace.salt, str(namespace.generation))
        return self._digest(b"".join(_framed(value) for value in fields), b"namespace")

    def block(self, parent: bytes, tokens: bytes) -> bytes:
        """Return the digest of a full block (packed tokens, in the machine's byte order) that follows `parent`."""
        return self._digest(parent + tokens, b"block")

    def _digest(self, content: bytes, domain: bytes) -> bytes:
        return blake2b(content, digest_size=DIGEST_BYTES, key=self._key, person=domain).digest()


def _framed(value: str | None) -> bytes:
    """Encode a field so that no sequence of fields reads like another: a tag for None, or a tag and the length."""
    if value is None:
        return b"\0"
    encoded = value.encode("utf-8", "surrogatepass")
    return b"\1" + len(encoded).to_bytes(8, "little") + encoded

"""Decoder: one msgpack type, read from bytes that nobody vouches for."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")

MAX_PAYLOAD_BYTES = 16 * 2**20
"""Longest message that is read: over three million token ids, far more than one engine step computes."""

MAX_DIGEST_BYTES = 64


class WireError(ValueError):
    """A message that cannot be read. Says what is wrong, and where in the message."""


class Decoder(Generic[T]):
    """Reads one type. Lengths that a message merely claims cost no memory, and fields that the type does not know are
    skipped without making objects of them."""

    def __init__(self, kind: Any) -> None:
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(kind)

    def decode(self, data: bytes | memoryview, where: str) -> T:
        """Return what `data` holds. Raises WireError, which begins with `where`, whatever the bytes are."""
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise WireError(f"{where}: {error}") from None
        except RecursionError:
            raise WireError(f"{where}: nested too deeply") from None


def require_size(payload: bytes, max_bytes: int) -> None:
    """Raise WireError for a message of more than `max_bytes`."""
    if len(payload) > max_bytes:
        raise WireError(f"payload: expected at most {max_bytes} bytes, got {len(payload)}")

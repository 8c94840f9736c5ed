"""Frames: the parts of one published message, as vLLM's and SGLang's sockets carry them."""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from anaphora.wire.decoder import WireError

if TYPE_CHECKING:
    from collections.abc import Sequence

SEQUENCE_BYTES = 8
_END_OF_REPLAY = 2**64 - 1


class EndpointError(ValueError):
    """An endpoint cannot be used; the message is one line that says why."""


class Frames(NamedTuple):
    """A batch of events on its way: topic, sequence number (from 0, one more for each batch), encoded batch."""

    topic: str
    sequence: int
    payload: bytes

    @property
    def is_end_of_replay(self) -> bool:
        """Whether this is the marker after the last replayed batch, and no batch."""
        return self.sequence == _END_OF_REPLAY and not self.payload

    def parts(self) -> list[bytes]:
        """Return the message parts: topic in UTF-8, 8 bytes of sequence number (big-endian), payload."""
        return [self.topic.encode(), self.sequence.to_bytes(SEQUENCE_BYTES, "big"), self.payload]

    @classmethod
    def from_parts(cls, parts: Sequence[bytes]) -> Frames:
        """Read the parts of a live message, or of a replayed one, which may lack the topic and may begin with the empty
        part that a DEALER socket sees. Raises WireError for anything else."""
        head = list(parts)
        if len(head) == 4 and not head[0]:
            del head[0]
        if len(head) == 2:
            head.insert(0, b"")
        if len(head) != 3:
            raise WireError(f"frames: expected topic, sequence and payload, or the last two, got {len(parts)} parts")
        topic, sequence, payload = head
        if len(sequence) != SEQUENCE_BYTES:
            raise WireError(f"frames: expected a sequence number of {SEQUENCE_BYTES} bytes, got {len(sequence)}")
        try:
            name = topic.decode()
        except UnicodeDecodeError as error:
            raise WireError(f"frames: the topic is no UTF-8: {error.reason} at byte {error.start}") from None
        return cls(name, int.from_bytes(sequence, "big"), payload)


END_OF_REPLAY = Frames("", _END_OF_REPLAY, b"")
"""The marker after the last replayed batch."""

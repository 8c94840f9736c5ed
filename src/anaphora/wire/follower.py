"""EventFollower: the index of one publisher, rebuilt from its batches, through losses and restarts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from anaphora.cache.events import AllBlocksCleared, BlockStored, Event
from anaphora.wire.anaphora_codec import EventBatch
from anaphora.wire.sequence import Apply, AskReplay, Restarted
from anaphora.wire.vllm_codec import events_of
from anaphora.wire.vllm_messages import decode_batch

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from anaphora.wire.sequence import Action


class EventSink(Protocol):
    """What keeps the picture: `anaphora.cache.events.Mirror`, `FindableNames`, or a router's index."""

    def apply(self, events: Iterable[Event]) -> None:
        """Follow events in order. A ValueError says that they do not fit the picture, which is given up then."""


class FindableNames:
    """An EventSink for indexes that keep each name once, like Anaphora's radix index, and for publishers that repeat
    what was found (`kv_cache_report_mode` full). The removal of a name that is not there is ignored, so it can follow a
    `partial` EventFollower."""

    def __init__(self) -> None:
        self.blocks: set[tuple[bytes, int, str]] = set()

    def apply(self, events: Iterable[Event]) -> None:
        """Follow events in order."""
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.blocks.clear()
                continue
            keys = [(digest, event.group, event.medium) for digest in event.digests]
            if isinstance(event, BlockStored):
                self.blocks.update(keys)
            else:
                self.blocks.difference_update(keys)


def decode_vllm(payload: bytes) -> EventBatch:
    """Read a batch in vLLM's form, for `EventFollower`."""
    batch = decode_batch(payload)
    return EventBatch(batch.ts, events_of(batch))


class EventFollower:
    """Does what an `EventSequence` says: applies one publisher's batches to a sink, and knows whether they are all.

    `is_whole` is the promise. While it is true, and the sequence asks for nothing (`EventSubscriber.is_settled`), the
    sink holds exactly what the publisher's index held at the last batch that was applied. It becomes false when a batch
    is lost, cannot be read or does not fit; and true again when the publisher begins anew, or clears its cache.

    sink: is given events, and AllBlocksCleared whenever the picture is given up.
    decode: reads a payload: `decode_vllm`, or `AnaphoraCodec(key).decode`. Raises WireError.
    partial: also apply what comes while the picture is not whole. Then the sink holds a part of what the index holds,
        and never more; it must ignore removals of what it does not hold.
    """

    def __init__(
        self, sink: EventSink, decode: Callable[[bytes], EventBatch] = decode_vllm, *, partial: bool = False
    ) -> None:
        self._sink = sink
        self._decode = decode
        self._partial = partial
        self.is_whole = True
        self.num_faults = 0
        """Batches that could not be read, or did not fit."""

    def take(self, actions: Iterable[Action]) -> None:
        """Follow what one sequence said, in its order."""
        for action in actions:
            if isinstance(action, Apply):
                self._follow(action.payload)
            elif not isinstance(action, AskReplay):
                self._clear(is_whole=isinstance(action, Restarted))

    def _follow(self, payload: bytes) -> None:
        try:
            events: Sequence[Event] = self._decode(payload).events
            clears = [i for i, event in enumerate(events) if isinstance(event, AllBlocksCleared)]
            if clears and not self.is_whole:
                events, self.is_whole = events[clears[-1] :], True
            if self.is_whole or self._partial:
                self._sink.apply(events)
        except ValueError:  # WireError is one
            self.num_faults += 1
            self._clear(is_whole=False)

    def _clear(self, *, is_whole: bool) -> None:
        self.is_whole = is_whole
        self._sink.apply([AllBlocksCleared()])

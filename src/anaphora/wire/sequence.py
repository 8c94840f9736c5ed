"""EventSequence: one publisher's batches in their order, each of them once, whatever the network did to them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from anaphora.wire.frames import Frames

_MAX_PENDING = 20_000
_NUM_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class Apply:
    """This batch is the next one."""

    payload: bytes


@dataclass(frozen=True, slots=True)
class AskReplay:
    """Batches are missing: ask the publisher for those from `first` on."""

    first: int


@dataclass(frozen=True, slots=True)
class Restarted:
    """The publisher began anew, with an empty cache; what was known of it is void."""


@dataclass(frozen=True, slots=True)
class Lost:
    """Batches are missing for good: what was known may be gone, and what comes may be a part."""


Action: TypeAlias = Apply | AskReplay | Restarted | Lost


class EventSequence:
    """Takes frames as they come, live and replayed, and says what to do.

    While a replay is asked for, live batches wait, so that nothing old is applied after something new. A live number
    that was seen with the same payload is a duplicate; with another one, or further back than is remembered, it is
    the publisher's restart. After a lost connection the last batch is asked for again: if the publisher has another one
    under that number, or none, it is a new publisher, even where its numbers seem to go on.
    """

    def __init__(self, *, max_pending: int = _MAX_PENDING) -> None:
        self._max_pending = max_pending
        self._last = -1
        self._pending: dict[int, bytes] = {}
        self._seen: OrderedDict[int, int] = OrderedDict()
        self._is_asking = False
        self._is_verifying = False

    def start(self) -> list[Action]:
        """Begin, or begin anew: all that the publisher still has is asked for."""
        self._last = -1
        self._pending.clear()
        self._seen.clear()
        self._is_asking = True
        self._is_verifying = False
        return [AskReplay(0)]

    def reconnected(self) -> list[Action]:
        """The connection was lost and is there again: perhaps to another process."""
        if self._last < 0:
            return self.start()
        self._is_asking = self._is_verifying = True
        return [AskReplay(self._last)]

    def live(self, frames: Frames) -> list[Action]:
        """A batch came over the publisher's socket."""
        actions: list[Action] = []
        number, payload = frames.sequence, frames.payload
        if number <= self._last and self._seen.get(number) == hash(payload):
            return []
        if number <= self._last or self._pending.get(number) not in {None, payload}:
            self.start()
            self._is_asking = False
            actions.append(Restarted())
        if number == self._last + 1 and not self._is_asking:
            return [*actions, self._apply(number, payload), *self._drain()]
        self._pending[number] = payload
        if len(self._pending) > self._max_pending:
            return [*actions, *self.end_replay()]
        if not self._is_asking:
            self._is_asking = True
            actions.append(AskReplay(self._last + 1))
        return actions

    def replayed(self, frames: Frames) -> list[Action]:
        """A batch, or the end, came in answer to the last AskReplay; answers to earlier ones must not come here."""
        if not self._is_asking:
            return []  # of a replay that was given up
        if frames.is_end_of_replay:
            return self._restart() if self._is_verifying else self.end_replay()
        if self._is_verifying and frames.sequence >= self._last:
            if frames.sequence > self._last or self._seen.get(self._last) != hash(frames.payload):
                return self._restart()
            self._is_verifying = False
            return []
        if frames.sequence == self._last + 1:
            return [self._apply(frames.sequence, frames.payload)]
        if frames.sequence > self._last and len(self._pending) < self._max_pending:
            self._pending.setdefault(frames.sequence, frames.payload)
        return []

    def end_replay(self) -> list[Action]:
        """The replay is complete, or will not come."""
        self._is_asking = False
        actions: list[Action] = [Lost()] if self._is_verifying else []
        self._is_verifying = False
        actions += self._drain()
        while self._pending:
            actions.append(Lost())
            self._last = min(self._pending) - 1
            actions += self._drain()
        return actions

    def _restart(self) -> list[Action]:
        pending = self._pending.copy()
        asked = self.start()
        self._pending = pending
        return [Restarted(), *asked]

    def _apply(self, number: int, payload: bytes) -> Apply:
        self._last = number
        self._seen[number] = hash(payload)
        if len(self._seen) > _NUM_REMEMBERED:
            self._seen.popitem(last=False)
        return Apply(payload)

    def _drain(self) -> list[Action]:
        for number in [number for number in self._pending if number <= self._last]:
            del self._pending[number]
        actions: list[Action] = []
        while (payload := self._pending.pop(self._last + 1, None)) is not None:
            actions.append(self._apply(self._last + 1, payload))
        return actions

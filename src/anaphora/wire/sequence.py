"""EventSequence: one publisher's batches in their order, each of them once, whatever the network did to them."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b
from typing import TYPE_CHECKING, TypeAlias

if TYPE_CHECKING:
    from anaphora.wire.frames import Frames

MAX_PENDING = 20_000
NUM_REMEMBERED = 20_000


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

    While a replay is asked for, live batches wait, so that nothing old is applied after something new. A number that
    was seen with the same payload is a duplicate; with another one it is the publisher's restart. Every replay begins
    with the last batch that is known: if the publisher has another one under that number, or none, it is a new
    publisher, even where its numbers seem to go on; if it does not have it any more, nobody can tell, and all is lost.

    A batch is known again by a digest of its payload, which holds the time; the last NUM_REMEMBERED are kept.
    """

    def __init__(self, *, max_pending: int = MAX_PENDING) -> None:
        self._max_pending = max_pending
        self._next: int | None = 0
        """The number that comes next; None if that is any."""
        self._seen: OrderedDict[int, bytes] = OrderedDict()
        self._is_asking = False
        self._answer: list[Frames] = []
        self._superseded: list[Frames] = []
        """Came before the replay was asked for, which therefore has them all."""
        self._pending: list[Frames] = []

    @property
    def is_asking(self) -> bool:
        """Whether something is missing that may still come."""
        return self._is_asking

    @property
    def last(self) -> int | None:
        """The number of the last batch that was applied, None if there is none."""
        return self._next - 1 if self._next else None

    def start(self) -> list[Action]:
        """Begin, or begin anew: all that the publisher still has is asked for."""
        self._next = 0
        self._seen.clear()
        self._superseded.clear()
        self._pending.clear()
        return self._ask()

    def reconnected(self) -> list[Action]:
        """The connection was lost and is there again, perhaps to another process; or it was silent for long, and its
        last batches may be missing."""
        self._superseded.clear()
        self._pending.clear()
        return self._ask()

    def asked(self) -> None:
        """The replay goes out only now: what came meanwhile is in it as well."""
        self._superseded += self._pending
        self._pending.clear()

    def live(self, frames: Frames) -> list[Action]:
        """A batch came over the publisher's socket."""
        if self._is_asking:
            self._pending.append(frames)
            del self._pending[: -self._max_pending]
            return []
        return self._take(frames)

    def replayed(self, frames: Frames) -> list[Action]:
        """A batch, or the end, came in answer to the last AskReplay; answers to earlier ones must not come here."""
        if not self._is_asking:
            return []  # of a replay that was given up
        if not frames.is_end_of_replay:
            is_other = self._next and frames.sequence == self._next - 1 and not self._was_seen(frames)
            if not self._answer and is_other:
                return self._restart()
            self._answer.append(frames)
            return []
        if not self._answer and self._next:
            return self._restart()
        answer, self._answer, self._is_asking = self._answer, [], False
        if not answer:  # nothing was published so far; or nothing is kept for replays
            return self._go_on([*self._superseded, *self._pending])
        actions: list[Action] = []
        if self._next and answer[0].sequence >= self._next:
            self._next = None  # whose batches these are cannot be told
        for each in answer:
            if self._next is None or each.sequence > self._next:
                actions.append(Lost())
            elif each.sequence < self._next:
                continue
            actions.append(self._apply(each))
        return actions + self._go_on(self._pending)

    def end_replay(self) -> list[Action]:
        """The replay will not come, or was cut short: what is missing is lost."""
        self._answer.clear()
        self._is_asking = False
        self._next = None
        actions = self._go_on([*self._superseded, *self._pending])
        return actions if actions and actions[0] in {Lost(), Restarted()} else [Lost(), *actions]

    def _take(self, frames: Frames) -> list[Action]:
        number = frames.sequence
        if self._next is None:
            return [Restarted() if number == 0 else Lost(), self._apply(frames)]
        if number == self._next:
            return [self._apply(frames)]
        if self._was_seen(frames):
            return []
        if number == 0 and self._next:
            self._seen.clear()
            return [Restarted(), self._apply(frames)]
        self._pending.append(frames)
        return self._restart() if number in self._seen else self._ask()

    def _go_on(self, waiting: list[Frames]) -> list[Action]:
        self._superseded, self._pending = [], []
        actions: list[Action] = []
        for frames in waiting:
            if self._is_asking:
                self._superseded.append(frames)
            else:
                actions += self._take(frames)
        return actions

    def _ask(self) -> list[Action]:
        self.asked()
        self._answer.clear()
        self._is_asking = True
        return [AskReplay(self._next - 1 if self._next else 0)]

    def _restart(self) -> list[Action]:
        self._next = 0
        self._seen.clear()
        return [Restarted(), *self._ask()]

    def _apply(self, frames: Frames) -> Apply:
        self._next = frames.sequence + 1
        self._seen[frames.sequence] = _digest(frames)
        if len(self._seen) > NUM_REMEMBERED:
            self._seen.popitem(last=False)
        return Apply(frames.payload)

    def _was_seen(self, frames: Frames) -> bool:
        return self._seen.get(frames.sequence) == _digest(frames)


def _digest(frames: Frames) -> bytes:
    return blake2b(frames.payload, digest_size=16).digest()

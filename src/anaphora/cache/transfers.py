"""Transfers: what the executor has to move between pages before the next step computes, and in which order."""

from __future__ import annotations

from typing import Literal, NamedTuple

TransferKind = Literal["copy", "save", "load"]


class Transfer(NamedTuple):
    """Pages to be copied whole, (from, to), one pair after the other: a later pair may build on an earlier one.

    kind: "copy" goes from block to block, "save" from a block to a host block, "load" from a host block to a block.
    """

    kind: TransferKind
    pairs: list[tuple[int, int]]


class Transfers:
    """The transfers that wait for the next step.

    They are a program. The books of the manager say what every block and host block holds once it has run up to its
    end; so a block can be handed on, found, evicted, or its sequence be gone, before what brings its content has run.
    """

    def __init__(self) -> None:
        self._waiting: list[Transfer] = []

    def add(self, kind: TransferKind, source: int, target: int) -> None:
        """Append one pair."""
        if not self._waiting or self._waiting[-1].kind != kind:
            self._waiting.append(Transfer(kind, []))
        self._waiting[-1].pairs.append((source, target))

    def take(self) -> list[Transfer]:
        """Return what waits, without saves that a later one overwrites unread; then forget it."""
        if not self._waiting:
            return []
        waiting, self._waiting = self._waiting, []
        return _without_dead_saves(waiting)

    def pending(self) -> list[Transfer]:
        """Return what `take` would, and keep it."""
        return _without_dead_saves(self._waiting)

    def clear(self) -> None:
        """Forget what waits: nobody needs it any more."""
        self._waiting = []


def _without_dead_saves(transfers: list[Transfer]) -> list[Transfer]:
    needed: list[Transfer] = []
    overwritten: set[int] = set()
    """Host blocks whose content nobody reads before a later save."""
    for kind, pairs in reversed(transfers):
        kept: list[tuple[int, int]]
        if kind == "save":
            kept = []
            for source, target in reversed(pairs):
                if target not in overwritten:
                    overwritten.add(target)
                    kept.append((source, target))
            kept.reverse()
        else:
            kept = list(pairs)
            if kind == "load":
                overwritten.difference_update(source for source, _ in pairs)
        if kept:
            needed.append(Transfer(kind, kept))
    needed.reverse()
    return needed

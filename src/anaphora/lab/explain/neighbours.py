"""The earlier request that shares the longest beginning with a prompt, part by part."""

from __future__ import annotations

from bisect import bisect_left, insort
from typing import TYPE_CHECKING, NamedTuple

from anaphora.lab.explain.volatile import common_length

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anaphora.lab.record import Part


class Neighbour(NamedTuple):
    """number: of the request, as it was given to `add`. num_parts: whole parts that are equal. num_characters: of the
    part after these."""

    number: int
    num_parts: int
    num_characters: int


class _Node:
    __slots__ = ("children", "latest", "texts")

    def __init__(self, latest: int) -> None:
        self.children: dict[str, _Node] = {}
        self.texts: list[str] = []
        """The children's texts in order, so that the one most like another is beside it."""
        self.latest = latest


class Neighbours:
    """A tree of prompts by their parts. Cost of a call: O(parts + log children). Memory: the distinct parts."""

    def __init__(self) -> None:
        self._root = _Node(-1)

    def find(self, parts: Sequence[Part]) -> Neighbour | None:
        """The latest of the earlier prompts that share most with this one; None if none shares anything."""
        node = self._root
        depth = 0
        while depth < len(parts):
            following = node.children.get(_key(parts[depth]))
            if following is None:
                break
            node, depth = following, depth + 1
        if depth < len(parts) and node.texts:
            key = _key(parts[depth])
            place = bisect_left(node.texts, key)
            beside = node.texts[max(0, place - 1) : place + 1]
            best = max(beside, key=lambda text: common_length(text, key))
            num = common_length(best, key) - len(key) + len(parts[depth].text)
            if num > 0:
                return Neighbour(node.children[best].latest, depth, num)
        return Neighbour(node.latest, depth, 0) if depth else None

    def add(self, parts: Sequence[Part], number: int) -> None:
        """Remember a prompt."""
        node = self._root
        for part in parts:
            key = _key(part)
            following = node.children.get(key)
            if following is None:
                following = node.children[key] = _Node(number)
                insort(node.texts, key)
            following.latest = number
            node = following


def _key(part: Part) -> str:
    return f"{part.section}\0{part.role}\0{part.text}"

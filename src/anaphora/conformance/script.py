"""Scripts: what to do to a manager, one operation after another, and how to make a failing one short.

Any operation may be left out of a script: those that then make no sense any more (a request is begun twice, computed
without blocks) are skipped when it is played. That is what makes scripts shrinkable and random ones easy to make.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Sequence

    from anaphora.conformance.adapter import Prompt

Kind = Literal[
    "begin",
    "resume",
    "append",
    "allocate",
    "computed",
    "finish",
    "abort",
    "preempt",
    "match",
    "evict",
    "reset",
    "invalidate",
    "forge_digests",
]
NEEDED = frozenset({"begin", "append", "allocate", "computed", "finish", "match"})
"""What can be played on every manager. A `match` that is not offered is played as a short request."""


@dataclass(frozen=True, slots=True)
class Op:
    """One operation. Make it with the functions below.

    num_tokens: for begin and resume, how many tokens after the hit to have blocks for (None: all); for allocate, how
        many after those computed (None: all that are known); for computed, how many (None: all that can be).
    position: for evict, the block's place in the request's table.
    expected: for begin, resume and match, the cached tokens that the script's author says are right; "refused" if none.
    """

    kind: Kind
    request: str = ""
    prompt: Prompt | None = None
    num_tokens: int | None = None
    token_ids: tuple[int, ...] = ()
    position: int = 0
    expected: int | Literal["refused"] | None = None

    def __str__(self) -> str:
        words: list[str] = [self.kind.ljust(9), self.request.ljust(2)]
        if self.prompt is not None:
            words.append(describe(self.prompt))
        if self.token_ids:
            words.append(as_ranges(self.token_ids))
        if self.num_tokens is not None:
            words.append(f"{self.num_tokens} tokens")
        if self.kind == "evict":
            words.append(f"block {self.position}")
        return " ".join(words).rstrip()

    def as_json(self) -> dict[str, Any]:
        """Return what the operation says, without what is at its default."""
        said: dict[str, Any] = {"op": self.kind}
        if self.request:
            said["request"] = self.request
        if self.prompt is not None:
            prompt, space = self.prompt, self.prompt.namespace
            said["token_ids"] = list(prompt.token_ids)
            if space.salt is not None:
                said["salt"] = space.salt
            if space.adapter is not None:
                said["adapter"] = {
                    "name": space.adapter.name, "path": space.adapter.path, "digest": space.adapter.digest
                }  # fmt: skip
            if prompt.media:
                said["media"] = [[item.offset, item.length, item.digest] for item in prompt.media]
            if not prompt.reads_cache:
                said["reads_cache"] = False
        if self.token_ids:
            said["token_ids"] = list(self.token_ids)
        if self.num_tokens is not None:
            said["num_tokens"] = self.num_tokens
        if self.kind == "evict":
            said["position"] = self.position
        return said


def begin(
    request: str,
    prompt: Prompt,
    num_tokens: int | None = None,
    *,
    expected: int | Literal["refused"] | None = None,
) -> Op:
    """Begin a request, holding blocks for `num_tokens` tokens after its hit."""
    return Op("begin", request, prompt, num_tokens=num_tokens, expected=expected)


def resume(request: str, *, expected: int | None = None) -> Op:
    """Begin a preempted request again."""
    return Op("resume", request, expected=expected)


def run(request: str, prompt: Prompt, *, expected: int | None = None) -> list[Op]:
    """Begin, compute, and end a request."""
    return [begin(request, prompt, expected=expected), computed(request), finish(request)]


def match(prompt: Prompt, *, expected: int | None = None) -> Op:
    """Ask what would be found."""
    return Op("match", prompt=prompt, expected=expected)


def append(request: str, token_ids: Iterable[int]) -> Op:
    """Add generated tokens."""
    return Op("append", request, token_ids=tuple(token_ids))


def allocate(request: str, num_tokens: int | None = None) -> Op:
    """Have blocks for more tokens."""
    return Op("allocate", request, num_tokens=num_tokens)


def computed(request: str, num_tokens: int | None = None) -> Op:
    """Say that KV exists."""
    return Op("computed", request, num_tokens=num_tokens)


def generate(request: str, token_ids: Iterable[int]) -> list[Op]:
    """Append tokens, have blocks for all that are known, and compute them."""
    return [append(request, token_ids), allocate(request), computed(request)]


def finish(request: str) -> Op:
    """End a request."""
    return Op("finish", request)


def abort(request: str) -> Op:
    """End a request in whatever state."""
    return Op("abort", request)


def preempt(request: str) -> Op:
    """Take a running request's blocks away."""
    return Op("preempt", request)


def evict(request: str, position: int) -> Op:
    """Make the content of one block of a running request unfindable."""
    return Op("evict", request, position=position)


RESET, INVALIDATE, FORGE_DIGESTS = Op("reset"), Op("invalidate"), Op("forge_digests")


def shrink(script: Sequence[Op], still_fails: Callable[[Sequence[Op]], bool]) -> tuple[Op, ...]:
    """Return a part of a failing script, in the same order, that still fails and of which no operation can be dropped.

    Cost: O(n log n) to O(n^2) plays for n operations.
    """
    ops = list(script)
    size = max(1, len(ops) // 2)
    while True:
        start, dropped = 0, False
        while start < len(ops):
            rest = ops[:start] + ops[start + size :]
            if still_fails(rest):
                ops, dropped = rest, True
            else:
                start += size
        if size == 1 and not dropped:
            return tuple(ops)
        size = max(1, size // 2)


def describe(prompt: Prompt) -> str:
    """Return a prompt in a few words."""
    words = [as_ranges(prompt.token_ids)]
    space = prompt.namespace
    if space.salt is not None:
        words.append(f"salt={space.salt!r}")
    if space.adapter is not None:
        words.append(f"adapter={space.adapter.name!r}:{space.adapter.path!r}:{space.adapter.digest!r}")
    words += [f"media={item.digest!r}@{item.offset}+{item.length}" for item in prompt.media]
    if not prompt.reads_cache:
        words.append("reads_cache=False")
    return " ".join(words)


def as_ranges(token_ids: Sequence[int]) -> str:
    """Return ids with runs of successors written as first..last."""
    return "[" + ",".join(f"{a}..{b}" if b > a else str(a) for a, b in _runs(token_ids)) + "]"


def _runs(token_ids: Sequence[int]) -> Iterator[tuple[int, int]]:
    first = last = token_ids[0]
    for token in token_ids[1:]:
        if token != last + 1:
            yield first, last
            first = token
        last = token
    yield first, last

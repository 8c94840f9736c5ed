"""What a manager chose where engines may differ: one probe for each field of a profile.

A probe plays a few operations without any rules and tells the manager's choice by what it sees, or None if the manager
offers nothing to see it by. Choices that cost something say what.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from anaphora.conformance.adapter import Counters, ManagerAdapter, Prompt
from anaphora.conformance.checks.check import Check, Result, ids, text
from anaphora.conformance.play import Step
from anaphora.conformance.script import Op
from anaphora.identity import Adapter, Namespace

if TYPE_CHECKING:
    from collections.abc import Callable

    from anaphora.conformance.adapter import MakeManager
    from anaphora.conformance.profile import Profile

CONSEQUENCES = {
    ("shareable", "at_allocation"): "whoever schedules must compute what was allocated before anyone reads it, or undo",
    ("shareable", "at_finish"): "a burst of equal prompts is computed once each",
    ("block_ids", "rewritten"): "whoever holds a copy of a block table must fetch it again",
    ("duplicates", "kept"): "copies of one block push out other content",
    ("last_token", "cached"): "the engine must keep logits or hidden states with the blocks",
    ("eviction", "may_take_more"): "a long prefix can be lost for want of one block",
    ("lookups", "refresh"): "whoever asks, a metric or a router, changes what is evicted next",
    ("digests", "trusted"): "a forged or colliding digest gets one request the KV of another",
    ("adapter_identity", "name_and_path"): "weights replaced in place are served the old ones' KV",
    ("counting", "at_lookup"): "a request that waits counts again at every step",
    ("unread", "left_out"): "hit rates look better than what was computed",
}
"""What follows from a choice, where that is not all good."""


@dataclass
class Probe:
    """A fresh manager, played on without rules."""

    manager: ManagerAdapter
    size: int
    steps: list[Step] = field(default_factory=list)

    def begin(self, request: str, prompt: Prompt, num_tokens: int | None = None) -> int | None:
        """Begin a request."""
        num_cached = self.manager.begin(request, prompt, num_tokens)
        self.note(Op("begin", request, prompt, num_tokens), "refused" if num_cached is None else f"{num_cached} cached")
        return num_cached

    def computed(self, request: str, num_tokens: int) -> None:
        """Say that the KV of the next tokens exists."""
        self.manager.computed(request, num_tokens)
        self.note(Op("computed", request, num_tokens=num_tokens))

    def generate(self, request: str, token_ids: tuple[int, ...]) -> None:
        """Append tokens to a request that is computed, and have blocks for them."""
        self.manager.append(request, token_ids)
        self.manager.allocate(request, len(token_ids))
        self.note(Op("append", request, token_ids=token_ids))
        self.note(Op("allocate", request))

    def finish(self, request: str) -> None:
        """End a request."""
        self.manager.finish(request)
        self.note(Op("finish", request))

    def run(self, prompt: Prompt) -> int:
        """Begin, compute and end a request; return the number of cached tokens, -1 if it was refused."""
        num_cached = self.begin("p", prompt)
        if num_cached is None:
            return -1
        if num_cached < len(prompt.token_ids):
            self.computed("p", len(prompt.token_ids) - num_cached)
        self.finish("p")
        return num_cached

    def twins(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        """Let two requests, "a" and "b", compute two blocks and a token at once; return b's table before and after."""
        tokens, cut = ids(1, 2 * self.size + 1), max(1, self.size - 1)
        for name in "ab":
            self.begin(name, Prompt(tokens[:cut]))
            self.computed(name, cut)
        for name in "ab":
            self.generate(name, tokens[cut:])
        before = tuple(self.manager.block_ids("b"))
        for name in "ab":
            self.computed(name, len(tokens) - cut)
        return before, tuple(self.manager.block_ids("b"))

    def note(self, op: Op, outcome: str = "") -> None:
        """Write a step down."""
        self.steps.append(Step(op, outcome))


def shareable(probe: Probe) -> str:
    """Begin, compute and end a request, and look at each point."""
    size = probe.size
    prompt = text(1, 2 * size + 1)
    probe.begin("a", prompt)
    if probe.run(prompt):
        return "at_allocation"
    other = text(5000, 2 * size + 1)
    probe.begin("b", other)
    probe.computed("b", 2 * size + 1)
    return "at_commit" if probe.run(other) > 0 else "at_finish"


def block_ids(probe: Probe) -> str:
    """See whether the table of one of two equal requests changes."""
    before, after = probe.twins()
    return "append_only" if before == after else "rewritten"


def duplicates(probe: Probe) -> str:
    """See whether two copies take memory while in use, and whether they push out something older afterwards."""
    older = text(5000, probe.size)
    probe.run(older)
    num_free = probe.manager.num_free_blocks()
    probe.twins()
    num_own = -(-(2 * probe.size + 1) // probe.size)
    if num_free - probe.manager.num_free_blocks() < 2 * num_own:
        return "swapped"
    probe.finish("a")
    probe.finish("b")
    num_full = (2 * probe.size + 1) // probe.size
    # What would be blank if one copy were given up.
    probe.run(text(7000, (probe.manager.num_free_blocks() - 1 - num_full) * probe.size))
    return "dropped" if probe.run(text(5000, probe.size + 1)) else "kept"


def granularity(probe: Probe) -> str | None:
    """Share one token more than a block: with a prompt that ends there, and with one that goes on."""
    if probe.size == 1:
        return None
    for first, more in ((1, 0), (1000, probe.size)):
        tokens = ids(first, probe.size + 1)
        probe.run(Prompt(tokens + ids(5000, more)))
        if probe.run(Prompt(tokens + ids(7000, 2))) > probe.size:
            return "token"
    return "block"


def last_token(probe: Probe) -> str:
    """Send a prompt of whole blocks again."""
    probe.run(text(1, 2 * probe.size))
    return "cached" if probe.run(text(1, 2 * probe.size)) == 2 * probe.size else "recomputed"


def eviction(probe: Probe) -> str:
    """Want one block of a long idle prefix."""
    num_blocks = probe.manager.num_free_blocks()
    probe.run(text(1, num_blocks * probe.size))
    probe.run(text(5000, probe.size))
    found = probe.run(text(1, num_blocks * probe.size))
    return "exact" if found >= (num_blocks - 2) * probe.size else "may_take_more"


def order(probe: Probe) -> str:
    """Use the older of two prompts again, leave room for one of them, and see which went."""
    size, num_blocks = probe.size, probe.manager.num_free_blocks()
    for first in (1, 1000):
        probe.run(text(first, size))
    probe.run(text(1, size + 1))
    probe.run(text(5000, (num_blocks - 1) * size))
    return "lru" if probe.run(text(1, size + 1)) == size else "other"


def lookups(probe: Probe) -> str | None:
    """Ask for the older of two prompts, and see which goes first."""
    if not probe.manager.offers("match"):
        return None
    size, num_blocks = probe.size, probe.manager.num_free_blocks()
    for first in (1, 1000):
        probe.run(text(first, size))
    asked = text(1, size + 1)
    found = probe.manager.match(asked)
    probe.note(Op("match", prompt=asked), f"{found} cached")
    probe.run(text(5000, (num_blocks - 1) * size))
    return "refresh" if probe.manager.match(asked) else "read_only"


def digests(probe: Probe) -> str | None:
    """Give all blocks one digest and ask for other tokens."""
    if not probe.manager.offers("forge_digests"):
        return None
    probe.manager.forge_digests()
    probe.note(Op("forge_digests"))
    probe.run(text(1, probe.size + 1))
    return "trusted" if probe.run(text(5000, probe.size + 1)) else "verified"


def adapter_identity(probe: Probe) -> str:
    """Put other weights where an adapter's were."""
    tokens = ids(1, probe.size + 1)
    for digest in ("aa", "bb"):
        found = probe.run(Prompt(tokens, Namespace(adapter=Adapter(digest, name="s", path="/s"))))
    return "name_and_path" if found else "content"


def counting(probe: Probe) -> str | None:
    """Ask for more than there is."""
    if not probe.manager.offers("counters"):
        return None
    probe.begin("a", text(1, (probe.manager.num_free_blocks() + 1) * probe.size))
    return "at_admission" if probe.manager.counters() == Counters(0, 0) else "at_lookup"


def unread(probe: Probe) -> str | None:
    """Run a request that must not read the cache."""
    if not probe.manager.offers("counters"):
        return None
    probe.run(replace(text(1, probe.size), reads_cache=False))
    return "counted" if probe.manager.counters().queries else "left_out"


@dataclass(frozen=True)
class ChoiceCheck(Check):
    """Whether a manager chose what its profile says it did. `name` is the profile's field."""

    name: str
    about: str
    see: Callable[[Probe], str | None]
    source: str = ""

    def observe(self, make: MakeManager, block_size: int) -> tuple[str | None, list[Step]]:
        """Return the manager's choice and how it showed. Raises what the manager raises."""
        probe = Probe(make(12, block_size), block_size)
        return self.see(probe), probe.steps

    def examine(self, make: MakeManager, profile: Profile, block_size: int) -> Result:
        """Compare what is seen with what the profile declares."""
        declared = profile.choices()[self.name]
        try:
            observed, steps = self.observe(make, block_size)
        except Exception as error:
            return self.result("failed", f"the manager raised {error!r}")
        if observed is None or declared is None:
            return self.result("not applicable", "cannot be seen" if observed is None else "not declared")
        if observed != declared:
            return self.result("failed", f"{profile.name} declares {declared!r}, observed {observed!r}", steps)
        return self.result("choice", "; ".join(filter(None, [observed, CONSEQUENCES.get((self.name, observed))])))


CHOICE_CHECKS = [
    ChoiceCheck("shareable", "When a full block can be found by others.", shareable),
    ChoiceCheck("block_ids", "Whether a running request's block table only grows.", block_ids),
    ChoiceCheck("duplicates", "What becomes of two copies of one block.", duplicates),
    ChoiceCheck("granularity", "Whether hits are whole blocks.", granularity),
    ChoiceCheck("last_token", "Whether a prompt's last token is always computed.", last_token),
    ChoiceCheck("eviction", "Whether no more is forgotten than is needed.", eviction),
    ChoiceCheck("order", "What goes first.", order),
    ChoiceCheck("lookups", "Whether a lookup alone changes what goes first.", lookups),
    ChoiceCheck("digests", "Whether hits by digest are compared with the tokens.", digests),
    ChoiceCheck("adapter_identity", "What tells adapters apart.", adapter_identity),
    ChoiceCheck("counting", "When a request counts in the statistics.", counting),
    ChoiceCheck("unread", "Whether a request that must not read the cache counts.", unread),
]
"""One for every field of a profile."""

"""Playing a script on a manager, with the model watching over every step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from anaphora.conformance.adapter import Counters, Prompt
from anaphora.conformance.model import LiveRequest, Model
from anaphora.conformance.profile import Profile
from anaphora.conformance.script import Op
from anaphora.conformance.violation import Violation

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from anaphora.conformance.adapter import MakeManager, ManagerAdapter

REFUSED: dict[str, tuple[object, ...]] = {"begin": (None,), "resume": (None,), "allocate": (False,), "reset": (False,)}
"""The answers with which nothing may have changed."""
PROBE = "?"
"""The request that stands in for a `match` that is not offered."""


@dataclass(frozen=True, slots=True)
class Step:
    """An operation and what came of it."""

    op: Op
    outcome: str

    def __str__(self) -> str:
        return f"{self.op}  -> {self.outcome}" if self.outcome else str(self.op)

    def as_json(self) -> dict[str, Any]:
        """Return the operation's JSON form with the outcome."""
        return {**self.op.as_json(), "outcome": self.outcome}


@dataclass
class Play:
    """One fresh manager on which operations are played, under the rules of a profile."""

    make: MakeManager
    num_blocks: int
    block_size: int
    profile: Profile
    steps: list[Step] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.manager: ManagerAdapter = self.make(self.num_blocks, self.block_size)
        self.model = Model(self.profile, self.num_blocks, self.block_size)
        self._preempted: dict[str, LiveRequest] = {}
        self._begun: set[str] = set()
        self._counters = Counters(0, 0)
        self._outcome = ""
        self._has_probed = False

    def play(self, script: Iterable[Op]) -> Violation | None:
        """Play operations until one breaks a rule; return what was broken."""
        for op in script:
            try:
                self.do(op)
            except Violation as violation:
                return violation
        return None

    def do(self, op: Op) -> Any:
        """Play one operation, unless it makes no sense now; return what the manager answered.

        Raises Violation for a broken rule, an exception of the manager's included.
        """
        if not self._makes_sense(op):
            return None
        self._outcome = ""
        try:
            answer = getattr(self, f"_{op.kind}")(op)
            self._check_books(was_refused=answer in REFUSED.get(op.kind, ()))
        except Violation:
            raise
        except Exception as error:
            self._outcome = f"raised {error!r}"
            raise Violation("raised", f"{op.kind} raised {error!r}") from error
        finally:
            self.steps.append(Step(op, self._outcome))
        self._check_expected(op, answer)
        return answer

    def table(self, request: str) -> tuple[int, ...]:
        """Return a running request's block table."""
        return tuple(self.manager.block_ids(request))

    # -- operations: each returns the manager's answer ----------------------------------------------------------------

    def _begin(self, op: Op) -> int | None:
        assert op.prompt is not None
        self._begun.add(op.request)
        request = self.model.request(op.prompt)
        num_cached = self.manager.begin(op.request, op.prompt, op.num_tokens)
        self._count_lookup(request, num_cached)
        return self._admit(op, request, num_cached)

    def _resume(self, op: Op) -> int | None:
        return self._admit(op, self._preempted[op.request], self.manager.resume(op.request, op.num_tokens))

    def _admit(self, op: Op, request: LiveRequest, num_cached: int | None) -> int | None:
        table = () if num_cached is None else self.table(op.request)
        self._outcome = "refused" if num_cached is None else f"{num_cached} cached, blocks {list(table)}"
        self.model.began(op.request, request, op.num_tokens, num_cached, table, self._copies())
        if num_cached is not None:
            self._preempted.pop(op.request, None)
        return num_cached

    def _append(self, op: Op) -> None:
        self.manager.append(op.request, op.token_ids)
        request = self.model.requests.get(op.request) or self._preempted[op.request]
        self.model.appended(request, op.token_ids)

    def _allocate(self, op: Op) -> bool:
        request = self.model.requests[op.request]
        num_tokens = self._num_wanted(op, request)
        ok = bool(self.manager.allocate(op.request, num_tokens))
        table = self.table(op.request)
        self._outcome = f"blocks {list(table)}" if ok else "refused"
        self.model.allocated(op.request, num_tokens, ok, table, self._copies())
        return ok

    def _computed(self, op: Op) -> None:
        num_tokens = self._num_computable(op)
        self.manager.computed(op.request, num_tokens)
        self.model.computed(op.request, num_tokens)
        self._outcome = f"{self.model.requests[op.request].num_computed} computed"

    def _finish(self, op: Op) -> None:
        self.manager.finish(op.request)
        self._end(op.request)

    def _abort(self, op: Op) -> None:
        has_ended = op.request not in self.model.requests and op.request not in self._preempted
        self._outcome = "it had ended" if has_ended else ""
        try:
            self.manager.abort(op.request)
        except Exception:
            if not has_ended:  # to complain about a request that has ended is as good as to do nothing
                raise
        self._end(op.request)

    def _preempt(self, op: Op) -> None:
        self.manager.preempt(op.request)
        self._preempted[op.request] = self.model.ended(op.request, comes_back=True)

    def _match(self, op: Op) -> int | None:
        assert op.prompt is not None
        if not self.manager.offers("match"):
            return self._match_by_request(op.prompt)
        num_cached = self.manager.match(op.prompt)
        self._outcome = f"{num_cached} cached"
        self.model.looked_up(self.model.request(op.prompt), num_cached)
        return num_cached

    def _match_by_request(self, prompt: Prompt) -> int | None:
        self._has_probed = True
        num_cached = self._begin(Op("begin", PROBE, prompt, num_tokens=1))
        if num_cached is not None:
            if self.profile.shareable == "at_allocation":
                self._computed(Op("computed", PROBE))
            self._finish(Op("finish", PROBE))
            self._outcome = f"{num_cached} cached"
        return num_cached

    def _evict(self, op: Op) -> None:
        block = self.model.requests[op.request].table[op.position]
        self.manager.evict([block])
        self._outcome = f"block {block}"
        self.model.evicted(block)

    def _reset(self, op: Op) -> bool:
        ok = bool(self.manager.reset())
        self._outcome = "done" if ok else "refused"
        if ok:
            self.model.forgot()
        elif not self.model.requests:
            raise Violation("reset", "refused though no request holds a block")
        return ok

    def _invalidate(self, op: Op) -> None:
        self.manager.invalidate()
        self.model.forgot(weights_changed=True)

    def _forge_digests(self, op: Op) -> None:
        self.manager.forge_digests()
        self.model.digests_are_forged = True

    # -- which operations make sense -------------------------------------------------------------------------------

    def _makes_sense(self, op: Op) -> bool:
        name, running = op.request, self.model.requests
        match op.kind:
            case "begin":
                return name not in running and name not in self._preempted
            case "resume":
                return name in self._preempted
            case "append" | "finish":
                return name in running or name in self._preempted
            case "allocate":
                return name in running and self._num_wanted(op, running[name]) > 0
            case "computed":
                return name in running and self._num_computable(op) > 0
            case "preempt":
                return name in running
            case "evict":
                return name in running and op.position < len(running[name].table)
            case "abort":
                return name in self._begun
        return True

    @staticmethod
    def _num_wanted(op: Op, request: LiveRequest) -> int:
        return request.num_tokens - request.num_computed if op.num_tokens is None else op.num_tokens

    def _num_computable(self, op: Op) -> int:
        most = self.model.num_computable(op.request)
        return most if op.num_tokens is None else min(op.num_tokens, most)

    # -- books -----------------------------------------------------------------------------------------------------

    def _end(self, name: str) -> None:
        if name in self.model.requests:
            self.model.ended(name)
        self._preempted.pop(name, None)

    def _copies(self) -> Sequence[tuple[int, int]]:
        return self.manager.take_copies() if self.manager.offers("take_copies") else ()

    def _check_books(self, *, was_refused: bool) -> None:
        try:
            self.model.has_tables({name: self.table(name) for name in self.model.requests})
            self.model.has_free(self.manager.num_free_blocks())
            if self.profile.counting is not None and self.manager.offers("counters"):
                found = self.manager.counters()
                if found != self._counters:
                    text = f"{tuple(found)} tokens asked for and found, by the books {tuple(self._counters)}"
                    raise Violation("statistics", text)
        except Violation as violation:
            if was_refused and violation.rule != "statistics":
                raise Violation("refusal", f"it changed something: {violation.text}") from None
            raise

    def _count_lookup(self, request: LiveRequest, num_cached: int | None) -> None:
        counting = self.profile.counting
        if counting is None or not self.manager.offers("counters"):
            return
        if num_cached is None:
            if counting == "at_lookup":
                self._counters = self.manager.counters()  # what a refused lookup found is not told
        elif request.prompt.reads_cache or self.profile.unread == "counted":
            queries, hits = self._counters
            self._counters = Counters(queries + request.num_tokens, hits + num_cached)

    def _check_expected(self, op: Op, answer: int | None) -> None:
        profile = self.profile
        finds_whole_blocks = profile.granularity == "block" or self.block_size == 1
        is_usual = finds_whole_blocks and profile.last_token == "recomputed" and profile.shareable != "at_finish"
        if op.expected is None or not is_usual or self._has_probed:
            return  # then the model alone says what is right
        found = "refused" if answer is None else answer
        if found != op.expected:
            raise Violation("expected", f"{op.kind} {op.request}: {found}, expected {op.expected}")

"""`anaphora bench`: what is measured, on the fake engine, whose times mean nothing."""

from __future__ import annotations

import json
from dataclasses import dataclass, field

import pytest

from anaphora.cache.manager import KVCacheManager
from anaphora.engine.executor import Batch, Output
from anaphora.engine.loop import Engine
from anaphora.engine.request import RequestError
from anaphora.server.bench import NUM_UNRELATED_PROMPTS, WARM_RUNS_PER_REPEAT, BenchResult, Plan, run_bench
from anaphora.server.bench_targets import EngineTarget, FirstToken, Overhead, ServerTarget, Target
from anaphora.server.client import ServerError, TimingClient
from tests.server.fake_engine import BLOCK_SIZE, AlphabetExecutor, FakeEngine
from tests.server.live_server import serving_fake

IDS = range(1, 257)
PLAN = Plan(prefix_tokens=(40, 100), suffix_tokens=5, repeats=2, seed=1)


def silent(_: str) -> None: ...


@dataclass
class ScriptedTarget(Target):
    """Tells times from a script and remembers the prompts."""

    name = "scripted"
    ideal_is = "made up"
    token_ids = IDS
    prompts: list[list[int]] = field(default_factory=list)
    ideals: list[list[int]] = field(default_factory=list)
    unrelated: list[list[int]] = field(default_factory=list)

    def first_token(self, prompt: list[int]) -> FirstToken:
        is_warm = bool(self.prompts) and self.prompts[-1][:40] == prompt[:40]
        self.prompts.append(prompt)
        return FirstToken(0.002 if is_warm else 0.1 * len(self.prompts), 32 if is_warm else 0)

    def ideal(self, prompt: list[int], num_suffix_tokens: int) -> float:
        self.ideals.append(prompt)
        return 0.001

    def overhead(self, prompts: list[list[int]], num_output_tokens: int) -> Overhead | None:
        self.unrelated = prompts
        return Overhead(schedule=0.0005, commit=0.00073)


def test_cold_runs_have_new_prefixes_and_warm_ones_only_new_suffixes() -> None:
    target = ScriptedTarget()
    run_bench(target, PLAN, silent)
    _, *runs = target.prompts
    size = 1 + WARM_RUNS_PER_REPEAT
    groups = [runs[i : i + size] for i in range(0, len(runs), size)]
    assert [len(group[0]) for group in groups] == [45, 45, 105, 105]
    assert len({tuple(group[0][:40]) for group in groups}) == len(groups)
    for group in groups:
        assert len({tuple(prompt[:-5]) for prompt in group}) == 1
        assert len({tuple(prompt) for prompt in group}) == size
    assert len({tuple(prompt[:40]) for prompt in target.unrelated}) == NUM_UNRELATED_PROMPTS


def test_medians_are_reported_in_milliseconds() -> None:
    result = run_bench(ScriptedTarget(), PLAN, silent)
    first = result.prefixes[0]
    assert (first.prefix_tokens, first.suffix_tokens, first.cached_tokens) == (40, 5, 32)
    assert first.cold_ttft_ms == pytest.approx((200 + 600) / 2)
    assert first.warm_ttft_ms == pytest.approx(2.0)
    assert first.ideal_ms == pytest.approx(1.0)


def test_json_and_table_say_the_same() -> None:
    result = run_bench(ScriptedTarget(), PLAN, silent)
    told = json.loads(result.to_json())
    assert told["overhead"] == {"schedule": 0.0005, "commit": 0.00073}
    assert [row["warm_ttft_ms"] for row in told["prefixes"]] == pytest.approx([2.0, 2.0])
    table = result.to_table()
    assert "at 0 % hits: 0.123 % of CPU time (schedule 0.050 %, commit 0.073 %)" in table
    assert table.splitlines()[3].split() == ["40", "+", "5", "32", "400.0", "2.0", "1.0", "200.0x", "2.00"]


def test_what_a_server_does_not_tell_is_said_so() -> None:
    row = run_bench(ScriptedTarget(), PLAN, silent).prefixes[0]
    unknown = BenchResult("x", 1, "y", (row,), overhead=None)
    assert "not told by this server" in unknown.to_table()
    assert json.loads(unknown.to_json())["overhead"] is None


@pytest.mark.parametrize(
    "values", [{"prefix_tokens": (0,)}, {"prefix_tokens": ()}, {"suffix_tokens": 0}, {"repeats": 0}]
)
def test_plan_without_work_is_refused(values: dict[str, int]) -> None:
    with pytest.raises(ValueError, match=f"^{next(iter(values))}: expected at least 1"):
        Plan(**values)  # type: ignore[arg-type]


class RecordingExecutor(AlphabetExecutor):
    """Keeps the spans of its last step."""

    def execute(self, batch: Batch) -> Output:
        self.last = [(span.start, span.tokens.tolist(), list(span.block_tables[0])) for span in batch.spans]
        return super().execute(batch)


def test_ideal_runs_the_very_span_that_a_warm_request_runs() -> None:
    executor = RecordingExecutor(max_context=2048)
    manager = KVCacheManager(256, BLOCK_SIZE)
    target = EngineTarget(Engine(executor, manager), "alphabet")
    prefix = list(range(1, 51))
    assert target.first_token([*prefix, 60, 61]).cached_tokens == 0
    assert target.first_token([*prefix, 70, 71]).cached_tokens == 48
    [(start, tokens, table)] = executor.last
    stats = manager.stats()
    target.ideal([*prefix, 80, 81], 2)
    [(ideal_start, ideal_tokens, ideal_table)] = executor.last
    assert (start, tokens) == (48, [49, 50, 70, 71])
    assert (ideal_start, ideal_tokens) == (48, [49, 50, 80, 81])
    assert ideal_table[:3] == table[:3]
    assert manager.usage == 0
    assert manager.match([*prefix, 80, 81]) == 48
    assert manager.stats().requests == stats.requests + 1


def test_in_process_run_over_a_real_engine() -> None:
    engine = Engine(AlphabetExecutor(max_context=2048), KVCacheManager(256, BLOCK_SIZE))
    result = run_bench(EngineTarget(engine, "alphabet"), PLAN, silent)
    assert result.target == "alphabet, in process"
    assert [row.cached_tokens for row in result.prefixes] == [32, 96]
    assert result.overhead is not None
    assert 0 < result.overhead.schedule < result.overhead.total < 1


@pytest.mark.parametrize(
    ("max_context", "message"),
    [
        (100, "105 prompt tokens and max_tokens 1 make 106 tokens; the longest context is 100 tokens"),
        (287, "256 prompt tokens and max_tokens 32 make 288 tokens; the longest context is 287 tokens"),
    ],
)
def test_what_does_not_fit_is_refused_before_anything_runs(max_context: int, message: str) -> None:
    engine = Engine(AlphabetExecutor(max_context), KVCacheManager(256, BLOCK_SIZE))
    notes: list[str] = []
    with pytest.raises(RequestError, match=message):
        run_bench(EngineTarget(engine, "alphabet"), PLAN, notes.append)
    assert notes == []


def test_run_over_http() -> None:
    notes: list[str] = []
    with serving_fake(FakeEngine(num_blocks=1024)) as live, TimingClient(live.url) as client:
        result = run_bench(ServerTarget(client, live.url, IDS), PLAN, notes.append)
    assert result.target == f"alphabet at {live.url}"
    assert [row.cached_tokens for row in result.prefixes] == [32, 96]
    assert result.ideal_is == "a prompt of the suffix's tokens alone, over HTTP"
    assert result.overhead is not None
    assert [note.split(":")[0] for note in notes[1:3]] == ["prefix 40, 1 of 2", "prefix 40, 2 of 2"]


def test_refusal_by_a_server_is_passed_on() -> None:
    with serving_fake(FakeEngine(max_context=64)) as live, TimingClient(live.url) as client:
        target = ServerTarget(client, live.url, IDS)
        with pytest.raises(ServerError, match=r"^400: prompt: .* longest context is 64 tokens"):
            run_bench(target, PLAN, silent)


def test_no_server_is_an_explained_failure() -> None:
    with TimingClient("http://127.0.0.1:9") as client, pytest.raises(ServerError, match="no list of models"):
        ServerTarget(client, "http://127.0.0.1:9")

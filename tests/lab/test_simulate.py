"""What a trace would find: integers worked out by hand on a small trace, and published ones on public traces."""

from __future__ import annotations

import json
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora import Namespace
from anaphora.cache.options import IndexKind
from anaphora.cli import main
from anaphora.lab.commands.options import FORMAT_NAMES
from anaphora.lab.encoding import EstimatingEncoder
from anaphora.lab.importers import FORMATS, open_requests
from anaphora.lab.model_files import kv_bytes_per_token
from anaphora.lab.optimum import Optimum
from anaphora.lab.replay import CacheReplay, Counting, Fleet, Routing, count
from anaphora.lab.simulate import OPTIMUM, Setting, run, settings_of, sweep
from anaphora.lab.trace import Prompt, Trace, build_trace
from anaphora.lab.workload import as_mooncake, generate

from .samples import SAMPLES, SHARED, jsonl


def trace_of(path: Path, block_size: int | None = None) -> Trace:
    return build_trace(path.name, open_requests(path).requests(), EstimatingEncoder(), block_size)


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Three prompts of 3 blocks each: the second shares 2 blocks with the first, the third 1."""
    path = tmp_path / "small.jsonl"
    path.write_bytes(
        jsonl(
            {"timestamp": 0, "input_length": 1100, "output_length": 20, "hash_ids": [0, 1, 2]},
            {"timestamp": 900, "input_length": 1300, "output_length": 20, "hash_ids": [0, 1, 3]},
            {"timestamp": 1800, "input_length": 1536, "output_length": 9, "hash_ids": [0, 4, 5]},
            {"timestamp": 2000, "input_length": 1536, "output_length": 9, "hash_ids": [0, 4, 5]},
            {"timestamp": 2100, "input_length": 1100, "output_length": 9, "hash_ids": [0, 1, 2]},
        )
    )
    return path


class TestSmallTrace:
    def test_listed_blocks_all_count(self, small: Path) -> None:
        outcome = run(trace_of(small), Setting(block_size=512, counting="listed"))
        # 0 + 2 + 1 + 3 + 3 of 15 blocks; the last request's partial block counts with its 76 tokens.
        assert (outcome.cached_blocks, outcome.blocks) == (9, 15)
        assert (outcome.cached_tokens, outcome.prompt_tokens) == (1024 + 512 + 1536 + 1100, 6572)

    def test_an_engine_serves_whole_blocks_and_never_the_last_token(self, small: Path) -> None:
        outcome = run(trace_of(small), Setting(block_size=512))
        # The fourth request repeats all of 1536 tokens: its last block is computed again.
        assert (outcome.cached_blocks, outcome.blocks) == (0 + 2 + 1 + 2 + 2, 2 + 2 + 3 + 3 + 2)
        assert outcome.cached_tokens == 7 * 512

    @pytest.mark.parametrize(
        ("block_size", "cached"), [(16, 0 + 1024 + 512 + 1520 + 1088), (1024, 0 + 1024 + 0 + 1024 + 1024)]
    )
    def test_other_block_sizes_than_the_traces(self, small: Path, block_size: int, cached: int) -> None:
        assert run(trace_of(small, block_size), Setting(block_size=block_size)).cached_tokens == cached

    def test_a_round_robin_fleet_shares_less(self, small: Path) -> None:
        # Requests 1, 3, 5 and 2, 4: the third finds block 0, the fifth blocks 0 and 1, the fourth block 0.
        outcome = run(trace_of(small), Setting(block_size=512, replicas=2))
        assert outcome.cached_blocks == 1 + 2 + 1

    def test_a_fleet_routed_by_prefix_shares_as_one(self, small: Path) -> None:
        assert run(trace_of(small), Setting(block_size=512, replicas=2, routing="prefix")).cached_blocks == 7

    def test_what_comes_before_the_measured_part_warms_up(self, small: Path) -> None:
        outcome = run(trace_of(small), Setting(block_size=512, measure_after=0.6))
        assert (outcome.num_requests, outcome.cached_blocks) == (2, 4)

    def test_eviction_takes_the_least_recently_used_tail(self, small: Path) -> None:
        # 3 blocks: 0 1 2; then 0 1 3 evicts 2; 0 4 5 evicts 3 and 1; all of it again; 0 1 2 finds 0.
        outcome = run(trace_of(small), Setting(3, block_size=512, counting="listed"))
        assert outcome.cached_blocks == 0 + 2 + 1 + 3 + 1
        best = run(trace_of(small), Setting(3, OPTIMUM, block_size=512, counting="listed"))
        assert best.cached_blocks == 0 + 2 + 1 + 3 + 1

    def test_a_prompt_longer_than_the_cache_is_served_from_what_fits(self, small: Path) -> None:
        outcome = run(trace_of(small), Setting(2, block_size=512))
        # 2 blocks fit, and the last of what is served is always computed: block 0 is found four times.
        assert outcome.cached_blocks == 4

    def test_text_is_told_apart_by_model(self, tmp_path: Path) -> None:
        path = tmp_path / "log.jsonl"
        body = {"model": "m", "messages": [{"role": "user", "content": "word " * 40}]}
        path.write_bytes(jsonl(body, body, body | {"model": "other"}))
        trace = trace_of(path)
        assert trace.is_estimate
        outcome = run(trace, Setting(block_size=16))
        assert outcome.cached_tokens == (trace.prompts[0].num_tokens - 1) // 16 * 16

    def test_requests_without_content_are_left_out_and_counted(self, tmp_path: Path) -> None:
        path = tmp_path / "azure.csv"
        path.write_bytes(SAMPLES["azure"])
        assert trace_of(path).num_without_content == 1


class TestSweep:
    def test_every_combination_runs_once(self) -> None:
        made = settings_of([None, 10], ["lru", OPTIMUM], [1, 2], Setting())
        assert [(s.capacity_blocks, s.policy, s.replicas) for s in made] == [
            (None, "lru", 1),
            (None, "lru", 2),
            (10, "lru", 1),
            (10, "lru", 2),
            (10, OPTIMUM, 1),
        ]

    def test_processes_find_what_one_does(self, small: Path) -> None:
        trace = trace_of(small)
        made = settings_of([2, 3], ["lru", "fifo"], [1], Setting(block_size=512))
        assert sweep(trace, made, jobs=2) == sweep(trace, made, jobs=1)


PROMPTS = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=5), min_size=1, max_size=30)


def as_prompts(ids: list[list[int]]) -> list[Prompt]:
    from anaphora.tokens import pack

    return [Prompt(pack(each), None, len(each), float(n), session=str(each[0])) for n, each in enumerate(ids)]


@settings(max_examples=200, deadline=None)
@given(ids=PROMPTS, capacity=st.integers(1, 12), policy=st.sampled_from(["lru", "fifo", "lfu", "slru", "mru"]))
def test_nothing_beats_the_optimum_and_the_optimum_never_the_unbounded(
    ids: list[list[int]], capacity: int, policy: str
) -> None:
    prompts = as_prompts(ids)
    fits = [p for p in prompts if p.num_units <= capacity]
    bounded = count(fits, CacheReplay(capacity, 1, 1, eviction=policy, counting="listed"), 1, counting="listed")
    best = count(fits, Optimum(fits, capacity, 1, 1, "listed"), 1, counting="listed")
    unbounded = count(fits, CacheReplay(200, 1, 1, counting="listed"), 1, counting="listed")
    assert bounded.num_cached_tokens <= best.num_cached_tokens <= unbounded.num_cached_tokens


@settings(max_examples=200, deadline=None)
@given(ids=PROMPTS, capacity=st.integers(1, 8), host=st.integers(1, 12), index=st.sampled_from(["radix", "hash"]))
def test_host_memory_adds_hits_and_one_that_holds_everything_loses_none(
    ids: list[list[int]], capacity: int, host: int, index: IndexKind
) -> None:
    fits = [p for p in as_prompts(ids) if p.num_units <= capacity]
    unbounded = count(fits, CacheReplay(200, 1, 1), 1)
    alone, ample, bounded = (
        count(fits, CacheReplay(capacity, 1, 1, index=index, host_blocks=blocks), 1) for blocks in (0, 200, host)
    )
    assert ample.num_cached_tokens == unbounded.num_cached_tokens
    assert ample.num_host_tokens == ample.num_cached_tokens - alone.num_cached_tokens
    assert alone.num_host_tokens == 0 <= bounded.num_host_tokens <= bounded.num_cached_tokens
    assert bounded.num_cached_tokens <= unbounded.num_cached_tokens


@settings(max_examples=100, deadline=None)
@given(ids=PROMPTS, num=st.integers(1, 4), routing=st.sampled_from(["round-robin", "session", "prefix"]))
def test_a_fleet_finds_no_more_than_one_cache_and_by_prefix_as_much(
    ids: list[list[int]], num: int, routing: Routing
) -> None:
    prompts = as_prompts(ids)
    one = count(prompts, CacheReplay(200, 1, 1), 1).num_cached_tokens
    found = count(prompts, Fleet([CacheReplay(200, 1, 1) for _ in range(num)], routing), 1).num_cached_tokens
    assert found <= one
    if routing == "prefix":
        assert found == one


@settings(max_examples=100, deadline=None)
@given(data=st.data(), unit=st.sampled_from([1, 2, 4]), block=st.sampled_from([4, 8]))
def test_units_are_exact_whatever_the_block_sizes(data: st.DataObject, unit: int, block: int) -> None:
    """A trace of named blocks in units finds what its tokens would find one by one."""
    from anaphora.tokens import pack

    listed = 4
    ids = data.draw(st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=12))
    lengths = [listed * (len(each) - 1) + data.draw(st.integers(1, listed)) for each in ids]
    in_units, in_tokens = CacheReplay(500, block, unit), CacheReplay(500, block, 1)
    for each, length in zip(ids, lengths, strict=True):
        tokens = [name * listed + k for name in each for k in range(listed)][:length]
        units = [name * (listed // unit) + k for name in each for k in range(listed // unit)]
        whole, rest = divmod(length, unit)
        prompt = Prompt(pack(units[:whole]), units[whole] if rest else None, length, 0.0)
        assert in_units.serve(prompt) == in_tokens.serve(Prompt(pack(tokens), None, length, 0.0))


def test_salts_keep_prompts_apart() -> None:
    from anaphora.tokens import pack

    cache = CacheReplay(10, 1, 1)
    served = [cache.serve(Prompt(pack([1, 2, 3]), None, 3, 0.0, Namespace(salt=salt))) for salt in ("a", "b", "a")]
    assert served == [0, 0, 2]


class TestPublicTraces:
    """Exact integers of Mooncake's FAST'25 traces (sha256 b8cbb061a852..., bd070915a98f...), counted independently."""

    @staticmethod
    @cache
    def trace(name: str) -> Trace:
        path = SHARED / "traces" / f"mooncake_{name}.jsonl"
        if not path.is_file():
            pytest.skip(f"no public trace at {path}: the small trace of this module covers the same rules")
        return trace_of(path)

    @pytest.mark.parametrize(("name", "requests", "tokens", "blocks"), [
        ("conversation", 12_031, 144_793_823, 288_500), ("synthetic", 3_993, 61_194_628, 121_877),
    ])  # fmt: skip
    def test_size(self, name: str, requests: int, tokens: int, blocks: int) -> None:
        trace = self.trace(name)
        assert (len(trace.prompts), trace.num_tokens, trace.num_blocks(512)) == (requests, tokens, blocks)

    @pytest.mark.parametrize(("name", "counting", "cached_blocks", "blocks", "cached_tokens"), [
        ("conversation", "listed", 105_710, 288_500, 54_098_411),
        ("synthetic", "listed", 77_953, 121_877, 39_852_661),
        ("conversation", "engine", 105_592, 276_491, 54_063_104),
        ("synthetic", "engine", 77_740, 117_888, 39_802_880),
    ])  # fmt: skip
    def test_unbounded(
        self, name: str, counting: Counting, cached_blocks: int, blocks: int, cached_tokens: int
    ) -> None:
        outcome = run(self.trace(name), Setting(block_size=512, counting=counting))
        assert (outcome.cached_blocks, outcome.blocks, outcome.cached_tokens) == (cached_blocks, blocks, cached_tokens)

    @pytest.mark.parametrize(("name", "rates"), [
        ("conversation", {2: 0.2759, 4: 0.1955, 8: 0.1390, 16: 0.1010}),
        ("synthetic", {2: 0.5178, 4: 0.3712, 8: 0.2305, 16: 0.1382}),
    ])  # fmt: skip
    def test_round_robin_fleets(self, name: str, rates: dict[int, float]) -> None:
        found = {n: run(self.trace(name), Setting(block_size=512, replicas=n)).hit_rate for n in rates}
        assert {n: round(rate or 0, 4) for n, rate in found.items()} == rates

    @pytest.mark.parametrize(("name", "rates"), [
        ("conversation", {1_000: 0.0445, 5_859: 0.1355, 10_000: 0.2112, 50_000: 0.3546}),
        ("synthetic", {1_000: 0.0825, 5_859: 0.3094, 10_000: 0.4235, 50_000: 0.6396}),
    ])  # fmt: skip
    def test_lru_over_capacity(self, name: str, rates: dict[int, float]) -> None:
        for capacity, rate in rates.items():
            outcome = run(self.trace(name), Setting(capacity, block_size=512, counting="listed"))
            assert outcome.block_hit_rate == pytest.approx(rate, abs=0.005)

    @pytest.mark.parametrize(("name", "capacity", "rate"), [
        ("conversation", None, 0.3981), ("synthetic", None, 0.8627),
        ("conversation", 954, 0.0467), ("conversation", 7_639, 0.1762), ("conversation", 61_119, 0.3835),
        ("synthetic", 954, 0.1268), ("synthetic", 7_639, 0.5316), ("synthetic", 61_119, 0.8627),
    ])  # fmt: skip
    def test_the_last_half_alone_agrees_with_another_simulator(
        self, name: str, capacity: int | None, rate: float
    ) -> None:
        """kvcache-simulator 0.1.3 counts tokens of the last half of the requests."""
        setting = Setting(capacity, block_size=512, counting="listed", measure_after=0.5)
        assert round(run(self.trace(name), setting).hit_rate or 0, 4) == pytest.approx(rate, abs=1.01e-4)

    @pytest.mark.parametrize(("name", "capacity", "rate"), [
        ("conversation", 1_000, 0.179), ("conversation", 3_000, 0.292), ("synthetic", 10_000, 0.617),
    ])  # fmt: skip
    def test_the_optimum(self, name: str, capacity: int, rate: float) -> None:
        outcome = run(self.trace(name), Setting(capacity, OPTIMUM, block_size=512, counting="listed"))
        assert round(outcome.block_hit_rate or 0, 3) == rate


class TestCommand:
    def test_json_is_one_object(self, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["simulate", str(small), "--json"]) == 0
        result: dict[str, Any] = json.loads(capsys.readouterr().out)
        assert result["trace"]["requests"] == 5
        assert result["runs"][0]["cached_tokens"] == 7 * 512

    def test_capacity_in_bytes_of_a_named_model(self, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert kv_bytes_per_token("meta-llama/Llama-3.1-8B") == 131_072
        assert main(["simulate", str(small), "--capacity", "192MiB", "--model", "Llama-3.1-8B", "--json"]) == 0
        assert json.loads(capsys.readouterr().out)["runs"][0]["setting"]["capacity_blocks"] == 3

    def test_host_memory_is_told_by_tier(self, small: Path, capsys: pytest.CaptureFixture[str]) -> None:
        options = ["--capacity", "4", "--host-capacity", "0", "10", "--jobs", "1"]
        assert main(["simulate", str(small), *options, "--json"]) == 0
        without, with_host = json.loads(capsys.readouterr().out)["runs"]
        assert without["cached_tokens_by_tier"] == {"device": without["cached_tokens"], "host": 0}
        by_tier = with_host["cached_tokens_by_tier"]
        assert by_tier["device"] == without["cached_tokens"]
        assert by_tier["device"] + by_tier["host"] == with_host["cached_tokens"] == 7 * 512
        assert main(["simulate", str(small), *options]) == 0
        header, *_ = (line for line in capsys.readouterr().out.splitlines() if "policy" in line)
        assert "host blocks" in header
        assert "from host" in header

    def test_pictures_and_a_page_that_asks_the_network_for_nothing(
        self, small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        page, folder = tmp_path / "r.html", tmp_path / "svg"
        options = ["--capacity", "2", "3", "--policy", "lru", "optimum", "--replicas", "1", "2", "--jobs", "1"]
        assert main(["simulate", str(small), *options, "--report", str(page), "--svg", str(folder)]) == 0
        assert {path.name for path in folder.iterdir()} == {"memory.svg", "replicas.svg"}
        text = page.read_text()
        assert text.count("<svg") == 2
        assert "http" not in text.replace("http://www.w3.org/2000/svg", "")
        assert "src=" not in text

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            (["--capacity", "24GiB"], "--model"),
            (["--capacity", "1token"], "expected blocks, tokens or bytes"),
            (["--model", "nothing", "--capacity", "1GiB"], "none of SmolLM2"),
            (["--count", "listed", "--block-size", "16"], "its own block size"),
            (["--index", "hash", "--policy", "lfu"], "lru alone"),
            (["--format", "azure"], "none with content"),
            (["--host-capacity", "10"], "--host-capacity: needs --capacity"),
            (["--capacity", "9", "--host-capacity", "unbounded"], "--host-capacity: needs a bound"),
            (["--capacity", "9", "--host-capacity", "1GiB"], "--host-capacity: a size in bytes needs --model"),
            (["--capacity", "9", "--host-capacity", "9", "--policy", "optimum"], "optimum has no host memory"),
        ],
    )
    def test_what_cannot_be_done_says_so(
        self, small: Path, options: list[str], message: str, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with suppress(SystemExit):
            assert main(["simulate", str(small), *options]) != 0
        assert message in capsys.readouterr().err


def test_the_command_line_knows_every_format() -> None:
    assert set(FORMAT_NAMES) == set(FORMATS)


class TestStream:
    @pytest.fixture
    def path(self, tmp_path: Path) -> Path:
        file = tmp_path / "trace.jsonl"
        file.write_text("\n".join(as_mooncake(generate(["chat", "rag"], 30, 1.0, seed=6))))
        return file

    def test_a_trace_that_is_not_kept_gives_the_same_outcomes(
        self, path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        found = []
        for more in ([], ["--stream"]):
            options = [
                "--capacity",
                "20",
                "100",
                "--replicas",
                "1",
                "7",
                "--routing",
                "session",
                "--jobs",
                "1",
                "--json",
            ]
            assert main(["simulate", str(path), *options, *more]) == 0
            found.append(json.loads(capsys.readouterr().out))
        assert found[0]["runs"] == found[1]["runs"]
        assert found[0]["trace"]["prompt_tokens"] == found[1]["trace"]["prompt_tokens"]

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ([], "needs --capacity with a bound"),
            (["--capacity", "10", "--policy", "optimum"], "not with --policy optimum"),
            (["--capacity", "10", "--count", "listed"], "not with --engine or --count listed"),
        ],
    )
    def test_what_needs_the_whole_trace_is_refused(
        self, options: list[str], message: str, path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert main(["simulate", str(path), "--stream", *options]) == 2
        assert message in capsys.readouterr().err

    def test_lines_that_go_back_in_time_are_named(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "trace.jsonl"
        line = '{"timestamp": %d, "input_length": 512, "output_length": 1, "hash_ids": [1]}\n'
        path.write_text(line % 2000 + line % 1000)
        assert main(["simulate", str(path), "--stream", "--capacity", "10"]) == 1
        assert "line 2: earlier than the line before" in capsys.readouterr().err

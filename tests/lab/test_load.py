"""A trace as load on a real server on a local port: what is sent, when, what is counted, what the simulator says."""

from __future__ import annotations

import asyncio
import json
from array import array
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from anaphora.cli import main
from anaphora.engine.cost_model import CostModel
from anaphora.engine.executor import Batch, Span
from anaphora.identity import Namespace
from anaphora.lab.load.endpoint import Answer, Endpoint
from anaphora.lab.load.generator import run_load
from anaphora.lab.load.probe import Speed, _fit
from anaphora.lab.load.prompts import Prompts, Vocabulary
from anaphora.lab.load.schedule import due_times
from anaphora.lab.trace import Prompt
from anaphora.lab.workload import as_mooncake, generate
from anaphora.tokens import pack
from tests.server.fake_engine import FakeEngine
from tests.server.live_server import serving_fake

IDS = "1-250"


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def line(time_ms: int, length: int, blocks: list[int], output: int = 4) -> dict[str, Any]:
    return {"timestamp": time_ms, "input_length": length, "output_length": output, "hash_ids": blocks}


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Two conversations and a stranger; the second turn of each extends its first."""
    return write(
        tmp_path / "trace.jsonl",
        [
            line(0, 512, [0]),
            line(10, 700, [1, 2]),
            line(20, 1100, [0, 3, 4]),
            line(30, 1024, [1, 5]),
            line(40, 600, [6, 7]),
            line(50, 1100, [0, 3, 4]),
        ],
    )


def bench(capsys: pytest.CaptureFixture[str], *options: object) -> dict[str, Any]:
    assert main(["bench", *map(str, options), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


class TestAgainstAServer:
    @pytest.mark.parametrize("num_blocks", [1024, 150])
    def test_one_client_finds_what_the_simulator_says_in_every_request(
        self, trace: Path, num_blocks: int, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with serving_fake(FakeEngine(num_blocks=num_blocks)) as live:
            found = bench(
                capsys, "--trace", trace, "--url", live.url, "--token-ids", IDS,
                "--as-fast-as-possible", "--concurrency", 1, "--seed", 7,
            )  # fmt: skip
        assert found["cached_tokens_by_request"] == {"num_requests": 6, "num_equal": 6, "worst": 0}
        assert found["measured"]["cached_tokens"] == found["server_counted_cached_tokens"]
        assert found["assumed_cache"]["num_blocks"] == num_blocks
        if num_blocks == 1024:  # 512 of the third and fourth; of the last all whole blocks before the last token
            assert found["measured"]["cached_tokens"] == 512 + 512 + 1088
        else:
            assert found["measured"]["cached_tokens"] < 512 + 512 + 1088
        assert found["sent"]["length_error"] == {"share": 0.0, "worst_tokens": 0}
        assert found["measured"]["output_tokens"] == 6 * 4

    def test_clients_that_do_not_wait_send_all_at_once_and_nothing_is_late_for_that(
        self, trace: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with serving_fake(FakeEngine(num_blocks=1024)) as live:
            found = bench(capsys, "--trace", trace, "--url", live.url, "--token-ids", IDS, "--speed", 0.5)
        assert found["measured"]["answered"] == 6
        assert found["errors"] == {}
        assert found["measured"]["ttft_s"]["p50"] > 0

    def test_what_the_server_rejects_is_counted_by_kind_and_the_rest_is_compared(
        self, trace: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with serving_fake(FakeEngine(max_context=800)) as live:
            found = bench(
                capsys, "--trace", trace, "--url", live.url, "--token-ids", IDS,
                "--as-fast-as-possible", "--concurrency", 1,
            )  # fmt: skip
        ((kind, count),) = found["errors"].items()
        assert kind.startswith("HTTP 400")
        assert (count, found["measured"]["answered"]) == (3, 3)
        assert found["cached_tokens_by_request"]["num_equal"] == 3

    def test_tables_pictures_pages_and_records(
        self, trace: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        with serving_fake(FakeEngine(num_blocks=1024)) as live:
            options = [
                "bench", "--trace", str(trace), "--url", f"{live.url}/v1", "--token-ids", IDS, "--limit", "3",
                "--as-fast-as-possible", "--concurrency", "1", "--svg", str(tmp_path / "pics"),
                "--report", str(tmp_path / "report.html"), "--records", str(tmp_path / "records.jsonl"),
            ]  # fmt: skip
            assert main(options) == 0
        out = capsys.readouterr().out
        assert "cached tokens of each request: equal in all 3" in out.lower()
        assert "lengths as the server counts them: +0.00% in total, +0 tokens at worst" in out
        assert (tmp_path / "pics/ttft.svg").read_text().startswith("<svg")
        assert "<svg" in (tmp_path / "report.html").read_text()
        records = [json.loads(each) for each in (tmp_path / "records.jsonl").read_text().splitlines()]
        assert [each["cached_tokens"] for each in records] == [0, 0, 512]
        assert [each["predicted_cached_tokens"] for each in records] == [0, 0, 512]

    def test_arrivals_without_content_share_nothing(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "azure.csv"
        path.write_text(
            "TIMESTAMP,ContextTokens,GeneratedTokens\n2026-05-01 10:00:00,300,3\n2026-05-01 10:00:01,300,3\n"
        )
        with serving_fake(FakeEngine(num_blocks=1024)) as live:
            found = bench(capsys, "--trace", path, "--url", live.url, "--token-ids", IDS, "--rate", 100)
        assert (found["measured"]["prompt_tokens"], found["measured"]["cached_tokens"]) == (600, 0)

    def test_nobody_there(self, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["bench", "--trace", str(trace), "--url", "http://127.0.0.1:9"]) == 1
        assert "no list of models" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("options", "message"),
        [
            ([], "--trace: needs --url"),
            (["--url", "http://x", "--as-fast-as-possible", "--rate", "1"], "--as-fast-as-possible: not with"),
            (["--url", "http://x", "--hardware", "h100"], "--hardware: needs MODEL"),
            (["--url", "http://x", "--api-key-env", "NO_SUCH_VARIABLE"], "NO_SUCH_VARIABLE is not set"),
        ],
    )
    def test_wrong_usage(self, options: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["bench", "--trace", "t.jsonl", *options]) == 2
        assert message in capsys.readouterr().err


class WordTokenizer:
    """A token a word, and one at the beginning, as many models have it."""

    adds_bos = True
    eos_token_ids = (256,)
    longest_token_bytes = 16
    vocab_size = 257
    special_token_ids = frozenset({256})

    def __init__(self) -> None:
        self._ids: dict[str, int] = {}

    def encode(self, text: str, *, add_bos: bool = False, parse_special: bool = True) -> bytes:
        words = text.split()
        return array("i", [0] * add_bos + [self._ids.setdefault(w, 1 + len(self._ids)) % 255 for w in words]).tobytes()

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = False) -> bytes:
        return f" {token_id}".encode()


class TestText:
    @pytest.mark.parametrize("form", ["text", "chat"])
    def test_words_that_are_one_token_each_make_prompts_of_the_right_length(
        self, form: str, trace: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        engine = FakeEngine(num_blocks=1024)
        engine.model = replace(engine.model, tokenizer=WordTokenizer())  # type: ignore[arg-type]
        with serving_fake(engine) as live:
            found = bench(
                capsys, "--trace", trace, "--url", live.url, "--send", form,
                "--as-fast-as-possible", "--concurrency", 1,
            )  # fmt: skip
        assert found["sent"]["form"] == form
        assert found["sent"]["length_error"] == {"share": 0.0, "worst_tokens": 0}
        assert found["cached_tokens_by_request"]["num_equal"] == 6

    def test_a_model_without_such_words_is_told(self, trace: Path, capsys: pytest.CaptureFixture[str]) -> None:
        with serving_fake() as live:  # a token a byte
            assert main(["bench", "--trace", str(trace), "--url", live.url, "--send", "text"]) == 1
        assert "common words are not one token each" in capsys.readouterr().err


class NeverAnswering:
    """An endpoint whose answers come when the last request was sent."""

    def __init__(self, total: int) -> None:
        self.num_sent, self._total, self._all = 0, total, asyncio.Event()

    clock = staticmethod(Endpoint.clock)

    def body(self, form: str, prompt: object, num_output_tokens: int) -> bytes:
        return b""

    async def send(self, form: str, body: bytes) -> Answer:
        answer = Answer(self.clock())
        self.num_sent += 1
        if self.num_sent == self._total:
            self._all.set()
        await self._all.wait()
        answer.first_s = answer.end_s = self.clock()
        return answer


PROMPTS = [Prompt(pack([n]), None, 1, 0.001 * n) for n in range(20)]


def test_arrivals_do_not_wait_for_answers() -> None:
    async def run() -> int:
        endpoint = NeverAnswering(len(PROMPTS))
        load = await run_load(endpoint, Prompts(Vocabulary("ids"), 1, 1), PROMPTS, due_times(PROMPTS))  # type: ignore[arg-type]
        return sum(answer.end_s is not None for answer in load.answers)

    assert asyncio.run(asyncio.wait_for(run(), 60)) == len(PROMPTS)


def test_a_bound_on_clients_makes_sends_late_and_that_is_told() -> None:
    class Slow(NeverAnswering):
        async def send(self, form: str, body: bytes) -> Answer:
            answer = Answer(self.clock())
            await asyncio.sleep(0.02)
            answer.end_s = self.clock()
            return answer

    async def run() -> list[float]:
        load = await run_load(
            Slow(0), Prompts(Vocabulary("ids"), 1, 1), PROMPTS[:4], [0.0] * 4, concurrency=1,  # type: ignore[arg-type]
        )  # fmt: skip
        return load.lateness_s

    lateness = asyncio.run(run())
    assert lateness[-1] >= 3 * 0.02
    assert lateness == sorted(lateness)


def common(one: list[int], other: list[int]) -> int:
    return next((n for n, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


@given(st.lists(st.integers(0, 3), max_size=4), st.lists(st.integers(0, 3), max_size=4), st.integers(0, 2**31))
def test_prompts_share_as_many_leading_units_as_in_the_trace(one: list[int], other: list[int], seed: int) -> None:
    unit = 64
    prompts = Prompts(Vocabulary("ids"), unit, seed)
    made = [
        prompts.spell(prompts.indices(Prompt(pack(ids), 99 + n, unit * len(ids) + 9, 0.0)))
        for n, ids in enumerate((one, other))
    ]
    assert [len(each) for each in made] == [unit * len(one) + 9, unit * len(other) + 9]
    assert common(made[0], made[1]) // unit == common(one, other)  # type: ignore[arg-type]


def test_prompts_under_another_salt_share_nothing() -> None:
    prompts = Prompts(Vocabulary("ids"), 16, 1)
    one, other = (
        prompts.indices(Prompt(pack([1, 2]), None, 32, 0.0, Namespace(salt=salt))).tolist() for salt in ("a", "b")
    )
    assert common(one, other) < 4


def test_another_seed_gives_other_contents_and_equal_seeds_equal_ones() -> None:
    prompt = Prompt(pack(list(range(32))), None, 32, 0.0)
    first, again, other = (Prompts(Vocabulary("ids"), 1, seed).indices(prompt).tolist() for seed in (1, 1, 2))
    assert first == again
    assert common(first, other) < 4


def test_times_are_the_traces_own_or_made() -> None:
    prompts = [Prompt(b"", None, 1, time_s) for time_s in (100.0, 101.0, 104.0)]
    assert due_times(prompts) == [0.0, 1.0, 4.0]
    assert due_times(prompts, speed=2) == [0.0, 0.5, 2.0]
    assert due_times(prompts, at_once=True) == [0.0, 0.0, 0.0]
    many = due_times(prompts * 1000, rate=50.0, seed=3)
    assert many == sorted(many)
    assert many[-1] == pytest.approx(3000 / 50, rel=0.1)


def test_a_field_that_a_server_refuses_by_name_is_left_out() -> None:
    endpoint = Endpoint("http://x")
    refusal = Answer(0.0, error="HTTP 400", message="Unrecognized request argument supplied: ignore_eos")
    assert "ignore_eos" in json.loads(endpoint.body("text", "a", 5))
    assert endpoint.learn(refusal)
    assert "ignore_eos" not in json.loads(endpoint.body("text", "a", 5))
    assert not endpoint.learn(refusal)
    assert not endpoint.learn(Answer(0.0, error="HTTP 429", message="ignore_eos"))


def test_speeds_are_found_again_in_the_times_that_they_make() -> None:
    def time_s(length: int) -> float:
        return 0.003 + 0.010 * -(-length // 512) + 2e-4 * length + 1e-7 * length * (length + 1) / 2

    rows = [(length, time_s(length)) for length in (32, 128, 512, 1536)]
    assert _fit(rows, 0.010, 512) == pytest.approx((2e-4, 1e-7, 0.003), rel=1e-6)


def test_the_cost_model_of_probed_speeds_takes_the_probed_time() -> None:
    speed = Speed(overhead_s=0.0, step_s=0.010, span_s=0.001, token_s=2e-4, pair_s=1e-7)
    costs = CostModel(*speed.model())
    prefill = Batch([Span(np.zeros(512, np.int32), 0, [array("i", [1])], 0)])
    assert costs.step_s(prefill) == pytest.approx(0.010 + 0.001 + 2e-4 * 512 + 1e-7 * 512 * 513 / 2, rel=1e-2)


def test_generated_traffic_is_a_trace_like_any_other(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "made.jsonl"
    path.write_text("\n".join(as_mooncake(generate(["few-shot"], 1, 1.0, seed=4))))
    with serving_fake(FakeEngine(max_context=8192, num_blocks=4096)) as live:
        found = bench(
            capsys, "--trace", path, "--url", live.url, "--token-ids", IDS, "--limit", 5,
            "--as-fast-as-possible", "--concurrency", 1, "--max-output-tokens", 2,
        )  # fmt: skip
    assert found["cached_tokens_by_request"]["num_equal"] == 5
    assert found["measured"]["output_tokens"] == 10

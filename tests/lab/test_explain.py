"""Why prompts were not reused: each cause on the smallest log that has it, and laws that hold for every log."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.cli import main
from anaphora.lab.encoding import EstimatingEncoder
from anaphora.lab.explain.case import Case, Conditions, prepare
from anaphora.lab.explain.fixes import fixes
from anaphora.lab.explain.neighbours import Neighbours
from anaphora.lab.explain.sessions import explain_sessions
from anaphora.lab.explain.volatile import canonical_json, common_length, tell, without
from anaphora.lab.explain.waterfall import Reality, Waterfall, explain
from anaphora.lab.record import LoggedRequest, Part, Usage
from anaphora.tokens import pack

from .samples import jsonl

STABLE = "The desk opens at noon and lends one toy to each child for a week. " * 30


def words(seed: str, num: int) -> str:
    rng = random.Random(seed)
    return " ".join("".join(rng.choices("abcdefgh", k=5)) for _ in range(num))


def part(path: str, text: str, section: Any = "messages", role: str = "user") -> Part:
    return Part(path, section, role, text)


def chat(system: str, *turns: str, tools: tuple[str, ...] = (), **fields: Any) -> LoggedRequest:
    parts = [part(f"tools[{n}]", text, "tools", "") for n, text in enumerate(tools)]
    parts.append(part("system", system, "system", "system"))
    parts += [part(f"messages[{n}].content", t, role=("user", "assistant")[n % 2]) for n, t in enumerate(turns)]
    return LoggedRequest(1, parts=tuple(parts), **fields)


def with_ids(*ids: int, **fields: Any) -> LoggedRequest:
    return LoggedRequest(1, token_ids=pack(list(ids)), **fields)


def case_of(*requests: LoggedRequest, block_size: int | None = None) -> Case:
    for number, request in enumerate(requests):
        request.line = number + 1
        if request.time_s is None:
            request.time_s = float(number)
    return prepare("log", requests, EstimatingEncoder(), block_size)


def causes(found: Waterfall) -> dict[str, float]:
    return {cause.name: cause.num_tokens for cause in found.causes if cause.num_tokens}


class TestGranularity:
    """A large block hides what is shared: 240 tokens of 900, blocks of 784."""

    SHARED = tuple(range(240))
    REQUESTS = ([*SHARED, *range(1000, 1660)], [*SHARED, *range(2000, 2660)])

    def test_shared_below_a_block_is_told_from_nothing_shared(self) -> None:
        case = case_of(*(with_ids(*ids) for ids in self.REQUESTS))
        found = explain(case, Reality(784))
        assert causes(found) == {"nothing shared": 900 + 660, "below block size (784)": 240}
        assert found.predicted == 0
        assert [(fix.action, fix.num_tokens) for fix in fixes(case, Reality(784), found)] == [
            ("blocks of 16 tokens", 240)
        ]

    def test_smaller_blocks_find_it(self) -> None:
        assert explain(case_of(*(with_ids(*ids) for ids in self.REQUESTS)), Reality(16)).predicted == 240

    def test_prompts_that_share_nothing_say_so(self) -> None:
        found = explain(case_of(with_ids(*range(900)), with_ids(*range(1000, 1900))), Reality(784))
        assert causes(found) == {"nothing shared": 1800}

    def test_a_repeat_still_computes_its_last_token(self) -> None:
        found = explain(case_of(with_ids(*range(32)), with_ids(*range(32))), Reality(16))
        assert causes(found) == {"nothing shared": 32, "last token": 1, "below block size (16)": 15}


class TestDivergence:
    def test_a_time_in_the_system_prompt(self) -> None:
        case = case_of(
            chat(f"Now: 2026-05-01 10:00:07. {STABLE}", "q one"), chat(f"Now: 2026-05-01 11:30:00. {STABLE}", "q two")
        )
        found = explain(case, Reality(16))
        assert causes(found)["diverged: timestamp in system"] > 400
        assert [(o.path, o.offset, o.lines) for o in found.offenders] == [("system", 5, [2])]
        best = fixes(case, Reality(16), found)[0]
        assert best.action.startswith("move the time")
        assert best.num_tokens > 400

    @pytest.mark.parametrize(("one", "other", "kind"), [
        ("x-billing: v=1; cch=ab12; ", "x-billing: v=1; cch=cd34; ", "identifier"),
        ("run 1b4e28ba-2fa1-4d3b-a3f5-ef19b5a7633b. ", "run 6fa459ea-ee8a-4ca4-894e-db77e160355e. ", "uuid"),
        ("It is Monday, June 1, 2026. ", "It is Tuesday, June 2, 2026. ", "timestamp"),
        ("Rules:\n\n", "Rules: ", "whitespace"),
    ])  # fmt: skip
    def test_what_changes_at_the_front_is_named(self, one: str, other: str, kind: str) -> None:
        found = explain(case_of(chat(one + STABLE, "q"), chat(other + STABLE, "r")), Reality(16))
        assert causes(found)[f"diverged: {kind} in system"] > 400

    def test_order_of_tools_and_of_keys(self) -> None:
        tools = tuple(json.dumps({"name": name, "x": words(name, 20)}) for name in "ab")
        turned = tuple(json.dumps(dict(reversed(json.loads(text).items()))) for text in tools)
        for other, kind in ((tools[::-1], "tool order"), (turned, "key order")):
            found = explain(case_of(chat(STABLE, "q", tools=tools), chat(STABLE, "r", tools=other)), Reality(16))
            assert causes(found)[f"diverged: {kind} in tools"] > 400

    def test_an_edited_list_of_tools(self) -> None:
        one, other = ('{"name":"a"}',), ('{"name":"b"}',)
        turns = ("hello " + words("h", 200), "hi", "and then?")
        found = explain(case_of(chat(STABLE, *turns[:1], tools=one), chat(STABLE, *turns, tools=other)), Reality(16))
        assert causes(found)["diverged: tools in tools"] > 150

    def test_a_system_message_that_was_moved_to_the_front(self) -> None:
        turns = (words("u1", 200), words("a1", 200))
        case = case_of(chat(STABLE, *turns), chat("Be brief. " + STABLE, *turns, "more"))
        found = explain(case, Reality(16))
        assert causes(found)["diverged: hoisted system in system"] > 400
        assert found.offenders[0].offset == 0
        assert any(
            fix.is_bound and "hoist" not in fix.action and "front" in fix.action
            for fix in fixes(case, Reality(16), found)
        )

    def test_an_edit_in_the_history(self) -> None:
        turns = [words(f"t{n}", 100) for n in range(5)]
        edited = [turns[0], "[cut]", *turns[2:], "next"]
        found = explain(case_of(chat(STABLE, *turns), chat(STABLE, *edited)), Reality(16))
        assert causes(found)["diverged: history in messages"] == 300

    def test_a_new_question_is_no_divergence(self) -> None:
        found = explain(case_of(chat(STABLE, words("a", 50)), chat(STABLE, words("b", 50))), Reality(16))
        assert not [name for name in causes(found) if name.startswith("diverged")]


class TestBoundaries:
    IDS = tuple(range(64))

    def test_salt_adapter_and_tenant_keep_apart_only_where_asked(self) -> None:
        case = case_of(with_ids(*self.IDS, salt="a"), with_ids(*self.IDS, salt="b"))
        assert causes(explain(case, Reality(16)))["split by salt"] == 48
        assert "split by salt" not in causes(explain(case, Reality(16, splits=())))
        assert fixes(case, Reality(16), explain(case, Reality(16)))[0].num_tokens == 48
        tenants = case_of(with_ids(*self.IDS, tenant="a"), with_ids(*self.IDS, tenant="b"))
        assert explain(tenants, Reality(16)).predicted == 48
        assert causes(explain(tenants, Reality(16, splits=("tenant",))))["split by tenant"] == 48

    def test_another_model_is_never_shared_with(self) -> None:
        found = explain(case_of(with_ids(*self.IDS, model="a"), with_ids(*self.IDS, model="b")), Reality(16))
        assert causes(found) == {"nothing shared": 128}

    def test_routed_elsewhere_by_the_logs_own_replicas_or_by_a_number(self) -> None:
        case = case_of(*(with_ids(*self.IDS, replica=name) for name in "aba"))
        assert causes(explain(case, Reality(16)))["routed elsewhere"] == 48
        alike = case_of(*(with_ids(*self.IDS) for _ in range(3)))
        assert causes(explain(alike, Reality(16, replicas=2)))["routed elsewhere"] == 48
        assert "routed elsewhere" not in causes(explain(alike, Reality(16)))

    def test_expired(self) -> None:
        case = case_of(*(with_ids(*self.IDS, time_s=time_s) for time_s in (0.0, 200.0, 501.0)))
        assert causes(explain(case, Reality(16, ttl_s=300.0)))["expired"] == 48
        actions = [fix.action for fix in fixes(case, Reality(16, ttl_s=300.0), explain(case, Reality(16, ttl_s=300.0)))]
        assert "a time to live of 1 hour" in actions

    def test_evicted(self) -> None:
        case = case_of(with_ids(*self.IDS), with_ids(*range(100, 164)), with_ids(*self.IDS))
        found = explain(case, Reality(16, capacity_blocks=4))
        assert causes(found)["evicted"] == 48
        gains = {fix.action: fix.num_tokens for fix in fixes(case, Reality(16, capacity_blocks=4), found)}
        assert gains == {"2 times the memory": 48, "4 times the memory": 48, "unbounded memory": 48}


class TestReported:
    def test_what_was_not_reported_is_not_zero(self) -> None:
        usages = [Usage(100), Usage(100), Usage(100, 0), Usage(100, 64)]
        found = explain(case_of(*(with_ids(*range(100), usage=usage) for usage in usages)), Reality(16))
        assert (found.reporting_requests, found.reported, found.reported_rate) == (2, 64, 0.32)
        silent = explain(case_of(with_ids(*range(100), usage=Usage(100))), Reality(16))
        assert (silent.reported, silent.reported_rate) == (None, None)

    def test_counts_are_brought_to_the_stated_lengths(self) -> None:
        one, other = chat(STABLE, "q", usage=Usage(5000, 0)), chat(STABLE, "q", usage=Usage(5000, 4000))
        found = explain(case_of(one, other), Reality(16))
        assert found.num_tokens == pytest.approx(10_000)
        assert found.estimate_error is not None


TOKENS = st.lists(st.integers(0, 1), min_size=1, max_size=24)


@settings(max_examples=150, deadline=None)
@given(
    prompts=st.lists(
        st.tuples(TOKENS, st.sampled_from([None, "a"]), st.sampled_from(["p", "q"])), min_size=1, max_size=12
    ),
    block_size=st.sampled_from([1, 2, 4]),
    ttl_s=st.sampled_from([None, 2.0]),
    capacity=st.sampled_from([None, 6, 16]),
)
def test_causes_are_never_negative_and_add_up(
    prompts: list[tuple[list[int], str | None, str]], block_size: int, ttl_s: float | None, capacity: int | None
) -> None:
    case = case_of(*(with_ids(*ids, salt=salt, replica=replica) for ids, salt, replica in prompts))
    found = explain(case, Reality(block_size, ttl_s=ttl_s, capacity_blocks=capacity))
    assert all(cause.num_tokens >= 0 for cause in found.causes)
    assert found.num_tokens - sum(cause.num_tokens for cause in found.causes) == found.predicted


@settings(max_examples=200, deadline=None)
@given(prompts=st.lists(st.lists(st.text("ab", max_size=3), max_size=4), max_size=12))
def test_the_neighbour_shares_most(prompts: list[list[str]]) -> None:
    neighbours = Neighbours()
    seen: list[tuple[Part, ...]] = []

    def shared(one: tuple[Part, ...], other: tuple[Part, ...]) -> tuple[int, int]:
        num = 0
        while num < min(len(one), len(other)) and one[num].text == other[num].text:
            num += 1
        rest = common_length(one[num].text, other[num].text) if num < min(len(one), len(other)) else 0
        return num, rest

    for texts in prompts:
        parts = tuple(part(f"m[{n}]", text) for n, text in enumerate(texts))
        found = neighbours.find(parts)
        best = max((shared(parts, other) for other in seen), default=(0, 0))
        assert ((found.num_parts, found.num_characters) if found else (0, 0)) == best
        if found:
            assert shared(parts, seen[found.number]) == best
        neighbours.add(parts, len(seen))
        seen.append(parts)


class TestCanonical:
    def test_keys_and_required_are_sorted_and_enums_are_not(self) -> None:
        one = '{"properties":{"y":{},"x":{}},"required":["y","x"],"enum":["lo","hi"]}'
        other = '{"required":["x","y"],"enum":["lo","hi"],"properties":{"x":{},"y":{}}}'
        assert canonical_json(one) == canonical_json(other)
        assert canonical_json(one) != canonical_json(other.replace('["lo","hi"]', '["hi","lo"]'))

    @given(st.text(max_size=40), st.text(max_size=40), st.text(max_size=40))
    def test_a_common_length_is_the_longest(self, head: str, one: str, other: str) -> None:
        num = common_length(head + one, head + other)
        assert num >= len(head)
        assert (head + one)[:num] == (head + other)[:num]
        assert (head + one)[num : num + 1] != (head + other)[num : num + 1] or num == len(head + one) == len(
            head + other
        )

    @given(st.text(max_size=60))
    def test_taking_out_what_changes_never_fails(self, text: str) -> None:
        parts = (part("m", text), part("t", "{" + text, "tools"))
        assert len(without(parts, ("timestamp", "uuid", "identifier", "key order", "tool order", "whitespace"))) == 2
        tell(parts, (part("m", text[::-1]), parts[1]))


class TestSessions:
    @staticmethod
    def call(session: str, time_s: float, prompt: int, cached: int | None, **fields: Any) -> LoggedRequest:
        usage = Usage(prompt, cached, fields.pop("written", None), fields.pop("written_1h", 0))
        return LoggedRequest(1, time_s=time_s, session=session, usage=usage, **fields)

    def test_each_uncached_token_has_one_reason(self) -> None:
        report = explain_sessions(
            [
                self.call("s", 0, 1000, 0),
                self.call("s", 10, 1200, 1000),
                self.call("s", 400, 1300, 0),
                self.call("s", 410, 500, 100),
                self.call("s", 420, 600, 0, model="other"),
                self.call("s", 430, 700, 0, model="other"),
                self.call("t", 0, 50, None),
            ],
            300,
        )
        found = {cause.name.partition(":")[0]: cause.num_tokens for cause in report.causes}
        assert found == {
            "first of a session": 1000,
            "new in this request": 200 + 100 + 0 + 100 + 100,
            "expired": 1200,
            "history was cut or compacted": 400,
            "model changed": 500,
            "lost for a reason that the log does not tell": 600,
        }
        assert report.num_tokens - report.cached == sum(found.values())
        assert report.not_reported == (1, 50)

    def test_what_was_written_for_an_hour_lives_an_hour(self) -> None:
        first = self.call("s", 0, 1000, 0, written=900, written_1h=900)
        report = explain_sessions([first, self.call("s", 3000, 1100, 0)], 300)
        assert "expired" not in {cause.name.partition(":")[0] for cause in report.causes if cause.num_tokens}


class TestCommand:
    @pytest.fixture
    def log(self, tmp_path: Path) -> Path:
        path = tmp_path / "log.jsonl"
        bodies = [
            {"messages": [{"role": "system", "content": f"secret 10:0{n} {STABLE}"}, {"role": "user", "content": "q"}]}
            for n in range(3)
        ]
        path.write_bytes(jsonl(*bodies))
        return path

    def test_content_is_never_shown(self, log: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        page, svg = tmp_path / "r.html", tmp_path / "w.svg"
        assert main(["explain", str(log), "--report", str(page), "--svg", str(svg)]) == 0
        printed = capsys.readouterr().out
        assert main(["explain", str(log), "--json"]) == 0
        for text in (printed, capsys.readouterr().out, page.read_text(), svg.read_text()):
            assert "timestamp" in text
            assert "secret" not in text
            assert "toy" not in text

    def test_unknown_is_not_zero(self, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert main(["explain", str(log), "--json"]) == 0
        result = json.loads(capsys.readouterr().out)
        assert result["reported"]["hit_rate"] is None
        assert result["reported"]["cached_tokens"] is None
        assert result["causes"][0]["dollars"] is None

    def test_exit_codes_for_continuous_integration(self, log: Path, tmp_path: Path) -> None:
        assert main(["explain", str(log), "--fail-under", "0.9"]) == 3
        assert main(["explain", str(log), "--fail-under", "0%"]) == 0
        usage = tmp_path / "usage.jsonl"
        line = {
            "request_id": "a",
            "call_type": "x",
            "spend": 0,
            "startTime": "2026-05-01T10:00:00Z",
            "prompt_tokens": 5,
        }
        usage.write_bytes(jsonl(line))
        assert main(["explain", str(usage), "--fail-under", "0.1"]) == 4

    def test_lengths_alone_explain_nothing(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "azure.csv"
        path.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n2026-05-01 10:00:00,374,44\n")
        assert main(["explain", str(path)]) == 1
        assert "nothing can be told" in capsys.readouterr().err

    def test_money_and_time_are_those_of_the_options(self, log: Path, capsys: pytest.CaptureFixture[str]) -> None:
        options = ["--price-input", "3", "--price-cached", "0.3", "--prefill-rate", "1000", "--json"]
        assert main(["explain", str(log), *options]) == 0
        cause = json.loads(capsys.readouterr().out)["causes"][0]
        assert cause["dollars"] == pytest.approx(cause["tokens"] * 2.7e-6, abs=2e-6)
        assert cause["prefill_s"] == pytest.approx(cause["tokens"] / 1000, abs=1e-3)


def test_conditions_only_ever_take_away() -> None:
    case = case_of(*(with_ids(*range(40)) for _ in range(3)))
    finest = case.run(case.prompts(), Conditions(serves_last_token=True))
    assert finest == [0, 40, 40]
    assert case.run(case.prompts(), Conditions(16)) == [0, 32, 32]

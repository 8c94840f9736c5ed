"""Providers' rules, worked through by hand, and their prices to the last digit."""

from __future__ import annotations

import json
from decimal import Decimal
from pathlib import Path

import pytest

from anaphora.cli import main
from anaphora.lab.importers.source import LogError
from anaphora.lab.providers.advice import AS_MARKED, best, markings, replay
from anaphora.lab.providers.catalogue import Catalogue
from anaphora.lab.providers.emulator import Billed, Emulator
from anaphora.lab.providers.segments import Call, Segment
from anaphora.lab.record import Usage

from .samples import jsonl

CATALOGUE = Catalogue()
ANTHROPIC = CATALOGUE.rules["anthropic"]
OPENAI = CATALOGUE.rules["openai"]
EXPLICIT = CATALOGUE.rules["openai-explicit"]
M5, H1 = 300, 3600


def seg(key: str, num: int, ttl_s: int | None = None, kind: str = "text", section: str = "messages") -> Segment:
    return Segment(key, num, key, section, kind, True, ttl_s)


def reads(calls: list[Call]) -> list[tuple[int, int]]:
    emulator = Emulator(ANTHROPIC)
    return [(billed.read, billed.write) for billed in map(emulator.serve, calls)]


class TestBreakpoints:
    def test_a_prefix_below_the_minimum_is_silently_not_cached(self) -> None:
        short, enough = [Call((seg("s", num, M5), seg("q", 5))) for num in (1023, 1024)]
        assert reads([short, short]) == [(0, 0), (0, 0)]
        assert Emulator(ANTHROPIC).serve(short).problem == "below_minimum"
        assert reads([enough, enough]) == [(0, 1024), (1024, 0)]

    def test_a_read_looks_twenty_positions_back_its_own_included(self) -> None:
        blocks = [seg(f"b{n}", 100) for n in range(35)]

        def call(num: int, *marks: int) -> Call:
            return Call(tuple(seg(b.key, 100, M5 if n in marks else None) for n, b in enumerate(blocks[:num])))

        assert reads([call(15, 14), call(35, 34)]) == [(0, 1500), (0, 3500)]
        assert reads([call(15, 14), call(35, 14, 34)]) == [(0, 1500), (1500, 2000)]
        # Entry at position 15, mark at 34: the twentieth position back, and the last that is tried.
        assert reads([call(15, 14), call(34, 33)]) == [(0, 1500), (1500, 1900)]

    def test_a_run_of_tool_blocks_is_one_position(self) -> None:
        head = tuple(seg(f"b{n}", 100) for n in range(14))
        uses = tuple(seg(f"u{n}", 1, kind="tool_use") for n in range(30))
        results = tuple(seg(f"r{n}", 1, kind="tool_result") for n in range(30))
        first = Call((*head, seg("b14", 100, M5)))
        second = Call((*head, seg("b14", 100), *uses, *results, seg("end", 1, M5)))
        assert reads([first, second]) == [(0, 1500), (1500, 61)]

    def test_mixed_lives_are_billed_by_their_places(self) -> None:
        call = Call((seg("tools", 2000, H1), seg("system", 3000, M5), seg("q", 10)))
        emulator = Emulator(ANTHROPIC)
        assert emulator.serve(call) == Billed(0, 5000, 2000, 10)
        longer = Call((seg("tools", 2000, H1), seg("system", 3000, H1), seg("more", 500, M5), seg("q", 10)), time_s=301)
        # The entry for 5 minutes is gone after 301 s, that for an hour is not.
        assert emulator.serve(longer) == Billed(2000, 3500, 3000, 10)

    def test_a_use_renews_an_entry(self) -> None:
        times = [0, 290, 580, 881]
        assert reads([Call((seg("s", 2000, M5),), time_s=time_s) for time_s in times]) == [
            (0, 2000), (2000, 0), (2000, 0), (0, 2000),
        ]  # fmt: skip

    def test_parallel_first_requests_all_miss(self) -> None:
        call = Call((seg("s", 2000, M5),), time_s=0.0, readable_s=1.5)
        assert reads([call, call, Call((seg("s", 2000, M5),), time_s=2.0)]) == [(0, 2000), (0, 2000), (2000, 0)]

    def test_five_marks_are_refused_wherever_they_stand(self) -> None:
        call = Call((seg("t", 9, M5, section="tools"), seg("s", 9, M5), *(seg(f"m{n}", 9, M5) for n in range(3))))
        assert Emulator(ANTHROPIC).serve(call).problem.endswith("Found 5.")

    def test_a_longer_life_comes_first(self) -> None:
        wrong = Call((seg("tools[0]", 9, M5), seg("system[0].text", 9, H1)))
        assert Emulator(ANTHROPIC).serve(wrong).problem.startswith("system.0.cache_control.ttl: a ttl='1h'")
        for right in (
            (seg("t", 9, H1), seg("s", 9), seg("m", 9, M5)),
            (seg("s", 9, H1), seg("m", 9, H1)),
        ):
            assert "cache_control" not in Emulator(ANTHROPIC).serve(Call(right)).problem

    def test_without_marks_nothing_is_cached(self) -> None:
        assert Emulator(ANTHROPIC).serve(Call((seg("s", 2000),))).problem == "no_mark"


class TestOpenAI:
    def test_hits_come_in_steps_from_a_minimum(self) -> None:
        emulator = Emulator(OPENAI)
        call = Call((seg("s", 1100), seg("q", 100)))
        assert [emulator.serve(call).read, emulator.serve(call).read] == [0, 1152]
        other = Call((seg("s", 1100), seg("z", 100)))
        assert emulator.serve(other).read == 1024

    def test_implicit_entries_stand_at_message_ends_only(self) -> None:
        whole = [Call((Segment(f"S+u{n}", 2100),)) for n in (1, 2)]
        emulator = Emulator(EXPLICIT)
        assert [emulator.serve(call).read for call in whole] == [0, 0]
        parted = [Call((Segment("S", 2000, ends_message=False, ttl_s=1800), Segment(f"u{n}", 100))) for n in (1, 2)]
        assert [emulator.serve(call).read for call in parted] == [0, 2000]

    def test_an_unused_entry_expires(self) -> None:
        emulator = Emulator(OPENAI)
        served = [emulator.serve(Call((seg("s", 2048), seg("q", 1)), time_s=t)).read for t in (0, 299, 600)]
        assert served == [0, 2048, 0]


class TestMoney:
    def test_parts_are_billed_once(self) -> None:
        prices = ANTHROPIC.prices(Decimal(3))
        assert prices.cost_of(Usage(1210, 1000, 200)) == Decimal("0.001080")

    def test_costs_are_exact_below_a_millionth(self) -> None:
        prices = ANTHROPIC.prices(Decimal("0.3"), read=Decimal("0.006"))
        assert prices.cost(1, 1, 1, 0) == Decimal("0.000000681")

    def test_writes_that_are_never_read_and_where_the_mark_belongs(self) -> None:
        calls = [
            Call((seg("S", 2000, section="system"), seg(f"V{n}", 200, M5, section="system")), time_s=float(n))
            for n in range(5)
        ]
        ways = markings(calls, ANTHROPIC)
        bills = {name: replay(marked, "anthropic", CATALOGUE, name, None) for name, marked in ways.items()}
        assert (bills[AS_MARKED].write, bills[AS_MARKED].read) == (11_000, 0)
        assert bills[AS_MARKED].relative_cost == 13_750
        advised = best(bills.values())
        assert advised.marking == "last part that comes again, 5 min"
        assert (advised.write, advised.read, advised.relative_cost) == (2000, 8000, 4300)

    def test_an_hour_pays_when_calls_are_further_apart_than_five_minutes(self) -> None:
        calls = [Call((seg("S", 2000, section="system"), seg(f"q{n}", 10)), time_s=600.0 * n) for n in range(4)]
        bills = [replay(m, "anthropic", CATALOGUE, name, None) for name, m in markings(calls, ANTHROPIC).items()]
        assert best(bills).marking == "end of system, 1 h"

    def test_models_are_found_by_the_longest_name(self) -> None:
        prices = CATALOGUE.prices_of("claude-opus-5-5-20260901")
        assert prices is not None
        assert (prices.input, prices.read, prices.write, prices.write_1h) == (4, Decimal("0.2"), 5, 8)
        assert CATALOGUE.rules_for("anthropic", "claude-opus-5-5").minimum_tokens == 512
        assert CATALOGUE.prices_of("my-own-model") is None


class TestOverride:
    def test_fields_of_a_file_win(self, tmp_path: Path) -> None:
        path = tmp_path / "rules.toml"
        path.write_text('[providers.anthropic]\nminimum_tokens = 7\n[models.mine]\nprovider = "openai"\ninput = 0.5\n')
        changed = Catalogue(path)
        assert changed.rules["anthropic"].minimum_tokens == 7
        assert changed.rules["anthropic"].lookback == 20
        prices = changed.prices_of("mine-large")
        assert prices is not None
        assert prices.read == Decimal("0.05")

    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("[provider.x]", "expected the tables providers and models"),
            ("[providers.anthropic]\nminimum = 1", "providers.anthropic.minimum: expected one of"),
            ("[providers.anthropic]\nlookback = -1", "expected a number from 0 up"),
            ('[providers.anthropic]\nkind = "magic"', "expected breakpoints, messages or automatic"),
            ("[models.x]\ninput = 1", "models.x.provider"),
            ("[", "rules.toml"),
        ],
    )
    def test_a_file_that_is_not_of_the_form_says_where(self, tmp_path: Path, text: str, message: str) -> None:
        path = tmp_path / "rules.toml"
        path.write_text(text)
        with pytest.raises(LogError, match=message):
            Catalogue(path)


class TestCommand:
    def test_a_log_under_every_provider(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        text = "The desk lends one toy to each child. " * 400
        bodies = [
            {"timestamp": 1_777_629_600 + 600 * n, "request": {
                "model": "m", "messages": [{"role": "system", "content": text}, {"role": "user", "content": f"q{n}"}]
            }}
            for n in range(4)
        ]  # fmt: skip
        path = tmp_path / "log.jsonl"
        path.write_bytes(jsonl(*bodies))
        assert main(["providers", str(path), "--price-input", "1", "--json"]) == 0
        bills = {bill["provider"]: bill for bill in json.loads(capsys.readouterr().out)["bills"]}
        assert bills.keys() == CATALOGUE.rules.keys()
        # Ten minutes apart: gone after five, so an hour pays where it can be had.
        assert bills["anthropic"]["marking"] == "end of system, 1 h"
        assert bills["openai"]["read"] == 0
        assert bills["deepseek"]["read"] > 0
        cost = Decimal(bills["anthropic"]["cost_usd"])
        read, write, rest = (bills["anthropic"][name] for name in ("read", "write", "uncached"))
        assert cost == round((Decimal(read) / 10 + 2 * write + rest) / 1_000_000, 6)

    def test_a_log_without_text_says_so(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        path = tmp_path / "t.jsonl"
        path.write_bytes(jsonl({"timestamp": 0, "input_length": 5, "hash_ids": [0]}))
        assert main(["providers", str(path)]) == 1
        assert "none with text" in capsys.readouterr().err

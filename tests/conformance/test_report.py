"""The report, the command line, the golden names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, get_args

import pytest

from anaphora.conformance import ANAPHORA_RADIX, VLLM, Counters, ManagerAdapter, NotOfferedError, Prompt, own, run
from anaphora.conformance.__main__ import main
from anaphora.conformance.checks.names import GoldenNamesCheck
from anaphora.conformance.checks.vectors import NAMES, PROMPTS
from anaphora.identity import VllmAlgorithm
from tests.conformance.broken_finding import IgnoresSalt
from tests.conformance.toy_manager import TOY, ToyManager

RECORDED = Path(__file__).parents[3] / "shared/golden/vllm/hash_vectors_v0.32.0.json"


class OnlyTheNeeded(ManagerAdapter):
    """A manager that offers nothing that is optional."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        self._toy = ToyManager(num_blocks, block_size)
        for operation in ("begin", "allocate", "computed", "append", "block_ids", "finish", "num_free_blocks"):
            setattr(self, operation, getattr(self._toy, operation))

    begin = allocate = computed = append = block_ids = finish = num_free_blocks = None  # type: ignore[assignment]


class TestReport:
    def test_the_table_has_a_line_for_each_check_and_a_script_for_each_failure(self):
        report = run(IgnoresSalt, TOY)
        lines = str(report).splitlines()
        assert lines[0] == "profile toy, blocks of 4 tokens"
        assert sum(line.startswith(("ok ", "FAILED  ", "choice ", "n/a ")) for line in lines) == len(report.results)
        start = lines.index("FAILED salt")
        identity = "identity: 8 tokens found, at most 0 can be: the rest is cached under another namespace"
        assert lines[start + 1 : start + 7] == [
            "  Tenants with different salts, and those without one, never share.",
            f"  {identity} or with other media",
            "  Reported in CVE-2025-46570, vllm-project/vllm#17045.",
            "    begin     a  [1..9]  -> 0 cached, blocks [0, 1, 2]",
            "    computed  a  -> 9 computed",
            "    finish    a",
        ]
        assert lines[-1] == "40 passed, 3 failed, 12 choice, 1 not applicable"

    def test_the_json_form_says_the_same(self):
        report = run(IgnoresSalt, TOY)
        said: dict[str, Any] = json.loads(json.dumps(report.as_json()))
        assert said["passed"] is False
        assert said["profile"] == {"name": "toy", **TOY.choices()}
        failed = [result for result in said["results"] if result["status"] == "failed"]
        assert [result["check"] for result in failed] == ["salt", "names of blocks", "generated scripts"]
        assert failed[0]["script"][0] == {
            "op": "begin",
            "request": "a",
            "token_ids": [1, 2, 3, 4, 5, 6, 7, 8, 9],
            "outcome": "0 cached, blocks [0, 1, 2]",
        }

    def test_what_a_manager_does_not_offer_is_not_applicable(self):
        report = run(OnlyTheNeeded)
        assert report.failures == []
        skipped = {result.check: result.detail for result in report.results if result.status == "not applicable"}
        assert skipped["past a gap"] == "not offered: evict"
        assert skipped["preempted request"] == "not offered: preempt, resume"
        assert skipped["names of blocks"] == "not offered: block_names"
        assert skipped["digests"] == skipped["counting"] == "cannot be seen"

    def test_a_choice_says_what_follows_from_it(self):
        details = {result.check: result.detail for result in run(own.hash_index).results}
        assert details["duplicates"] == "kept; copies of one block push out other content"

    def test_an_operation_that_is_not_offered_says_so(self):
        manager = OnlyTheNeeded(4, 4)
        assert not manager.offers("counters")
        assert own.radix(4, 4).offers("counters")
        assert own.radix(4, 4).counters() == Counters(0, 0)
        with pytest.raises(NotOfferedError):
            manager.match(Prompt((1,)))


class TestCommandLine:
    def test_a_right_manager_exits_with_0(self, capsys):
        assert main(["anaphora.conformance.own:radix", "--profile", "anaphora-radix", "--scripts", "5"]) == 0
        assert capsys.readouterr().out.startswith("profile anaphora-radix, blocks of 4 tokens")

    def test_a_broken_manager_exits_with_1(self, capsys):
        assert main(["tests.conformance.broken_finding:IgnoresSalt", "--json", "--block-size", "2"]) == 1
        said = json.loads(capsys.readouterr().out)
        assert (said["passed"], said["block_size"]) == (False, 2)

    def test_another_profile_is_a_failure(self, capsys):
        assert main(["anaphora.conformance.own:radix", "--profile", "vllm", "--scripts", "0"]) == 1
        assert "vllm declares 'at_allocation', observed 'at_commit'" in capsys.readouterr().out

    def test_a_wrong_block_size_is_named(self, capsys):
        with pytest.raises(SystemExit):
            main(["anaphora.conformance.own:radix", "--block-size", "0"])
        assert "--block-size: expected a whole number from 1 up, got '0'" in capsys.readouterr().err

    @pytest.mark.parametrize(
        ("argument", "message"),
        [("own", "expected MODULE:FACTORY"), ("nowhere:make", "No module named"), ("json:make", "no attribute 'make'")],
    )
    def test_a_wrong_factory_is_named(self, argument, message, capsys):
        with pytest.raises(SystemExit) as exit_:
            main([argument])
        assert exit_.value.code == 2
        assert message in capsys.readouterr().err


class TestGoldenNames:
    def test_there_is_a_vector_for_every_algorithm_and_prompt(self):
        assert set(NAMES) == {
            (name, size, kind) for name in get_args(VllmAlgorithm) for size in (4, 16) for kind in PROMPTS
        }

    @pytest.mark.parametrize("algorithm", get_args(VllmAlgorithm))
    @pytest.mark.parametrize("block_size", [4, 16])
    def test_our_managers_names_are_those(self, algorithm, block_size):
        class Named(own.OwnManager):
            digest_algorithm = algorithm

        result = GoldenNamesCheck().examine(lambda *size: Named(*size, "radix"), ANAPHORA_RADIX, block_size)
        assert (result.status, result.detail) == ("passed", f"{algorithm}, 5 vectors")

    @pytest.mark.skipif(not RECORDED.exists(), reason="the full set of recorded digests is not at hand")
    def test_the_vectors_are_those_of_the_real_code(self):
        kinds = {"plain": "plain", "salt": "salt", "lora": "adapter", "mm_one": "media", "mm_lora_salt": "all three"}
        assert {
            (chain["algo"], chain["block_size"], kinds[chain["variant"]]): chain["hashes"][-1]
            for chain in json.loads(RECORDED.read_text())["chains"]
            if chain["prompt"] == "seq_37"
            and chain["seed"] == "0"
            and chain["block_size"] in {4, 16}
            and chain["variant"] in kinds
        } == NAMES


def test_ready_profiles_differ_where_the_engines_do():
    ours, theirs = ANAPHORA_RADIX.choices(), VLLM.choices()
    assert {name for name in ours if ours[name] != theirs[name]} == {
        "shareable",
        "duplicates",
        "digests",
        "adapter_identity",
        "unread",
    }

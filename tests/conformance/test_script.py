"""Scripts: shrinking, and how operations are written."""

from __future__ import annotations

from anaphora.conformance import Prompt
from anaphora.conformance.checks.check import failing
from anaphora.conformance.play import Play
from anaphora.conformance.script import FORGE_DIGESTS, abort, append, as_ranges, begin, computed, evict, finish, shrink
from anaphora.identity import Adapter, MediaSpan, Namespace
from tests.conformance.broken_finding import IgnoresSalt
from tests.conformance.toy_manager import TOY, ToyManager

NINE = Prompt(tuple(range(1, 10)))
SALTED = Prompt(tuple(range(1, 10)), Namespace(salt="a"))


class TestShrinking:
    def test_what_is_not_needed_goes_and_the_order_stays(self):
        script = [finish(str(number)) for number in range(100)]
        needed = [script[17], script[18], script[71]]
        shrunk = shrink(script, lambda ops: [op for op in ops if op in needed] == needed)
        assert list(shrunk) == needed

    def test_nothing_goes_from_a_script_of_which_all_is_needed(self):
        script = (finish("a"), finish("b"), finish("c"))
        assert shrink(script, lambda ops: len(ops) == 3) == script

    def test_a_failing_script_shrinks_to_what_breaks_the_same_rule(self):
        noise = [begin("n", Prompt((500, 501))), computed("n"), finish("n")]
        script = [*noise, begin("a", NINE), computed("a"), *noise, append("a", [10]), begin("b", SALTED), finish("a")]
        failure = failing(IgnoresSalt, TOY, 16, 4, script)
        assert failure is not None
        violation, steps = failure
        assert violation.rule == "identity"
        assert [str(step) for step in steps] == [
            "begin     a  [1..9]  -> 0 cached, blocks [0, 1, 2]",
            "computed  a  -> 9 computed",
            "begin     b  [1..9] salt='a'  -> 8 cached, blocks [0, 1, 3]",
        ]


class TestPlaying:
    def test_operations_that_make_no_sense_are_skipped(self):
        play = Play(ToyManager, 8, 4, TOY)
        script = [
            computed("a"),
            finish("a"),
            abort("a"),
            begin("a", NINE),
            begin("a", NINE),
            evict("a", 7),
            finish("b"),
        ]
        assert play.play(script) is None
        assert [step.op.kind for step in play.steps] == ["begin"]

    def test_an_exception_of_the_manager_is_a_finding(self):
        class Raises(ToyManager):
            def computed(self, request: str, num_tokens: int) -> None:
                raise KeyError(request)

        play = Play(Raises, 8, 4, TOY)
        violation = play.play([begin("a", NINE), computed("a"), finish("a")])
        assert violation is not None
        assert str(violation) == "raised: computed raised KeyError('a')"
        assert len(play.steps) == 2


class TestWriting:
    def test_runs_of_ids_are_written_short(self):
        assert as_ranges([1, 2, 3, 7, 9, 10]) == "[1..3,7,9..10]"

    def test_a_prompt_is_written_with_all_that_sets_it_apart(self):
        lora = Adapter("aa", name="s", path="/s")
        prompt = Prompt((1, 2, 3), Namespace(adapter=lora, salt="a"), (MediaSpan(1, 2, "X"),), reads_cache=False)
        op = begin("a", prompt, 2)
        assert str(op) == "begin     a  [1..3] salt='a' adapter='s':'/s':'aa' media='X'@1+2 reads_cache=False 2 tokens"
        assert op.as_json() == {
            "op": "begin",
            "request": "a",
            "token_ids": [1, 2, 3],
            "salt": "a",
            "adapter": {"name": "s", "path": "/s", "digest": "aa"},
            "media": [[1, 2, "X"]],
            "reads_cache": False,
            "num_tokens": 2,
        }

    def test_other_operations_say_what_they_need(self):
        assert evict("a", 2).as_json() == {"op": "evict", "request": "a", "position": 2}
        assert append("a", [4, 5]).as_json() == {"op": "append", "request": "a", "token_ids": [4, 5]}
        assert FORGE_DIGESTS.as_json() == {"op": "forge_digests"}

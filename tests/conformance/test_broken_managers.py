"""The kit on broken managers: each fault is found by the check that is there for it, and shown in a few operations."""

from __future__ import annotations

import pytest

from anaphora.conformance.checks import CHOICE_CHECKS, all_checks
from anaphora.conformance.checks.check import ScriptCheck
from tests.conformance import broken_finding, broken_keeping
from tests.conformance.other_choices import CHOICES
from tests.conformance.toy_manager import TOY

CAUGHT_BY = {**broken_finding.CAUGHT_BY, **broken_keeping.CAUGHT_BY}
CHECKS = {check.name: check for check in all_checks(num_scripts=40, seed=0)}
EXPECTED = [
    pytest.param(broken, name, id=f"{broken.__name__}-{name}") for broken in CAUGHT_BY for name in CAUGHT_BY[broken]
]


@pytest.mark.parametrize(("broken", "name"), EXPECTED)
def test_a_fault_is_found_by_its_check(broken, name):
    result = CHECKS[name].examine(broken, TOY, 4)
    assert result.status == "failed", result.detail
    assert result.detail


def test_every_check_finds_a_fault():
    found = {name for names in CAUGHT_BY.values() for name in names}
    found |= {field for fields in CHOICES.values() for field in fields}
    assert set(CHECKS) - found == {"generated scripts"}


def test_generated_scripts_find_most_faults_that_no_scenario_was_written_for():
    generated = CHECKS["generated scripts"]
    missed = {broken.__name__ for broken in CAUGHT_BY if generated.examine(broken, TOY, 4).status != "failed"}
    assert missed <= {
        # These need what the scripts do not play: digests that collide, two adapters with one path, names.
        "TrustsDigests",
        "JoinsFieldsAsText",
        "NamesDependOnTheRequest",
        "SaysThatItsNamesAreThoseOfVllm",
        # These need what they play too seldom.
        "IgnoresWhereMediaBegin",
        "GoesOnPastAGap",
        "ResetForgetsNothing",
        "PublishesOnOldWeights",
    }


@pytest.mark.parametrize("broken", CAUGHT_BY, ids=lambda broken: broken.__name__)
def test_a_failing_script_is_short_and_fails_again(broken):
    for name in CAUGHT_BY[broken]:
        check = CHECKS[name]
        if isinstance(check, ScriptCheck):
            first, second = (check.examine(broken, TOY, 4) for _ in range(2))
            assert first == second
            whole = sum(1 for part in check.build(4)[1] for _ in (part if isinstance(part, list) else [part]))
            assert 0 < len(first.script) <= whole


def test_choices_cover_every_field_of_a_profile():
    assert {check.name for check in CHOICE_CHECKS} == set(TOY.choices())

"""The kit on right managers: it finds nothing, whatever they chose, and tells what that was."""

from __future__ import annotations

from dataclasses import replace

import pytest

from anaphora.conformance import ANAPHORA_HASH, ANAPHORA_RADIX, MakeManager, Profile, detect_profile, own, run
from tests.conformance.other_choices import CHOICES, FindsBlocksOnceAllocated
from tests.conformance.toy_manager import TOY, ToyManager

OURS = [pytest.param(own.radix, ANAPHORA_RADIX, id="radix"), pytest.param(own.hash_index, ANAPHORA_HASH, id="hash")]


def failures(make: MakeManager, profile: Profile | None = None, **options: int) -> list[str]:
    return [f"{result.check}: {result.detail}" for result in run(make, profile, **options).failures]


@pytest.mark.parametrize("block_size", [1, 2, 4, 16])
@pytest.mark.parametrize(("make", "profile"), OURS)
def test_our_manager_keeps_every_rule_and_its_own_profile(make, profile, block_size):
    assert failures(make, profile, block_size=block_size) == []


@pytest.mark.parametrize(("make", "profile"), OURS)
def test_our_manager_keeps_every_rule_on_many_scripts(make, profile):
    assert failures(make, profile, num_scripts=200, seed=1) == []


@pytest.mark.parametrize(("make", "profile"), OURS)
def test_our_profiles_are_recognised(make, profile):
    seen = detect_profile(make)
    assert seen.name == profile.name
    # The radix index finds nothing by digests, so there is none to forge.
    assert seen == (profile if make is own.hash_index else replace(profile, digests=None))


def test_a_manager_by_someone_else_keeps_every_rule():
    assert failures(ToyManager, TOY, num_scripts=200) == []


@pytest.mark.parametrize("manager", CHOICES, ids=lambda manager: manager.__name__)
def test_a_choice_is_found_out_and_is_no_failure(manager):
    seen = detect_profile(manager)
    chosen = {name: value for name, value in seen.choices().items() if value != TOY.choices()[name]}
    assert chosen == CHOICES[manager]
    expected = ["given up before computed"] if manager is FindsBlocksOnceAllocated else []
    assert [result.check for result in run(manager).failures] == expected


@pytest.mark.parametrize("manager", CHOICES, ids=lambda manager: manager.__name__)
def test_the_same_choice_is_a_failure_of_a_manager_that_declares_another(manager):
    failed = {result.check: result.detail for result in run(manager, TOY, num_scripts=0).failures}
    for field, chosen in CHOICES[manager].items():
        assert failed[field] == f"toy declares {TOY.choices()[field]!r}, observed {chosen!r}"

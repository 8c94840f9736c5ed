"""What the kit found in our own manager, kept from coming back."""

from __future__ import annotations

import pytest

from anaphora.conformance import Prompt, own
from anaphora.conformance.play import Play
from anaphora.conformance.profile import ANAPHORA_HASH, ANAPHORA_RADIX
from anaphora.conformance.script import begin, computed, evict, finish


@pytest.mark.parametrize(
    ("make", "profile"), [(own.radix, ANAPHORA_RADIX), (own.hash_index, ANAPHORA_HASH)], ids=["radix", "hash"]
)
def test_an_evicted_private_copy_does_not_come_back_when_the_served_one_is_let_go(make, profile):
    two = Prompt((1, 2))
    script = [begin("a", two), computed("a"), begin("b", two), computed("b"), evict("b", 0), finish("a")]
    play = Play(make, 4, 2, profile)
    assert play.play(script) is None
    evicted = play.model.requests["b"].table[0]
    play.do(begin("c", Prompt((7, 8))))
    play.do(begin("d", Prompt((1, 2, 3, 4)), 1))
    assert evicted not in play.model.requests["d"].table

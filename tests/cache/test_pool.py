"""The free queue against a plain list: the head is taken, the tail appended to, any block removed."""

from __future__ import annotations

from array import array

from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora.cache.pool import FreeQueue

NUM_BLOCKS = 6
STEPS = st.lists(
    st.tuples(st.sampled_from(["take", "append", "prepend", "remove"]), st.integers(0, NUM_BLOCKS), st.randoms()),
    max_size=60,
)


@settings(max_examples=500, deadline=None)
@given(STEPS)
def test_the_queue_is_the_list_that_it_stands_for(steps):
    queue = FreeQueue(NUM_BLOCKS)
    model = list(range(1, NUM_BLOCKS + 1))
    out: list[int] = []
    prepended: set[int] = set()
    """Blocks that must not be removed: they have no content, so no hit finds them."""
    for do, most, chance in steps:
        num = min(most, len(model)) if do == "take" else most
        if do == "take":
            assert queue.take(num).tolist() == model[:num]
            out += model[:num]
            prepended -= set(model[:num])
            del model[:num]
        elif do == "remove":
            chosen = [block for block in model if block not in prepended][:num]
            chance.shuffle(chosen)
            queue.remove(chosen)
            model = [block for block in model if block not in chosen]
            out += chosen
        else:
            chance.shuffle(out)
            chosen, out = out[:num], out[num:]
            if do == "append":
                queue.append(array("i", chosen))
                model = model + chosen
            else:
                queue.prepend(array("i", chosen))
                model = chosen + model
                prepended |= set(chosen)
        queue.check()
        assert list(queue) == model
        assert len(queue) == len(model)


def test_blocks_that_come_and_go_leave_no_more_dead_entries_than_there_are_blocks():
    queue = FreeQueue(4)
    for _ in range(100):
        queue.remove([2, 3])
        queue.append(array("i", [3, 2]))
        assert len(queue._log) <= 2 * 4 + 1
    assert list(queue) == [1, 4, 3, 2]


def test_blocks_that_are_taken_leave_no_entries():
    queue = FreeQueue(4)
    for _ in range(100):
        queue.append(queue.take(3))
        assert len(queue._log) <= 2 * 4

"""EventSequence: every batch once and in order, whatever the network does."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from anaphora.wire import Frames
from anaphora.wire.sequence import Action, Apply, AskReplay, EventSequence, Lost, Restarted

END = Frames("", 2**64 - 1, b"")


def frames(number: int, text: str = "") -> Frames:
    return Frames("t", number, f"{number}{text}".encode())


def applied(actions: list[Action]) -> list[str]:
    return [action.payload.decode() for action in actions if isinstance(action, Apply)]


def started() -> EventSequence:
    sequence = EventSequence()
    assert sequence.start() == [AskReplay(0)]
    assert sequence.replayed(END) == []
    return sequence


def test_a_gap_is_filled_before_what_is_newer() -> None:
    sequence = started()
    actions = [a for number in (0, 1, 4) for a in sequence.live(frames(number))]
    assert applied(actions) == ["0", "1"]
    assert actions[-1] == AskReplay(1), "the last one that is known shows whose they are"
    actions = [a for frame in (*map(frames, (1, 2, 3, 4)), END) for a in sequence.replayed(frame)]
    assert actions == [Apply(b"2"), Apply(b"3"), Apply(b"4")]
    assert sequence.live(frames(4)) == []
    assert applied(sequence.live(frames(5))) == ["5"]


def test_what_cannot_be_replayed_is_lost_and_said_so() -> None:
    sequence = started()
    sequence.live(frames(0))
    sequence.live(frames(5))
    assert sequence.end_replay() == [Lost(), Apply(b"5")]


def test_a_reader_that_joins_late_gets_all_that_is_left() -> None:
    sequence = EventSequence()
    sequence.start()
    actions = [a for frame in (*map(frames, range(7, 10)), END) for a in sequence.replayed(frame)]
    assert actions == [Lost(), Apply(b"7"), Apply(b"8"), Apply(b"9")]


def test_a_number_that_goes_back_is_a_restart() -> None:
    sequence = started()
    for number in range(3):
        sequence.live(frames(number))
    assert sequence.live(frames(0, "new")) == [Restarted(), Apply(b"0new")]
    assert sequence.live(frames(1, "new")) == [Apply(b"1new")]


def test_a_restart_that_was_missed_at_first_is_replayed() -> None:
    sequence = started()
    for number in range(9):
        sequence.live(frames(number))
    assert sequence.live(frames(2, "new")) == [Restarted(), AskReplay(0)]
    replayed = [a for frame in (*(frames(n, "new") for n in range(3)), END) for a in sequence.replayed(frame)]
    assert applied(replayed) == ["0new", "1new", "2new"]


def test_after_a_lost_connection_the_last_batch_proves_that_it_is_the_same_publisher() -> None:
    sequence = started()
    for number in range(3):
        sequence.live(frames(number))
    assert sequence.reconnected() == [AskReplay(2)]
    assert sequence.live(frames(3)) == []
    actions = [a for frame in (frames(2), frames(3), END) for a in sequence.replayed(frame)]
    assert actions == [Apply(b"3")]


def test_a_new_publisher_whose_numbers_go_on_is_found_out() -> None:
    sequence = started()
    for number in range(3):
        sequence.live(frames(number))
    sequence.reconnected()
    sequence.live(frames(3, "new"))
    assert sequence.replayed(frames(2, "new")) == [Restarted(), AskReplay(0)]
    replayed = [a for frame in (*(frames(n, "new") for n in range(4)), END) for a in sequence.replayed(frame)]
    assert applied(replayed) == ["0new", "1new", "2new", "3new"]


def test_a_new_publisher_that_has_sent_less_is_found_out() -> None:
    sequence = started()
    for number in range(3):
        sequence.live(frames(number))
    sequence.reconnected()
    assert sequence.replayed(END) == [Restarted(), AskReplay(0)]


def test_without_a_replay_a_lost_connection_is_a_loss() -> None:
    sequence = started()
    sequence.live(frames(0))
    sequence.reconnected()
    assert sequence.end_replay() == [Lost()]


@given(st.integers(0, 30), st.integers(0, 2**32), st.integers(1, 12))
def test_any_loss_order_and_repetition_gives_each_batch_once(num: int, seed: int, buffered: int) -> None:
    rng = random.Random(seed)
    sequence = started()
    order: list[int] = []
    lost = False

    def do(actions: list[Action], sent: int) -> None:
        nonlocal lost
        for action in actions:
            if isinstance(action, Apply):
                order.append(int(action.payload))
            elif isinstance(action, Lost):
                lost = True
            elif isinstance(action, AskReplay):
                kept = range(max(action.first, sent + 1 - buffered), sent + 1)
                for frame in (*map(frames, kept), END):
                    do(sequence.replayed(frame), sent)
            else:  # a batch that was given up comes after all: to be safe, a new publisher's
                lost = True
                order.clear()

    arriving = [n for n in range(num) for _ in range(rng.choice([0, 1, 1, 1, 2]))] + [num]
    for i in range(len(arriving) - 2):
        if rng.random() < 0.2:
            arriving[i], arriving[i + 1] = arriving[i + 1], arriving[i]
    for number in arriving:
        do(sequence.live(frames(number)), max(number, *arriving[: arriving.index(number) + 1]))
    assert order == sorted(set(order))
    assert lost or order == list(range(num + 1))

"""The picture that a follower draws equals the publisher's index, or the follower says that it does not know."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora import KVCacheManager
from anaphora.cache.events import AllBlocksCleared, BlockRemoved, Mirror
from anaphora.identity import BlockDigests
from anaphora.wire import AnaphoraCodec, EventFollower, FindableNames, Frames
from anaphora.wire.frames import END_OF_REPLAY
from anaphora.wire.sequence import Action, AskReplay, EventSequence

CODEC = AnaphoraCodec()
Blocks = Counter[tuple[bytes, int, str]]


@dataclass
class Publisher:
    """A cache whose events are numbered batches. `states`: by payload, what the index holds once it was sent."""

    index: str = "radix"
    buffer_steps: int = 1000
    buffer: list[Frames] = field(default_factory=list)
    states: dict[bytes, Blocks] = field(default_factory=dict)
    ts: float = 0.0

    def __post_init__(self) -> None:
        self.restart()

    def restart(self) -> None:
        digests = BlockDigests(bytes(32))
        self.manager = KVCacheManager(12, 2, index=self.index, digests=digests, events=True)  # type: ignore[arg-type]
        self.truth = Mirror()
        self.buffer = []
        self.sequence = 0

    def serve(self, prompt: list[int]) -> None:
        sequence = self.manager.start(prompt)
        if self.manager.allocate(sequence, len(prompt) - sequence.num_cached_tokens):
            self.manager.commit(sequence, sequence.num_tokens - sequence.num_computed_tokens)
        self.manager.finish(sequence)

    def publish(self, *, is_dropped: bool = False) -> list[Frames]:
        """The batch of what happened, as it goes out; none if its number is used up and nobody ever sees it."""
        events = self.manager.take_events()
        if not events:
            return []
        self.ts += 1
        self.truth.apply(events)
        frames = Frames("", self.sequence, CODEC.encode(events, self.ts))
        self.sequence += 1
        if is_dropped:
            return []
        self.states[frames.payload] = Counter(self.truth.blocks)
        self.buffer = [*self.buffer, frames][-self.buffer_steps :]
        return [frames]

    def replay(self, start: int) -> list[Frames]:
        return [frames for frames in self.buffer if frames.sequence >= start]


@dataclass
class Reader:
    """A sequence, the follower that does what it says, and what it asked for."""

    sink: Mirror | FindableNames
    partial: bool = False

    def __post_init__(self) -> None:
        self.sequence = EventSequence()
        self.follower = EventFollower(self.sink, CODEC.decode, partial=self.partial)
        self.asks: list[int] = []
        self.do(self.sequence.start())

    @property
    def is_known(self) -> bool:
        return self.follower.is_whole and not self.sequence.is_asking

    def do(self, actions: list[Action]) -> None:
        self.follower.take(actions)
        for action in actions:
            if isinstance(action, AskReplay):
                self.asks.append(action.first)

    def receive(self, *batches: Frames) -> None:
        for frames in batches:
            self.do(self.sequence.live(frames))

    def replay(self, publisher: Publisher | None) -> None:
        """Ask until nothing is missing that can be had; nobody answers where there is no publisher."""
        while self.sequence.is_asking:
            if publisher is None:
                self.do(self.sequence.end_replay())
                continue
            self.sequence.asked()
            num_asked = len(self.asks)
            for frames in [*publisher.replay(self.asks[-1]), END_OF_REPLAY]:
                self.do(self.sequence.replayed(frames))
                if len(self.asks) != num_asked:
                    break  # what is left answers another question


PROMPTS = st.lists(st.integers(0, 2), min_size=1, max_size=8)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("serve"), PROMPTS),
        st.tuples(st.just("dropped"), PROMPTS),
        st.tuples(st.just("reset"), st.just([])),
        st.tuples(st.just("restart"), st.just([])),
        st.tuples(st.just("lost"), PROMPTS),
        st.tuples(st.just("deliver"), st.just([])),
        st.tuples(st.just("read"), st.just([])),
        st.tuples(st.just("replay"), st.just([])),
    ),
    max_size=40,
)


@pytest.mark.parametrize("index", ["radix", "hash"])
@given(actions=ACTIONS, buffer_steps=st.integers(1, 6), has_replay=st.booleans())
@settings(deadline=None, max_examples=150)
def test_through_losses_restarts_and_delays_the_picture_is_the_index_or_unknown(
    index: str, actions: list[tuple[str, list[int]]], buffer_steps: int, has_replay: bool
) -> None:
    publisher = Publisher(index, buffer_steps)
    mirror = Mirror()
    reader = Reader(mirror)
    on_the_way: list[Frames] = []
    numbers: dict[int, set[bytes]] = {}

    def send(frames: Frames) -> None:
        numbers.setdefault(frames.sequence, set()).add(frames.payload)

    def read() -> None:
        reader.receive(*on_the_way)
        on_the_way.clear()

    def replay() -> None:
        read()
        reader.replay(publisher if has_replay else None)

    def check() -> None:
        """What is known is what some index was at that batch."""
        if reader.is_known and reader.sequence.last is not None:
            assert mirror.blocks in [publisher.states[payload] for payload in numbers[reader.sequence.last]]
        if not reader.follower.is_whole:
            assert mirror.blocks == Counter()

    for action, prompt in actions:
        if action in {"serve", "dropped", "lost"}:
            publisher.serve(prompt)
            for frames in publisher.publish(is_dropped=action == "dropped"):
                send(frames)
                if action == "serve":
                    on_the_way.append(frames)
        elif action == "reset":
            publisher.manager.reset()
            for frames in publisher.publish():
                send(frames)
                on_the_way.append(frames)
        elif action == "restart":
            publisher.restart()
            read()  # the end of the connection is noticed after what it brought
            reader.do(reader.sequence.reconnected())
        elif action == "deliver":
            reader.receive(*on_the_way[:1])
            del on_the_way[:1]
        elif action == "read":
            read()
        else:
            replay()
        check()

    # Whatever happened: once something new has come and gaps were asked for, what is known is what is true now.
    publisher.serve([7, 7])
    for frames in publisher.publish():
        send(frames)
        on_the_way.append(frames)
    replay()
    check()
    if reader.is_known:
        assert mirror.blocks == publisher.truth.blocks
    if has_replay and publisher.sequence == len(publisher.buffer):
        assert reader.is_known, "the publisher still has everything, so nothing is missing"
    # And a cleared cache is known again, whatever was lost.
    publisher.manager.reset()
    reader.receive(*publisher.publish())
    assert reader.is_known
    assert mirror.blocks == Counter()


@given(actions=ACTIONS)
@settings(deadline=None, max_examples=100)
def test_a_partial_picture_never_holds_more_than_the_index(actions: list[tuple[str, list[int]]]) -> None:
    publisher = Publisher()
    names = FindableNames()
    reader = Reader(names, partial=True)
    reader.replay(None)
    for action, prompt in actions:
        publisher.serve(prompt or [1])
        for frames in publisher.publish(is_dropped=action == "dropped"):
            if action != "lost":
                reader.receive(frames)
                reader.replay(None)
                assert names.blocks <= set(publisher.truth.blocks)


def published(publisher: Publisher, *prompts: list[int]) -> list[Frames]:
    batches = []
    for prompt in prompts:
        publisher.serve(prompt)
        batches += publisher.publish()
    return batches


def test_from_batch_0_on_everything_is_known() -> None:
    publisher, mirror = Publisher(), Mirror()
    reader = Reader(mirror)
    reader.replay(None)
    assert not reader.is_known
    reader.receive(*published(publisher, [1, 2, 3, 4], [5, 6]))
    assert reader.is_known
    assert mirror.blocks == publisher.truth.blocks


def test_who_comes_late_asks_for_what_was() -> None:
    publisher, mirror = Publisher(), Mirror()
    published(publisher, [1, 2, 3, 4], [5, 6])
    reader = Reader(mirror)
    reader.replay(publisher)
    assert (reader.is_known, reader.sequence.last) == (True, 1)
    assert mirror.blocks == publisher.truth.blocks


def test_who_comes_too_late_for_a_replay_knows_nothing_until_the_cache_is_cleared() -> None:
    publisher, mirror = Publisher(buffer_steps=1), Mirror()
    published(publisher, [1, 2], [3, 4])
    reader = Reader(mirror)
    reader.replay(publisher)
    assert (reader.is_known, reader.sequence.is_asking, mirror.blocks) == (False, False, Counter())
    publisher.manager.reset()
    publisher.serve([5, 6])
    reader.receive(*publisher.publish())
    assert reader.is_known
    assert mirror.blocks == publisher.truth.blocks


def test_what_cannot_be_read_or_does_not_fit_is_a_loss() -> None:
    for payload in (b"\xff", CODEC.encode([BlockRemoved((b"never stored",))], 9.0)):
        mirror = Mirror()
        reader = Reader(mirror)
        reader.replay(Publisher())
        reader.receive(*published(Publisher(), [1, 1]), Frames("", 1, payload))
        assert (reader.is_known, reader.follower.num_faults, mirror.blocks) == (False, 1, Counter())


def test_repeated_stores_are_one_name() -> None:
    publisher = Publisher()
    publisher.serve([1, 1])
    stored = publisher.manager.take_events()
    names = FindableNames()
    names.apply([*stored, *stored])
    assert len(names.blocks) == 1
    names.apply([AllBlocksCleared()])
    assert not names.blocks

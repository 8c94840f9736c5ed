"""Publisher and subscriber over real sockets: the frames are vLLM's, and nobody holds up the engine."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

import pytest

from anaphora.cache.events import AllBlocksCleared, BlockStored, Event
from anaphora.identity import DEFAULT_NAMESPACE
from anaphora.tokens import pack
from anaphora.wire import EventFollower, FindableNames, Frames, VllmEventFormat, decode_batch, events_of
from tests.wire import golden

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

zmq = pytest.importorskip("zmq")

from anaphora.wire.frames import EndpointError  # noqa: E402
from anaphora.wire.publisher import EventPublisher  # noqa: E402
from anaphora.wire.sequence import Apply  # noqa: E402
from anaphora.wire.subscriber import EventSubscriber  # noqa: E402

ANY = "tcp://127.0.0.1:*"
ENCODE = VllmEventFormat(clear_salts=True).encode


def stored(number: int) -> list[Event]:
    return [BlockStored((number.to_bytes(8, "big"),), None, pack([number]), 1, DEFAULT_NAMESPACE)]


def names(*numbers: int) -> set[tuple[bytes, int, str]]:
    return {(number.to_bytes(8, "big"), 0, "GPU") for number in numbers}


def until(condition: Callable[[], bool], step: Callable[[], object] = lambda: time.sleep(0.01)) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline, "it never came true"
        step()


class Gate:
    """An encoder that can be held."""

    def __init__(self) -> None:
        self.opened = threading.Event()
        self.opened.set()
        self.is_inside = threading.Event()

    def __call__(self, events: Sequence[Event], ts: float) -> bytes:
        self.is_inside.set()
        assert self.opened.wait(20)
        return ENCODE(events, ts)


@pytest.fixture
def gate() -> Iterator[Gate]:
    gate = Gate()
    yield gate
    gate.opened.set()


class Following:
    """A subscriber of one publisher, and what it makes of it."""

    def __init__(
        self, publisher: EventPublisher, *, replays: bool = True, topic: str = "", check_s: float = 10
    ) -> None:
        self.names = FindableNames()
        self.follower = EventFollower(self.names)
        self.subscriber = EventSubscriber(lambda: None, check_s=check_s)
        self.subscriber.start()
        self.subscriber.add("it", publisher.endpoint, publisher.replay_endpoint if replays else None, topic)

    def __enter__(self) -> Following:
        return self

    def __exit__(self, *_: object) -> None:
        self.subscriber.close()

    def read(self) -> None:
        time.sleep(0.01)
        self.follower.take(action for _, action in self.subscriber.take())

    @property
    def known(self) -> set[tuple[bytes, int, str]] | None:
        """What is findable; None if it is not known."""
        self.read()
        return self.names.blocks if self.follower.is_whole and self.subscriber.is_settled("it") else None


@pytest.mark.parametrize("source", golden.SOURCES)
def test_the_frames_of_a_live_vllm_server_come_out_of_the_socket_byte_for_byte(source: golden.Path) -> None:
    messages = [golden.parts(frames) for step in golden.live(source)["steps"] for frames in step["frames_hex"]]
    batches = [decode_batch(message[2]) for message in messages]
    times = iter([batch.ts for batch in batches])
    with (
        EventPublisher(ANY, ANY, encode=ENCODE, topic="kv@test", clock=lambda: next(times)) as publisher,
        zmq.Context() as context,
        context.socket(zmq.DEALER) as replay,
        context.socket(zmq.SUB) as live,
    ):
        live.setsockopt(zmq.SUBSCRIBE, b"kv@")
        live.connect(publisher.endpoint)
        connected = live.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED)
        assert connected.poll(10_000)
        live.disable_monitor()
        time.sleep(0.2)  # the subscription follows the handshake
        for batch in batches:
            publisher.publish(events_of(batch))
        received = []
        while len(received) < len(messages) and live.poll(10_000):
            received.append(live.recv_multipart())
        assert received == messages
        replay.connect(publisher.replay_endpoint)
        replay.send_multipart([b"", (3).to_bytes(8, "big")])
        answer = [replay.recv_multipart() for _ in range(len(messages) - 2) if replay.poll(10_000)]
        assert answer == [[b"", *message] for message in messages[3:]] + [[b"", b"", b"\xff" * 8, b""]]


def test_a_req_socket_gets_the_first_batch_as_from_vllm() -> None:
    with (
        EventPublisher(ANY, replay_endpoint=ANY, topic="t") as publisher,
        zmq.Context() as context,
        context.socket(zmq.REQ) as replay,
    ):
        publisher.publish(stored(1))
        until(lambda: publisher.stats().num_published == 1)
        replay.connect(publisher.replay_endpoint)
        replay.send((0).to_bytes(8, "big"))
        assert replay.poll(10_000)
        assert Frames.from_parts(replay.recv_multipart()).sequence == 0


def test_a_subscriber_follows_through_a_late_start_and_a_restart() -> None:
    with EventPublisher(ANY, ANY) as publisher:
        publisher.publish(stored(1))
        following = Following(publisher)
        until(lambda: following.known == names(1))
        publisher.publish(stored(2))
        until(lambda: following.known == names(1, 2))
        endpoint, replay_endpoint = publisher.endpoint, publisher.replay_endpoint
    until(lambda: following.known is None)
    with following, EventPublisher(endpoint, replay_endpoint) as publisher:
        for number in (3, 4, 5):
            publisher.publish(stored(number))
        until(lambda: following.known == names(3, 4, 5))


def test_a_full_queue_holds_nobody_up_and_leaves_a_gap_that_is_seen_at_once(gate: Gate) -> None:
    with EventPublisher(ANY, ANY, encode=gate, queue_size=2) as publisher, Following(publisher) as following:
        until(lambda: following.known == set())
        gate.opened.clear()
        publisher.publish(stored(0))
        assert gate.is_inside.wait(10)
        for number in range(1, 6):  # two wait, three are dropped, the last one among them
            publisher.publish(stored(number))
        assert (publisher.stats().num_queued, publisher.stats().num_dropped) == (2, 3)
        gate.opened.set()
        until(lambda: publisher.stats().num_published == 4)  # with the empty batch that shows the gap
        until(lambda: following.known is None and not following.follower.is_whole)
        publisher.publish([AllBlocksCleared(), *stored(7)])
        until(lambda: following.known == names(7))


def test_without_a_replay_socket_what_was_missed_is_unknown_until_the_cache_is_cleared() -> None:
    with EventPublisher(ANY) as publisher:
        publisher.publish(stored(1))
        until(lambda: publisher.stats().num_published == 1)
        with Following(publisher) as following:
            applied: list[object] = []

            def has_applied() -> bool:  # what is sent before the subscription stands is sent to nobody
                publisher.publish(stored(2))
                actions = [action for _, action in following.subscriber.take()]
                following.follower.take(actions)
                applied.extend(action for action in actions if isinstance(action, Apply))
                return bool(applied)

            until(has_applied)
            assert following.known is None
            publisher.publish([AllBlocksCleared()])
            until(lambda: following.known == set())


def test_a_silent_loss_is_found_by_asking() -> None:
    with EventPublisher(ANY, ANY) as publisher, Following(publisher, topic="no such", check_s=0.1) as following:
        until(lambda: following.known == set())
        publisher.publish(stored(1))  # is not sent to this subscriber, so for it it is lost
        until(lambda: following.known == names(1))


def test_a_publisher_may_connect_to_a_subscriber_that_binds() -> None:
    with zmq.Context() as context, context.socket(zmq.SUB) as live:
        live.setsockopt(zmq.SUBSCRIBE, b"")
        port = live.bind_to_random_port("tcp://127.0.0.1")
        with EventPublisher(f"tcp://127.0.0.1:{port}", connects=True) as publisher:

            def publish() -> None:
                publisher.publish(stored(1))
                time.sleep(0.05)

            until(lambda: bool(live.poll(0)), publish)


def test_only_so_much_is_kept_for_replays() -> None:
    for limit in ({"buffer_steps": 2}, {"buffer_bytes": 2 * len(ENCODE(stored(1), 1.0))}):
        with EventPublisher(ANY, ANY, **limit) as publisher, zmq.Context() as context:
            for number in range(5):
                publisher.publish(stored(number))
            until(lambda: publisher.stats().num_published == 5)
            with context.socket(zmq.DEALER) as replay:
                replay.connect(publisher.replay_endpoint)
                replay.send_multipart([b"", bytes(8)])
                answer = [Frames.from_parts(replay.recv_multipart()) for _ in range(3) if replay.poll(10_000)]
            assert [frames.sequence for frames in answer[:2]] == [3, 4]
            assert answer[2].is_end_of_replay


def test_a_batch_without_a_form_is_counted_and_leaves_a_gap() -> None:
    def encode(events: Sequence[Event], ts: float) -> bytes:
        if len(events) == 2:
            raise ValueError("no form")
        return ENCODE(events, ts)

    with EventPublisher(ANY, ANY, encode=encode) as publisher:
        publisher.publish([*stored(1), *stored(2)])
        until(lambda: publisher.stats().num_published == 1)
        assert publisher.stats().num_dropped == 1


def test_endpoints_that_cannot_be_used_are_one_clear_line() -> None:
    with EventPublisher(ANY) as publisher:
        with pytest.raises(EndpointError, match=f"^{publisher.endpoint}: Address already in use$"):
            EventPublisher(publisher.endpoint)
        with pytest.raises(EndpointError, match=r"^elsewhere: Invalid argument$"):
            EventPublisher(ANY, replay_endpoint="elsewhere")
    with pytest.raises(ValueError, match=r"^queue_size: expected at least 1, got 0$"):
        EventPublisher(ANY, queue_size=0)

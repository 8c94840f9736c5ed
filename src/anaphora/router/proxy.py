"""The way of a request through the router: read, decide, send, pass the answer on byte for byte."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import logging
from typing import TYPE_CHECKING

import msgspec

from anaphora.fleet.scorers import session_token
from anaphora.router.admission import OBJECTIVE_HEADERS, Admission
from anaphora.router.prompt import PromptBody, PromptSource, read_body
from anaphora.router.rewrites import ModelRewrites
from anaphora.router.upstream import BadRequestError, RawHeaders, Upstream, UpstreamError, end_to_end
from anaphora.router.usage import UsageReader
from anaphora.server.errors import ApiError

if TYPE_CHECKING:
    from collections.abc import Container

    from starlette.types import Receive, Scope, Send

    from anaphora.router.fleet_state import Fleet, Routed, Trip
    from anaphora.router.metrics import Metrics
    from anaphora.router.replica import Replica
    from anaphora.router.upstream import UpstreamAnswer

log = logging.getLogger(__name__)

_RETRYABLE = frozenset({429, 502, 503, 504})
_PRIVATE = b"x-anaphora-"
_PREFILLER = b"x-prefiller-host-port"
RANK_HEADER = b"x-data-parallel-rank"
"""Chooses among the data-parallel ranks of one vLLM server."""
_MODEL_HEADERS = (b"x-llm-d-model-name-rewrite", b"x-gateway-model-name-rewrite")
FOR_THE_ROUTER = frozenset(
    {
        *OBJECTIVE_HEADERS,
        *_MODEL_HEADERS,
        b"x-llm-d-inference-fairness-id",
        b"x-gateway-inference-fairness-id",
        b"x-llm-d-slo-ttft-ms",
        b"x-llm-d-slo-tpot-ms",
        b"test-epp-endpoint-selection",
    }
)
"""Request headers that are meant for whoever routes, and go no further."""


class ClientGoneError(Exception):
    """Nobody waits for the answer any more."""


class Proxy:
    """Sends requests to the replicas that a fleet chooses.

    salt_secret: where given, a request's cache salt is derived from its Authorization header, whatever the body says,
        so that no tenant can choose another's.
    steers: False for shadow mode: decisions are made and told, but requests go round robin.
    admission, rewrites: by InferenceObjective and InferenceModelRewrite; None: neither is in use.
    max_attempts: replicas that a request is sent to at most, all but the last before the first byte of an answer.
    """

    def __init__(
        self,
        fleet: Fleet,
        prompts: PromptSource,
        upstream: Upstream,
        metrics: Metrics,
        *,
        body_limit_bytes: int = 32 * 2**20,
        salt_secret: bytes | None = None,
        steers: bool = True,
        admission: Admission | None = None,
        rewrites: ModelRewrites | None = None,
        max_attempts: int = 3,
    ) -> None:
        self._fleet = fleet
        self._prompts = prompts
        self._upstream = upstream
        self._metrics = metrics
        self._limit = body_limit_bytes
        self._salt_secret = salt_secret
        self._steers = steers
        self._admission = admission or Admission()
        self._rewrites = rewrites or ModelRewrites()
        self._max_attempts = max_attempts
        self._turn = 0

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request under /v1. Raises ApiError where no replica can."""
        body = await self.read(scope, receive)
        routed, body = await self.route(scope, body)
        started = self._fleet.clock()
        client = _Client(send)
        watch = asyncio.ensure_future(client.watch(receive))
        self._metrics.streams.inc()
        try:
            await self._send(scope, body, routed, client, started)
        except asyncio.CancelledError:
            if not client.has_ended_its_wait():
                raise
        finally:
            self._metrics.streams.dec()
            watch.cancel()

    async def route(self, scope: Scope, body: bytes, *, allowed: Container[str] | None = None) -> tuple[Routed, bytes]:
        """Return the decision for a request, and the body to send.

        scope: `headers` and `path` are read. allowed: names of the replicas that may be chosen; None: all.

        Raises ApiError (429) for a request that is shed.
        """
        fields = read_body(body) if body else None
        headers = dict(scope["headers"])
        requested = fields.model if fields is not None and isinstance(fields.model, str) else None
        if fields is not None:
            body = self._rewrite(fields, body, headers)
        priority = self._admission.priority(headers)
        if priority < 0:
            self._admit(priority, self._fleet.candidates(fields.model if fields else None, allowed))
        prompt_fields = fields or PromptBody()
        if self._prompts.is_slow and len(body) > 16_384:  # milliseconds, and the event loop has streams to serve
            prompt = await asyncio.to_thread(self._prompts.prompt, prompt_fields)
        else:
            prompt = self._prompts.prompt(prompt_fields)
        salt = prompt_fields.cache_salt if isinstance(prompt_fields.cache_salt, str) else None
        header = self._fleet.policy.session_header
        session = headers.get(header.lower().encode(), b"").decode("latin-1") if header else None
        routed = self._fleet.decide(prompt_fields.model, prompt, salt, session, allowed)
        routed.requested_model, routed.priority = requested, priority
        self._metrics.decision_s.observe(routed.decided_s)
        if scope["path"].startswith("/v1"):
            self._fleet.remember(routed)
        return routed, body

    def _rewrite(self, fields: PromptBody, body: bytes, headers: dict[bytes, bytes]) -> bytes:
        """Return the body with the model and the salt that the replica is to see; `fields` follow."""
        changed: dict[str, str] = {}
        if isinstance(fields.model, str):
            rewrite = self._rewrites.rewrite(fields.model)
            named = next((headers[name] for name in _MODEL_HEADERS if headers.get(name)), None)
            if rewrite is not None:
                self._metrics.rewrites.labels(rewrite.rule, rewrite.target).inc()
                changed["model"] = rewrite.target
            elif named is not None:
                changed["model"] = named.decode("utf-8", "replace")
            if changed.get("model") == fields.model:
                del changed["model"]
            else:
                fields.model = changed.get("model", fields.model)
        if self._salt_secret is not None:
            fields.cache_salt = changed["cache_salt"] = self._tenant_salt(headers)
        return _with_fields(body, changed) if changed else body

    def _admit(self, priority: int, candidates: list[Replica]) -> None:
        try:
            self._admission.check(priority, candidates)
        except ApiError:
            self._metrics.shed.labels(str(priority)).inc()
            raise

    async def _send(self, scope: Scope, body: bytes, routed: Routed, client: _Client, started: float) -> None:
        headers = _request_headers(scope)
        if routed.decision.prefill is not None:
            headers.append((_PREFILLER, routed.decision.prefill.encode()))
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        method = scope["method"].encode()
        problem: UpstreamError | None = None
        names = self._order(routed)[: self._max_attempts]
        for attempt, name in enumerate(names):
            replica = self._fleet.replicas.get(name)
            if replica is None:
                continue
            is_last = attempt + 1 == len(names)
            trip = self._fleet.depart(routed, name)
            succeeded = False
            try:
                sent = _for_rank(headers, replica.spec.rank)
                answer = await self._upstream.send(replica.spec.url, method, target, sent, body)
                try:
                    if answer.status in _RETRYABLE and not is_last:
                        routed.attempts.append((name, str(answer.status)))
                        self._metrics.retries.labels(name).inc()
                        replica.breaker.release()
                        continue
                    routed.sent_to = name
                    routed.status = answer.status
                    routed.attempts.append((name, str(answer.status)))
                    self._metrics.prompt_tokens.labels(name).inc(routed.prompt.num_tokens)
                    self._metrics.predicted.labels(name).inc(routed.predicted_tokens(name))
                    await self._pass_on(answer, routed, trip, client, started)
                    succeeded = answer.status < 500
                    if succeeded:
                        replica.breaker.succeed()
                    self._metrics.requests.labels(name, "answered" if succeeded else "error").inc()
                    return
                finally:
                    answer.close()
            except UpstreamError as error:
                routed.attempts.append((name, str(error)))
                self._failed(trip, error)
                self._metrics.requests.labels(name, "broken_off" if client.has_started else "unreachable").inc()
                if client.has_started:
                    await client.break_off(f"The replica broke off: {error}")
                    return
                problem = error
                if error.is_timeout:  # the work may still be going on; the same again elsewhere would double it
                    break
                self._metrics.retries.labels(name).inc()
            except BadRequestError as error:
                replica.breaker.release()
                raise ApiError(400, f"This request cannot be passed on: {error}", code="bad_request") from None
            except asyncio.CancelledError:
                replica.breaker.release()
                routed.attempts.append((name, "client went away" if client.is_gone else "the router stopped"))
                self._metrics.requests.labels(name, "abandoned").inc()
                raise
            finally:
                trip.end(succeeded=succeeded)
        if problem is None:
            raise ApiError(503, "No replica is ready to take this request.", code="no_replica")
        if problem.is_timeout:
            raise ApiError(504, f"The replica did not answer in time: {problem}", code="replica_timeout")
        raise ApiError(502, f"No replica could be reached: {problem}", code="replica_unreachable")

    def _order(self, routed: Routed) -> list[str]:
        names = list(routed.decision.replicas)
        if not self._steers and names:
            ring = sorted(view.name for view in routed.views)
            self._turn += 1
            at = self._turn % len(ring)
            names = ring[at:] + ring[:at]
        return names

    def _failed(self, trip: Trip, error: UpstreamError) -> None:
        trip.replica.breaker.fail(self._fleet.clock())
        log.warning("%s: %s", trip.replica.name, error)
        if not error.is_timeout:
            # Whoever refuses connections or breaks them off has perhaps just died, and its cache with it.
            trip.end(succeeded=False)
            self._fleet.lost(trip.replica)

    async def _pass_on(
        self, answer: UpstreamAnswer, routed: Routed, trip: Trip, client: _Client, started: float
    ) -> None:
        name = trip.replica.name
        usage = UsageReader()
        told: RawHeaders = [
            (b"x-anaphora-replica", name.encode()),
            (b"x-anaphora-request-id", routed.request_id.encode()),
            (b"x-anaphora-prompt-tokens", b"%d" % routed.prompt.num_tokens),
            (b"x-anaphora-predicted-cached-tokens", b"%d" % routed.predicted_tokens(name)),
            (b"x-anaphora-tokens", b"exact" if routed.prompt.is_exact else b"estimated"),
        ]
        if self._fleet.policy.session_header:
            told.append((self._fleet.policy.session_header.lower().encode(), session_token(name).encode()))
        if not self._steers:
            told.append((b"x-anaphora-shadow-replica", (routed.decision.replica or "").encode()))
        theirs: RawHeaders = []
        content_type = b""
        for pair in answer.headers:
            if pair[0] == b"content-type":
                content_type = pair[1]
            if not pair[0].startswith(_PRIVATE):
                theirs.append(pair)
        is_success = answer.status < 400
        is_stream = content_type.startswith(b"text/event-stream")
        await client.start(answer.status, theirs + told, is_event_stream=is_stream)
        chunk = await answer.read()
        if chunk:
            self._metrics.first_byte_s.observe(self._fleet.clock() - started)
            if is_success:
                trip.answered(is_stream=is_stream)
        while not answer.is_at_end:
            usage.feed(chunk)
            await client.body(chunk)
            chunk = await answer.read()
        usage.feed(chunk)
        if is_success:
            routed.reported_tokens = usage.cached_tokens
            self._metrics.observe_report(routed, name)
        await client.finish(chunk)

    def _tenant_salt(self, headers: dict[bytes, bytes]) -> str:
        assert self._salt_secret is not None
        tenant = headers.get(b"authorization") or headers.get(b"x-api-key") or b""
        return hmac.new(self._salt_secret, tenant, hashlib.sha256).hexdigest()[:32]

    async def read(self, scope: Scope, receive: Receive) -> bytes:
        """Return a request's body. Raises ApiError (413), ClientGoneError."""
        parts: list[bytes] = []
        num_bytes = 0
        is_more = True
        while is_more:
            message = await receive()
            if message["type"] == "http.disconnect":
                raise ClientGoneError
            part = message.get("body", b"")
            num_bytes += len(part)
            if num_bytes > self._limit:
                raise ApiError(
                    413, f"The request body is over the limit of {self._limit} bytes.", code="body_too_large"
                )
            parts.append(part)
            is_more = message.get("more_body", False)
        return b"".join(parts)


class _Client:
    """The client's side of one answer, which the current task gives."""

    def __init__(self, send: Send) -> None:
        self._send = send
        self._is_event_stream = False
        self._task = asyncio.current_task()
        self.has_started = False
        self.has_finished = False
        self.is_gone = False

    async def watch(self, receive: Receive) -> None:
        """Cancel the task that gives the answer once nobody waits for it."""
        while (await receive())["type"] != "http.disconnect":
            pass
        if not self.has_finished and self._task is not None:
            self.is_gone = True
            self._task.cancel()

    def has_ended_its_wait(self) -> bool:
        """Whether the task was cancelled by `watch` and by nobody else. Asked once, by the task."""
        return self.is_gone and self._task is not None and self._task.uncancel() == 0

    async def start(self, status: int, headers: RawHeaders, *, is_event_stream: bool) -> None:
        self.has_started = True
        self._is_event_stream = is_event_stream
        await self._send({"type": "http.response.start", "status": status, "headers": headers})

    async def body(self, chunk: bytes) -> None:
        await self._send({"type": "http.response.body", "body": chunk, "more_body": True})

    async def finish(self, chunk: bytes = b"") -> None:
        self.has_finished = True
        await self._send({"type": "http.response.body", "body": chunk, "more_body": False})

    async def break_off(self, message: str) -> None:
        """End an answer that cannot be completed, so that nobody takes it for whole.

        A stream of events ends with an error event, as OpenAI's clients know it; all else with a broken connection.
        """
        if not self._is_event_stream:
            raise ConnectionAbortedError(message)
        error = ApiError(502, message, code="replica_broke_off").body()
        await self.body(b"\n\ndata: " + msgspec.json.encode(error) + b"\n\n")
        await self.finish()


def _request_headers(scope: Scope) -> RawHeaders:
    drop = {b"host", b"content-length", b"expect", _PREFILLER, *FOR_THE_ROUTER}
    headers = [
        (name, value)
        for name, value in end_to_end(scope["headers"])
        if name not in drop and not name.startswith(_PRIVATE)
    ]
    if scope.get("client"):
        before = [value for name, value in headers if name == b"x-forwarded-for"]
        headers = [pair for pair in headers if pair[0] != b"x-forwarded-for"]
        headers.append((b"x-forwarded-for", b", ".join([*before, scope["client"][0].encode()])))
    return headers


def _for_rank(headers: RawHeaders, rank: int | None) -> RawHeaders:
    if rank is None:
        return headers
    return [*(pair for pair in headers if pair[0] != RANK_HEADER), (RANK_HEADER, b"%d" % rank)]


def _with_fields(body: bytes, changed: dict[str, str]) -> bytes:
    """The body with these fields' values and no others: a second field of a name would win, so it is written anew.

    What the other fields hold stays as it is, byte for byte.
    """
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    for name, value in changed.items():
        fields[name] = msgspec.Raw(msgspec.json.encode(value))
    return msgspec.json.encode(fields)

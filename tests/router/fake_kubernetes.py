"""An API server of Kubernetes in miniature: lists by pages, watches with versions, bookmarks, 410, and broken lines.

It behaves as https://kubernetes.io/docs/reference/using-api/api-concepts/ says: one version counter for everything, a
bounded history behind it, label and field selectors (an object that leaves a selection is told as DELETED), 401 without
the right token, 404 for kinds that are not defined.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import json
import random
import threading
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl

import uvicorn

if TYPE_CHECKING:
    from collections.abc import Iterator

    from starlette.types import Receive, Scope, Send

POOL_PATH = "/apis/inference.networking.k8s.io/v1/namespaces/ai/inferencepools"
POD_PATH = "/api/v1/namespaces/ai/pods"
OBJECTIVE_PATH = "/apis/llm-d.ai/v1alpha2/namespaces/ai/inferenceobjectives"
REWRITE_PATH = "/apis/llm-d.ai/v1alpha2/namespaces/ai/inferencemodelrewrites"


@dataclass(frozen=True)
class _Change:
    version: int
    path: str
    before: dict[str, Any] | None
    after: dict[str, Any] | None


@dataclass
class FakeKubernetes:
    """Objects by path and name, and every change to them. Its methods may be called from any thread.

    cut: bytes of a watch that go out at once; a chunk ends anywhere, in the middle of a character too.
    """

    kinds: tuple[str, ...] = (POOL_PATH, POD_PATH, OBJECTIVE_PATH, REWRITE_PATH)
    token: str | None = "first"
    page: int = 2
    cut: int = 7
    forbidden: set[str] = field(default_factory=set)
    is_down: bool = False
    requests: list[str] = field(default_factory=list)
    num_lists: int = 0
    num_watches: int = 0

    def __post_init__(self) -> None:
        self._objects: dict[tuple[str, str], dict[str, Any]] = {}
        self._changes: list[_Change] = []
        self._version = 100
        self._oldest = 100
        self._epoch = 0
        self._bookmark_at = 0
        self._lock = threading.Lock()
        self._rng = random.Random(7)

    # What a cluster's users do

    def put(self, path: str, item: dict[str, Any]) -> None:
        """Create or change an object."""
        name = item["metadata"]["name"]
        with self._lock:
            self._version += 1
            after = copy.deepcopy(item)
            after["metadata"]["resourceVersion"] = str(self._version)
            before = self._objects.get((path, name))
            self._objects[path, name] = after
            self._changes.append(_Change(self._version, path, before, after))

    def delete(self, path: str, name: str) -> None:
        with self._lock:
            self._version += 1
            before = self._objects.pop((path, name))
            self._changes.append(_Change(self._version, path, before, None))

    def bookmark(self) -> None:
        """Tell every watch the present version, though nothing changed for it."""
        with self._lock:
            self._version += 1
            self._bookmark_at = self._version

    def end_watches(self) -> None:
        """End every watch in good order, as a timeout does."""
        with self._lock:
            self._epoch += 1

    def compact(self) -> None:
        """Forget the history: a watch from any earlier version is 410 Gone."""
        with self._lock:
            self._version += 1
            self._oldest = self._version
            self._epoch += 1

    # What the router sees

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        query = dict(parse_qsl(scope["query_string"].decode(), keep_blank_values=True))
        path = scope["path"]
        self.requests.append(f"{path}?{scope['query_string'].decode()}")
        authorization = dict(scope["headers"]).get(b"authorization", b"").decode()
        if self.is_down:
            await _answer(send, 503, _status(503, "the server is down"))
        elif self.token is not None and authorization != f"Bearer {self.token}":
            await _answer(send, 401, _status(401, "Unauthorized"))
        elif path in self.forbidden:
            await _answer(send, 403, _status(403, "forbidden"))
        elif path not in self.kinds:
            await _answer(send, 404, b"404 page not found\n")
        elif query.get("watch") == "true":
            await self._watch(path, query, send)
        else:
            await self._list(path, query, send)

    async def _list(self, path: str, query: dict[str, str], send: Send) -> None:
        with self._lock:
            # Later pages are of the first one's version, and can be had as long as its history.
            start, version = map(int, query.get("continue", f"0@{self._version}").split("@"))
            is_expired = version < self._oldest
            found = [item for item in self._as_of(path, version) if _selected(item, query)]
            end = start + min(self.page, int(query["limit"]))
            metadata = {"resourceVersion": str(version)}
            if end < len(found):
                metadata["continue"] = f"{end}@{version}"
            self.num_lists += start == 0
            body = json.dumps({"kind": "List", "metadata": metadata, "items": found[start:end]})
        if is_expired:
            await _answer(send, 410, _status(410, "the provided continue parameter is too old"))
        else:
            await _answer(send, 200, body.encode())

    def _as_of(self, path: str, version: int) -> list[dict[str, Any]]:
        objects = {name: item for (at, name), item in self._objects.items() if at == path}
        for change in reversed(self._changes):
            if change.path == path and change.version > version:
                changed = change.after or change.before
                assert changed is not None
                objects.pop(changed["metadata"]["name"], None)
                if change.before is not None:
                    objects[change.before["metadata"]["name"]] = change.before
        return [objects[name] for name in sorted(objects)]

    async def _watch(self, path: str, query: dict[str, str], send: Send) -> None:
        self.num_watches += 1
        version = int(query["resourceVersion"])
        epoch, bookmark = self._epoch, self._bookmark_at
        if version < self._oldest and self._rng.random() < 0.5:  # the API has two ways to say so
            await _answer(send, 410, _status(410, "too old resource version"))
            return
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-type", b"application/json")]})
        if version < self._oldest:
            await self._lines(send, [{"type": "ERROR", "object": json.loads(_status(410, "too old resource version"))}])
            epoch = -1
        while epoch == self._epoch and not self.is_down:
            with self._lock:
                events = [event for c in self._changes if c.version > version and (event := _event(c, path, query))]
                version = max(version, self._version)
                if self._bookmark_at > bookmark and query.get("allowWatchBookmarks") == "true":
                    bookmark = self._bookmark_at
                    events.append({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": str(bookmark)}}})
            await self._lines(send, events)
            await asyncio.sleep(0.005)
        await send({"type": "http.response.body", "body": b""})

    async def _lines(self, send: Send, events: list[dict[str, Any]]) -> None:
        data = b"".join(json.dumps(event, ensure_ascii=False).encode() + b"\n" for event in events)
        for at in range(0, len(data), self.cut):
            await send({"type": "http.response.body", "body": data[at : at + self.cut], "more_body": True})


def _event(change: _Change, path: str, query: dict[str, str]) -> dict[str, Any] | None:
    if change.path != path:
        return None
    was = change.before is not None and _selected(change.before, query)
    if change.after is not None and _selected(change.after, query):
        return {"type": "MODIFIED" if was else "ADDED", "object": change.after}
    if not was:
        return None
    gone = copy.deepcopy(change.after or change.before)
    assert gone is not None
    gone["metadata"]["resourceVersion"] = str(change.version)
    return {"type": "DELETED", "object": gone}


def _selected(item: dict[str, Any], query: dict[str, str]) -> bool:
    labels = item["metadata"].get("labels", {})
    wanted = [word.split("=") for word in query.get("labelSelector", "").split(",") if word]
    name = query.get("fieldSelector", "").removeprefix("metadata.name=")
    return all(labels.get(key) == value for key, value in wanted) and name in {"", item["metadata"]["name"]}


def _status(code: int, message: str) -> bytes:
    return json.dumps({"kind": "Status", "status": "Failure", "message": message, "code": code}).encode()


async def _answer(send: Send, status: int, body: bytes) -> None:
    await send({"type": "http.response.start", "status": status, "headers": [(b"content-type", b"application/json")]})
    await send({"type": "http.response.body", "body": body})


@contextlib.contextmanager
def serving(cluster: FakeKubernetes, **tls: Any) -> Iterator[str]:
    """Serve it, over TLS with uvicorn's ssl_certfile and ssl_keyfile; yield its URL."""
    config = uvicorn.Config(cluster, port=0, log_level="error", lifespan="off", timeout_graceful_shutdown=1, **tls)
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        while not server.started:
            assert thread.is_alive()
            threading.Event().wait(0.005)
        port = server.servers[0].sockets[0].getsockname()[1]
        yield f"{'https' if tls else 'http'}://127.0.0.1:{port}"
    finally:
        cluster.end_watches()
        server.should_exit = True
        thread.join(10)


def pod(name: str, ip: str | None, *, ready: bool = True, leaving: bool = False, **more: Any) -> dict[str, Any]:
    """A pod labelled app=vllm; more: labels, annotations, uid."""
    metadata = {"name": name, "namespace": "ai", "uid": f"uid-{name}", "labels": {"app": "vllm"}, **more}
    if leaving:
        metadata["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    status: dict[str, Any] = {"phase": "Running", "conditions": [{"type": "Ready", "status": str(ready)}]}
    if ip is not None:
        status |= {"podIP": ip, "podIPs": [{"ip": ip}]}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": {"nodeName": "œuf"}, "status": status}


def pool(*ports: int, name: str = "llama", app: str = "vllm") -> dict[str, Any]:
    """An InferencePool of the pods that are labelled app=`app`."""
    return {
        "apiVersion": "inference.networking.k8s.io/v1",
        "kind": "InferencePool",
        "metadata": {"name": name, "namespace": "ai"},
        "spec": {
            "selector": {"matchLabels": {"app": app}},
            "targetPorts": [{"number": port} for port in ports],
            "endpointPickerRef": {"name": "anaphora", "port": {"number": 9002}},
        },
    }


def objective(name: str, priority: int | None, *, of: str = "llama") -> dict[str, Any]:
    spec: dict[str, Any] = {"poolRef": {"name": of}}
    if priority is not None:
        spec["priority"] = priority
    return {"metadata": {"name": name, "namespace": "ai"}, "spec": spec}


def rewrite(name: str, model: str | None, *targets: tuple[str, int | None], of: str = "llama") -> dict[str, Any]:
    rule: dict[str, Any] = {
        "targets": [{"modelRewrite": t, **({} if weight is None else {"weight": weight})} for t, weight in targets]
    }
    if model is not None:
        rule["matches"] = [{"model": {"value": model}}]
    metadata = {"name": name, "namespace": "ai", "creationTimestamp": "2026-01-01T00:00:00Z"}
    return {"metadata": metadata, "spec": {"poolRef": {"name": of}, "rules": [rule]}}

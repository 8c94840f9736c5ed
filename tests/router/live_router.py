"""A router on a free port, in a thread of this process, in front of replicas that are real servers."""

from __future__ import annotations

import contextlib
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx

from anaphora.router.prompt import PromptSource, TextEstimate
from anaphora.router.replica import ReplicaSpec
from anaphora.router.route import RouteOptions, build_app, make_server
from tests.server.live_server import running

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from anaphora.router.app import RouterApp


@dataclass
class LiveRouter:
    """A running router and a client for it."""

    url: str
    app: RouterApp
    client: httpx.Client

    def chat(self, *contents: str, **fields: Any) -> httpx.Response:
        """Post a conversation; the first message is the user's, roles alternate."""
        messages = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
        body = {"model": "alphabet", "messages": messages, "max_tokens": 4, "temperature": 0, **fields}
        return self.client.post("/v1/chat/completions", json=body)

    def complete(self, prompt: Any, **fields: Any) -> httpx.Response:
        body = {"model": "alphabet", "prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
        return self.client.post("/v1/completions", json=body)

    def replicas(self) -> dict[str, dict[str, Any]]:
        return {entry["replica"]: entry for entry in self.client.get("/replicas").json()["replicas"]}

    def explain(self, response: httpx.Response) -> dict[str, Any]:
        explanation: dict[str, Any] = self.client.get(f"/explain/{response.headers['x-anaphora-request-id']}").json()
        return explanation


@contextlib.contextmanager
def routing(*urls: str, prompts: PromptSource | None = None, **options: Any) -> Iterator[LiveRouter]:
    """Route to these replicas while in the context, once each is known to be ready."""
    options.setdefault("probe_s", 0.05)
    specs = tuple(ReplicaSpec.of(url) for url in urls)
    app = build_app(RouteOptions(replicas=specs, **options), prompts or TextEstimate())
    with running(app, make_server) as (_, url), httpx.Client(base_url=url, timeout=10) as client:  # type: ignore[arg-type]
        router = LiveRouter(url, app, client)
        eventually(lambda: all(entry["healthy"] for entry in router.replicas().values()))
        yield router


def eventually(condition: Callable[[], Any], timeout_s: float = 10) -> Any:
    """Wait until `condition` holds; return what it returned."""
    deadline = time.monotonic() + timeout_s
    while not (value := condition()):
        assert time.monotonic() < deadline, "it never came to hold"
        time.sleep(0.01)
    return value


def replica_of(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return response.headers["x-anaphora-replica"]


def cached_tokens(response: httpx.Response) -> int:
    return response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]

"""A client that times streams: for the demo and the benchmark, against this server or another that speaks its API."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import httpx
import msgspec

if TYPE_CHECKING:
    from collections.abc import Callable

TIMEOUT_S = 600.0
"""A cold prompt of thousands of tokens takes minutes on a slow machine."""


class ServerError(Exception):
    """The server cannot be reached, or refused; the message is what it said."""


@dataclass(frozen=True, slots=True)
class TimedAnswer:
    """One streamed answer.

    ttft_s: from sending the request to the first chunk with a choice.
    cached_tokens: None where the server does not say.
    """

    text: str
    ttft_s: float
    prompt_tokens: int
    cached_tokens: int | None


class TimingClient:
    """Calls one server over one kept connection, so that no time goes into connecting.

    Every call raises ServerError where the server cannot be reached or refuses.
    """

    def __init__(self, url: str, clock: Callable[[], float] = time.perf_counter) -> None:
        self._http = httpx.Client(base_url=url, timeout=TIMEOUT_S)
        self._clock = clock

    def __enter__(self) -> TimingClient:
        return self

    def __exit__(self, *_: object) -> None:
        self._http.close()

    def model_name(self) -> str:
        """The first model that the server lists."""
        try:
            listed = self._http.get("/v1/models")
            _raise_for_error(listed)
            name: str = listed.json()["data"][0]["id"]
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise ServerError(f"{self._http.base_url}: no list of models: {_describe(error)}") from None
        return name

    def metrics(self) -> str:
        """The server's exposition for Prometheus, empty if it has none."""
        try:
            response = self._http.get("/metrics", headers={"accept": "text/plain"})
        except httpx.HTTPError as error:
            raise ServerError(_describe(error)) from None
        return response.text if response.is_success else ""

    def stream(self, path: str, body: dict[str, Any], on_text: Callable[[str], object] = lambda _: None) -> TimedAnswer:
        """Post `body` to /v1/completions or /v1/chat/completions and read the streamed answer to its end.

        on_text: given each piece of text as it comes.
        """
        body = {**body, "stream": True, "stream_options": {"include_usage": True}}
        texts: list[str] = []
        ttft_s: float | None = None
        usage: dict[str, Any] = {}
        started = self._clock()
        try:
            with self._http.stream("POST", path, json=body) as response:
                if not response.is_success:
                    response.read()
                _raise_for_error(response)
                for line in response.iter_lines():
                    if not line.startswith("data: {"):
                        continue
                    chunk = msgspec.json.decode(line[len("data: ") :])
                    if "error" in chunk:
                        raise ServerError(chunk["error"]["message"])
                    for choice in chunk["choices"]:
                        ttft_s = self._clock() - started if ttft_s is None else ttft_s
                        texts.append(choice.get("text") or choice.get("delta", {}).get("content") or "")
                        on_text(texts[-1])
                    usage = chunk.get("usage") or usage
        except httpx.HTTPError as error:
            raise ServerError(_describe(error)) from None
        if ttft_s is None:
            raise ServerError("the server's stream ended without an answer")
        return TimedAnswer(
            text="".join(texts),
            ttft_s=ttft_s,
            prompt_tokens=usage.get("prompt_tokens", 0),
            cached_tokens=(usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
        )


def _raise_for_error(response: httpx.Response) -> None:
    if response.is_success:
        return
    try:
        message = response.json()["error"]["message"]
    except (ValueError, LookupError, TypeError):
        message = response.text[:200]
    raise ServerError(f"{response.status_code}: {message}")


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__

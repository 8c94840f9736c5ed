"""One OpenAI-compatible endpoint: requests sent as streams, each timed token by token."""

from __future__ import annotations

import asyncio
import re
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import httpx
import msgspec

from anaphora.lab.importers import LogError
from anaphora.lab.importers.fields import FieldError, Fields
from anaphora.lab.importers.usage import read_usage
from anaphora.lab.record import Usage, UsageError

if TYPE_CHECKING:
    from anaphora.lab.load.prompts import Form

_PATHS = {"ids": "/v1/completions", "text": "/v1/completions", "chat": "/v1/chat/completions"}
_EXTENSIONS = ("ignore_eos", "temperature", "stream_options", "max_tokens")
"""Fields that not every server takes; what one refuses by name is left out from then on."""
_UNKNOWN_FIELD = re.compile("unrecogni|unsupported|not supported|unknown|extra inputs|not permitted", re.IGNORECASE)


@dataclass(slots=True)
class Answer:
    """What became of one request. Times are the endpoint's clock's, in seconds; None for what did not happen.

    sent_s: when it was handed to the network. gaps_s: from each piece of the answer to the next.
    prompt_tokens, cached_tokens, output_tokens: as the server reported; None where it did not.
    error: what went wrong in few words, by which failures are counted; message: what was said of it.
    """

    sent_s: float
    first_s: float | None = None
    end_s: float | None = None
    gaps_s: list[float] = field(default_factory=list)
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    output_tokens: int | None = None
    error: str | None = None
    message: str = ""

    @property
    def ttft_s(self) -> float | None:
        """From sending to the first piece of the answer."""
        return None if self.first_s is None else self.first_s - self.sent_s


class Endpoint:
    """A server and a model of it. Use it in an `async with`; connections are kept.

    key: sent as a bearer token. timeout_s: for each wait within a request.
    """

    def __init__(self, url: str, model: str = "", *, key: str | None = None, timeout_s: float = 600.0) -> None:
        headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
        self._http = httpx.AsyncClient(base_url=url, timeout=timeout_s, limits=limits, headers=headers, trust_env=False)
        self.url = url
        self.model = model
        self.refused_fields: set[str] = set()

    async def __aenter__(self) -> Endpoint:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._http.aclose()

    @staticmethod
    def clock() -> float:
        """Seconds from any origin."""
        return time.perf_counter()

    async def choose_model(self) -> None:
        """Take the first model that the server lists, unless one was named. Raises LogError: it lists none."""
        if self.model:
            return
        try:
            listed = await self._http.get("/v1/models")
            listed.raise_for_status()
            self.model = str(listed.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError) as error:
            raise LogError(
                f"{self.url}: no list of models ({_describe(error)}); name one with --served-model"
            ) from None

    def body(self, form: Form, prompt: list[int] | str, num_output_tokens: int) -> bytes:
        """A request's body: greedy, of exactly so many output tokens where the server lets one ask for that."""
        fields: dict[str, Any] = {
            "model": self.model,
            "stream": True,
            "stream_options": {"include_usage": True},
            "temperature": 0,
            "max_tokens": num_output_tokens,
            "ignore_eos": True,
        }
        if "max_tokens" in self.refused_fields:
            fields["max_completion_tokens"] = num_output_tokens
        fields = {name: value for name, value in fields.items() if name not in self.refused_fields}
        fields |= {"messages": [{"role": "user", "content": prompt}]} if form == "chat" else {"prompt": prompt}
        return msgspec.json.encode(fields)

    def learn(self, answer: Answer) -> bool:
        """Whether an answer refuses a field that can be left out, which is done from then on."""
        if answer.error is None or not answer.error.startswith(("HTTP 400", "HTTP 422")):
            return False
        if _UNKNOWN_FIELD.search(answer.message) is None:
            return False
        named = [name for name in _EXTENSIONS if name in answer.message and name not in self.refused_fields]
        self.refused_fields.update(named[:1])
        return bool(named)

    async def send(self, form: Form, body: bytes) -> Answer:
        """Send a request and read its answer to the end. Nothing is raised: failures are in the answer."""
        answer = Answer(self.clock())
        try:
            headers = {"Content-Type": "application/json", "Accept": "text/event-stream"}
            async with self._http.stream("POST", _PATHS[form], content=body, headers=headers) as response:
                if not response.is_success:
                    _refused(answer, response.status_code, await response.aread())
                    return answer
                await self._read(answer, response)
        except httpx.TimeoutException:
            answer.error = "timed out"
        except httpx.ConnectError as error:
            answer.error, answer.message = "cannot connect", _describe(error)
        except (httpx.HTTPError, OSError) as error:
            answer.error, answer.message = "connection lost", _describe(error)
        except asyncio.CancelledError:
            answer.error = "stopped"
            raise
        return answer

    async def _read(self, answer: Answer, response: httpx.Response) -> None:
        last = 0.0
        usage: dict[str, Any] = {}
        async for line in response.aiter_lines():
            if not line.startswith("data:") or line.endswith("[DONE]"):
                continue
            now = self.clock()
            try:
                chunk = msgspec.json.decode(line[len("data:") :])
            except msgspec.DecodeError:
                answer.error, answer.message = "unreadable stream", "an event of the stream is no JSON"
                return
            if not isinstance(chunk, dict) or "error" in chunk:
                answer.error = "error in the stream"
                answer.message = str(chunk.get("error") if isinstance(chunk, dict) else chunk)[:300]
                return
            choices = chunk.get("choices") or ()
            is_end = any(choice.get("finish_reason") for choice in choices)
            if any(map(_has_text, choices)) or (is_end and answer.first_s is None):
                if answer.first_s is None:
                    answer.first_s = now
                else:
                    answer.gaps_s.append(now - last)
                last = now
            usage = chunk.get("usage") or usage
        answer.end_s = self.clock()
        if answer.first_s is None:
            answer.error = "empty answer"
        _take_usage(answer, usage)


def _has_text(choice: dict[str, Any]) -> bool:
    """Whether a piece brings something. Of /v1/completions each does, if only a token that is part of a character, but
    for the last; of chat the first one may name the role alone."""
    delta = choice.get("delta")
    if delta is None:
        return choice.get("finish_reason") is None or bool(choice.get("text"))
    return bool(delta.get("content") or delta.get("reasoning_content") or delta.get("reasoning"))


def _take_usage(answer: Answer, usage: dict[str, Any]) -> None:
    try:
        read = read_usage(Fields(usage, "usage")) if usage else None
    except (FieldError, UsageError) as error:
        answer.error, answer.message = "unreadable usage", str(error)
        return
    if isinstance(read, Usage):
        answer.prompt_tokens, answer.cached_tokens, answer.output_tokens = read.prompt, read.cached, read.output


def _refused(answer: Answer, status: int, body: bytes) -> None:
    answer.end_s = None
    answer.error = f"HTTP {status}"
    try:
        error = msgspec.json.decode(body)
        error = error.get("error", error)
        answer.message = str(error.get("message") or error.get("detail") or error)[:300]
        code = error.get("code") or error.get("type")
        if isinstance(code, str):
            answer.error = f"HTTP {status} {code[:60]}"
    except (msgspec.DecodeError, AttributeError):
        answer.message = body[:300].decode("utf-8", "replace")


def _describe(error: Exception) -> str:
    return str(error) or type(error).__name__

"""The Kubernetes API over HTTPS, as far as a reader needs it: lists and watches.

Paths, parameters and the meaning of 410 are those of https://kubernetes.io/docs/reference/using-api/api-concepts/.
"""

from __future__ import annotations

import logging
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import msgspec

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping

log = logging.getLogger(__name__)

SERVICE_ACCOUNT = Path("/var/run/secrets/kubernetes.io/serviceaccount")
_CONNECT_S = 5.0
_READ_S = 30.0
_PAGE = 500
WATCH_S = 60
"""A watch ends after this time, by our own wish, and begins anew: so a connection that died silently is noticed."""
_WATCH_GRACE_S = 15.0
_MAX_LINE_BYTES = 64 * 2**20


class KubernetesError(Exception):
    """The API did not answer as asked. status: of HTTP, 0 where there was none. retry_after_s: if it says so."""

    def __init__(self, message: str, status: int = 0, retry_after_s: float = 0.0) -> None:
        super().__init__(message)
        self.status = status
        self.retry_after_s = retry_after_s


class ExpiredError(KubernetesError):
    """410 Gone: that version is no longer kept; only a new list helps."""

    def __init__(self, message: str) -> None:
        super().__init__(message, 410)


class NotInClusterError(Exception):
    """No API was named, and this process does not run in a pod."""


@dataclass(frozen=True, slots=True)
class ApiAccess:
    """Where the API is, and who we are.

    token_file is read for every request, because the kubelet replaces the token about once an hour; ca_file: None for
    the system's authorities. namespace: our own.
    """

    url: str
    token_file: Path | None = None
    ca_file: Path | None = None
    namespace: str = "default"

    @classmethod
    def in_cluster(cls, environment: Mapping[str, str], folder: Path = SERVICE_ACCOUNT) -> ApiAccess:
        """As a pod finds it. Raises NotInClusterError."""
        host, port = environment.get("KUBERNETES_SERVICE_HOST"), environment.get("KUBERNETES_SERVICE_PORT", "443")
        if not host or not (folder / "token").exists():
            raise NotInClusterError(
                "this is no pod of a cluster (no KUBERNETES_SERVICE_HOST, or no service account's token); "
                "name the API with --kube-api, say http://127.0.0.1:8001 of `kubectl proxy`"
            )
        shown = f"[{host}]" if ":" in host else host
        return cls(f"https://{shown}:{port}", folder / "token", folder / "ca.crt", own_namespace(folder))


def own_namespace(folder: Path = SERVICE_ACCOUNT) -> str:
    """The namespace of this process's pod, "default" outside of a cluster."""
    try:
        return (folder / "namespace").read_text(encoding="utf-8").strip() or "default"
    except OSError:
        return "default"


class WatchEvent(msgspec.Struct):
    """One line of a watch."""

    type: str
    object: msgspec.Raw


class _ListMeta(msgspec.Struct, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _List(msgspec.Struct):
    metadata: _ListMeta
    items: list[msgspec.Raw] | None = None


class Status(msgspec.Struct):
    """What the API says of a failure."""

    message: str = ""
    code: int = 0


@dataclass(frozen=True, slots=True)
class Listing:
    """Every object of a kind at one version."""

    version: str
    items: list[msgspec.Raw]


_list_decoder = msgspec.json.Decoder(_List)
_event_decoder = msgspec.json.Decoder(WatchEvent)
_status_decoder = msgspec.json.Decoder(Status)


class WatchLines:
    """Puts a watch's lines together again, wherever the network cut them."""

    def __init__(self) -> None:
        self._rest = bytearray()

    def feed(self, data: bytes) -> list[WatchEvent]:
        """Return the events that are whole by now. Raises KubernetesError for what is none."""
        self._rest += data
        end = self._rest.rfind(b"\n") + 1
        if len(self._rest) - end > _MAX_LINE_BYTES:
            raise KubernetesError(f"a line of the watch has over {_MAX_LINE_BYTES} bytes")
        lines = bytes(self._rest[:end]).split(b"\n")
        del self._rest[:end]
        try:
            return [_event_decoder.decode(line) for line in lines if line.strip()]
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            raise KubernetesError(f"a line of the watch is no event: {error}") from None


class ApiServer:
    """A client of one API server. Raises KubernetesError throughout.

    on_lost: called with True when it cannot be asked any more, with False when it can again.
    """

    def __init__(self, access: ApiAccess, on_lost: Callable[[bool], None] = lambda _is_lost: None) -> None:
        self._access = access
        self._on_lost = on_lost
        self._client: httpx.AsyncClient | None = None
        self._is_lost = False

    @property
    def namespace(self) -> str:
        """Our own."""
        return self._access.namespace

    async def list_all(self, path: str, parameters: Mapping[str, str]) -> Listing:
        """Every object under `path`, page by page."""
        items: list[msgspec.Raw] = []
        more = ""
        while True:
            query = {**parameters, "limit": str(_PAGE), **({"continue": more} if more else {})}
            try:
                response = await self._open().get(path, params=query, headers=self._headers())
            except httpx.HTTPError as error:
                raise _broken(error) from None
            if response.status_code != 200:
                raise _failure(response, response.content)
            try:
                page = _list_decoder.decode(response.content)
            except (msgspec.DecodeError, UnicodeDecodeError) as error:
                raise KubernetesError(f"{path}: the answer is no list: {error}") from None
            items += page.items or []
            more = page.metadata.continue_
            if not more:
                return Listing(page.metadata.resource_version, items)

    async def watch(self, path: str, parameters: Mapping[str, str], version: str) -> AsyncIterator[list[WatchEvent]]:
        """What changes after `version`, some events at a time, until the server ends the watch. The first are none.

        Raises ExpiredError where the version is too old.
        """
        query = {
            **parameters,
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": version,
            "timeoutSeconds": str(WATCH_S),
        }
        timeout = httpx.Timeout(_CONNECT_S, read=WATCH_S + _WATCH_GRACE_S)
        lines = WatchLines()
        try:
            opening = self._open().stream("GET", path, params=query, headers=self._headers(), timeout=timeout)
            async with opening as response:
                if response.status_code != 200:
                    raise _failure(response, await response.aread())
                yield []
                async for data in response.aiter_bytes():
                    events = lines.feed(data)
                    for event in events:
                        if event.type == "ERROR":
                            raise _status_error(event.object)
                    if events:
                        yield events
        except httpx.HTTPError as error:
            raise _broken(error) from None

    def answered(self) -> None:
        """Whoever asks has an answer. Says so if it could not be had before."""
        if self._is_lost:
            self._is_lost = False
            self._on_lost(False)
            log.warning("%s: the Kubernetes API answers again", self._access.url)

    def lost(self, error: KubernetesError) -> None:
        """Whoever asks has no answer. Says so once."""
        if not self._is_lost:
            self._is_lost = True
            self._on_lost(True)
            log.warning("%s: %s; what is known stays in force", self._access.url, error)

    async def close(self) -> None:
        """End every connection; the next request opens them anew, with the authorities as they are then."""
        client, self._client = self._client, None
        if client is not None:
            await client.aclose()

    def _open(self) -> httpx.AsyncClient:
        if self._client is None:
            access = self._access
            try:
                authorities = ssl.create_default_context(cafile=str(access.ca_file) if access.ca_file else None)
            except (OSError, ssl.SSLError) as error:
                raise KubernetesError(f"{access.ca_file}: {error}") from None
            self._client = httpx.AsyncClient(
                base_url=access.url,
                verify=authorities,
                timeout=httpx.Timeout(_CONNECT_S, read=_READ_S),
                trust_env=False,
            )
        return self._client

    def _headers(self) -> dict[str, str]:
        headers = {"accept": "application/json", "user-agent": "anaphora-route"}
        if self._access.token_file is not None:
            try:
                headers["authorization"] = f"Bearer {self._access.token_file.read_text(encoding='utf-8').strip()}"
            except (OSError, UnicodeDecodeError) as error:
                raise KubernetesError(f"{self._access.token_file}: {error}") from None
        return headers


def _broken(error: httpx.HTTPError) -> KubernetesError:
    return KubernetesError(str(error) or type(error).__name__)


def _failure(response: httpx.Response, body: bytes) -> KubernetesError:
    try:
        message = _status_decoder.decode(body).message
    except (msgspec.DecodeError, UnicodeDecodeError):
        message = ""
    text = f"{response.request.url.path}: {response.status_code} {message or response.reason_phrase}"
    if response.status_code == 410:
        return ExpiredError(text)
    wait = response.headers.get("retry-after", "")
    return KubernetesError(text, response.status_code, float(wait) if wait.isdecimal() else 0.0)


def _status_error(status: msgspec.Raw) -> KubernetesError:
    try:
        said = _status_decoder.decode(status)
    except msgspec.DecodeError:
        said = Status("an error that is no Status")
    return ExpiredError(said.message) if said.code == 410 else KubernetesError(said.message, said.code)

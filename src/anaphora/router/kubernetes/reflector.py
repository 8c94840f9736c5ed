"""A table that is what a cluster has of one kind: listed once, then watched."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

import msgspec

from anaphora.router.kubernetes.api import ExpiredError, KubernetesError

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable, Mapping

    from anaphora.router.kubernetes.api import ApiServer
    from anaphora.router.resources import Metadata

log = logging.getLogger(__name__)

_MIN_WAIT_S = 0.25
_MAX_WAIT_S = 10.0
_ABSENT_S = 30.0
_SHORT_WATCH_S = 1.0
_FORBIDDEN = 403
_NOT_FOUND = 404


class _Resource(Protocol):
    @property
    def metadata(self) -> Metadata: ...


_R = TypeVar("_R", bound=_Resource)


class _VersionOnly(msgspec.Struct):
    class _Meta(msgspec.Struct, rename="camel"):
        resource_version: str = ""
        name: str = ""

    metadata: _Meta


class Reflector(Generic[_R]):
    """Keeps `objects`, by name, as the API has them.

    While the API cannot be reached, the table stays as it was. A watch goes on from the last version seen; a new list
    is made only where that one has expired. Objects that cannot be read are left out and named in the log. A kind that
    the cluster does not know (404), because its definition is not installed, has no objects.

    on_change: called after a list, and after each read of a watch that changed something.
    """

    def __init__(
        self,
        api: ApiServer,
        path: str,
        kind: type[_R],
        on_change: Callable[[], None],
        parameters: Mapping[str, str] | None = None,
        *,
        sleep: Callable[[float], Awaitable[None]] = asyncio.sleep,
    ) -> None:
        self.objects: dict[str, _R] = {}
        self.is_synced = False
        self.num_lists = 0
        self._api = api
        self._path = path
        self._decoder = msgspec.json.Decoder(kind)
        self._on_change = on_change
        self._parameters = parameters or {}
        self._sleep = sleep
        self._version: str | None = None
        self._wait_s = _MIN_WAIT_S
        self._problem: str | None = None

    async def run(self) -> None:
        """Follow until cancelled."""
        while True:
            try:
                if self._version is None:
                    await self._list()
                started = time.monotonic()
                await self._watch()
                if time.monotonic() - started < _SHORT_WATCH_S:  # a server that is going away ends watches at once
                    await self._pause(0.0)
                else:
                    self._wait_s = _MIN_WAIT_S
            except ExpiredError as error:
                log.info("%s: listing anew: %s", self._path, error)
                self._version = None
                await self._pause(0.0)
            except KubernetesError as error:
                self._complain(error)
                await self._pause(_ABSENT_S if error.status == _NOT_FOUND else min(error.retry_after_s, _ABSENT_S))

    async def _list(self) -> None:
        try:
            listing = await self._api.list_all(self._path, self._parameters)
        except KubernetesError as error:
            if error.status == _NOT_FOUND:
                self.objects = {}
                self._synced()
            raise
        self._answered()
        self.num_lists += 1
        found = filter(None, map(self._read, listing.items))
        self.objects = {item.metadata.name: item for item in found}
        self._version = listing.version
        self._synced()

    def _synced(self) -> None:
        self.is_synced = True
        self._on_change()

    def _answered(self) -> None:
        self._problem = None
        self._api.answered()

    async def _watch(self) -> None:
        assert self._version is not None
        async for events in self._api.watch(self._path, self._parameters, self._version):
            self._answered()
            if events:
                self._wait_s = _MIN_WAIT_S
            has_changed = False
            for event in events:
                has_changed = self._take(event.type, event.object) or has_changed
            if has_changed:
                self._on_change()

    def _take(self, kind: str, raw: msgspec.Raw) -> bool:
        try:
            seen = msgspec.json.decode(raw, type=_VersionOnly).metadata
        except msgspec.DecodeError as error:
            raise KubernetesError(f"{self._path}: an event without metadata: {error}") from None
        if seen.resource_version:
            self._version = seen.resource_version
        if kind == "BOOKMARK":
            return False
        item = None if kind == "DELETED" else self._read(raw)
        if item is None:
            return self.objects.pop(seen.name, None) is not None
        self.objects[seen.name] = item
        return True

    def _read(self, raw: msgspec.Raw) -> _R | None:
        try:
            return self._decoder.decode(raw)
        except (msgspec.DecodeError, UnicodeDecodeError) as error:
            log.warning("%s: an object is left out, it cannot be read: %s", self._path, error)
            return None

    def _complain(self, error: KubernetesError) -> None:
        if error.status == _NOT_FOUND:
            log.info("%s; no such kind is defined, so there are none", error)
        elif error.status == 0 or error.status >= 500:
            self._api.lost(error)
        elif str(error) != self._problem:
            self._problem = str(error)
            is_forbidden = error.status == _FORBIDDEN
            log.warning("%s%s", error, "; the account needs the verbs list and watch" if is_forbidden else "")

    async def _pause(self, at_least_s: float) -> None:
        wait_s, self._wait_s = self._wait_s, min(self._wait_s * 2, _MAX_WAIT_S)
        await self._sleep(max(wait_s * random.uniform(0.5, 1.0), at_least_s))

"""A live server's KV events for some seconds: what was stored, lost and stored again says why prompts do not hit."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field
from statistics import median
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from anaphora.cache.events import AllBlocksCleared, BlockRemoved, BlockStored
from anaphora.lab.importers.source import LogError
from anaphora.tokens import TOKEN_BYTES
from anaphora.wire import AnaphoraCodec, WireError, decode_vllm
from anaphora.wire.sequence import Apply, Lost, Restarted

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from anaphora.cache.events import Event
    from anaphora.wire.sequence import Action

_Key = tuple[bytes, int]


@dataclass(slots=True)
class EventWatch:
    """What a stream of events told. Give it what `EventSubscriber.take` returns. Memory: the names of the blocks seen.

    clock: seconds; for how long a block was away before it was stored again.

    num_stored, num_removed: blocks. num_stored_tokens: of them. num_cleared: times that the cache was emptied.
    num_lost: gaps in the stream. num_restarts: of the publisher. num_unreadable: batches.
    num_back_after_eviction, num_back_after_clearing: blocks stored again that had been there before.
    num_heads: prompts' first blocks, different ones. num_split_heads: of these, with the tokens of another one.
    """

    clock: Callable[[], float] = time.monotonic
    num_batches: int = 0
    num_lost: int = 0
    num_restarts: int = 0
    num_unreadable: int = 0
    num_stored: int = 0
    num_stored_tokens: int = 0
    num_removed: int = 0
    num_cleared: int = 0
    num_back_after_eviction: int = 0
    num_back_after_clearing: int = 0
    num_split_heads: int = 0
    away_s: list[float] = field(default_factory=list)
    _held: set[_Key] = field(default_factory=set)
    _evicted: dict[_Key, float] = field(default_factory=dict)
    _cleared: set[_Key] = field(default_factory=set)
    _heads: dict[bytes, set[bytes]] = field(default_factory=dict)
    _following: dict[bytes, set[bytes]] = field(default_factory=dict)

    def take(self, actions: Iterable[Action]) -> None:
        """Follow what the publisher's sequence said."""
        for action in actions:
            if isinstance(action, Apply):
                try:
                    events = _decode(action.payload)
                except ValueError:
                    self.num_unreadable += 1
                    continue
                self.num_batches += 1
                for event in events:
                    self._follow(event)
            elif isinstance(action, Lost):
                self.num_lost += self.num_batches > 0
                self._held.clear()
            elif isinstance(action, Restarted):
                self.num_restarts += self.num_batches > 0
                self._held.clear()

    def _follow(self, event: Event) -> None:
        if isinstance(event, BlockStored):
            self._store(event)
        elif isinstance(event, BlockRemoved):
            now = self.clock()
            self.num_removed += len(event.digests)
            for digest in event.digests:
                self._held.discard((digest, event.group))
                self._evicted[digest, event.group] = now
        elif isinstance(event, AllBlocksCleared):
            self.num_cleared += 1
            self._cleared |= self._held
            self._held.clear()

    def _store(self, event: BlockStored) -> None:
        new = [digest for digest in event.digests if (digest, event.group) not in self._held]
        self.num_stored += len(new)
        self.num_stored_tokens += len(new) * event.block_size
        parent = event.parent
        for number, digest in enumerate(event.digests):
            key = (digest, event.group)
            if key not in self._held:
                away_since = self._evicted.pop(key, None)
                if away_since is not None:
                    self.num_back_after_eviction += 1
                    self.away_s.append(self.clock() - away_since)
                elif key in self._cleared:
                    self._cleared.discard(key)
                    self.num_back_after_clearing += 1
                self._held.add(key)
            if parent is not None:
                self._following.setdefault(parent, set()).add(digest)
            elif event.tokens:
                size = event.block_size * TOKEN_BYTES
                names = self._heads.setdefault(event.tokens[number * size : (number + 1) * size], set())
                self.num_split_heads += bool(names) and digest not in names
                names.add(digest)
            parent = digest

    @property
    def num_heads(self) -> int:
        """Prompts' first blocks, different ones."""
        return sum(map(len, self._heads.values()))

    @property
    def num_shared(self) -> int:
        """Blocks from which two prompts or more went on differently: these were surely used again."""
        return sum(len(following) > 1 for following in self._following.values())

    @property
    def back_share(self) -> float | None:
        """Blocks that were stored again after their eviction, of all that were stored."""
        return self.num_back_after_eviction / self.num_stored if self.num_stored else None

    def facts(self) -> dict[str, float | int | str | bool | None]:
        """For people and JSON."""
        return {
            "stored blocks": self.num_stored,
            "evicted blocks": self.num_removed,
            "stored again after eviction": self.num_back_after_eviction,
            "seconds away before that": median(self.away_s) if self.away_s else None,
            "times cleared": self.num_cleared,
            "stored again after clearing": self.num_back_after_clearing,
            "different first blocks": self.num_heads,
            "first blocks with another's tokens": self.num_split_heads,
            "blocks that prompts part behind": self.num_shared,
            "gaps in the stream": self.num_lost + self.num_unreadable,
        }


def _decode(payload: bytes) -> Iterable[Event]:
    """Events of a batch in vLLM's form, or in Anaphora's own. Raises WireError."""
    try:
        return decode_vllm(payload).events
    except WireError:
        return AnaphoraCodec().decode(payload).events


def watch(endpoint: str, replay: str | None, topic: str, seconds: float) -> EventWatch:
    """Follow a publisher for so many seconds; with `replay` also what it still has from before.

    Raises LogError: no endpoint, or no connection to it within that time.
    """
    # Needs ZMQ, which only this does.
    from anaphora.wire.subscriber import EventSubscriber  # noqa: PLC0415

    found = EventWatch()
    ready = threading.Event()
    subscriber = EventSubscriber(ready.set)
    try:
        subscriber.add("server", endpoint, replay, topic)
    except ValueError as error:
        raise LogError(f"--kv-events: {error}") from None
    subscriber.start()
    try:
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            ready.wait(min(left, 0.2))
            ready.clear()
            while actions := subscriber.take():
                found.take(action for _, action in actions)
    finally:
        subscriber.close()
    return found


def source_of(described: object, url: str) -> tuple[str, str | None, str] | None:
    """Endpoint, replay endpoint and topic from what a server answers to GET /kv_event_sources; None if it has none. An
    address that it listens on everywhere is taken to be at the URL's host."""
    if not isinstance(described, dict):
        return None
    for source in described.values():
        if isinstance(source, dict) and isinstance(source.get("endpoint"), str):
            host = urlsplit(url).hostname or "127.0.0.1"
            replay, topic = source.get("replay_endpoint"), source.get("topic")
            return (
                _at(source["endpoint"], host),
                _at(replay, host) if isinstance(replay, str) else None,
                topic if isinstance(topic, str) else "",
            )
    return None


def _at(endpoint: str, host: str) -> str:
    for everywhere in ("*", "0.0.0.0", "[::]"):
        endpoint = endpoint.replace(f"tcp://{everywhere}:", f"tcp://{host}:", 1)
    return endpoint

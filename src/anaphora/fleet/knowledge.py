"""Where an index's knowledge comes from: engines' events, our own decisions, and requests on their way."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from anaphora.cache import KVCacheManager
from anaphora.cache.events import DEVICE, AllBlocksCleared, BlockRemoved, BlockStored
from anaphora.identity import BlockDigests
from anaphora.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from anaphora.cache.events import Event
    from anaphora.cache.sequence import Sequence as CachedSequence
    from anaphora.fleet.index import FleetIndex, Match
    from anaphora.fleet.view import Knowledge
    from anaphora.identity import Extras, Namespace
    from anaphora.tokens import TokenIds

APPROXIMATE = "APPROXIMATE"
"""The medium of what our own decisions say of a replica whose events are known in part."""
SPECULATIVE = "SPECULATIVE"
"""The medium of blocks that a request on its way will leave behind."""
DEFAULT_SPECULATIVE_TTL_S = 120.0
DEFAULT_NUM_BLOCKS = 4096
"""Blocks of a replica that does not say how many it has."""


@dataclass(slots=True, eq=False)
class Visit:
    """A request's traces in the knowledge of one replica."""

    replica: str
    generation: int
    tokens: bytes
    namespace: Namespace
    expires: float
    names: tuple[bytes, ...] = ()
    sequence: CachedSequence | None = None


class _RecallingDigests(BlockDigests):
    """Digests that need not be computed for a prompt whose names are known: the mirror names it as it was sent."""

    def __init__(self) -> None:
        super().__init__()
        self._before: list[bytes] = []
        self._tokens = b""
        self._last_root: tuple[Namespace, bytes] | None = None

    def root(self, namespace: Namespace) -> bytes:
        """See BlockDigests."""
        if self._last_root is None or self._last_root[0] is not namespace:
            self._last_root = (namespace, super().root(namespace))
        return self._last_root[1]

    def recall(self, namespace: Namespace, tokens: bytes, names: tuple[bytes, ...]) -> None:
        """These are the names of this prompt's blocks, until others are told."""
        self._before = [self.root(namespace), *names]
        self._tokens = tokens

    def chain(
        self, parent: bytes, tokens: TokenIds, block_size: int, extras: Sequence[Extras | None] | None = None
    ) -> list[bytes]:
        """See BlockDigests."""
        if extras is None and isinstance(tokens, bytes) and parent in self._before:
            width = block_size * TOKEN_BYTES
            first = self._before.index(parent)
            count = len(tokens) // width
            if self._tokens.startswith(tokens, first * width) and first + count < len(self._before):
                return self._before[first + 1 : first + 1 + count]
        return super().chain(parent, tokens, block_size, extras)


class _Mirror:
    """A replica's cache as it would be if it saw our requests alone: the real manager, without memory behind it."""

    def __init__(self, num_blocks: int, block_size: int, digests: BlockDigests, medium: str) -> None:
        self.manager = KVCacheManager(num_blocks, block_size, digests=digests, events=True)
        self.medium = medium

    def admit(self, visit: Visit) -> list[Event]:
        sequence = self.manager.start(visit.tokens, visit.namespace)
        num_tokens = sequence.num_tokens - sequence.num_cached_tokens
        if not self.manager.allocate(sequence, num_tokens):
            return []  # longer than the pool, or everything is pinned: the engine would make it wait
        self.manager.commit(sequence, sequence.num_tokens - sequence.num_computed_tokens)
        visit.sequence = sequence
        return self._take()

    def finish(self, visit: Visit) -> list[Event]:
        if visit.sequence is None:
            return []
        self.manager.finish(visit.sequence)
        visit.sequence = None
        return self._take()

    def _take(self) -> list[Event]:
        events = self.manager.take_events()
        if self.medium == DEVICE:
            return events
        return [
            replace(event, medium=self.medium) if isinstance(event, BlockStored | BlockRemoved) else event
            for event in events
        ]


class FleetKnowledge:
    """Keeps a FleetIndex true, replica by replica.

    - speculative: at the decision the prompt's blocks are entered in a medium of their own; they are taken out when the
      answer begins (then the engine has them), when the request failed, or after `speculative_ttl_s`.
    - approximate: when the answer begins, the prompt is admitted to a mirror of the replica's cache, which evicts as an
      engine does, tails first, with as many blocks as the replica has.
    - precise: the replica's events are followed from its empty cache on, and no mirror is needed.
    - partial: events are followed, but some were lost. The engine stores nothing anew that it has already, so a mirror
      stands beside them, in a medium of its own, until the cache was emptied.

    clock: returns seconds, and never goes back.
    """

    def __init__(
        self, index: FleetIndex, clock: Callable[[], float], *, speculative_ttl_s: float = DEFAULT_SPECULATIVE_TTL_S
    ) -> None:
        self.index = index
        self._clock = clock
        self._speculative_ttl_s = speculative_ttl_s
        self._digests = _RecallingDigests()
        self._mirrors: dict[str, _Mirror] = {}
        self._following: dict[str, bool] = {}
        self._updated: dict[str, float] = {}
        self._num_blocks: dict[str, int] = {}
        self._visits: dict[Visit, None] = {}

    def add(self, replica: str, *, model: str = "", num_blocks: int = DEFAULT_NUM_BLOCKS) -> None:
        """Begin to know a replica. num_blocks: of its cache, in the index's block size."""
        self.index.add(replica, model)
        self._num_blocks[replica] = num_blocks
        self._start_mirror(replica)

    def remove(self, replica: str) -> None:
        """The replica is gone."""
        self.index.remove_replica(replica)
        for table in (self._mirrors, self._following, self._updated, self._num_blocks):
            table.pop(replica, None)

    def resize(self, replica: str, num_blocks: int) -> None:
        """The replica says how many blocks it has. What was known by approximation begins anew if that is another
        number."""
        if num_blocks < 1 or self._num_blocks[replica] == num_blocks:
            return
        self._num_blocks[replica] = num_blocks
        if replica in self._mirrors:
            self.index.forget(replica, self._mirrors[replica].medium)
            self._start_mirror(replica)

    def lose(self, replica: str) -> None:
        """Whatever was known of the replica is perhaps not so any more: it may have restarted, or events were lost."""
        self.index.forget(replica)
        self._updated.pop(replica, None)
        if replica in self._following:
            self._following[replica] = False
        self._start_mirror(replica)

    def kind(self, replica: str) -> Knowledge:
        """Where the knowledge of a replica comes from."""
        if replica in self._following:
            return "precise" if self._following[replica] else "partial"
        return "approximate" if replica in self._updated else "unknown"

    def age_s(self, replica: str) -> float:
        """Seconds since something was last learnt of the replica; infinite if nothing ever was."""
        updated = self._updated.get(replica)
        return float("inf") if updated is None else self._clock() - updated

    # Precise

    def begin_following(self, replica: str) -> None:
        """The replica's cache is empty, and all of its events will come to `follow`."""
        self.index.forget(replica)
        self._mirrors.pop(replica, None)
        self._following[replica] = True
        self._updated[replica] = self._clock()

    def follow(self, replica: str, events: Iterable[Event]) -> None:
        """The replica's own events, in order. After `lose`, an event that empties the cache makes them complete."""
        self._updated[replica] = self._clock()
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.begin_following(replica)
            else:
                self._following.setdefault(replica, False)
                self.index.apply(replica, [event])

    def stop_following(self, replica: str) -> None:
        """The replica publishes no events any more."""
        if self._following.pop(replica, None) is not None:
            self.lose(replica)

    # Approximate and speculative

    def send(self, replica: str, tokens: bytes, namespace: Namespace) -> Visit:
        """A request is on its way to the replica."""
        visit = Visit(
            replica, self.index.generation(replica), tokens, namespace, self._clock() + self._speculative_ttl_s
        )
        width = self.index.tree.width
        whole = tokens[: len(tokens) // width * width]
        if whole:
            root = self._digests.root(namespace)
            visit.names = tuple(self._digests.chain(root, whole, self.index.block_size))
            stored = BlockStored(visit.names, None, whole, self.index.block_size, namespace, medium=SPECULATIVE)
            self.index.apply(replica, [stored])
        self._visits[visit] = None
        return visit

    def confirm(self, visit: Visit) -> None:
        """The answer began: the prompt is in the replica's cache."""
        replica = visit.replica
        if visit.sequence is not None or not self._is_current(visit):
            return
        mirror = self._mirrors.get(replica)
        if mirror is None:
            return  # its events say so soon; until the request ends it is expected
        self._digests.recall(visit.namespace, visit.tokens, visit.names)
        self._unspeculate(visit)
        if visit.tokens:
            self._updated[replica] = self._clock()
            self.index.apply(replica, mirror.admit(visit))

    def close(self, visit: Visit) -> None:
        """The request ended, in whatever way. Idempotent."""
        if self._visits.pop(visit, self) is self:
            return
        if self._is_current(visit):
            self._unspeculate(visit)
            mirror = self._mirrors.get(visit.replica)
            if mirror is not None and visit.sequence is not None:
                self.index.apply(visit.replica, mirror.finish(visit))

    def expire(self) -> None:
        """Take out what was expected for too long. Call it every few seconds."""
        now = self._clock()
        for visit in [visit for visit in self._visits if visit.names and visit.expires <= now]:
            if self._is_current(visit):
                self._unspeculate(visit)

    def match(self, tokens: bytes, namespace: Namespace, replicas: Iterable[str]) -> Match:
        """How much of a prompt each of these replicas has."""
        return self.index.match(tokens, namespace, replicas=replicas)

    def _is_current(self, visit: Visit) -> bool:
        return visit.replica in self._num_blocks and self.index.generation(visit.replica) == visit.generation

    def _unspeculate(self, visit: Visit) -> None:
        if visit.names:
            self.index.apply(visit.replica, [BlockRemoved(visit.names, SPECULATIVE)])
            visit.names = ()

    def _start_mirror(self, replica: str) -> None:
        medium = APPROXIMATE if replica in self._following else DEVICE
        self._mirrors[replica] = _Mirror(self._num_blocks[replica], self.index.block_size, self._digests, medium)

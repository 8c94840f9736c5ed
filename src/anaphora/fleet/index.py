"""FleetIndex: what is known of the caches of a fleet, kept by KV events, asked for prefixes."""

from __future__ import annotations

import itertools
import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from functools import lru_cache
from hashlib import shake_256
from typing import TYPE_CHECKING

from anaphora.cache.events import DEVICE, AllBlocksCleared, BlockRemoved, BlockStored
from anaphora.fleet.names import BlockNames
from anaphora.fleet.tree import TokenTree
from anaphora.identity import Adapter, Namespace

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from anaphora.cache.events import Event
    from anaphora.identity import Extras

log = logging.getLogger(__name__)

DEFAULT_MAX_BYTES = 1 << 30
NAME_BYTES = 120
"""What a block's name takes for each holder: the name, and its entries in a table and in a run."""
MAX_ORPHANS = 4096
"""Events of all replicas that may wait for their parent."""


@lru_cache(maxsize=4096)
def prefix_namespace(model: str, adapter: str | None = None, salt: str | None = None) -> Namespace:
    """Return the namespace under which a fleet's prefixes are kept: adapters by name alone, as events have them."""
    return Namespace(model=model, adapter=Adapter(adapter, name=adapter) if adapter else None, salt=salt or None)


@dataclass(slots=True)
class _Tier:
    """What one replica has in one medium. ratio: blocks of the index in a block of the engine."""

    holder: int
    names: BlockNames = field(default_factory=BlockNames)
    ratio: int = 1


@dataclass(slots=True, eq=False)
class _Orphan:
    """An event whose parent is unknown, and which of its blocks were removed while it waited."""

    replica: str
    event: BlockStored
    removed: list[bytes] = field(default_factory=list)


@dataclass(slots=True)
class _Replica:
    tiers: dict[str, _Tier] = field(default_factory=dict)
    generation: int = 0
    model: str = ""


@dataclass(slots=True)
class IndexCounters:
    """What came in and could not be used."""

    num_stored: int = 0
    num_removed: int = 0
    num_cleared: int = 0
    num_orphans: int = 0
    num_orphans_lost: int = 0
    num_unknown_removed: int = 0
    num_incompatible_block_size: int = 0
    num_other_group: int = 0


@dataclass(frozen=True, slots=True)
class Match:
    """How much of a prompt each replica has, in whole blocks.

    blocks: replica -> leading blocks that it has in any medium; replicas that were not asked about are left out.
    device_blocks: the same, in the engine's own memory alone.
    num_blocks: whole blocks of the prompt.
    """

    blocks: dict[str, int]
    device_blocks: dict[str, int]
    num_blocks: int
    block_size: int

    def tokens(self, replica: str) -> int:
        """Tokens of the prompt's start that the replica has."""
        return self.blocks.get(replica, 0) * self.block_size


class FleetIndex:
    """The prefixes that each replica of a fleet has.

    Replicas are names; what is known of one is dropped in O(1) (`forget`), by a new generation. Media are kept apart: a
    block is gone when the last medium lost it. Names of blocks are opaque and belong to their replica, so engines need
    not agree on a digest, and nobody's names can stand for somebody else's blocks. Not thread-safe.

    block_size: tokens of a block here. Engines whose blocks are a multiple of it are understood, others are refused.
    max_bytes: an upper bound of what the index takes, names included. The oldest tails go first.
    """

    def __init__(
        self, block_size: int = 16, *, max_bytes: int = DEFAULT_MAX_BYTES, max_orphans: int = MAX_ORPHANS
    ) -> None:
        if block_size < 1:
            raise ValueError(f"block_size: expected 1 or more tokens, got {block_size}")
        self.block_size = block_size
        self.tree = TokenTree(block_size, max_bytes)
        self.counters = IndexCounters()
        self._max_bytes = max_bytes
        self._max_orphans = max_orphans
        self._replicas: dict[str, _Replica] = {}
        self._by_holder: dict[int, str] = {}
        self._all = 0
        self._tiered: set[str] = set()
        """Replicas that have more media than their device's."""
        self._orphans: OrderedDict[_Orphan, None] = OrderedDict()
        self._waiting: dict[tuple[str, str, bytes], list[_Orphan]] = {}
        self._orphaned: dict[tuple[str, str, bytes], _Orphan] = {}
        self._told_block_sizes: set[tuple[str, int]] = set()
        self._num_names = 0
        self._generations = itertools.count(1)

    # Replicas

    @property
    def replicas(self) -> tuple[str, ...]:
        """Their names."""
        return tuple(self._replicas)

    def add(self, replica: str, model: str = "") -> None:
        """Begin to know a replica, of which nothing is known. `model`: what its prefixes are prefixes for."""
        if replica in self._replicas:
            self.remove_replica(replica)
        self._replicas[replica] = _Replica(generation=next(self._generations), model=model)
        self._open(replica, DEVICE)

    def remove_replica(self, replica: str) -> None:
        """Forget a replica and its name. Cost: O(1)."""
        self.forget(replica)
        for tier in self._replicas.pop(replica).tiers.values():
            self._close(tier)

    def forget(self, replica: str, medium: str | None = None) -> None:
        """Forget what a replica has, in one medium or in all. Cost: O(1), and the orphans that wait."""
        state = self._replicas[replica]
        media = list(state.tiers) if medium is None else [medium] if medium in state.tiers else []
        for name in media:
            self._close(state.tiers.pop(name))
        if state.tiers.keys() <= {DEVICE}:
            self._tiered.discard(replica)
        if DEVICE in media:
            self._open(replica, DEVICE)
            state.generation = next(self._generations)
        for orphan in [o for o in self._orphans if o.replica == replica and medium in {None, o.event.medium}]:
            self._take_orphan(orphan)

    def generation(self, replica: str) -> int:
        """A number that changes when a replica is forgotten, and that no other replica ever has."""
        return self._replicas[replica].generation

    def num_blocks_of(self, replica: str, medium: str = DEVICE) -> int:
        """How many names of blocks a replica has in a medium."""
        tier = self._replicas[replica].tiers.get(medium)
        return tier.names.count if tier else 0

    # Events

    def apply(self, replica: str, events: Iterable[Event]) -> None:
        """Follow a replica's events in order. What cannot be used is counted, and never fatal.

        Raises KeyError for a replica that was not added. Cost: 0.2 to 0.4 us a block.
        """
        state = self._replicas[replica]
        for event in events:
            if isinstance(event, BlockStored):
                self._store(replica, state, event)
            elif isinstance(event, BlockRemoved):
                self._remove(replica, state, event)
            elif isinstance(event, AllBlocksCleared):
                self.counters.num_cleared += 1
                self.forget(replica)
        if self._max_bytes < self.num_bytes:
            self._shrink_names()

    @property
    def num_bytes(self) -> int:
        """An estimate of the memory that the index takes."""
        return self.tree.num_bytes + self._num_names * NAME_BYTES

    def _store(self, replica: str, state: _Replica, event: BlockStored) -> None:
        names = event.digests
        if event.group:
            self.counters.num_other_group += 1
            return
        tier = state.tiers.get(event.medium) or self._open(replica, event.medium)
        if not event.tokens:
            self._store_by_name(state, tier, names)
            return
        ratio, rest = divmod(event.block_size, self.block_size)
        if rest or not ratio or len(event.tokens) != len(names) * event.block_size * 4:
            self._refuse_block_size(replica, event.block_size)
            return
        tier.ratio = ratio
        after: int | None = None
        if event.parent is not None:
            after = self._place(state, tier, event.parent)
            if after is None:
                self._wait(_Orphan(replica, event))
                return
            after += ratio - 1
        tokens = event.tokens
        if event.extras is not None:
            tokens = _content(tokens, event.extras, event.block_size * 4)
        namespace = event.namespace
        root = prefix_namespace(state.model, namespace.adapter and _adapter_name(namespace.adapter), namespace.salt)
        try:
            places = self.tree.store(tier.holder, root, after, tokens)
        except KeyError:  # the parent was dropped for want of memory
            self._wait(_Orphan(replica, event))
            return
        self.counters.num_stored += len(names)
        self._name(tier, names, places)
        if self._waiting:
            self._adopt(replica, event.medium, names)

    def _name(self, tier: _Tier, names: tuple[bytes, ...], places: list[tuple[int, int, bool]]) -> None:
        before = tier.names.count
        step = tier.ratio
        # A known name may be stored anew where its block was dropped; engine's blocks of several here may share some.
        may_be_new = step == 1 and not self.tree.num_dropped_blocks
        at = units = 0
        for place, count, is_new in places:
            end = -(-(units + count) // step)  # the names whose blocks begin before the end of these places
            if end > at:
                tier.names.add(names[at:end], place + at * step - units, step, is_new=is_new and may_be_new)
            units += count
            at = end
        self._num_names += tier.names.count - before

    def _store_by_name(self, state: _Replica, tier: _Tier, names: tuple[bytes, ...]) -> None:
        """A lower tier that names blocks without their tokens: they are where another tier of the replica has them."""
        for name in names:
            place = self._place(state, tier, name)
            if place is None:
                self.counters.num_orphans_lost += 1
                continue
            ratio = max(other.ratio for other in state.tiers.values())
            tier.ratio = ratio
            try:
                node, position = self.tree.resolve(place)
                self.tree.hold(node, position, min(ratio, node.size - position), tier.holder)
            except KeyError:
                continue
            self.counters.num_stored += 1
            self._name(tier, (name,), [(place, ratio, False)])

    def _place(self, state: _Replica, own: _Tier, name: bytes) -> int | None:
        """Where a replica's block lies, asked for in its own medium first."""
        for tier in (own, *state.tiers.values()) if len(state.tiers) > 1 else (own,):
            before = tier.names.count
            place = tier.names.place(name)
            self._num_names += tier.names.count - before  # names that turn out to be one
            if place is not None:
                return place
        return None

    def _remove(self, replica: str, state: _Replica, event: BlockRemoved) -> None:
        if event.group:
            self.counters.num_other_group += 1
            return
        tier = state.tiers.get(event.medium)
        spans: list[tuple[int, int]] = []
        unknown: Sequence[bytes] = event.digests
        if tier is not None:
            before = tier.names.count
            spans, unknown = tier.names.take(event.digests)
            self._num_names -= before - tier.names.count
            self.counters.num_removed += before - tier.names.count
        for name in unknown:
            if orphan := self._orphaned.get((replica, event.medium, name)):
                orphan.removed.append(name)
            else:
                self.counters.num_unknown_removed += 1
        if tier is None or not spans:
            return
        spans.sort()
        first, last = spans[0][0], sum(spans[0])
        for place, count in spans[1:]:
            if place != last:
                self.tree.remove(tier.holder, first, last - first)
                first = place
            last = place + count
        self.tree.remove(tier.holder, first, last - first)

    def _refuse_block_size(self, replica: str, block_size: int) -> None:
        self.counters.num_incompatible_block_size += 1
        if (replica, block_size) not in self._told_block_sizes and len(self._told_block_sizes) < 1024:
            self._told_block_sizes.add((replica, block_size))
            log.warning(
                "%s: events with blocks of %d tokens cannot be used; expected a multiple of %d",
                replica, block_size, self.block_size,
            )  # fmt: skip

    # Orphans

    def _wait(self, orphan: _Orphan) -> None:
        event = orphan.event
        assert event.parent is not None
        self.counters.num_orphans += 1
        self._orphans[orphan] = None
        self._waiting.setdefault((orphan.replica, event.medium, event.parent), []).append(orphan)
        for name in event.digests:
            self._orphaned[orphan.replica, event.medium, name] = orphan
        while len(self._orphans) > self._max_orphans:
            self._take_orphan(next(iter(self._orphans)))
            self.counters.num_orphans_lost += 1

    def _take_orphan(self, orphan: _Orphan) -> None:
        event = orphan.event
        assert event.parent is not None
        del self._orphans[orphan]
        key = (orphan.replica, event.medium, event.parent)
        brothers = self._waiting[key]
        brothers.remove(orphan)
        if not brothers:
            del self._waiting[key]
        for name in event.digests:
            if self._orphaned.get((orphan.replica, event.medium, name)) is orphan:
                del self._orphaned[orphan.replica, event.medium, name]

    def _adopt(self, replica: str, medium: str, names: Sequence[bytes]) -> None:
        """Store what waited for these blocks, and then what waited for that."""
        ready = [o for name in names for o in self._waiting.get((replica, medium, name), ())]
        for orphan in ready:
            self._take_orphan(orphan)
        for orphan in ready:
            self.apply(replica, [orphan.event])
            if orphan.removed:
                self.apply(replica, [BlockRemoved(tuple(orphan.removed), medium)])

    # Asking

    def match(
        self,
        tokens: bytes,
        namespace: Namespace,
        *,
        extras: Sequence[Extras | None] | None = None,
        replicas: Iterable[str] | None = None,
    ) -> Match:
        """Return how much of a prompt each replica has.

        tokens: packed int32 ids. namespace: see `prefix_namespace`; its model chooses among the replicas by itself.
        extras: per block of this index what it holds besides tokens. replicas: those to ask about; None: all.
        """
        width = self.tree.width
        content = _content(tokens, extras, width) if extras else tokens
        asked = self._replicas if replicas is None else [name for name in replicas if name in self._replicas]
        mask = self._all
        if replicas is not None:
            mask = 0
            for name in asked:
                mask |= 1 << self._replicas[name].tiers[DEVICE].holder
        groups = self.tree.match(namespace, content, mask)
        # Most replicas are in one group: they are entered together, and the others over them.
        largest = max(groups, key=lambda group: group[1].bit_count(), default=(0, 0))
        device = dict.fromkeys(asked, largest[0])
        by_holder = self._by_holder
        for group in groups:
            if group is largest:
                continue
            blocks, left = group
            while left:
                bit = left & -left
                device[by_holder[bit.bit_length() - 1]] = blocks
                left ^= bit
        anywhere = device
        for name in self._tiered.intersection(asked) if self._tiered else ():
            tiers = self._replicas[name].tiers
            if any(tier.names.count for medium, tier in tiers.items() if medium != DEVICE):
                if anywhere is device:
                    anywhere = dict(device)
                holders_of = tuple(tier.holder for tier in tiers.values())
                anywhere[name] = self.tree.match_together(namespace, content, holders_of)
        return Match(anywhere, device, len(tokens) // width, self.block_size)

    def sweep(self, max_nodes: int = 4096) -> bool:
        """Do some of the work that `forget` left. Return whether there is more."""
        return self.tree.sweep(max_nodes)

    def check(self) -> None:
        """Assert every invariant. Cost: all of the index."""
        self.tree.check()
        num_names = 0
        for replica, state in self._replicas.items():
            for tier in state.tiers.values():
                num_names += tier.names.count
                assert self._by_holder[tier.holder] == replica
                tier.names.check()
                for _, place in tier.names.items():
                    try:
                        node, position = self.tree.resolve(place)
                    except KeyError:
                        continue  # dropped for want of memory
                    if not node.full >> tier.holder & 1:
                        assert node.partial[tier.holder] >> position & 1
        assert num_names == self._num_names
        assert sum(map(len, self._waiting.values())) == len(self._orphans) <= self._max_orphans

    # Inside

    def _open(self, replica: str, medium: str) -> _Tier:
        tier = self._replicas[replica].tiers[medium] = _Tier(self.tree.add_holder())
        self._by_holder[tier.holder] = replica
        if medium == DEVICE:
            self._all |= 1 << tier.holder
        else:
            self._tiered.add(replica)
        return tier

    def _close(self, tier: _Tier) -> None:
        del self._by_holder[tier.holder]
        self._all &= ~(1 << tier.holder)
        self._num_names -= tier.names.count
        self.tree.retire(tier.holder)

    def _shrink_names(self) -> None:
        """Names of blocks that were dropped go; then, if that is not enough, more blocks."""
        limit = self.tree.max_bytes
        for share in (1.0, 0.6, 0.3, 0.1):
            self.tree.max_bytes = int(limit * share)
            self.tree.shrink()
            for state in self._replicas.values():
                for tier in state.tiers.values():
                    before = tier.names.count
                    tier.names.lose(self.tree.is_place)
                    self._num_names -= before - tier.names.count
            if self.num_bytes <= self._max_bytes - self._max_bytes // 8:
                break
        self.tree.max_bytes = limit


def _adapter_name(adapter: Adapter) -> str:
    return adapter.name or adapter.digest


def _content(tokens: bytes, extras: Sequence[Extras | None] | None, width: int) -> bytes:
    """Return what a block is compared by: its tokens, or a digest as wide as those where it holds more than tokens."""
    if not extras or not any(extras):
        return tokens
    blocks = [tokens[at : at + width] for at in range(0, len(tokens), width)]
    for i, entry in enumerate(extras[: len(blocks)]):
        if entry is not None and entry.content is not None:
            media = [(item.digest, item.offset) for item in entry.media]
            rows = [row.digest for row in entry.embeds or ()]
            blocks[i] = shake_256(b"media" + blocks[i] + repr((media, rows)).encode()).digest(width)
    return b"".join(blocks)

"""Search for a history of calls that breaks the contract, with the whole of the books checked after every call."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from anaphora import KVCacheManager, Namespace, Sequence
from anaphora.cache.events import DEVICE, HOST, Mirror
from anaphora.cache.eviction import EvictionPolicy, Tlru
from anaphora.cache.retention import Retention
from anaphora.cache.transfers import Transfer
from anaphora.identity import BlockDigests
from anaphora.tokens import TOKEN_BYTES
from tests.cache.paged_memory import PagedMemory, fingerprint

NAMESPACES = [Namespace(), Namespace(salt="x")]
# Few letters and few lengths, so that prompts share prefixes, diverge inside blocks, and repeat.
PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=14)


class CollidingDigests(BlockDigests):
    """One name for every block."""

    def chain(self, parent, tokens, block_size, extras=None):
        return [b"the same for all"] * (len(tokens) // TOKEN_BYTES // block_size)


class CacheMachine(RuleBasedStateMachine):
    kind = "radix"
    num_blocks = 10
    block_size = 2
    digests: BlockDigests | None = None
    windows: tuple[int | None, ...] = (None,)
    window_retention: int | None = None
    match_unit: int | None = None
    eviction: str | EvictionPolicy = "lru"
    host_blocks = 0

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0
        self.manager = KVCacheManager(
            self.num_blocks,
            self.block_size,
            index=self.kind,
            digests=self.digests,
            eviction=self.eviction,
            windows=self.windows,
            window_retention=self.window_retention,
            match_unit=self.match_unit,
            host_blocks=self.host_blocks,
            clock=lambda: self.now_s,
            events=True,
            measure_residency=True,
        )
        self.mirror = Mirror()
        self.memory = PagedMemory(self.manager)
        self.live: list[Sequence] = []
        self.tables: dict[Sequence, list[list[int]]] = {}
        self.copied: dict[int, int] = {}
        self.retained: list[Retention] = []
        self.forgotten = False
        self.published: set[tuple[Namespace, bytes]] = set()
        """Every prefix of whole blocks that has ever been committed by someone who writes to the cache."""

    @rule(prompt=PROMPTS, namespace=st.sampled_from(NAMESPACES), read=st.booleans(), write=st.booleans())
    @precondition(lambda self: len(self.live) < 5)
    def start(self, prompt: list[int], namespace: Namespace, read: bool, write: bool) -> None:
        before = fingerprint(self.manager)
        sequence = self.manager.start(prompt, namespace, read_cache=read or len(prompt) % 3 > 0, write_cache=write)
        assert sequence.num_cached_tokens <= sequence.num_tokens - 1
        assert fingerprint(self.manager) == before
        self.live.append(sequence)

    @rule(data=st.data(), num_tokens=st.integers(0, 9))
    @precondition(lambda self: self.live)
    def allocate(self, data: st.DataObject, num_tokens: int) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        was_running = sequence.state == "running"
        expected_hit = sequence.num_computed_tokens if was_running else self.lookup(sequence)
        before = fingerprint(self.manager)
        num_needed = -(-(expected_hit + num_tokens) // self.block_size) - len(sequence.block_table)
        if self.manager.allocate(sequence, num_tokens):
            if not self.host_blocks:  # transfers of a host tier wait for the next step that computes
                self.transfer()
            self.note_copies(self.manager._transfers.pending())
            assert sequence.num_computed_tokens == expected_hit
            if not was_running:
                self.memory.foresee().verify(sequence)
                self.tables[sequence] = []
        else:
            assert fingerprint(self.manager) == before
            assert num_needed > 0 or sequence in self.manager._copies.forked

    def transfer(self) -> None:
        transfers = self.manager.take_transfers()
        self.memory.transfer(transfers)
        self.note_copies(transfers)

    def note_copies(self, transfers: list[Transfer]) -> None:
        self.copied |= {target: source for kind, pairs in transfers if kind == "copy" for source, target in pairs}

    def lookup(self, sequence: Sequence) -> int:
        if not sequence.read_cache:
            return 0
        return self.manager.match(bytes(sequence.tokens), sequence.namespace)

    @rule(data=st.data(), share=st.integers(1, 4))
    @precondition(lambda self: self.running())
    def compute(self, data: st.DataObject, share: int) -> None:
        sequence = data.draw(st.sampled_from(self.running()))
        slots = len(sequence.block_table) * self.block_size
        possible = min(sequence.num_tokens, slots) - sequence.num_computed_tokens
        if possible and not self.manager.allocate(sequence, 1):
            return  # its last block is shared, and there is none to copy it to
        self.transfer()
        num_tokens = possible * share // 4
        self.memory.compute(sequence, num_tokens)
        self.note_published(sequence)

    def note_published(self, sequence: Sequence) -> None:
        if sequence.publishes:
            for end in range(self.block_size, sequence.num_computed_tokens + 1, self.block_size):
                self.published.add((sequence.namespace, bytes(sequence.tokens[: end * TOKEN_BYTES])))

    @rule(data=st.data(), ids=st.lists(st.integers(0, 1), max_size=3))
    @precondition(lambda self: self.live)
    def append(self, data: st.DataObject, ids: list[int]) -> None:
        self.manager.append(data.draw(st.sampled_from(self.live)), ids)

    @rule(data=st.data(), abort=st.booleans())
    @precondition(lambda self: self.live)
    def end(self, data: st.DataObject, abort: bool) -> None:
        sequence = data.draw(st.sampled_from(self.live))
        self.live.remove(sequence)
        self.tables.pop(sequence, None)
        (self.manager.abort if abort else self.manager.finish)(sequence)

    @rule(data=st.data())
    @precondition(lambda self: self.running())
    def preempt(self, data: st.DataObject) -> None:
        sequence = data.draw(st.sampled_from(self.running()))
        self.manager.preempt(sequence)
        del self.tables[sequence]

    @rule(data=st.data())
    @precondition(lambda self: self.running() and len(self.live) < 5)
    def fork(self, data: st.DataObject) -> None:
        parent = data.draw(st.sampled_from(self.running()))
        num_free = self.manager.num_free_blocks
        child = self.manager.fork(parent)
        assert self.manager.num_free_blocks == num_free
        self.live.append(child)
        self.tables[child] = [list(table) for table in child.block_tables]

    @rule(data=st.data(), blocks=st.sets(st.integers(1, 4), min_size=1, max_size=2))
    def evict_blocks(self, data: st.DataObject, blocks: set[int]) -> None:
        before = {s: self.manager.match(bytes(s.tokens), s.namespace) for s in self.live}
        self.manager.evict_blocks(blocks)
        self.forgotten = True
        for sequence, found in before.items():
            assert self.manager.match(bytes(sequence.tokens), sequence.namespace) <= found

    @rule()
    def invalidate(self) -> None:
        self.manager.invalidate()
        self.published.clear()
        self.forgotten = True
        assert self.manager.num_cached_blocks == 0

    @rule(prompt=PROMPTS, namespace=st.sampled_from(NAMESPACES), priority=st.integers(0, 1))
    def retain(self, prompt: list[int], namespace: Namespace, priority: int) -> None:
        found = self.manager.match([*prompt, 7], namespace)
        self.retained.append(self.manager.retain(prompt, namespace, priority=priority))
        assert self.retained[-1].num_tokens <= found
        assert self.manager.num_retained_blocks <= self.num_blocks // 2

    @rule(data=st.data())
    @precondition(lambda self: self.retained)
    def release(self, data: st.DataObject) -> None:
        self.retained.pop(data.draw(st.integers(0, len(self.retained) - 1))).release()

    @rule()
    @precondition(lambda self: not self.running())
    def reset(self) -> None:
        assert self.manager.reset()
        self.published.clear()
        assert self.manager.num_free_blocks == self.num_blocks

    @rule(prompt=PROMPTS, namespace=st.sampled_from(NAMESPACES))
    def match(self, prompt: list[int], namespace: Namespace) -> None:
        before = fingerprint(self.manager)
        found = self.manager.match(prompt, namespace)
        assert fingerprint(self.manager) == before
        packed = self.manager.start(prompt).tokens
        if self.match_unit is not None:
            return
        possible = 0
        while (
            possible + self.block_size < len(prompt)
            and (namespace, bytes(packed[: (possible + self.block_size) * TOKEN_BYTES])) in self.published
        ):
            possible += self.block_size
        assert found <= possible
        stats = self.manager.stats()
        num_lost = stats.host_evicted_blocks if self.host_blocks else stats.evicted_blocks
        if num_lost == 0 and not self.forgotten and self.window_retention is None:
            assert found == possible

    def running(self) -> list[Sequence]:
        return [sequence for sequence in self.live if sequence.state == "running"]

    @invariant()
    def the_books_are_in_order(self) -> None:
        self.manager.check()
        self.mirror.apply(self.manager.take_events())
        stored = Counter((digest, group, DEVICE) for digest, group in self.manager._index.stored())
        if self.manager._host is not None:
            stored.update((digest, 0, HOST) for digest in self.manager._host.stored())
        assert self.mirror.blocks == stored
        ahead = self.memory.foresee()
        ahead.verify_host()
        running = self.running()
        held = {block for sequence in running for table in sequence.block_tables for block in table if block}
        assert len(held) <= self.num_blocks - self.manager.num_free_blocks
        for sequence in running:
            ahead.verify(sequence)
            seen = self.tables[sequence]
            self.tables[sequence] = [list(table) for table in sequence.block_tables]
            if not seen:
                continue
            # Only a shared block that is not full is ever replaced, by a copy; windows leave null blocks behind.
            for before, after in zip(seen, self.tables[sequence], strict=True):
                for old, new in zip(before, after, strict=False):
                    assert old == new or not new or self.copied.get(new) == old

    @invariant()
    def what_a_running_sequence_has_published_is_found(self) -> None:
        for sequence in self.running():
            if sequence.publishes and not (self.forgotten and self.kind == "hash") and self.windows == (None,):
                num_whole = sequence.num_computed_tokens // self.block_size * self.block_size
                prefix = bytes(sequence.tokens[: num_whole * TOKEN_BYTES]) + b"\x07\0\0\0"
                found = self.manager.match(prefix, sequence.namespace)
                assert found == num_whole


class HashMachine(CacheMachine):
    kind = "hash"


class ForgedHashMachine(HashMachine):
    digests = CollidingDigests()


class TokenGranularMachine(CacheMachine):
    block_size = 1


class TinyPoolMachine(CacheMachine):
    num_blocks = 4


class FineMachine(CacheMachine):
    block_size = 4
    match_unit = 2


class FineHashMachine(FineMachine):
    kind = "hash"


class LfuMachine(TinyPoolMachine):
    eviction = "lfu"


class FifoMachine(TinyPoolMachine):
    eviction = "fifo"


class TlruMachine(TinyPoolMachine):
    eviction = Tlru(threshold=6, next_prompt=2)


class AdaptiveMachine(CacheMachine):
    eviction = "adaptive"

    @rule(seconds=st.sampled_from([0.3, 1.0, 100.0, 255.99999999999994]))
    def wait(self, seconds: float) -> None:
        self.now_s += seconds


class TinyAdaptiveMachine(AdaptiveMachine):
    num_blocks = 4


class QuotaMachine(CacheMachine):
    def __init__(self) -> None:
        super().__init__()
        self.manager.set_quota(NAMESPACES[1], 3)

    @rule(quota=st.one_of(st.none(), st.integers(0, 4)))
    def set_quota(self, quota: int | None) -> None:
        self.manager.set_quota(NAMESPACES[1], quota)


class AdaptiveQuotaMachine(QuotaMachine, AdaptiveMachine):
    pass


class HashQuotaMachine(QuotaMachine, HashMachine):
    pass


class WindowMachine(HashMachine):
    windows = (4,)


class HybridMachine(HashMachine):
    num_blocks = 16
    windows = (None, 3, 6)


class HybridQuotaMachine(QuotaMachine, HybridMachine):
    pass


class SparseHybridMachine(HybridMachine):
    window_retention = 0


class TinyHybridMachine(HybridMachine):
    num_blocks = 9
    windows = (None, 3)

    @rule(prompt=PROMPTS)
    def serve(self, prompt: list[int]) -> None:
        sequence = self.manager.start(prompt)
        if self.manager.allocate(sequence, sequence.num_tokens - sequence.num_cached_tokens):
            self.memory.compute(sequence, sequence.num_tokens - sequence.num_computed_tokens)
            self.note_published(sequence)
        self.manager.finish(sequence)


class TinyHashPoolMachine(HashMachine):
    num_blocks = 4


class HostMachine(TinyPoolMachine):
    host_blocks = 24

    @rule()
    def fail(self) -> None:
        """Transfers fail: whoever lacks what they were to bring ends, and nobody finds it again."""
        transfers = self.manager.take_transfers()
        lacking = self.manager.fail_transfers(transfers)
        self.forgotten |= bool(transfers)
        for kind, pairs in transfers:
            for _, target in pairs:
                (self.memory.host if kind == "save" else self.memory.pages)[target] = (NAMESPACES[0], b"lost")
        for sequence in self.running():
            if not lacking.isdisjoint(sequence.block_table):
                self.live.remove(sequence)
                self.manager.abort(sequence)


class SmallHostMachine(HostMachine):
    num_blocks = 6
    host_blocks = 3


class TinyHostMachine(HostMachine):
    host_blocks = 1


class HashHostMachine(HostMachine):
    kind = "hash"


class ForgedHashHostMachine(SmallHostMachine):
    kind = "hash"
    digests = CollidingDigests()


class FineHostMachine(SmallHostMachine):
    block_size = 4
    match_unit = 2


class AdaptiveQuotaHostMachine(SmallHostMachine, AdaptiveQuotaMachine):
    pass


class QuotaHashHostMachine(SmallHostMachine, QuotaMachine):
    kind = "hash"


SETTINGS = settings(max_examples=200, stateful_step_count=50, deadline=None)
MACHINES = (
    CacheMachine,
    HashMachine,
    ForgedHashMachine,
    TokenGranularMachine,
    TinyPoolMachine,
    TinyHashPoolMachine,
    LfuMachine,
    FifoMachine,
    TlruMachine,
    AdaptiveMachine,
    TinyAdaptiveMachine,
    AdaptiveQuotaMachine,
    QuotaMachine,
    HashQuotaMachine,
    HybridQuotaMachine,
    FineMachine,
    FineHashMachine,
    WindowMachine,
    HybridMachine,
    SparseHybridMachine,
    TinyHybridMachine,
    HostMachine,
    SmallHostMachine,
    TinyHostMachine,
    HashHostMachine,
    ForgedHashHostMachine,
    FineHostMachine,
    AdaptiveQuotaHostMachine,
    QuotaHashHostMachine,
)


@pytest.mark.parametrize("machine", MACHINES, ids=lambda machine: machine.__name__)
def test_no_history_of_calls_breaks_the_contract(machine: type[CacheMachine]) -> None:
    run_state_machine_as_test(machine, settings=SETTINGS)

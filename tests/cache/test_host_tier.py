"""What the device evicts goes to host memory, is found there, and comes back with the right content."""

from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from anaphora import KVCacheManager, MediaSpan, Namespace
from anaphora.cache.events import HOST, BlockRemoved, BlockStored
from anaphora.cache.transfers import Transfer, Transfers
from tests.cache.conftest import BLOCK_SIZE
from tests.cache.paged_memory import PagedMemory, fingerprint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from anaphora import Sequence as CachedSequence

A = range(1, 14)  # three whole blocks and the token that is always computed
B = range(101, 114)


class Device:
    """A manager with the pages that an executor would have."""

    def __init__(self, manager: KVCacheManager) -> None:
        self.manager = manager
        self.memory = PagedMemory(manager)

    def admit(self, tokens: Iterable[int], namespace: Namespace | None = None, **options: object) -> CachedSequence:
        sequence = self.manager.start(list(tokens), namespace or Namespace(), **options)  # type: ignore[arg-type]
        assert self.manager.allocate(sequence, sequence.num_tokens - sequence.num_cached_tokens)
        self.manager.check()
        return sequence

    def compute(self, sequence: CachedSequence) -> None:
        transfers = self.manager.take_transfers()
        self.memory.transfer(transfers)
        self.memory.compute(sequence, sequence.num_tokens - sequence.num_computed_tokens)
        self.memory.verify_host()
        self.manager.check()

    def serve(self, tokens: Iterable[int], namespace: Namespace | None = None, **options: object) -> int:
        """Admit, transfer, compute, finish; return how many tokens were cached."""
        sequence = self.admit(tokens, namespace, **options)
        self.compute(sequence)
        self.manager.finish(sequence)
        return sequence.num_cached_tokens

    def hits(self) -> dict[str, int]:
        return self.manager.stats().hits_by_tier


@pytest.fixture
def device(make: Callable[..., KVCacheManager]) -> Callable[..., Device]:
    def make_device(num_blocks: int = 4, host_blocks: int = 8, **options: object) -> Device:
        return Device(make(num_blocks, host_blocks=host_blocks, **options))

    return make_device


def kinds(transfers: Sequence[Transfer]) -> list[tuple[str, int]]:
    return [(kind, len(pairs)) for kind, pairs in transfers]


def test_what_was_evicted_is_found_in_host_memory(device: Callable[..., Device]) -> None:
    served = device()
    assert served.serve(A) == 0
    assert served.serve(B) == 0
    assert served.manager.match(A) == 12
    assert served.serve(A) == 12
    assert served.hits() == {"device": 0, "host": 12}
    stats = served.manager.stats()
    assert (stats.hits, stats.loaded_blocks, stats.host_evicted_blocks) == (12, 3, 0)


def test_a_hit_goes_on_in_host_memory_where_the_device_ends(device: Callable[..., Device]) -> None:
    served = device()
    served.serve(A)
    served.serve(B[:5])  # takes the last whole block of A and the one that is not full
    sequence = served.admit(A)
    assert served.hits() == {"device": 8, "host": 4}
    served.compute(sequence)


def test_what_was_loaded_is_found_on_the_device(device: Callable[..., Device]) -> None:
    served = device()
    served.serve(A)
    served.serve(B)
    served.serve(A)
    assert served.serve(A) == 12
    assert served.hits() == {"device": 12, "host": 12}


def test_two_who_ask_in_one_step_load_once(device: Callable[..., Device]) -> None:
    served = device(num_blocks=6)
    served.serve(A)
    served.serve(range(201, 225))
    first, second = served.admit(A), served.admit([*A[:12], 77])
    assert served.hits() == {"device": 12, "host": 12}
    transfers = served.manager.take_transfers()
    assert [(kind, num) for kind, num in kinds(transfers) if kind == "load"] == [("load", 3)]
    served.memory.transfer(transfers)
    for sequence in (first, second):
        served.memory.compute(sequence, 1)


def test_what_a_load_replaces_is_saved_before_it(device: Callable[..., Device]) -> None:
    served = device()
    served.serve(A)
    served.serve(B)
    served.admit(A)
    assert kinds(served.manager.take_transfers()) == [("save", 3), ("load", 3)]


def test_what_is_in_host_memory_already_is_not_saved_again(device: Callable[..., Device]) -> None:
    served = device(host_blocks=12)
    for tokens in (A, B, A, B):
        served.serve(tokens)
    assert served.manager.stats().saved_blocks == 6
    served.admit(A)
    assert kinds(served.manager.take_transfers()) == [("load", 3)]


def test_a_load_whose_sequence_is_gone_is_made_all_the_same(device: Callable[..., Device]) -> None:
    served = device()
    served.serve(A)
    served.serve(B)
    served.manager.abort(served.admit(A))
    assert served.serve([*A, 99]) == 12
    assert served.hits() == {"device": 12, "host": 12}


def test_a_block_evicted_before_its_load_was_made_keeps_its_content(device: Callable[..., Device]) -> None:
    served = device()
    served.serve(A)
    served.serve(B)
    served.manager.abort(served.admit(A))
    served.manager.abort(served.admit(B))  # takes the blocks that A is still to be loaded into
    assert served.serve(A) == 12


def test_a_preempted_sequence_finds_its_own_blocks_in_host_memory(device: Callable[..., Device]) -> None:
    served = device()
    sequence = served.admit(A)
    served.compute(sequence)
    served.manager.preempt(sequence)
    served.serve(B)
    assert served.manager.allocate(sequence, 1)
    served.compute(sequence)
    stats = served.manager.stats()
    assert (stats.preempted_hits, stats.preempted_host_hits, stats.host_hits) == (12, 12, 0)


def test_a_fork_shares_what_was_loaded(device: Callable[..., Device]) -> None:
    served = device(num_blocks=6)
    served.serve(A)
    served.serve(range(201, 225))
    parent = served.admit(A)
    child = served.manager.fork(parent)
    served.compute(parent)
    assert served.manager.allocate(child, 1)
    served.compute(child)


def test_a_refused_allocate_changes_nothing_in_host_memory(device: Callable[..., Device]) -> None:
    served = device()
    served.serve(A)
    held = served.admit(B)
    served.compute(held)
    sequence = served.manager.start(A)
    before = fingerprint(served.manager)
    assert not served.manager.allocate(sequence, 1)
    assert fingerprint(served.manager) == before
    served.manager.finish(held)
    assert served.manager.allocate(sequence, 1)
    assert served.hits() == {"device": 0, "host": 12}


def test_only_an_equal_namespace_finds_it(device: Callable[..., Device]) -> None:
    served = device(host_blocks=32)
    served.serve(A, Namespace(salt="a"))
    served.serve(B)
    assert served.manager.match(A) == served.manager.match(A, Namespace(salt="b")) == 0
    assert served.serve(A, Namespace(salt="a")) == 12


def test_only_equal_media_find_it(device: Callable[..., Device]) -> None:
    served = device(host_blocks=32)
    tokens, aa, bb = [1, 2, 9, 9, 9, 9, 9, 9, 3, 4, 5, 6, 7], MediaSpan(2, 6, "aa"), MediaSpan(2, 6, "bb")
    served.serve(tokens, media=[aa])
    served.serve(B)
    assert served.manager.match(tokens) == served.manager.match(tokens, media=[bb]) == 0
    assert served.serve(tokens, media=[aa]) == 12


def test_who_does_not_read_the_cache_loads_nothing(device: Callable[..., Device]) -> None:
    served = device()
    served.serve(A)
    served.serve(B)
    assert served.serve(A, read_cache=False) == 0


def test_a_drafter_has_the_last_block_of_a_host_hit_computed_again(device: Callable[..., Device]) -> None:
    served = device()
    served.serve(A)
    served.serve(B)
    assert served.serve(A, recompute_last_block=True) == 8


def test_the_oldest_goes_first_and_its_tail_before_its_head(device: Callable[..., Device]) -> None:
    served = device(host_blocks=4)
    served.serve(A)
    served.serve(B)
    served.serve(range(201, 214))  # B comes in: of A's three blocks one is left
    assert served.manager.match(A) == 4
    assert served.manager.match(B) == 12
    assert served.manager.stats().host_evicted_blocks == 2


def test_what_the_device_has_too_goes_before_what_it_has_not(device: Callable[..., Device]) -> None:
    served = device(num_blocks=7, host_blocks=9)
    prompts = [range(first, first + 13) for first in (100, 200, 300, 400, 500)]
    for prompt in (*prompts[:4], prompts[0], prompts[4]):  # the first has been brought back when room runs short
        served.serve(prompt)
    assert [served.manager.match(prompt) for prompt in prompts] == [12] * 5


def test_what_is_being_loaded_gives_no_room_to_what_the_load_evicts(device: Callable[..., Device]) -> None:
    served = device(host_blocks=6)
    for tokens in (A, B, range(201, 214)):
        served.serve(tokens)
    assert served.serve(A) == 12  # the oldest in host memory, which is full
    assert served.manager.match(B) == 0
    assert served.manager.match(range(201, 214)) == 12


def test_of_more_than_there_is_room_for_the_head_stays(device: Callable[..., Device]) -> None:
    served = device(num_blocks=6, host_blocks=2)
    served.serve(range(1, 22))
    served.serve(range(201, 222))
    assert served.manager.match(range(1, 22)) == 8
    served.manager.check()


def test_reset_forgets_host_memory_too(device: Callable[..., Device]) -> None:
    served = device()
    served.serve(A)
    served.serve(B)
    assert served.manager.reset()
    assert served.manager.match(A) == served.manager.match(B) == 0
    assert served.manager.num_cached_host_blocks == 0
    assert served.manager.take_transfers() == []
    served.manager.check()


def test_new_weights_find_nothing_in_host_memory(device: Callable[..., Device]) -> None:
    served = device()
    served.serve(A)
    served.serve(B)
    served.manager.invalidate()
    assert served.manager.match(A) == 0
    served.manager.check()


def test_what_is_forgotten_on_purpose_is_forgotten_with_all_that_extends_it(device: Callable[..., Device]) -> None:
    served = device()
    sequence = served.admit(A)
    served.compute(sequence)
    head = sequence.block_table[0]
    served.manager.finish(sequence)
    served.serve(B[:5])  # the tail of A leaves for host memory
    assert served.manager.match(A) == 12
    served.manager.evict_blocks([head])
    assert served.manager.match(A) == 0
    served.manager.check()


def test_transfers_that_fail_bring_nothing_that_is_found(device: Callable[..., Device]) -> None:
    served = device()
    served.serve(A)
    served.serve(B)
    sequence = served.admit(A)
    lacking = served.manager.fail_transfers(served.manager.take_transfers())
    assert lacking == set(sequence.block_table[:3])
    served.manager.abort(sequence)
    assert served.manager.match(A) == served.manager.match(B) == 0
    served.manager.check()
    assert served.serve(A) == 0


def test_events_say_in_which_medium(device: Callable[..., Device]) -> None:
    served = device(host_blocks=3, events=True)
    namespace = Namespace(salt="a")
    served.serve(A, namespace)
    (computed,) = served.manager.take_events()
    served.serve(B)
    first, *_ = stored = [e for e in served.manager.take_events() if isinstance(e, BlockStored) and e.medium == HOST]
    assert isinstance(computed, BlockStored)
    assert [name for event in stored for name in event.digests] == list(computed.digests)
    assert (first.parent, first.namespace, first.tokens) == (None, namespace, computed.tokens[: len(first.tokens)])
    served.serve(range(201, 214))
    removed = [e for e in served.manager.take_events() if isinstance(e, BlockRemoved) and e.medium == HOST]
    assert [name for event in removed for name in event.digests] == list(reversed(computed.digests))


def test_explain_tells_what_host_memory_serves_and_where_that_ends(device: Callable[..., Device]) -> None:
    served = device(host_blocks=5)
    served.serve(A)
    served.serve(B)
    explained = served.manager.explain(A)
    assert (explained.reason, explained.num_cached_tokens, explained.num_host_tokens) == ("complete", 12, 12)
    explained = served.manager.explain([*A[:10], 88, 89, 90])
    assert (explained.reason, explained.position, explained.num_host_tokens) == ("diverged", 10, 8)
    assert (explained.prompt_token, explained.cached_token) == (88, 11)
    served.serve(range(201, 214))
    explained = served.manager.explain(A)
    assert (explained.reason, explained.num_host_tokens) == ("evicted", 8)


def test_a_part_of_a_block_is_matched_on_the_device_alone(device: Callable[..., Device]) -> None:
    served = device(match_unit=2)
    served.serve(A)
    assert served.serve([*A[:6], 77, 78, 79]) == 6
    served.serve(range(201, 214))
    assert served.serve([*A[:6], 87, 88, 89]) == 4


@pytest.mark.parametrize("host_blocks", [-1, 1.5, True, 2**31, None])
def test_a_number_of_host_blocks_that_is_none_is_refused(host_blocks: object) -> None:
    with pytest.raises(ValueError, match="host_blocks: expected an integer"):
        KVCacheManager(4, host_blocks=host_blocks)  # type: ignore[arg-type]


def test_windows_have_no_host_tier() -> None:
    with pytest.raises(ValueError, match="host_blocks: several layer groups, or windows"):
        KVCacheManager(4, windows=(None, 32), host_blocks=4)


def test_copies_alone_cannot_be_taken_where_their_order_among_loads_matters() -> None:
    with pytest.raises(ValueError, match="take_transfers"):
        KVCacheManager(4, BLOCK_SIZE, host_blocks=4).take_copies()


def test_without_a_host_tier_transfers_are_copies() -> None:
    manager = KVCacheManager(4, BLOCK_SIZE)
    parent = manager.start([1, 2])
    manager.allocate(parent, 2)
    manager.commit(parent, 2)
    child = manager.fork(parent)
    manager.append(child, [3])
    manager.allocate(child, 1)
    assert manager.take_transfers() == [Transfer("copy", [(parent.block_table[0], child.block_table[0])])]


def test_a_save_that_nobody_reads_before_the_next_is_left_out() -> None:
    transfers = Transfers()
    for kind, source, target in (("save", 1, 1), ("save", 2, 2), ("copy", 5, 1), ("save", 3, 1)):
        transfers.add(kind, source, target)  # type: ignore[arg-type]
    needed = [Transfer("save", [(2, 2)]), Transfer("copy", [(5, 1)]), Transfer("save", [(3, 1)])]
    assert transfers.pending() == needed
    assert transfers.take() == needed
    assert transfers.take() == []


def test_a_save_that_is_loaded_before_the_next_is_made() -> None:
    transfers = Transfers()
    for kind, source, target in (("save", 1, 1), ("save", 2, 1), ("load", 1, 4), ("save", 3, 1)):
        transfers.add(kind, source, target)  # type: ignore[arg-type]
    assert transfers.take() == [
        Transfer("save", [(2, 1)]),
        Transfer("load", [(1, 4)]),
        Transfer("save", [(3, 1)]),
    ]

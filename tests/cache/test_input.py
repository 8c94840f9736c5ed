"""Bad input is refused by name, with nothing changed.

The contract of KVCacheManager, in the smallest pool that shows it; block size 4.
"""

from __future__ import annotations

from array import array

import pytest

from anaphora import Adapter, KVCacheManager, Namespace
from anaphora.identity import PromptEmbeds, VllmDigests
from tests.cache.conftest import admit, run, tokens
from tests.cache.paged_memory import fingerprint


class TestInput:
    @pytest.mark.parametrize(
        ("arguments", "field"),
        [({"num_blocks": 0}, "num_blocks"), ({"block_size": 0}, "block_size"), ({"index": "tree"}, "index")],
    )
    def test_a_wrong_argument_is_named(self, arguments, field):
        with pytest.raises(ValueError, match=field):
            KVCacheManager(**{"num_blocks": 4, **arguments})

    def test_an_empty_prompt_is_refused(self, make):
        with pytest.raises(ValueError, match="at least one token"):
            make(4).start([])

    def test_every_kind_of_buffer_is_the_same_prompt(self, make):
        manager = make(16)
        ids = tokens(1, 9)
        run(manager, ids)
        for same in (tuple(ids), array("i", ids), array("q", ids), array("i", ids).tobytes(), iter(ids)):
            assert manager.match(same) == 8

    def test_a_wrong_argument_or_state_is_refused_before_anything_changes(self, make):
        manager, other = make(8), make(8)
        waiting = manager.start(tokens(1, 5))
        running = admit(manager, tokens(21, 25))
        before = fingerprint(manager)
        for call in (
            lambda: manager.allocate(waiting, 1.5),
            lambda: manager.allocate(running, float("nan")),
            lambda: manager.commit(running, 0.5),
            lambda: manager.commit(waiting, 0),
            lambda: other.allocate(waiting, 5),
            lambda: manager.retain([1], ttl_s=float("nan")),
            lambda: manager.retain([1], priority="high"),
            lambda: make(True),
            lambda: make(4, match_unit=1.5),
            lambda: make(4, clock=5),
            lambda: make(4, eviction=5),
        ):
            with pytest.raises(ValueError, match=r"expected|running|another"):
                call()
        with pytest.raises(TypeError, match="namespace"):
            manager.start([1], "tenant")
        assert fingerprint(manager) == before
        manager.check()
        other.check()

    def test_a_wrong_type_is_refused_by_the_name_of_its_field(self, make):
        manager = make(8)
        for field, call in (
            ("num_blocks", lambda: KVCacheManager(2**31)),
            ("index", lambda: KVCacheManager(4, index=["radix"])),
            ("digests", lambda: make(4, digests="sha256")),
            ("max_retained_share", lambda: make(4, max_retained_share="half")),
            ("windows", lambda: KVCacheManager(4, windows=8)),
            ("window_retention", lambda: KVCacheManager(4, 4, windows=(None, 8), window_retention=4.0)),
            ("priority", lambda: manager.start([1], priority="high")),
            ("media", lambda: manager.start([1], media=5)),
            ("ttl_s", lambda: manager.retain([1], ttl_s="a day")),
            ("block_ids", lambda: manager.evict_blocks(5)),
            ("block_ids", lambda: manager.evict_blocks([1.5])),
            ("namespace", lambda: manager.set_quota("tenant", 1)),
        ):
            with pytest.raises((ValueError, TypeError), match=field):
                call()
        assert manager.match([1, 2, 3], media=iter(())) == 0
        manager.check()

    @pytest.mark.parametrize(
        "call",
        [
            lambda manager, sequence: manager.allocate(sequence, 1),
            lambda manager, sequence: manager.commit(sequence, 1),
            lambda manager, sequence: manager.append(sequence, [1]),
            lambda manager, sequence: manager.preempt(sequence),
            lambda manager, sequence: manager.fork(sequence),
            lambda manager, sequence: manager.finish(sequence),
            lambda manager, sequence: manager.abort(sequence),
            lambda manager, sequence: manager.lookup(sequence),
            lambda manager, sequence: manager.block_digests(sequence),
        ],
        ids=["allocate", "commit", "append", "preempt", "fork", "finish", "abort", "lookup", "block_digests"],
    )
    def test_another_managers_sequence_is_refused_whatever_its_state(self, make, call):
        manager, other = make(8), make(8)
        run(other, tokens(1, 8))
        running, waiting = admit(manager, tokens(1, 5)), manager.start(tokens(1, 9))
        for sequence in (running, waiting):
            before = fingerprint(manager), fingerprint(other)
            with pytest.raises(ValueError, match="another manager"):
                call(other, sequence)
            assert (fingerprint(manager), fingerprint(other)) == before

    def test_what_events_could_not_name_is_refused_at_the_start(self, make):
        manager = make(8, events=True, digests=VllmDigests("sha256_cbor"))
        rows = PromptEmbeds(2, b"ab" * 2, 2)
        for namespace, media, field in (
            (Namespace(adapter=Adapter("sha256:aa")), (), "adapter.name"),
            (Namespace(salt="\ud800"), (), "salt"),
            (Namespace(), (rows,), "media"),
        ):
            with pytest.raises(ValueError, match=field):
                manager.start(tokens(1, 9), namespace, media=media)
        manager.check()

    def test_only_a_running_sequence_can_be_preempted(self, make):
        manager = make(4)
        with pytest.raises(ValueError, match="running"):
            manager.preempt(manager.start([1]))

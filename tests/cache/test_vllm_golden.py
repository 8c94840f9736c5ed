"""HashIndex against the real allocator: traces recorded from vLLM 0.32.0's KVCacheManager, step by step.

Each step's result is compared, and the whole state after it: the request's table and digests, the free queue in order,
the counts of holders, the names and which blocks carry them, usage, events; the statistics at the end. vLLM names a
block when it is allocated, here it is named when its KV exists, so a step is `allocate` with `commit` at once.

A small trace is in `tests/golden/vllm/`; the others are read where the full set of golden files is at hand.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anaphora import KVCacheManager, Namespace, Sequence
from anaphora.cache.events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from anaphora.cache.hash_index import HashIndex
from anaphora.identity import VllmDigests
from anaphora.tokens import unpack

REPOSITORY = Path(__file__).parents[2]
OWN = REPOSITORY / "tests/golden/vllm/traces_v0.32.0.json"
ALL = REPOSITORY.parent / "shared/golden/vllm/traces_v0.32.0.json"

Trace = dict[str, Any]


class Replay:
    """Does to a manager what a trace says was done to vLLM's, and tells the outcome in the trace's own words."""

    def __init__(self, trace: Trace) -> None:
        num_blocks = trace["num_blocks"] - 1  # vLLM counts the null block in
        digests = VllmDigests("sha256_cbor", seed="0")
        self.manager = KVCacheManager(num_blocks, trace["block_size"], index="hash", digests=digests, events=True)
        assert isinstance(self.manager._index, HashIndex)
        self.manager._index.keeps_orphans = True
        self.requests: dict[str, Sequence] = {}

    def step(self, op: dict[str, Any]) -> dict[str, Any]:
        kind, rid = op["op"], op.get("rid")
        result: dict[str, Any] = {}
        if kind == "admit":
            self.requests[rid] = self.manager.start(op["tokens"], Namespace(salt=op.get("salt")))
            result = self.admit(self.requests[rid], op.get("chunk"))
        elif kind == "resume":
            if self.requests[rid].state == "running":
                result = {"skipped": True}
            else:
                result = self.admit(self.requests[rid], op.get("chunk"))
        elif kind in {"decode", "chunk"}:
            result = self.grow(self.requests[rid], op)
        elif kind == "free":
            self.manager.finish(self.requests.pop(rid))
        elif kind == "preempt":
            if self.requests[rid].state == "running":
                self.manager.preempt(self.requests[rid])
        elif kind == "evict":
            self.manager.evict_blocks(op["block_ids"])
        elif kind == "reset":
            result = {"ok": self.manager.reset()}
        else:
            raise AssertionError(f"an operation that is not known: {op}")
        self.manager.check()
        return result

    def admit(self, sequence: Sequence, chunk: int | None) -> dict[str, Any]:
        hit = self.manager.lookup(sequence)
        missing = sequence.num_tokens - hit
        want = min(missing, chunk) if chunk else missing
        admitted = self.manager.allocate(sequence, want)
        num_hit = hit // self.manager.block_size
        hit_blocks = list(sequence.block_table[:num_hit]) if admitted else None
        result = {"hit_tokens": hit, "hit_block_ids": hit_blocks, "new_tokens": want}
        result["new_block_ids"] = list(sequence.block_table[num_hit:]) if admitted else None
        if admitted:
            self.manager.commit(sequence, want)
        return result

    def grow(self, sequence: Sequence, op: dict[str, Any]) -> dict[str, Any]:
        if op["op"] == "decode":
            self.manager.append(sequence, op["tokens"])
        if not sequence.num_computed_tokens:
            return {"skipped": True}
        rest = sequence.num_tokens - sequence.num_computed_tokens
        want = min(rest, op["n"]) if op["op"] == "chunk" else rest
        if not want:
            return {"skipped": True}
        num_held = len(sequence.block_table)
        if not self.manager.allocate(sequence, want):
            return {"new_tokens": want, "new_block_ids": None}
        self.manager.commit(sequence, want)
        return {"new_tokens": want, "new_block_ids": list(sequence.block_table[num_held:])}

    def state(self) -> dict[str, Any]:
        index = self.manager._index
        assert isinstance(index, HashIndex)
        trie = index._trie
        cached = {
            f"{trie.names(run, position + 1)[position].hex()}{group:08x}": blocks
            for run, position, group, blocks in trie.cached()
        }
        return {
            "free_queue": list(index._free),
            "ref_cnt": {str(block): count for block, count in enumerate(index._num_holders) if count},
            "cached": cached,
            "usage": self.manager.usage,
        }


def as_golden(event: Event) -> dict[str, Any]:
    if isinstance(event, AllBlocksCleared):
        return {"type": "AllBlocksCleared"}
    digests = [digest.hex() for digest in event.digests]
    if isinstance(event, BlockRemoved):
        return {"type": "BlockRemoved", "block_hashes": digests}
    assert isinstance(event, BlockStored)
    return {
        "type": "BlockStored",
        "block_hashes": digests,
        "parent_block_hash": event.parent.hex() if event.parent else None,
        "token_ids": list(unpack(event.tokens)),
        "block_size": event.block_size,
    }


def golden_digest(value: Any) -> Any:
    return value["hex"] if isinstance(value, dict) else value


def traces() -> list[Any]:
    path = ALL if ALL.exists() else OWN
    loaded = json.loads(path.read_text())["traces"]
    return [pytest.param(trace, id=name) for name, trace in loaded.items()]


def test_the_full_set_of_golden_traces_is_at_hand() -> None:
    if not ALL.exists():
        pytest.skip("only the small trace that the repository carries is replayed")
    assert len(traces()) == 6


@pytest.mark.parametrize("trace", traces())
def test_every_step_of_the_trace_comes_out_as_in_vllm(trace: Trace) -> None:
    replay = Replay(trace)
    for number, step in enumerate(trace["steps"]):
        where = f"step {number}: {step['op']}"
        result = replay.step(step["op"])
        expected = dict(step["result"])
        if result.get("hit_block_ids", ()) is None:
            result["hit_block_ids"] = expected["hit_block_ids"]  # a refused admission shows no table
        if "skipped" in expected:
            expected = {"skipped": True}
        assert result == expected, where
        for key, value in replay.state().items():
            assert value == step[key], f"{where}: {key}"
        events = [as_golden(event) for event in replay.manager.take_events()]
        expected_events = step["events"]
        if step["op"]["op"] == "evict":  # vLLM goes through a set of ids, in no order that means anything
            events.sort(key=lambda event: event["block_hashes"])
            expected_events = sorted(expected_events, key=lambda event: event["block_hashes"])
        for event, golden in zip(events, expected_events, strict=True):
            for key, value in event.items():
                found = golden[key]
                if key in {"block_hashes", "parent_block_hash"}:
                    found = [golden_digest(v) for v in found] if isinstance(found, list) else golden_digest(found)
                assert value == found, f"{where}: {key}"
        if "block_table" in step and step["op"]["rid"] in replay.requests:
            sequence = replay.requests[step["op"]["rid"]]
            assert list(sequence.block_table) == step["block_table"], where
            assert sequence.num_computed_tokens == step["num_computed_tokens"], where
            if sequence.state == "running":
                names = [name.hex() for name in replay.manager.block_digests(sequence)]
                assert names == step["block_hashes"][: len(names)], where
    stats = replay.manager.stats()
    for key in ("requests", "queries", "hits", "preempted_requests", "preempted_queries", "preempted_hits"):
        assert getattr(stats, key) == trace["prefix_cache_stats"][key], key

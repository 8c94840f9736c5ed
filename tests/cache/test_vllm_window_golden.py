"""Layer groups against the real allocator: traces of vLLM 0.32.0 with window-only and full + window groups.

At every step the results, the tables of every group, the free queue in order and the names of all blocks are compared.
Sparse traces keep only the window blocks that the end of a prompt or a shared prefix needs (`window_retention=0`).
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from anaphora import KVCacheManager, Sequence
from anaphora.cache.hash_index import HashIndex
from anaphora.identity import VllmDigests

REPOSITORY = Path(__file__).parents[2]
OWN = REPOSITORY / "tests/golden/vllm/window_traces_v0.32.0.json"
ALL = REPOSITORY.parent / "shared/golden/vllm/window_traces_v0.32.0.json"
GOLDEN = json.loads((ALL if ALL.exists() else OWN).read_text())
WINDOWS = {"full": None, "window8": GOLDEN["meta"]["sliding_window"]}


def compute(manager: KVCacheManager, sequence: Sequence, num_tokens: int) -> dict[str, Any]:
    held = [len(table) for table in sequence.block_tables]
    assert manager.allocate(sequence, num_tokens)
    manager.commit(sequence, num_tokens)
    new = [list(table[n:]) for table, n in zip(sequence.block_tables, held, strict=True)]
    return {"new_tokens": num_tokens, "new_block_ids": new}


def admit(manager: KVCacheManager, sequence: Sequence, chunk: int | None) -> dict[str, Any]:
    hit = manager.lookup(sequence)
    want = min(sequence.num_tokens - hit, chunk or sequence.num_tokens)
    result = compute(manager, sequence, want)
    num_hit = hit // manager.block_size
    tables = [list(table) for table in sequence.block_tables]
    # vLLM tells of a junction only where full attention could have been served more.
    junction = sequence.num_shared_blocks * manager.block_size
    return {
        **result,
        "hit_tokens": hit,
        "shared_prefix_boundary": junction if junction > hit else 0,
        "hit_block_ids": [table[:num_hit] for table in tables],
        "new_block_ids": [table[num_hit:] for table in tables],
    }


def names(index: HashIndex) -> dict[str, list[int]]:
    return {
        f"{index._trie.names(run, position + 1)[position].hex()}{group:08x}": blocks
        for run, position, group, blocks in index._trie.cached()
    }


@pytest.mark.parametrize("name", list(GOLDEN["traces"]))
def test_every_step_of_the_trace_comes_out_as_in_vllm(name: str) -> None:
    trace, meta = GOLDEN["traces"][name], GOLDEN["meta"]
    manager = KVCacheManager(
        meta["num_blocks"] - 1,  # vLLM counts the null block in
        meta["block_size"],
        index="hash",
        digests=VllmDigests("sha256_cbor", seed="0"),
        windows=[WINDOWS[group] for group in trace["groups"]],
        window_retention=trace["retention_interval"],
    )
    requests: dict[str, Sequence] = {}
    for number, step in enumerate(trace["steps"]):
        op, rid, *arguments = step["op"]
        where = f"step {number}: {step['op']}"
        if op in {"admit", "chunk"}:
            requests[rid] = manager.start(arguments[0])
            result = admit(manager, requests[rid], arguments[1])
        elif op == "free":
            manager.finish(requests.pop(rid))
            result = {}
        else:
            sequence = requests[rid]
            if op == "decode":
                manager.append(sequence, arguments[0])
            result = compute(manager, sequence, sequence.num_tokens - sequence.num_computed_tokens)
        manager.check()
        assert result == step["result"], where
        if rid in requests:
            assert [list(table) for table in requests[rid].block_tables] == step["block_tables"], where
        index = manager._index
        assert isinstance(index, HashIndex)
        assert list(index._free) == step["free_queue"], where
        assert names(index) == step["cached"], where

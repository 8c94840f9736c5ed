"""Names of blocks in KV events that are vLLM's own: what a vLLM server published comes out of our engine."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from anaphora import Namespace
from anaphora.cache import KVCacheManager
from anaphora.engine.cost_model import HardwareProfile
from anaphora.engine.loop import Engine
from anaphora.engine.request import Request, SamplingParams
from anaphora.engine.virtual import VirtualClock, VirtualExecutor, scripted_sampler
from anaphora.identity import VllmDigests
from anaphora.model.shape import ModelShape
from anaphora.tokens import pack
from anaphora.wire import VllmEventFormat, decode_batch

SERVER = json.loads((Path(__file__).parents[1] / "golden/vllm/kv_events_live_server_v0.32.0.json").read_text())
"""Requests to a server with blocks of 32 tokens, `sha256_cbor` and PYTHONHASHSEED=0; what it said and published."""
SHAPE = ModelShape("llama", 2, 64, 128, 4, 2, 16, 49152, 8192, 1e4, 1e-5)
PROFILE = HardwareProfile("any", 1e-3, None, None, None, None)


def replay(manager: KVCacheManager) -> list[list[Any]]:
    """Send the server's requests through an engine, one after the other; return the events of each step."""
    clock = VirtualClock()
    requests = [(str(i), step) for i, step in enumerate(SERVER["steps"])]
    said = {name: step.get("output_token_ids", ()) for name, step in requests}
    engine = Engine(VirtualExecutor(SHAPE, PROFILE, clock), manager, clock=clock, new_sampler=scripted_sampler(said))
    batches: list[list[Any]] = []
    for name, step in requests:
        if step["path"] == "/reset_prefix_cache":
            assert manager.reset()
            continue
        asked = step["request"]
        engine.submit(
            Request(
                name,
                pack(asked["prompt"]),
                SamplingParams(max_tokens=asked["max_tokens"]),
                Namespace(salt=asked.get("cache_salt")),
                reports_hits="vllm_xargs" in asked,
            )
        )
        while engine.has_work:
            engine.step()
            if events := engine.take_events():
                batches.append(events)
    return batches


def test_an_engine_publishes_what_a_vllm_server_published_byte_for_byte() -> None:
    digests = VllmDigests("sha256_cbor", seed="0")
    batches = replay(KVCacheManager(23, 32, index="hash", digests=digests, events=True))
    payloads = [bytes.fromhex(frames[-1]) for step in SERVER["steps"] for frames in step["frames_hex"]]
    assert len(batches) == len(payloads) == 10
    form = VllmEventFormat(clear_salts=True)
    for events, payload in zip(batches, payloads, strict=True):
        received = decode_batch(payload)
        assert form.encode(events, received.ts, received.data_parallel_rank) == payload


def test_names_are_the_same_whatever_finds_prefixes_and_wherever_salts_are_hidden() -> None:
    digests = VllmDigests("sha256_cbor", seed="0")
    names: dict[str, set[object]] = {}
    for index in ("radix", "hash"):
        batches = replay(KVCacheManager(23, 32, index=index, digests=digests, events=True))
        messages = [VllmEventFormat().message(event) for events in batches for event in events]
        names[index] = {name for message in messages for name in getattr(message, "block_hashes", ())}
    published = [decode_batch(bytes.fromhex(frames[-1])) for step in SERVER["steps"] for frames in step["frames_hex"]]
    theirs = {
        name for batch in published for message in batch.messages for name in getattr(message, "block_hashes", ())
    }
    assert names["radix"] == names["hash"] == theirs

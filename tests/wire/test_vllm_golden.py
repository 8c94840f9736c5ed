"""vLLM's own bytes: read, followed, written again, and made by our manager from the same requests.

0.26 writes what 0.32 writes, except that it has no `ownership` and `session_id` (an ordinary engine sets neither) and
that names of blocks with extra keys differ, since 0.32 tags the keys that it digests (never those that it publishes).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from anaphora import Adapter, KVCacheManager, Namespace, Sequence
from anaphora.cache.events import BlockStored, Event, Mirror
from anaphora.identity import DEFAULT_NAMESPACE, Media, MediaSpan, VllmDigests
from anaphora.wire import Frames, VllmEventFormat, decode_batch, encode_batch, events_of
from tests.wire.golden import SOURCES, VERSIONS, events, live, parts

if TYPE_CHECKING:
    from pathlib import Path

    from anaphora.identity import VllmVersion

both = pytest.mark.parametrize("source", SOURCES)
versions = pytest.mark.parametrize("version", VERSIONS)


@both
@versions
def test_every_single_event_is_read_and_written_again_byte_for_byte(source: Path, version: str) -> None:
    golden = events(source, version)
    empty = encode_batch(decode_batch(bytes.fromhex("93cb3ff000000000000090c0")))
    for name, event in golden["single_events"].items():
        payload = empty[:-2] + b"\x91" + bytes.fromhex(event["msgpack_hex"]) + b"\xc0"
        batch = decode_batch(payload)
        assert len(batch.messages) == 1, name
        assert encode_batch(batch) == payload, name
    without_rank = bytes.fromhex(golden["batch_without_rank"])
    assert encode_batch(decode_batch(without_rank)) == without_rank


@both
@versions
def test_integer_names_are_the_last_eight_bytes(source: Path, version: str) -> None:
    for vector in events(source, version)["int_conversion"]:
        event = BlockStored((bytes.fromhex(vector["hash"]),), None, b"", 4, Namespace())
        assert VllmEventFormat().message(event).block_hashes == (vector["as_int"],)


@both
@versions
def test_every_frame_is_read_and_written_again_byte_for_byte(source: Path, version: str) -> None:
    for stream in events(source, version)["streams"]:
        form = VllmEventFormat(int_hashes=stream["int_block_hashes"], clear_salts=True)
        for golden in filter(lambda batch: batch["published"], stream["batches"]):
            frames = Frames.from_parts(parts(golden["frames_hex"]))
            assert (frames.topic, frames.sequence) == (stream["topic"], golden["seq"])
            assert frames.parts() == parts(golden["frames_hex"])
            batch = decode_batch(frames.payload)
            assert batch.data_parallel_rank == stream["data_parallel_rank"]
            assert form.encode(events_of(batch), batch.ts, batch.data_parallel_rank) == frames.payload, golden["label"]


@both
@versions
def test_a_replay_brings_the_live_frames_and_then_the_end(source: Path, version: str) -> None:
    for stream in events(source, version)["streams"]:
        sent = {batch.get("seq"): batch.get("frames_hex") for batch in stream["batches"]}
        *replies, end = (Frames.from_parts(parts(reply)) for reply in stream["replay"]["replies_frames_hex_dealer"])
        assert replies
        for reply in replies:
            assert reply.parts() == parts(sent[reply.sequence])
            assert not reply.is_end_of_replay
        assert end.is_end_of_replay


class Engine:
    """Computes requests one after another, as vLLM's scheduler does without a load, and keeps each step's payload."""

    def __init__(self, num_blocks: int, block_size: int, version: VllmVersion, form: VllmEventFormat) -> None:
        digests = VllmDigests("sha256_cbor", seed="0", version=version)
        self.manager = KVCacheManager(num_blocks, block_size, index="hash", digests=digests, events=True)
        self.form = form
        self.batches: list[list[Event]] = []

    def prefill(
        self,
        tokens: list[int],
        namespace: Namespace = DEFAULT_NAMESPACE,
        media: tuple[Media, ...] = (),
        report_hits: bool = False,
    ) -> Sequence:
        sequence = self.manager.start(tokens, namespace, media=media)
        self.compute(sequence, len(tokens) - self.manager.lookup(sequence), report_hits)
        return sequence

    def decode(self, sequence: Sequence, tokens: list[int]) -> None:
        for token in tokens:
            self.manager.append(sequence, [token])
            self.compute(sequence, 1)

    def compute(self, sequence: Sequence, num_tokens: int, report_hits: bool = False) -> None:
        assert self.manager.allocate(sequence, num_tokens)
        self.manager.commit(sequence, num_tokens)
        reported = [hit_report(self.manager, sequence)] if report_hits else []
        # An engine that has nothing to compute drains nothing: a reset goes out with the next step.
        if batch := reported + self.manager.take_events():
            self.batches.append(batch)

    def payload(self, number: int, golden: bytes) -> bytes:
        received = decode_batch(golden)
        return self.form.encode(self.batches[number], received.ts, received.data_parallel_rank)


def hit_report(manager: KVCacheManager, sequence: Sequence) -> Event:
    """What a request with `kv_cache_report_mode: full` adds: its hit, told as if it were stored."""
    num_tokens = sequence.num_cached_tokens
    names = manager.block_digests(sequence)[: num_tokens // manager.block_size]
    return BlockStored(
        tuple(names), None, bytes(sequence.tokens[: 4 * num_tokens]), manager.block_size, sequence.namespace
    )


@both
@versions
def test_the_recorded_streams_come_out_of_our_manager(source: Path, version: VllmVersion) -> None:
    for stream in events(source, version)["streams"]:
        form = VllmEventFormat(int_hashes=stream["int_block_hashes"], clear_salts=True)
        engine = Engine(15, 4, version, form)
        first = engine.prefill(list(range(14)))
        engine.decode(first, [100, 70000])
        salted = engine.prefill([*range(10), 50, 51], Namespace(salt="tenant-a"))
        adapter = Adapter("weights", name="sql", path="/adapters/sql", lora_id=3)
        image = MediaSpan(2, 4, "img-hash-1")
        everything = engine.prefill(list(range(200, 208)), Namespace(adapter=adapter, salt="tenant-b"), media=(image,))
        for sequence in (first, salted, everything):
            engine.manager.finish(sequence)
        engine.manager.finish(engine.prefill(list(range(300, 332))))
        assert engine.manager.reset()
        engine.batches.append(engine.manager.take_events())
        published = [batch for batch in stream["batches"] if batch["published"]]
        assert len(published) == len(engine.batches)
        for number, golden in enumerate(published):
            payload = parts(golden["frames_hex"])[-1]
            assert engine.payload(number, payload) == payload, golden["label"]


def requests(golden: dict[str, Any]) -> list[dict[str, Any]]:
    return [step for step in golden["steps"] if step["path"] == "/v1/completions"]


def captured(golden: dict[str, Any]) -> list[list[bytes]]:
    return [parts(frames) for step in golden["steps"] for frames in step.get("frames_hex") or ()]


def replay(golden: dict[str, Any]) -> Engine:
    engine = Engine(23, 32, "0.32", VllmEventFormat(clear_salts=True))
    for step in golden["steps"]:
        if step["path"] == "/reset_prefix_cache":
            assert engine.manager.reset()
            continue
        request, output = step["request"], step["output_token_ids"]
        sequence = engine.prefill(
            request["prompt"],
            Namespace(salt=request.get("cache_salt")),
            report_hits=request.get("vllm_xargs") == {"kv_cache_report_mode": "full"},
        )
        assert sequence.num_cached_tokens == step["usage"]["prompt_tokens_details"]["cached_tokens"], step["label"]
        engine.decode(sequence, output[:-1])
        engine.manager.finish(sequence)
    return engine


@both
def test_a_live_servers_frames_are_read_and_written_again_byte_for_byte(source: Path) -> None:
    form = VllmEventFormat(clear_salts=True)
    for number, message in enumerate(captured(live(source))):
        frames = Frames.from_parts(message)
        assert (frames.topic, frames.sequence) == ("kv@test", number)
        batch = decode_batch(frames.payload)
        assert batch.unknown_types == ()
        payload = form.encode(events_of(batch), batch.ts, batch.data_parallel_rank)
        assert Frames(frames.topic, number, payload).parts() == message


@both
def test_a_mirror_that_follows_a_live_server_ends_with_what_the_server_holds(source: Path) -> None:
    mirror = Mirror()
    for message in captured(live(source)):
        mirror.apply(events_of(decode_batch(Frames.from_parts(message).payload)))
    held = replay(live(source)).manager._index.stored()
    assert len(held) == 3
    expected = sorted((digest[-8:], group, "GPU") for digest, group in held)
    assert sorted(mirror.blocks.elements()) == expected


@both
def test_our_manager_publishes_what_the_live_server_published_byte_for_byte(source: Path) -> None:
    golden = live(source)
    engine = replay(golden)
    expected = captured(golden)
    assert len(expected) == len(engine.batches) == 10
    for number, message in enumerate(expected):
        assert engine.payload(number, message[-1]) == message[-1], number

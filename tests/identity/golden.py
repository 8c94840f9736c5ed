"""Golden vectors of vLLM: a selection beside the tests, and the complete files where a checkout has them beside it."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from anaphora import Adapter, Namespace
from anaphora.identity import Media, MediaSpan, PromptEmbeds, VllmDigests

STORED = Path(__file__).parents[1] / "golden" / "vllm"
COMPLETE = Path(__file__).parents[3] / "shared" / "golden" / "vllm"

VERSIONS = ("0.26", "0.32")
SOURCES = [pytest.param(source, id=name) for name, source in (("stored", STORED), ("complete", COMPLETE))]


@cache
def vectors(source: Path, version: str) -> dict[str, Any]:
    path = source / f"hash_vectors_v{version}.0.json"
    if not path.is_file():
        pytest.skip(f"no complete golden vectors at {source}: the stored selection covers the same ground")
    loaded: dict[str, Any] = json.loads(path.read_text())
    return loaded


def digests(algorithm: str, seed: str, version: str) -> VllmDigests:
    """vLLM's digests under a seed of the files, where `<unset>` stands for none."""
    if algorithm.startswith("xxhash"):
        pytest.importorskip("xxhash")
    seeds = None if seed == "<unset>" else seed
    return VllmDigests(algorithm, seed=seeds, version=version, allow_unsafe=True)


def prompt(chain: dict[str, Any], prompts: dict[str, list[int]]) -> tuple[list[int], Namespace, tuple[Media, ...]]:
    """A chain's request: the ids of its whole blocks, its namespace and its media."""
    request = chain["request"]
    media: tuple[Media, ...] = tuple(MediaSpan(offset, n, digest) for digest, offset, n in request.get("mm", ()))
    if "block_bytes_hex" in chain:
        blocks = [bytes.fromhex(block) for block in chain["block_bytes_hex"]]
        ids = [0] * (len(blocks) * chain["block_size"])
        media = (PromptEmbeds(0, b"".join(blocks), len(blocks[0]) // chain["block_size"]),)
    else:
        ids = prompts[chain["prompt"]]
    adapter = None
    if "lora" in request:
        name, lora_id, path = request["lora"]
        adapter = Adapter("weights", name=name, path=path, lora_id=lora_id)
    whole = len(ids) - len(ids) % chain["block_size"]
    return ids[:whole], Namespace(adapter=adapter, salt=request.get("cache_salt")), media

"""vLLM's real KVCacheManager, run by an interpreter that has vllm installed. Written against 0.32."""

from __future__ import annotations

from array import array
from itertools import count
from typing import TYPE_CHECKING, Any

import torch
import vllm.envs
from vllm import SamplingParams
from vllm.utils.hashing import get_hash_fn_by_name
from vllm.v1.core.kv_cache_manager import KVCacheManager
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.request import Request

from .contestant import Contestant, serve

if TYPE_CHECKING:
    from .workload import Scenario


class VllmManager(Contestant):
    """Hash, look up, allocate (which publishes), free, in the order of vLLM's scheduler; the default sha256."""

    def __init__(self, scenario: Scenario) -> None:
        block_size = scenario.block_size
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=8, head_size=128, dtype=torch.bfloat16)
        self._manager = KVCacheManager(
            KVCacheConfig(
                num_blocks=scenario.num_blocks + 1,  # its null block is one of them
                kv_cache_tensors=[],
                kv_cache_groups=[KVCacheGroupSpec(["layers"], spec)],
            ),
            max_model_len=2**20,
            scheduler_block_size=block_size,
            hash_block_size=block_size,
        )
        digest = get_hash_fn_by_name("sha256")
        init_none_hash(digest)
        self._hasher = get_request_block_hasher(block_size, digest)
        self._params = SamplingParams(max_tokens=max(1, scenario.num_decode_tokens))
        self._decode = range(scenario.num_decode_tokens)
        self._names = map(str, count())
        self._hits: dict[str, int] = {}

    def prepare(self, tokens: bytes) -> tuple[str, list[int]]:
        """A request's name and a list of ints, as the engine core decodes them from its socket."""
        return next(self._names), array("i", tokens).tolist()

    def begin(self, prompt: tuple[str, list[int]]) -> Request:
        """See `Contestant.begin`."""
        name, ids = prompt
        manager = self._manager
        request = Request(name, ids, self._params, None, block_hasher=self._hasher)
        blocks, num_hit, _ = manager.get_computed_blocks(request)
        num_new = request.num_tokens - num_hit
        if manager.allocate_slots(request, num_new, num_hit, blocks) is None:
            raise RuntimeError("vLLM: no blocks left")
        request.num_computed_tokens = num_hit + num_new
        self._hits[name] = num_hit
        for token in self._decode:
            request.append_output_token_ids(token)
            manager.allocate_slots(request, 1)
            request.num_computed_tokens += 1
        return request

    def end(self, request: Request) -> None:
        """See `Contestant.end`."""
        self._manager.free(request)
        del self._hits[request.request_id]

    def hit_tokens(self, request: Any) -> int:
        """See `Contestant.hit_tokens`."""
        return self._hits[request.request_id]


if __name__ == "__main__":
    vllm.envs.enable_envs_cache()
    serve(f"vLLM {vllm.__version__}", {"vLLM": VllmManager})

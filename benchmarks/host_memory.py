"""`python -m benchmarks.host_memory`: the time to the first token of a prefix that was evicted, with host memory for it
and without.

Two prompts take turns in a pool that holds one of them, so each evicts the other. Without host memory both are computed
every time. Both engines run in one process, in turns; the least of several runs is what the machine can do.
"""

from __future__ import annotations

import argparse
import time
from typing import TYPE_CHECKING

import numpy as np

from anaphora.engine.build import build_engine
from anaphora.engine.llm import LLM
from anaphora.engine.request import SamplingParams
from anaphora.model import load_model

if TYPE_CHECKING:
    from collections.abc import Sequence

FIRST_TOKEN = SamplingParams(max_tokens=1, temperature=0.0)
SUFFIX_TOKENS, BLOCK_SIZE = 20, 16


def ttft_ms(llm: LLM, prompt: bytes) -> float:
    """Serve a prompt; return the time to its first token."""
    started = time.perf_counter()
    llm.generate(prompt, FIRST_TOKEN)
    return 1000 * (time.perf_counter() - started)


def main(arguments: Sequence[str] | None = None) -> None:
    """Print one row for each length."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.host_memory", description=__doc__)
    parser.add_argument("--prefix-tokens", type=int, nargs="+", default=[1000, 4000], metavar="N")
    parser.add_argument("--repeats", type=int, default=3, metavar="N", help="(default: %(default)s)")
    parser.add_argument("model", nargs="?", help="as for `anaphora serve`")
    options = parser.parse_args(arguments)
    model = load_model(options.model)
    engine = build_engine(model, kv_memory_bytes=1 << 28)
    bytes_per_token = sum(group.kv_bytes_per_token for group in engine.executor.layer_groups)
    rng = np.random.default_rng(0)
    names = ("computed", "in the pool", "from host, first", "from host")
    print(f"{'prefix':>8}  {'KV MB':>6}  " + "  ".join(f"{name:>16}" for name in names) + "   (ms, least)")
    for num_tokens in options.prefix_tokens:
        size = num_tokens + SUFFIX_TOKENS
        prompts = [rng.integers(model.shape.vocab_size // 2, size=size, dtype=np.int32).tobytes() for _ in range(2)]
        # The blocks of one prompt and its token, and the null block.
        kv_bytes = (size // BLOCK_SIZE + 2) * BLOCK_SIZE * bytes_per_token
        plain = LLM(model, kv_memory_bytes=kv_bytes)
        tiered = LLM(model, kv_memory_bytes=kv_bytes, host_kv_memory_bytes=4 * kv_bytes)
        times: dict[str, list[float]] = {name: [] for name in names}
        for prompt in prompts:
            ttft_ms(tiered, prompt)
        times["from host, first"] = [ttft_ms(tiered, prompt) for prompt in prompts]
        for _ in range(options.repeats):
            for prompt in prompts:
                times["computed"].append(ttft_ms(plain, prompt))
                times["in the pool"].append(ttft_ms(plain, prompt))
                times["from host"].append(ttft_ms(tiered, prompt))
        row = "  ".join(f"{min(times[name]):>16,.1f}" for name in names)
        print(f"{num_tokens:>8,}  {num_tokens * bytes_per_token / 1e6:>6.1f}  {row}", flush=True)
        expected = (2 * options.repeats + 2) * ((size - 1) // BLOCK_SIZE * BLOCK_SIZE)
        assert tiered.stats().host_cached_tokens == expected, "not all of the prefix came from host memory"


if __name__ == "__main__":
    main()

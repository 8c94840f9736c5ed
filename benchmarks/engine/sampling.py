"""What drawing the tokens of one step costs: python -m benchmarks.engine.sampling [--rows 32] [--vocab-size 49152].

CPU time of this thread, the least of several steps. Logits of two kinds: peaked, as a model's mostly are (falling with
the logarithm of the rank), and flat (normal, of standard deviation 3), where a nucleus has thousands of tokens.
"""

from __future__ import annotations

import argparse
import itertools
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from anaphora.engine.request import SamplingParams
from anaphora.engine.sampling import Sampler, token_logprob
from anaphora.tokens import pack

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

NUM_STEPS = 15
NUM_PROMPT_TOKENS = 2000
CASES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "temperature 0.8": {"temperature": 0.8},
    "top_p 0.9": {"top_p": 0.9},
    "top_k 40": {"top_k": 40},
    "top_k 40, top_p 0.9": {"top_k": 40, "top_p": 0.9},
    "min_p 0.05": {"min_p": 0.05},
    "greedy, repetition_penalty 1.1": {"temperature": 0.0, "repetition_penalty": 1.1},
}


def logits(num_rows: int, vocab_size: int) -> dict[str, NDArray[np.float32]]:
    """Rows of both kinds, float32 [num_rows, vocab_size]."""
    rng = np.random.default_rng(0)
    peaked = -2 * np.log(np.arange(1, vocab_size + 1)) + rng.normal(0, 0.7, (num_rows, vocab_size))
    return {
        "peaked": rng.permuted(peaked, axis=1).astype(np.float32),
        "flat": rng.normal(0, 3, (num_rows, vocab_size)).astype(np.float32),
    }


def least_ms(step: Callable[[], object]) -> float:
    """CPU time of a step."""
    taken = []
    for _ in range(NUM_STEPS):
        started = time.thread_time()
        step()
        taken.append(time.thread_time() - started)
    return min(taken) * 1e3


def drawing_ms(rows: NDArray[np.float32], params: SamplingParams) -> float:
    """Of drawing one token for each row."""
    prompt = pack(list(range(NUM_PROMPT_TOKENS)))
    samplers = [Sampler(params, seed, prompt) for seed in range(len(rows))]
    positions = itertools.count()

    def step() -> None:
        position = next(positions)
        for sampler, row in zip(samplers, rows, strict=True):
            sampler.sample(row, position)

    return least_ms(step)


def logprobs_ms(rows: NDArray[np.float32], num_top: int) -> float:
    """Of the log-probabilities of one token for each row."""
    return least_ms(lambda: [token_logprob(row, 0, num_top) for row in rows])


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--vocab-size", type=int, default=49152)
    args = parser.parse_args()
    kinds = logits(args.rows, args.vocab_size)
    print(f"ms a step of {args.rows} rows of {args.vocab_size:,}".ljust(40), *(f"{kind:>8}" for kind in kinds))
    for name, fields in CASES.items():
        print(name.ljust(40), *(f"{drawing_ms(rows, SamplingParams(**fields)):8.2f}" for rows in kinds.values()))
    for num_top in (0, 20):
        taken = [logprobs_ms(rows, num_top) for rows in kinds.values()]
        print(f"and log-probabilities, {num_top} alternatives".ljust(40), *(f"{ms:8.2f}" for ms in taken))


if __name__ == "__main__":
    main()

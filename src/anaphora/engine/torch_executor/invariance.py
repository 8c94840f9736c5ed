"""How many tokens to compute at once: sizes with which a token's bits do not depend on its company.

A library's kernels choose the order of additions by the shape of a call. So a step is cut into tiles of a few fixed
numbers of tokens, the last one padded, and each tile goes through the whole model alone: every operation outside
attention has the same shapes each time. What is left, whether a token's place in the tile and its neighbours show in
its bits, is not known of a library, a CPU and an architecture before it was tried. So it is tried.
"""

from __future__ import annotations

import logging
from itertools import accumulate
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from numpy.typing import NDArray

    Logits = NDArray[np.float32]
    Run = Callable[[Sequence[int], Sequence[int]], Logits]
    """(lengths of spans, tile sizes) -> logits of all tokens of one and the same sequence, in fresh pages."""

log = logging.getLogger(__name__)

TILE_SIZES = (16, 32, 128)
"""Tokens to try, ascending: few make a decode step cheap, many make prefill fast."""

MAX_PADDING = 32
"""Tokens of padding worth adding to save a pass over the weights."""


def cut(num_tokens: int, sizes: Sequence[int]) -> Iterator[tuple[int, int, int]]:
    """Cut tokens into tiles (start, stop, size): as many large ones as fit, then smaller ones, the last one padded."""
    start = 0
    while start < num_tokens:
        rest = num_tokens - start
        covering = next((size for size in sizes if size >= rest), None)
        fitting = next((size for size in reversed(sizes) if size <= rest), None)
        if covering is not None and (fitting is None or covering - rest <= MAX_PADDING):
            yield start, num_tokens, covering
            return
        assert fitting is not None
        yield start, start + fitting, fitting
        start += fitting


def agreeing_sizes(run: Run, num_tokens: int, candidates: Sequence[int] = TILE_SIZES) -> tuple[int, ...]:
    """Return the candidates that give each token the same bits, at every place; none if not even one does alone.

    The first that is free of position sets the bits, larger ones must agree with it.

    run: computes a sequence of `num_tokens` tokens, at least `num_sample_tokens(candidates)`.
    Cost: for each candidate one or two passes over the sequence.
    """
    for index, size in enumerate(candidates):
        expected = run([num_tokens], [size])
        if not _same_bits(run(_moved(num_tokens, size // 2 - 1), [size]), expected):
            continue
        agreeing = [size]
        for larger in candidates[index + 1 :]:
            if _same_bits(run(_moved(num_tokens, size + 1), [size, larger]), expected):
                agreeing.append(larger)
        return tuple(agreeing)
    return ()


def num_sample_tokens(sizes: Sequence[int]) -> int:
    """Return how long a sequence must be for each size to fit into it behind a few tokens, and others behind it."""
    return max(sizes) + 2 * min(sizes) + 3


def _moved(num_tokens: int, by: int) -> list[int]:
    """Spans that put each token at another place of its tile: a short one, the rest but one, one alone."""
    return [by, num_tokens - by - 1, 1]


def _same_bits(left: Logits, right: Logits) -> bool:
    return np.array_equal(left.view(np.uint32), right.view(np.uint32))


def starts(lengths: Sequence[int]) -> list[int]:
    """Where each of consecutive spans begins."""
    return [0, *accumulate(lengths)][:-1]

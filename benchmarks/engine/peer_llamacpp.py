"""llama.cpp: `python -m benchmarks.engine.peer_llamacpp MODEL.gguf`. Written against llama-cpp-python 0.3.36."""

from __future__ import annotations

from typing import TYPE_CHECKING

import llama_cpp
import numpy as np

from .process import num_threads, serve

if TYPE_CHECKING:
    from collections.abc import Sequence

NUM_SEQUENCES, CONTEXT, BATCH = 64, 81_920, 512


class LlamaCpp:
    """Continuous batching over its unified KV cells: prompt number s is sequence s.

    A prompt keeps what it has in common with its sequence's earlier text, or copies what it has in common with the
    first prompt's if that is more.
    """

    def __init__(self, arguments: Sequence[str]) -> None:
        (path,) = arguments
        llama_cpp.llama_backend_init()
        self._model = llama_cpp.llama_model_load_from_file(path.encode(), llama_cpp.llama_model_default_params())
        params = llama_cpp.llama_context_default_params()
        params.n_ctx, params.n_batch, params.n_ubatch, params.n_seq_max = CONTEXT, BATCH, BATCH, NUM_SEQUENCES
        params.n_threads = params.n_threads_batch = num_threads()
        params.kv_unified = True
        self._context = llama_cpp.llama_init_from_model(self._model, params)
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._batch = llama_cpp.llama_batch_init(BATCH, 0, 1)
        self._vocab_size = llama_cpp.llama_vocab_n_tokens(llama_cpp.llama_model_get_vocab(self._model))
        self._computed: list[list[int]] = [[] for _ in range(NUM_SEQUENCES)]
        self.version = f"llama-cpp-python {llama_cpp.__version__}"

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Continue all prompts at once."""
        texts = [list(prompt) for prompt in prompts]
        for s in range(len(texts), NUM_SEQUENCES):
            self._cut(s, 0)
        for s, text in enumerate(texts):
            own, of_first = _common(text, self._computed[s]), _common(text, self._computed[0])
            if of_first > own:
                self._cut(s, 0)
                llama_cpp.llama_memory_seq_cp(self._memory, 0, s, 0, of_first)
                self._computed[s] = text[:of_first]
            # The last token is always computed: its logits are wanted.
            self._cut(s, min(max(own, of_first), len(text) - 1))
            if s == 0:
                self._compute([(0, at) for at in range(len(self._computed[0]), len(text) - 1)], texts)
        for _ in range(num_tokens):
            self._compute(
                [(s, at) for s, text in enumerate(texts) for at in range(len(self._computed[s]), len(text))], texts
            )

    def _cut(self, s: int, length: int) -> None:
        llama_cpp.llama_memory_seq_rm(self._memory, s, length, -1)
        del self._computed[s][length:]

    def _compute(self, pending: Sequence[tuple[int, int]], texts: list[list[int]]) -> None:
        """Compute tokens (sequence, position) in order; add the next one to a text whose last token was among them."""
        for first in range(0, len(pending), BATCH):
            chunk = pending[first : first + BATCH]
            batch = self._batch
            batch.n_tokens = len(chunk)
            lasts = {i: s for i, (s, at) in enumerate(chunk) if at + 1 == len(texts[s])}
            for i, (s, at) in enumerate(chunk):
                batch.token[i], batch.pos[i], batch.n_seq_id[i] = texts[s][at], at, 1
                batch.seq_id[i][0], batch.logits[i] = s, i in lasts
            if status := llama_cpp.llama_decode(self._context, batch):
                raise RuntimeError(f"llama_decode: {status}")
            for s, at in chunk:
                self._computed[s].append(texts[s][at])
            for i, s in lasts.items():
                logits = np.ctypeslib.as_array(llama_cpp.llama_get_logits_ith(self._context, i), (self._vocab_size,))
                texts[s].append(int(logits.argmax()))


def _common(left: Sequence[int], right: Sequence[int]) -> int:
    unequal = (i for i, (a, b) in enumerate(zip(left, right, strict=False)) if a != b)
    return next(unequal, min(len(left), len(right)))


if __name__ == "__main__":
    serve(LlamaCpp)

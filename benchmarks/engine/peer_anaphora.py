"""Anaphora: `peer_anaphora MODEL EXECUTOR`: "reference", or a path: "avx2", "avx2/stored", "avx2/q8_0"."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anaphora.cache import KVCacheManager
from anaphora.engine.build import num_blocks_for
from anaphora.engine.loop import Engine
from anaphora.engine.native import NativeExecutor
from anaphora.engine.reference import ReferenceExecutor
from anaphora.engine.request import Request, SamplingParams
from anaphora.model import load_model
from anaphora.tokens import pack
from anaphora.version import __version__

from .process import num_threads, serve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anaphora.engine.executor import Executor

KV_MEMORY_BYTES = {"native": 2 << 30, "reference": 4 << 30}  # bf16, float32


class Anaphora:
    """The engine without its server."""

    def __init__(self, arguments: Sequence[str]) -> None:
        file, kind = arguments
        model = load_model(file)
        executor: Executor
        if kind == "reference":
            executor = ReferenceExecutor(model.shape, model.weights, num_threads())
        else:
            path, _, weight_format = kind.partition("/")
            weights = model.stored_weights if weight_format == "stored" else model.weights
            executor = NativeExecutor(
                model.shape, weights, num_threads(), path, "q8_0" if weight_format == "q8_0" else "bf16"
            )
        memory = KV_MEMORY_BYTES["reference" if kind == "reference" else "native"]
        manager = KVCacheManager(num_blocks=num_blocks_for(memory, executor.layer_groups, 16), block_size=16)
        self._engine = Engine(executor, manager)
        self.version = f"Anaphora {__version__}"

    def run(self, prompts: Sequence[Sequence[int]], num_tokens: int) -> None:
        """Continue all prompts at once."""
        sampling = SamplingParams(max_tokens=num_tokens, temperature=0.0, ignore_eos=True)
        for number, prompt in enumerate(prompts):
            self._engine.submit(Request(str(number), pack(prompt), sampling))
        while self._engine.has_work:
            for delta in self._engine.step():
                if delta.error:
                    raise RuntimeError(delta.error)


if __name__ == "__main__":
    serve(Anaphora)

"""Anaphora: `python -m benchmarks.engine.peer_anaphora MODEL EXECUTOR`, a native path's name or "reference"."""

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

from .process import serve

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anaphora.engine.executor import Executor

KV_MEMORY_BYTES = {"native": 2 << 30, "reference": 4 << 30}  # bf16, float32


class Anaphora:
    """The engine without its server."""

    def __init__(self, arguments: Sequence[str]) -> None:
        path, kind = arguments
        model = load_model(path)
        executor: Executor
        if kind == "reference":
            executor = ReferenceExecutor(model.shape, model.weights)
        else:
            executor = NativeExecutor(model.shape, model.weights, path=kind)
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

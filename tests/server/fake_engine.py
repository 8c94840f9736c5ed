"""The real engine over a model that takes no time: it goes on with the alphabet.

After "b" comes "c", after "z" the end of the sequence; so every answer is known beforehand, while admission, caching,
stop strings, sampling and cancellation are the engine's own.
"""

from __future__ import annotations

import threading
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np

from anaphora.cache.manager import KVCacheManager
from anaphora.engine.executor import LayerGroup, Output
from anaphora.engine.loop import Engine
from anaphora.engine.service import EngineService
from anaphora.server.served_model import ServedModel

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from anaphora.engine.executor import Batch
    from anaphora.engine.request import Delta, Request

EOS = 256
VOCAB_SIZE = 257
BLOCK_SIZE = 16


class AlphabetExecutor:
    """Logits that all but say which token comes next: the successor of the last one.

    gate: while it is clear, steps wait. failures: raised by the next steps.
    """

    block_sizes = (BLOCK_SIZE,)
    numerics_id = "alphabet"
    layer_groups = (LayerGroup(layers=(0,), kv_bytes_per_token=4),)
    vocab_size = VOCAB_SIZE

    def __init__(self, max_context: int) -> None:
        self.max_context = max_context
        self.gate = threading.Event()
        self.gate.set()
        self.failures: list[Exception] = []

    def allocate_kv(self, num_blocks: int, block_size: int) -> None: ...

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None: ...

    def execute(self, batch: Batch) -> Output:
        assert self.gate.wait(10), "a test left the gate closed"
        if self.failures:
            raise self.failures.pop()
        return Output([_successors(span.tokens[len(span.tokens) - span.num_logits :]) for span in batch.spans])


def _successors(tokens: Any) -> Any:
    logits = np.zeros((len(tokens), VOCAB_SIZE), np.float32)
    for row, token in zip(logits, tokens.tolist(), strict=True):
        row[EOS if token == ord("z") else (token + 1) % 256] = 100.0
    return logits


class ByteTokenizer:
    """One token a byte; "<eos>" is a token of its own."""

    adds_bos = False
    eos_token_ids = (EOS,)
    longest_token_bytes = len("<eos>")
    vocab_size = VOCAB_SIZE
    special_token_ids = frozenset({EOS})

    def encode(self, text: str, *, add_bos: bool = False, parse_special: bool = True) -> bytes:
        ids = array("i")
        for i, part in enumerate(text.split("<eos>") if parse_special else [text]):
            ids.extend([EOS] * (i > 0))
            ids.extend(part.encode())
        return ids.tobytes()

    def token_bytes(self, token_id: int, *, skip_special_tokens: bool = False) -> bytes:
        if token_id == EOS:
            return b"" if skip_special_tokens else b"<eos>"
        return bytes([token_id])


class PlainTemplate:
    """ "<role>: content" a line, and no generation prompt, so that the answer goes on after the last message."""

    def render(self, messages: list[dict[str, Any]], *, tools: Any = None, add_generation_prompt: bool = True) -> str:
        return "".join(f"[tools {len(tools)}]" if tools else "") + "\n".join(
            f"{message['role']}: {message['content']}" for message in messages
        )


class RecordingService(EngineService):
    """Keeps the requests that it was given and the ids that it was told to abort."""

    def __init__(self, engine: Engine, **options: Any) -> None:
        super().__init__(engine, **options)
        self.requests: list[Request] = []
        self.aborted: list[str] = []

    def submit(self, request: Request, on_delta: Callable[[Delta], None]) -> None:
        super().submit(request, on_delta)
        self.requests.append(request)

    def abort(self, request_id: str) -> None:
        self.aborted.append(request_id)
        super().abort(request_id)


class FakeEngine:
    """An engine service with its model, and handles to both for tests."""

    def __init__(self, *, max_context: int = 2048, num_blocks: int = 256, **options: Any) -> None:
        """`options` are those of EngineService."""
        self.executor = AlphabetExecutor(max_context)
        self.manager = KVCacheManager(num_blocks, BLOCK_SIZE, events="on_events" in options)
        tokenizer = ByteTokenizer()
        engine = Engine(self.executor, self.manager, tokenizer=tokenizer, eos_token_ids=tokenizer.eos_token_ids)
        self.service = RecordingService(engine, **options)
        self.model = ServedModel(
            name="alphabet",
            revision="r1",
            max_context=engine.max_context,
            max_request_tokens=engine.max_request_tokens,
            tokenizer=tokenizer,  # type: ignore[arg-type]
            chat_template=PlainTemplate(),  # type: ignore[arg-type]
            grammars=engine.grammars,
        )

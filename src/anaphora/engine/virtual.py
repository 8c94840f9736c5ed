"""The virtual executor: an engine's loop on a model that is not there, by a clock that only work moves on.

Everything else is the engine itself: queue, scheduler, KVCacheManager. So the cached tokens, the order and the
preemptions that a virtual run reports are those that the real one makes of the same arrivals at the same times.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from anaphora.engine.cost_model import CostModel, HardwareProfile, WorkModel
from anaphora.engine.executor import LayerGroup, Output

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from numpy.typing import NDArray

    from anaphora.engine.executor import Batch
    from anaphora.engine.request import Request
    from anaphora.model.shape import ModelShape

FILLER_TOKEN = 0
"""What a virtual model says when it was not told what to say."""


class VirtualClock:
    """Seconds from 0; never goes back."""

    def __init__(self) -> None:
        self._now = 0.0

    def __call__(self) -> float:
        """Return the time."""
        return self._now

    def advance(self, seconds: float) -> None:
        """Let time pass."""
        self._now += seconds

    def wait_until(self, time_s: float) -> None:
        """Let time pass up to `time_s`, if that is to come."""
        self._now = max(self._now, time_s)


class VirtualExecutor:
    """Executor that computes nothing: a step moves the clock on by what a CostModel says it takes.

    Its logits are all zero. What requests "say" comes from `scripted_sampler`.
    """

    numerics_id = "virtual"

    def __init__(
        self,
        shape: ModelShape,
        profile: HardwareProfile,
        clock: VirtualClock,
        *,
        block_sizes: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512),
    ) -> None:
        self.block_sizes = block_sizes
        self.vocab_size = shape.vocab_size
        self.max_context = shape.max_context
        self.layer_groups = (LayerGroup(tuple(range(shape.num_layers)), WorkModel(shape).kv_bytes_per_token),)
        self._shape, self._costs = shape, CostModel(shape, profile)
        self._clock = clock
        self._block_size = 0
        self._rows: dict[int, NDArray[np.float32]] = {}

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Nothing to allocate. What groups share of blocks is read once."""
        self._costs = CostModel(self._shape, self._costs.profile, block_size)
        self._block_size = block_size

    def allocate_host(self, num_blocks: int) -> None:
        """Nothing to allocate."""

    def save_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Let the time pass that this takes."""
        self._clock.advance(self._costs.transfer_s(len(pairs) * self._block_size))

    def load_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """The same."""
        self.save_blocks(pairs)

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Nothing to copy, and nothing that it would cost: a block is small beside a step."""

    def execute(self, batch: Batch) -> Output:
        """Let the time of this step pass."""
        self._clock.advance(self._costs.step_s(batch))
        return Output([self._logits(span.num_logits) if span.num_logits else None for span in batch.spans])

    def _logits(self, num_rows: int) -> NDArray[np.float32]:
        rows = self._rows.get(num_rows)
        if rows is None:
            # One zero, seen everywhere: it takes no memory.
            rows = self._rows[num_rows] = np.broadcast_to(np.float32(0), (num_rows, self.vocab_size))
        return rows


class ScriptedSampler:
    """Says a text that is known beforehand, then FILLER_TOKEN, whatever the logits are."""

    __slots__ = ("_token_ids",)

    is_complete = False

    def __init__(self, token_ids: Sequence[int] = ()) -> None:
        self._token_ids = token_ids

    def sample(self, logits: NDArray[np.float32], position: int) -> int:
        """Return output token number `position`, from 0."""
        return self._token_ids[position] if position < len(self._token_ids) else FILLER_TOKEN


def scripted_sampler(outputs: Mapping[str, Sequence[int]]) -> Callable[[Request, int], ScriptedSampler]:
    """Return what an Engine takes as `new_sampler`: requests say their part of `outputs`, by request id."""

    def new_sampler(request: Request, seed: int) -> ScriptedSampler:
        return ScriptedSampler(outputs.get(request.request_id, ()))

    return new_sampler

"""How long a step takes: from the shape of a model and the speeds of a machine, both plain data.

    step = step_s + row_s * rows + span_s * spans
         + weight bytes / speed + matrix FLOPs / speed + attention FLOPs / speed + KV bytes / speed

Every term is linear in something that the batch alone tells, so the speeds can be fitted to measured steps
(`anaphora.engine.calibration`) or written down from a data sheet. Time is in seconds.
"""

from __future__ import annotations

import json
from dataclasses import MISSING, asdict, dataclass, fields
from types import NoneType
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from anaphora.engine.executor import Batch, Group
    from anaphora.model.shape import ModelShape

_BYTES_PER_VALUE = 2
"""bfloat16, in weights and in KV."""


@dataclass(frozen=True, slots=True)
class HardwareProfile:
    """What one machine does in a second, as one executor drives it. A speed of None costs nothing.

    span_s: what every span of a batch takes besides (queueing, norms, small kernels), in seconds.
    weight_bytes_per_s: reading the weights, once a step. kv_bytes_per_s: reading the KV of a span, once a span, and
    what spans share by the batch's groups, once for all of them. host_bytes_per_s: moving KV to host memory or back,
    before a step.
    flops_per_s: matrix products with the weights. attention_flops_per_s: queries times keys, weights times values.
    step_s, row_s: what the engine itself takes, for a step and for each row of logits of which a token is drawn.
    """

    name: str
    span_s: float
    weight_bytes_per_s: float | None
    flops_per_s: float | None
    attention_flops_per_s: float | None
    kv_bytes_per_s: float | None
    step_s: float = 0.0
    row_s: float = 0.0
    host_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        for name in ("span_s", "step_s", "row_s"):
            if not getattr(self, name) >= 0:
                raise ValueError(f"{name}: {getattr(self, name)} is not allowed; it must be 0 or more")
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name.endswith("_per_s") and value is not None and not value > 0:
                raise ValueError(f"{field.name}: {value} is not allowed; it must be above 0, or null for no cost")

    def save(self, path: Path) -> None:
        """Write it as JSON."""
        path.write_text(json.dumps(asdict(self), indent=2) + "\n")

    @classmethod
    def load(cls, path: Path) -> HardwareProfile:
        """Read what `save` wrote. ValueError, with the field's name, for anything else."""
        values = json.loads(path.read_text())
        names = {field.name for field in fields(cls)}
        needed = {field.name for field in fields(cls) if field.default is MISSING}
        if not isinstance(values, dict) or not needed <= values.keys() <= names:
            raise ValueError(f"{path}: expected an object with the fields {', '.join(sorted(names))}")
        for name, value in values.items():
            kinds = (int, float, NoneType) if name.endswith("_per_s") else (int, float)
            if name != "name" and not isinstance(value, kinds):
                raise ValueError(f"{path}: {name}: expected a number, got {value!r}")
        return cls(**values)


class StepWork(NamedTuple):
    """What a step has to do, in the units that a HardwareProfile has speeds for."""

    num_spans: int
    weight_bytes: float
    flops: float
    attention_flops: float
    kv_bytes: float
    num_rows: int


class CostModel:
    """Tells how long a batch takes on a machine. Cost: O(spans)."""

    def __init__(self, shape: ModelShape, profile: HardwareProfile, block_size: int = 0) -> None:
        self.profile = profile
        self._work = WorkModel(shape, block_size)
        self._seconds_per = (
            profile.span_s,
            _inverse(profile.weight_bytes_per_s),
            _inverse(profile.flops_per_s),
            _inverse(profile.attention_flops_per_s),
            _inverse(profile.kv_bytes_per_s),
            profile.row_s,
        )

    def step_s(self, batch: Batch) -> float:
        """Return the seconds that an executor needs for the batch."""
        work = self._work.of(batch)
        return self.profile.step_s + sum(amount * each for amount, each in zip(work, self._seconds_per, strict=True))

    def transfer_s(self, num_tokens: int) -> float:
        """Return the seconds that moving the KV of so many tokens to host memory, or back, takes."""
        return self._work.kv_bytes_per_token * num_tokens * _inverse(self.profile.host_bytes_per_s)


class WorkModel:
    """Counts what a batch has to do on a model of some shape, weights and KV being bfloat16.

    block_size: tokens in the blocks that groups of spans have in common; 0 where every span reads for itself.
    """

    def __init__(self, shape: ModelShape, block_size: int = 0) -> None:
        self._block_size = block_size
        query, key = shape.num_heads * shape.head_dim, shape.num_kv_heads * shape.head_dim
        per_layer = shape.hidden_size * (2 * query + 2 * key + 3 * shape.intermediate_size)
        num_head_weights = shape.hidden_size * shape.vocab_size
        self._weight_bytes = _BYTES_PER_VALUE * (shape.num_layers * per_layer + num_head_weights)
        self._flops_per_token = 2 * shape.num_layers * per_layer
        self._flops_per_logits = 2 * num_head_weights
        self._flops_per_pair = 4 * shape.num_layers * query
        self._window = shape.sliding_window
        self.kv_bytes_per_token = _BYTES_PER_VALUE * shape.num_layers * 2 * key
        """What one token's keys and values take over all layers."""

    def of(self, batch: Batch) -> StepWork:
        """Return the work of one step."""
        num_tokens = num_logits = num_pairs = num_read = 0
        window = self._window
        for span in batch.spans:
            num, start = len(span.tokens), span.start
            num_tokens += num
            num_logits += span.num_logits
            if window is not None:
                start = min(start, window)
            num_pairs += num * start + num * (num + 1) // 2
            num_read += start + num
        if batch.shared and self._block_size:
            num_read -= self._block_size * _num_blocks_saved(batch.shared)
        return StepWork(
            len(batch.spans),
            self._weight_bytes,
            self._flops_per_token * num_tokens + self._flops_per_logits * num_logits,
            self._flops_per_pair * num_pairs,
            self.kv_bytes_per_token * num_read,
            num_logits,
        )


def _num_blocks_saved(groups: Sequence[Group]) -> int:
    """How many reads of a block groups save, nested ones counted by what they share beyond the outer."""
    num_saved = 0
    num_counted: dict[int, int] = {}
    for members, num_blocks in groups:
        num_saved += (len(members) - 1) * (num_blocks - num_counted.get(members[0], 0))
        num_counted |= dict.fromkeys(members, num_blocks)
    return num_saved


def _inverse(speed: float | None) -> float:
    return 0.0 if speed is None else 1.0 / speed

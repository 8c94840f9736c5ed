"""NativeExecutor: a Llama-layout model in C++, weights of 16, 8 or 4 bits, bf16 KV, float32 sums; one call a step.

Batch-invariant by construction: every output row is computed by one sequence of operations, whatever else is in the
call. docs/native.md explains how; cpp/layout.h draws the data.
"""

from __future__ import annotations

import ctypes
import weakref
import zlib
from typing import TYPE_CHECKING, Literal, TypeAlias

import numpy as np

from anaphora.engine.executor import LayerGroup, Output
from anaphora.engine.native.adapter import NativeAdapter
from anaphora.engine.native.library import Sizes, load_library, native_paths
from anaphora.engine.native.packing import pack_weights
from anaphora.engine.validation import check_batch, check_copies, check_pages
from anaphora.engine.workers import default_num_threads
from anaphora.model import StoredWeights

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from anaphora.engine.executor import Batch, Group, Span
    from anaphora.model import LoraAdapter, ModelShape, Weights

    Array: TypeAlias = NDArray[np.float32]

WeightFormat: TypeAlias = Literal["bf16", "q8_0"]

BLOCK_SIZES = (16, 32, 64, 128)

MAX_SHARING_TOKENS = 16
"""Longer spans attend alone: their own rows are enough to make the most of a key tile once it is loaded."""

CELL_TOKENS, KEY_TILE, STRIP = 16, 256, 32
"""Constants of cpp/layout.h: tokens of a KV cell, tokens of one partial softmax, outputs of a weight strip."""

WEIGHT_FORMATS = ("bf16", "q8_0")
_BF16_BYTES = 2
_POSITIONS_AT_ONCE = 4096


class NativeExecutor:
    """Implements `anaphora.engine.executor.Executor` for every architecture that `anaphora.model` loads.

    It packs the weights, so the caller may drop `weights`. Construction takes time proportional to them, and the first
    one on a machine compiles the library.

    num_threads: by default one for each CPU that this process may use. It does not show in the bits.
    path: one of `native_paths()`, by default the first. Bits differ between paths.
    weights: of `StoredWeights`, quantised matrices stay so, and are multiplied with as if they were float32.
    weight_format: how other matrices are kept. "bf16", or "q8_0", as GGUF's blocks of 32 numbers of 8 bits: 9/16 of
        the memory, so faster at small batches; weights that were Q8_0 lose nothing, others half a step of 1/127 of the
        largest in their block.

    Raises:
        NativeUnavailableError: the library cannot be built on this machine.
        ValueError: a path that the processor cannot run, num_threads below 1, or an unknown format.
        MemoryError: there is not enough memory for the weights.
    """

    def __init__(
        self,
        shape: ModelShape,
        weights: Weights | StoredWeights,
        num_threads: int | None = None,
        path: str | None = None,
        weight_format: WeightFormat = "bf16",
    ) -> None:
        paths = native_paths()
        if path is not None and path not in paths:
            raise ValueError(f"path: {path!r} is not allowed; this machine's are {paths}")
        if num_threads is not None and num_threads < 1:
            raise ValueError(f"num_threads: {num_threads} is not allowed; it must be at least 1")
        if weight_format not in WEIGHT_FORMATS:
            raise ValueError(f"weight_format: {weight_format!r} is not allowed; allowed are {WEIGHT_FORMATS}")
        self.path = path or paths[0]
        self._shape = shape
        self._num_blocks = self._block_size = self._num_host_blocks = 0
        self._adapters: dict[str, NativeAdapter] = {}
        self._library = load_library()
        sizes = Sizes(
            shape.num_layers,
            shape.hidden_size,
            shape.intermediate_size,
            shape.num_heads,
            shape.num_kv_heads,
            shape.head_dim,
            shape.vocab_size,
            shape.max_context,
            shape.sliding_window or 0,
            shape.rms_norm_eps,
        )
        self._handle = self._library.anaphora_create(
            self.path.encode(), ctypes.byref(sizes), num_threads or default_num_threads(), weight_format == "q8_0"
        )
        if not self._handle:
            raise MemoryError("not enough memory, or too many threads, for the native executor")
        weakref.finalize(self, self._library.anaphora_destroy, self._handle)
        cosines, sines = _rope_tables(shape)
        rope = zlib.crc32(sines.data, zlib.crc32(cosines.data))
        kept = f"stored-{weight_format}" if isinstance(weights, StoredWeights) else weight_format
        self._numerics_id = f"native-{self.path}-{kept}-strip{STRIP}-keys{KEY_TILE}-rope{rope:08x}"
        if not pack_weights(self._library, self._handle, shape, weights, cosines, sines):
            raise MemoryError("not enough memory for the model's weights")

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """16 to 128 tokens; the bits are the same with each."""
        return BLOCK_SIZES

    @property
    def numerics_id(self) -> str:
        """Kernel path, how weights are kept, tile constants, and a checksum of the tabulated sines and cosines."""
        return self._numerics_id

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """All layers in one group with full tables; a sliding window is a matter of masks."""
        shape = self._shape
        value_dims = -(-shape.head_dim // CELL_TOKENS) * CELL_TOKENS
        kv_bytes = shape.num_layers * shape.num_kv_heads * (shape.head_dim + value_dims) * _BF16_BYTES
        return (LayerGroup(tuple(range(shape.num_layers)), kv_bytes),)

    @property
    def vocab_size(self) -> int:
        """Length of a row of logits."""
        return self._shape.vocab_size

    @property
    def max_context(self) -> int:
        """The longest sequence, in tokens."""
        return self._shape.max_context

    @property
    def adapters(self) -> Collection[str]:
        """The digests of the adapters that are loaded."""
        return self._adapters.keys()

    def load_adapter(self, adapter: LoraAdapter) -> None:
        """Take an adapter in, rounded to bf16 whatever the weights' format; of one that is there already, nothing.

        Raises:
            MemoryError: there is not enough memory for it.
        """
        if adapter.digest not in self._adapters:
            self._adapters[adapter.digest] = NativeAdapter(self._library, self._handle, self._shape, adapter)

    def unload_adapter(self, digest: str) -> None:
        """Forget an adapter, KeyError if there is none such."""
        del self._adapters[digest]

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Make zeroed pages for blocks 0 .. num_blocks, in place of any earlier ones.

        Raises:
            ValueError: num_blocks below 1, or a block size that is not in `block_sizes`.
            MemoryError: there is not enough memory for them; there are no pages then.
        """
        check_pages(num_blocks, block_size, BLOCK_SIZES)
        self._num_blocks = self._num_host_blocks = 0
        if not self._library.anaphora_allocate_pages(self._handle, num_blocks, block_size):
            raise MemoryError(f"not enough memory for {num_blocks} blocks of {block_size} tokens")
        self._num_blocks, self._block_size = num_blocks, block_size

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, (from, to), in every layer, one pair after the other.

        Raises:
            ValueError: a block that does not exist, or the null block as the target.
            RuntimeError: there are no pages yet.
        """
        self._check_has_pages()
        check_copies(pairs, self._num_blocks)
        for source, target in pairs:
            self._library.anaphora_copy_block(self._handle, source, target)

    def allocate_host(self, num_blocks: int) -> None:
        """Make zeroed host blocks 1 .. num_blocks, in place of any earlier ones. They take memory as they are written.

        Raises:
            ValueError: num_blocks below 1.
            RuntimeError: there are no pages yet.
            MemoryError: there is not enough memory for them; there are none then.
        """
        self._check_has_pages()
        check_pages(num_blocks, self._block_size, BLOCK_SIZES)
        self._num_host_blocks = 0
        if not self._library.anaphora_allocate_host(self._handle, num_blocks):
            raise MemoryError(f"not enough memory for {num_blocks} host blocks of {self._block_size} tokens")
        self._num_host_blocks = num_blocks

    def save_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages to host blocks. ValueError for one that does not exist, RuntimeError if there are none."""
        self._check_has_host_blocks()
        check_copies(pairs, self._num_blocks, self._num_host_blocks)
        for source, target in pairs:
            self._library.anaphora_save_block(self._handle, source, target)

    def load_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy host blocks back. ValueError for one that does not exist, RuntimeError if there are none."""
        self._check_has_host_blocks()
        check_copies(pairs, self._num_host_blocks, self._num_blocks)
        for source, target in pairs:
            self._library.anaphora_load_block(self._handle, source, target)

    def execute(self, batch: Batch) -> Output:
        """Compute the spans, write their KV and return the logits asked for.

        Key tiles that spans have in common, by `batch.shared`, are attended to once for all, with the same bits.
        Nothing is written if the batch is refused.

        Raises:
            ValueError: a span or group that cannot be computed; the message names its index and field.
            RuntimeError: there are no pages yet.
            MemoryError: there is not enough memory for a step of this size; nothing was written.
        """
        self._check_has_pages()
        check_batch(
            batch,
            vocab_size=self.vocab_size,
            max_context=self.max_context,
            num_blocks=self._num_blocks,
            block_size=self._block_size,
            adapters=self._adapters,
        )
        if not batch.spans:
            return Output([])
        groups = _groups_of_short_spans(batch)
        order = _groups_together(groups, len(batch.spans))
        ordered = [batch.spans[i] for i in order]
        tokens = np.concatenate([span.tokens for span in ordered])
        tables = [self._needed_table(span) for span in ordered]
        firsts = np.cumsum([0, *(len(table) for table in tables)])
        spans = np.array(
            [
                (span.start, len(span.tokens), span.num_logits, first)
                for span, first in zip(ordered, firsts[:-1], strict=True)
            ],
            np.int32,
        )
        blocks = np.concatenate(tables)
        adapters = np.array(
            [0 if span.adapter is None else self._adapters[span.adapter].handle for span in ordered], np.uintp
        )
        place = {span: at for at, span in enumerate(order)}
        shared = np.array(
            [
                (min(place[i] for i in members), len(members), num_blocks * self._block_size // KEY_TILE)
                for members, num_blocks in groups
            ],
            np.int32,
        )
        ends = np.cumsum(spans[:, 2])
        logits = np.empty((ends[-1], -(-self.vocab_size // STRIP) * STRIP), np.float32)
        if not self._library.anaphora_execute(
            self._handle,
            tokens.ctypes.data,
            spans.ctypes.data,
            adapters.ctypes.data,
            len(spans),
            blocks.ctypes.data,
            shared.ctypes.data,
            len(shared),
            logits.ctypes.data,
        ):
            raise MemoryError(f"not enough memory for a step of {len(tokens)} tokens")
        output: list[Array | None] = [None] * len(order)
        for i, end, span in zip(order, ends.tolist(), ordered, strict=True):
            if span.num_logits:
                output[i] = logits[end - span.num_logits : end, : self.vocab_size]
        return Output(output)

    def _needed_table(self, span: Span) -> NDArray[np.int32]:
        num_needed = -(-(span.start + len(span.tokens)) // self._block_size)
        return np.frombuffer(span.block_tables[0], np.int32, num_needed)

    def _check_has_pages(self) -> None:
        if not self._num_blocks:
            raise RuntimeError("there are no KV pages yet; call allocate_kv first")

    def _check_has_host_blocks(self) -> None:
        if not self._num_host_blocks:
            raise RuntimeError("there are no host blocks yet; call allocate_host first")


def _groups_of_short_spans(batch: Batch) -> list[Group]:
    """The groups without their long spans, outer ones first."""
    is_short = [len(span.tokens) <= MAX_SHARING_TOKENS for span in batch.spans]
    short = ((tuple(i for i in members if is_short[i]), num_blocks) for members, num_blocks in batch.shared)
    return sorted((group for group in short if len(group[0]) > 1), key=lambda group: (-len(group[0]), group[1]))


def _groups_together(groups: list[Group], num_spans: int) -> list[int]:
    """The spans in an order in which those of each group follow one another."""
    groups_of: list[list[int]] = [[] for _ in range(num_spans)]
    for number, (members, _) in enumerate(groups):
        for i in members:
            groups_of[i].append(number)
    return sorted(range(num_spans), key=groups_of.__getitem__)


def _rope_tables(shape: ModelShape) -> tuple[Array, Array]:
    """Cosines and sines, float32 [max_context, head_dim / 2], of angles in float64, never all there at once."""
    frequencies = shape.inverse_frequencies()
    cosines, sines = (np.empty((shape.max_context, len(frequencies)), np.float32) for _ in range(2))
    for first in range(0, shape.max_context, _POSITIONS_AT_ONCE):
        rows = slice(first, min(first + _POSITIONS_AT_ONCE, shape.max_context))
        angles = np.arange(rows.start, rows.stop)[:, None] * frequencies
        cosines[rows], sines[rows] = np.cos(angles), np.sin(angles)
    return cosines, sines

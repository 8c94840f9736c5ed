"""ReferenceExecutor: a Llama-layout model in numpy, float32; short, obvious and batch-invariant.

The oracle of the faster executors, and itself fast enough to serve a small model. A row of logits is the same bits
however its sequence was cut into spans, wherever its KV lies and whatever else is in the batch, because everything
here is row-wise with an order of operations of its own: products by `InvariantProduct`, attention by key tiles at fixed
positions, the rest per element or along one row. docs/exactness.md explains.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from anaphora.engine.executor import LayerGroup, Output
from anaphora.engine.invariant_math import InvariantProduct, rms_norm, silu
from anaphora.engine.kv_pages import KVPages
from anaphora.engine.low_rank import BatchAdapters, LowRankAdapters
from anaphora.engine.tiled_attention import KEY_TILE, QUERY_BLOCK, KeyTile, attend, plan_tiles
from anaphora.engine.validation import check_batch, check_pages
from anaphora.engine.workers import Workers

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from numpy.typing import NDArray

    from anaphora.engine.executor import Batch, Span
    from anaphora.model import LayerWeights, LoraAdapter, ModelShape, Weights

    Array: TypeAlias = NDArray[np.float32]

BLOCK_SIZES = (16, 32, 64, 128)

ATTENTION_ROW_COUNTS = (8,)
"""8 rows already run at full speed on operands as small as a key tile."""

HEAD_COLUMNS = 8192
"""Vocabulary entries per product of the output head, so that checking the product does not take the whole of it."""

HEAD_ROW_COUNTS = (8, 16, 32, 64)

MIN_COLUMNS = 64
"""Weights are cut at multiples of this many columns, so that no part is too narrow for the kernels."""


class ReferenceExecutor:
    """Implements `anaphora.engine.executor.Executor` for every architecture that `anaphora.model` loads.

    It copies the layers' weights into the arrangement of its products, so the caller may drop `weights`; embedding and
    output are used in place. Construction takes time proportional to the weights (0.5 s for 135 M) and settles the row
    counts of the products (see `InvariantProduct`). Weights are cut by columns into a part for each thread; so the bits
    depend on the number of threads, by default one for each CPU.
    """

    def __init__(self, shape: ModelShape, weights: Weights, num_threads: int | None = None) -> None:
        self._shape = shape
        self._workers = Workers(num_threads)
        self._embedding = weights.embedding
        self._layers = [_Layer.arrange(layer, self._workers.num_threads) for layer in weights.layers]
        self._final_norm = weights.final_norm
        output = np.require(weights.output, np.float32, ["C", "A"])
        self._head = tuple(output[row : row + HEAD_COLUMNS].T for row in range(0, shape.vocab_size, HEAD_COLUMNS))
        angles = np.arange(shape.max_context)[:, None, None] * shape.inverse_frequencies()
        self._cosines, self._sines = np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
        self._pages: KVPages | None = None
        self._host_pages: KVPages | None = None
        self._adapters = LowRankAdapters(shape)

        first = self._layers[0]
        tile = np.random.default_rng(0).standard_normal((shape.head_dim, KEY_TILE), np.float32)
        with self._workers.alone():
            self._layer_product = InvariantProduct(
                [parts[i] for parts in (first.qkv, first.o, first.gate_up, first.down) for i in (0, -1)]
            )
            self._head_product = InvariantProduct([self._head[0], self._head[-1]], HEAD_ROW_COUNTS)
            self._attention_product = InvariantProduct([tile, np.ascontiguousarray(tile.T)], ATTENTION_ROW_COUNTS)
        self._numerics_id = self._describe_numerics()

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """16 to 128 tokens; the bits are the same with each."""
        return BLOCK_SIZES

    @property
    def numerics_id(self) -> str:
        """dtype, row counts of the layers', the head's and the attention's products, key tile, BLAS, and a digest.

        The digest is of bits that this BLAS gives on this CPU for this model's weights, cut for this number of threads.
        """
        return self._numerics_id

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """All layers in one group with full tables; a sliding window is a matter of masks."""
        shape = self._shape
        kv_bytes = shape.num_layers * 2 * shape.num_kv_heads * shape.head_dim * np.dtype(np.float32).itemsize
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
        return self._adapters.digests

    def load_adapter(self, adapter: LoraAdapter) -> None:
        """Take an adapter in, in float32. The first one of a rank settles the row counts of its products."""
        with self._workers.alone():
            self._adapters.load(adapter)

    def unload_adapter(self, digest: str) -> None:
        """Forget an adapter, KeyError if there is none such."""
        self._adapters.unload(digest)

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Make zeroed pages for blocks 0 .. num_blocks, in place of any earlier ones.

        Raises:
            ValueError: num_blocks below 1, or a block size that is not in `block_sizes`.
        """
        check_pages(num_blocks, block_size, BLOCK_SIZES)
        shape = self._shape
        self._pages = KVPages(shape.num_layers, shape.num_kv_heads, shape.head_dim, num_blocks, block_size)
        self._host_pages = None

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, (from, to), in every layer, one pair after the other.

        Raises:
            ValueError: a block that does not exist, or the null block as the target.
            RuntimeError: there are no pages yet.
        """
        self._allocated_pages().copy(pairs)

    def allocate_host(self, num_blocks: int) -> None:
        """Make zeroed host blocks 1 .. num_blocks, in place of any earlier ones. They take memory as they are written.

        Raises:
            ValueError: num_blocks below 1.
            RuntimeError: there are no pages yet.
        """
        shape, block_size = self._shape, self._allocated_pages().block_size
        check_pages(num_blocks, block_size, BLOCK_SIZES)
        self._host_pages = KVPages(shape.num_layers, shape.num_kv_heads, shape.head_dim, num_blocks, block_size)

    def save_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages to host blocks. ValueError for one that does not exist, RuntimeError if there are none."""
        self._allocated_host_pages().copy_from(self._allocated_pages(), pairs)

    def load_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy host blocks back. ValueError for one that does not exist, RuntimeError if there are none."""
        self._allocated_pages().copy_from(self._allocated_host_pages(), pairs)

    def execute(self, batch: Batch) -> Output:
        """Compute the spans, write their KV and return the logits asked for.

        `batch.shared` is not made use of. Nothing is written if the batch is refused.

        Raises:
            ValueError: a span that cannot be computed; the message names its index and field.
            RuntimeError: there are no pages yet.
        """
        pages = self._allocated_pages()
        check_batch(
            batch,
            vocab_size=self.vocab_size,
            max_context=self.max_context,
            num_blocks=pages.num_blocks,
            block_size=pages.block_size,
            adapters=self.adapters,
        )
        if not batch.spans:
            return Output([])
        sequences, num_rows = [], 0
        for span in batch.spans:
            sequences.append(_Sequence.of(span, num_rows, pages.block_size, self._shape.sliding_window))
            num_rows += len(span.tokens)
        tokens = np.concatenate([span.tokens for span in batch.spans])
        # silu overflows on the way to 0; sums of numbers that a broken model made too large may do so anywhere.
        with np.errstate(over="ignore", invalid="ignore"), self._workers.alone():
            hidden = self._forward(tokens, sequences, pages, self._adapters.of_batch(batch.spans))
            return Output(self._logits(hidden, batch.spans, sequences))

    def _forward(
        self, tokens: NDArray[np.int32], sequences: list[_Sequence], pages: KVPages, adapters: BatchAdapters
    ) -> Array:
        shape = self._shape
        num_rows = len(tokens)
        first_key, first_value = shape.num_heads, shape.num_heads + shape.num_kv_heads
        slots = np.concatenate([sequence.slots for sequence in sequences])
        positions = np.concatenate([sequence.positions for sequence in sequences])
        cosines, sines = self._cosines[positions], self._sines[positions]
        scale = np.float32(shape.head_dim**-0.5)
        hidden = self._embedding[tokens]
        for number, layer in enumerate(self._layers):
            normed = rms_norm(hidden, layer.attention_norm, shape.rms_norm_eps)
            qkv = self._multiply(normed, layer.qkv)
            adapters.add(number, ("q", "k", "v"), normed, qkv)
            if layer.qkv_bias is not None:
                qkv += layer.qkv_bias
            heads = qkv.reshape(num_rows, -1, shape.head_dim)
            queries, keys, values = heads[:, :first_key], heads[:, first_key:first_value], heads[:, first_value:]
            if layer.q_norm is not None and layer.k_norm is not None:
                queries = rms_norm(queries, layer.q_norm, shape.rms_norm_eps)
                keys = rms_norm(keys, layer.k_norm, shape.rms_norm_eps)
            queries = _rotate(queries, cosines, sines)
            queries *= scale
            pages.write(number, slots, _rotate(keys, cosines, sines), values)
            attended = self._attend(queries, number, sequences, pages)
            attended = attended.reshape(num_rows, -1)
            output = self._multiply(attended, layer.o)
            adapters.add(number, ("o",), attended, output)
            hidden += output

            normed = rms_norm(hidden, layer.mlp_norm, shape.rms_norm_eps)
            gate_up = self._multiply(normed, layer.gate_up)
            adapters.add(number, ("gate", "up"), normed, gate_up)
            activated = silu(gate_up[:, : shape.intermediate_size])
            activated *= gate_up[:, shape.intermediate_size :]
            output = self._multiply(activated, layer.down)
            adapters.add(number, ("down",), activated, output)
            hidden += output
        return hidden

    def _multiply(self, rows: Array, parts: tuple[Array, ...]) -> Array:
        """Return rows @ weight for a weight that is cut by columns."""
        return np.concatenate(self._workers.map(lambda part: self._layer_product(rows, part), parts), axis=1)

    def _attend(self, queries: Array, layer: int, sequences: list[_Sequence], pages: KVPages) -> Array:
        """Attend piece by piece: which queries are computed together does not show in the bits."""
        attended = np.empty_like(queries)

        def attend_piece(piece: _Piece) -> None:
            attended[piece.rows] = attend(queries[piece.rows], pages, layer, piece.tiles, self._attention_product)

        self._workers.map(attend_piece, [piece for sequence in sequences for piece in sequence.pieces])
        return attended

    def _logits(self, hidden: Array, spans: list[Span], sequences: list[_Sequence]) -> list[Array | None]:
        wanted = [
            hidden[sequence.rows.stop - span.num_logits : sequence.rows.stop]
            for span, sequence in zip(spans, sequences, strict=True)
        ]
        rows = rms_norm(np.concatenate(wanted), self._final_norm, self._shape.rms_norm_eps)
        parts = self._workers.map(lambda columns: self._head_product(rows, columns), self._head)
        logits = np.concatenate(parts, axis=1)
        ends = np.cumsum([span.num_logits for span in spans])
        return [
            logits[end - span.num_logits : end] if span.num_logits else None
            for span, end in zip(spans, ends.tolist(), strict=True)
        ]

    def _allocated_pages(self) -> KVPages:
        if self._pages is None:
            raise RuntimeError("there are no KV pages yet; call allocate_kv first")
        return self._pages

    def _allocated_host_pages(self) -> KVPages:
        if self._host_pages is None:
            raise RuntimeError("there are no host blocks yet; call allocate_host first")
        return self._host_pages

    def _describe_numerics(self) -> str:
        blas = np.show_config(mode="dicts")["Build Dependencies"]["blas"]
        products = (self._layer_product, self._head_product, self._attention_product)
        digest = hashlib.blake2b(digest_size=6)
        for product in products:
            digest.update(product.fingerprint.encode())
        digest.update(np.exp(np.linspace(-20, 0, KEY_TILE, dtype=np.float32)).tobytes())
        rows = "/".join("+".join(map(str, product.row_counts)) for product in products)
        return f"reference-float32-rows{rows}-keys{KEY_TILE}-{blas['name']}-{blas['version']}-{digest.hexdigest()}"


@dataclass(frozen=True, slots=True)
class _Layer:
    """One layer's weights as its products take them: what reads the same rows fused, [inputs, outputs], cut by columns
    into parts."""

    attention_norm: Array
    qkv: tuple[Array, ...]
    qkv_bias: Array | None
    q_norm: Array | None
    k_norm: Array | None
    o: tuple[Array, ...]
    mlp_norm: Array
    gate_up: tuple[Array, ...]
    down: tuple[Array, ...]

    @classmethod
    def arrange(cls, layer: LayerWeights, num_parts: int) -> _Layer:
        biases = [bias for bias in (layer.q_bias, layer.k_bias, layer.v_bias) if bias is not None]
        return cls(
            attention_norm=layer.attention_norm,
            qkv=_in_parts(num_parts, layer.q, layer.k, layer.v),
            qkv_bias=np.concatenate(biases) if biases else None,
            q_norm=layer.q_norm,
            k_norm=layer.k_norm,
            o=_in_parts(num_parts, layer.o),
            mlp_norm=layer.mlp_norm,
            gate_up=_in_parts(num_parts, layer.gate, layer.up),
            down=_in_parts(num_parts, layer.down),
        )


def _in_parts(num_parts: int, *matrices: Array) -> tuple[Array, ...]:
    """Return the matrices [outputs, inputs] on top of each other, transposed, in parts of whole MIN_COLUMNS columns."""
    fused = np.concatenate(matrices)
    width = -(-len(fused) // (num_parts * MIN_COLUMNS)) * MIN_COLUMNS
    return tuple(np.ascontiguousarray(fused[row : row + width].T) for row in range(0, len(fused), width))


@dataclass(frozen=True, slots=True)
class _Piece:
    """Some of a span's tokens: their rows of the batch, and the key tiles that they meet."""

    rows: slice
    tiles: list[KeyTile]


@dataclass(frozen=True, slots=True)
class _Sequence:
    """A span as the layers see it: its rows of the batch, their positions and slots, and its pieces for attention."""

    rows: slice
    positions: NDArray[np.int64]
    slots: NDArray[np.int64]
    pieces: list[_Piece]

    @classmethod
    def of(cls, span: Span, first_row: int, block_size: int, window: int | None) -> _Sequence:
        num_tokens = len(span.tokens)
        end = span.start + num_tokens
        table = np.array(span.block_tables[0][: -(-end // block_size)], np.int64)
        positions = np.arange(span.start, end)
        pieces = []
        for first in range(0, num_tokens, QUERY_BLOCK):
            length = min(QUERY_BLOCK, num_tokens - first)
            start = span.start + first
            blocks = table[: -(-(start + length) // block_size)]
            tiles = plan_tiles(start, length, blocks, block_size, window)
            pieces.append(_Piece(slice(first_row + first, first_row + first + length), tiles))
        return cls(
            rows=slice(first_row, first_row + num_tokens),
            positions=positions,
            slots=table[positions // block_size] * block_size + positions % block_size,
            pieces=pieces,
        )


def _rotate(heads: Array, cosines: Array, sines: Array) -> Array:
    """Turn heads [n, heads, head_dim] by their positions' angles [n, 1, head_dim / 2] (RoPE, arXiv 2104.09864)."""
    half = heads.shape[-1] // 2
    left, right = heads[..., :half], heads[..., half:]
    return np.concatenate([left * cosines - right * sines, right * cosines + left * sines], axis=-1)

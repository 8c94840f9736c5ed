"""TorchExecutor: a `transformers` model over paged KV, on a CPU in float32 or on CUDA.

    step:   spans of several sequences ──── one row per token ────┐
    tiles:  | 8 tokens | 8 tokens | 8 tokens, padded |            cut at fixed sizes
    tile:   the whole model: embedding ... attention over the pages ... logits

A span may go on in the next tile: its first tokens' KV is in the pages of every layer by then.
"""

from __future__ import annotations

import hashlib
import inspect
import logging
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from anaphora.engine.executor import Batch, LayerGroup, Output, Span
from anaphora.engine.torch_executor.attention import (
    IMPLEMENTATION,
    KEY_TILE,
    AttentionCall,
    PagedAttention,
    Piece,
    attend_densely,
    attending,
)
from anaphora.engine.torch_executor.invariance import TILE_SIZES, agreeing_sizes, cut, num_sample_tokens, starts
from anaphora.engine.torch_executor.modules import check_config, module_from_arrays, module_from_folder
from anaphora.engine.torch_executor.pages import KVLayer, TorchPages, group_layers
from anaphora.engine.validation import check_batch, check_pages
from anaphora.model import ModelError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray
    from transformers import PreTrainedModel

    from anaphora.engine.torch_executor.attention import Attending
    from anaphora.model import Model

    Logits = NDArray[np.float32]

log = logging.getLogger(__name__)

BLOCK_SIZES = (16, 32, 64, 128)

OWN_FORWARD_TOLERANCE = {torch.float32: 1e-4}
"""How far logits may be from the model's own forward pass, as a share of the largest of them."""
LOW_PRECISION_TOLERANCE = 5e-2

_PROBE_TOKENS = 40


class TorchExecutor:
    """Implements `anaphora.engine.executor.Executor` for decoders of `transformers`, any of them that attends through
    the library's attention interface and whose layers have full attention or a sliding window.

    On construction it runs the model a few times, some 800 tokens in all: to learn what each layer keeps, to compare
    a short sequence with the model's own forward pass, and to find the `tile_sizes` with which a token's bits do not
    depend on its company. If there are none (experts that are computed with as many tokens as chose them are the usual
    cause), `is_invariant` is False, the log says so, and results agree within rounding only.

    module: set to evaluation, and to our attention, for good. tile_sizes: what to try, ascending.

    Raises:
        ModelError: a model of a kind that cannot be run over pages, or whose own forward pass gives other logits.
    """

    def __init__(self, module: PreTrainedModel, tile_sizes: Sequence[int] = TILE_SIZES) -> None:
        check_config(module.config)
        if not module._supports_attention_backend:
            raise ModelError(
                f"model_type: {module.config.model_type!r} does not attend through transformers' attention interface"
            )
        self._module = module.eval()
        self._device, self._dtype = module.device, module.dtype
        self._is_cuda = self._device.type == "cuda"
        self._can_choose_rows = "logits_to_keep" in inspect.signature(module.forward).parameters
        self._pages: TorchPages | None = None
        self._host_pages: TorchPages | None = None
        self._tile_sizes = tuple(tile_sizes)
        module.set_attn_implementation(IMPLEMENTATION)
        with torch.inference_mode():
            self._vocab_size, layers = self._look_at_layers()
            self._kv_layers = list(layers.values())
            self._layer_groups = group_layers(self._kv_layers, self._dtype.itemsize)
            groups = {layer: number for number, group in enumerate(self._layer_groups) for layer in group.layers}
            self._layers = {attention: (number, groups[number]) for number, attention in enumerate(layers)}
            self._compare_with_own_forward()
            self._settle_tile_sizes()
        self._pages = None

    @classmethod
    def of(cls, model: Model, *, device: str | None = None, dtype: torch.dtype | None = None) -> TorchExecutor:
        """Return the executor of a loaded model: from its folder if it has one, or else from its arrays.

        device: by default "cuda" where there is one, or else "cpu". dtype: float32 on a CPU, bfloat16 on CUDA.
        """
        device = device or ("cuda" if torch.cuda.is_available() else "cpu")
        dtype = dtype or (torch.float32 if device == "cpu" else torch.bfloat16)
        if model.folder is not None:
            module = module_from_folder(model.folder, dtype, device)
        else:
            module = module_from_arrays(model.shape, model.weights, dtype, device)
        executor = cls(module)
        if model.tokenizer.vocab_size > executor.vocab_size:
            raise ModelError(
                f"vocab_size: the tokenizer has {model.tokenizer.vocab_size} tokens, "
                f"the model gives logits of {executor.vocab_size}"
            )
        return executor

    @property
    def is_invariant(self) -> bool:
        """Whether a row of logits was found to be the same bits whatever else is computed, and however it was cut."""
        return self._is_invariant

    @property
    def tile_sizes(self) -> tuple[int, ...]:
        """How many tokens go through the model at once, ascending."""
        return self._tile_sizes

    @property
    def block_sizes(self) -> tuple[int, ...]:
        """16 to 128 tokens; the bits are the same with each."""
        return BLOCK_SIZES

    @property
    def numerics_id(self) -> str:
        """Device, dtype, tile sizes ("varying" if no bits are promised), key tile, and a digest of sample logits."""
        return self._numerics_id

    @property
    def layer_groups(self) -> tuple[LayerGroup, ...]:
        """Layers by attention window; full attention first."""
        return self._layer_groups

    @property
    def vocab_size(self) -> int:
        """Length of a row of logits."""
        return self._vocab_size

    @property
    def max_context(self) -> int:
        """The longest sequence, in tokens."""
        return int(self._module.config.get_text_config(decoder=True).max_position_embeddings)

    def allocate_kv(self, num_blocks: int, block_size: int) -> None:
        """Make zeroed pages for blocks 0 .. num_blocks, in place of any earlier ones.

        Each block id has a page in every layer, also in layers of groups that do not hold it.

        Raises:
            ValueError: num_blocks below 1, or a block size that is not in `block_sizes`.
        """
        check_pages(num_blocks, block_size, BLOCK_SIZES)
        self._pages = TorchPages(self._kv_layers, num_blocks, block_size, self._dtype, self._device)
        self._host_pages = None

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Copy whole pages, (from, to), in every layer, one pair after the other.

        Raises:
            ValueError: a block that does not exist, or the null block as the target.
            RuntimeError: there are no pages yet.
        """
        self._allocated_pages().copy(pairs)

    def allocate_host(self, num_blocks: int) -> None:
        """Make zeroed host blocks 1 .. num_blocks in the machine's own memory, in place of any earlier ones.

        Raises:
            ValueError: num_blocks below 1.
            RuntimeError: there are no pages yet.
        """
        block_size = self._allocated_pages().block_size
        check_pages(num_blocks, block_size, BLOCK_SIZES)
        self._host_pages = TorchPages(self._kv_layers, num_blocks, block_size, self._dtype, "cpu")

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
            windows=[group.window for group in self._layer_groups],
        )
        if not batch.spans:
            return Output([])
        with torch.inference_mode():
            return Output(self._run(batch.spans, pages, self._tile_sizes))

    def _run(self, spans: Sequence[Span], pages: TorchPages, sizes: Sequence[int]) -> list[Logits | None]:
        first_rows = starts([len(span.tokens) for span in spans])
        tables = [[self._padded(table, span, pages) for table in span.block_tables] for span in spans]
        tokens = np.concatenate([span.tokens for span in spans])
        positions = np.concatenate([np.arange(span.start, span.start + len(span.tokens)) for span in spans])
        found: list[list[Logits]] = [[] for _ in spans]
        for start, stop, size in cut(len(tokens), sizes):
            pieces, slots, wanted = [], [], []
            for number, (span, first) in enumerate(zip(spans, first_rows, strict=True)):
                begin, end = max(start, first), min(stop, first + len(span.tokens))
                if begin >= end:
                    continue
                rows = slice(begin - start, end - start)
                at = torch.from_numpy(positions[begin:end]).to(self._device)
                padded = next(size for size in sizes if size >= end - begin)
                pieces.append(Piece(rows, int(positions[begin]), padded, self._up_to(at, tables[number], pages)))
                slots.append([_slots(at, table, pages.block_size) for table in tables[number]])
                wanted_from = max(begin, first + len(span.tokens) - span.num_logits)
                if wanted_from < end:
                    wanted.append((number, slice(wanted_from - start, end - start)))
            paged = PagedAttention(
                pages, self._layers, [torch.cat(group) for group in zip(*slots, strict=True)], pieces
            )
            logits = self._forward(tokens[start:stop], positions[start:stop], size, paged, bool(wanted))
            for number, rows in wanted:
                found[number].append(logits[rows])
        return [np.concatenate(rows) if rows else None for rows in found]

    def _forward(
        self,
        tokens: NDArray[np.int32],
        positions: NDArray[np.int64],
        size: int,
        paged: PagedAttention,
        wants_logits: bool,
    ) -> Logits:
        """Return the logits of a tile made up to `size` tokens; of fewer rows if nobody wants them."""
        padding = (0, size - len(tokens))
        ids = torch.from_numpy(np.pad(tokens.astype(np.int64), padding)).to(self._device)
        at = torch.from_numpy(np.pad(positions, padding)).to(self._device)
        attend: Attending = paged
        if self._is_cuda:
            from anaphora.engine.torch_executor.varlen import VarlenAttention  # noqa: PLC0415

            attend = VarlenAttention(paged)
        with attending(attend):
            return self._call(ids, at, 0 if wants_logits else 1)

    def _call(self, ids: torch.Tensor, positions: torch.Tensor, num_rows: int) -> Logits:
        options: dict[str, Any] = {"logits_to_keep": num_rows} if self._can_choose_rows else {}
        output = self._module(input_ids=ids[None], position_ids=positions[None], use_cache=False, **options)
        logits: Logits = output.logits[0].float().cpu().numpy()
        return logits

    def _padded(self, table: array[int], span: Span, pages: TorchPages) -> torch.Tensor:
        """The blocks of all tokens up to the span's end, and null blocks up to a whole key tile."""
        num_blocks = -(-(span.start + len(span.tokens)) // pages.block_size)
        blocks_per_tile = KEY_TILE // pages.block_size
        padded = np.zeros(-(-num_blocks // blocks_per_tile) * blocks_per_tile, np.int64)
        padded[:num_blocks] = table[:num_blocks]
        return torch.from_numpy(padded).to(self._device)

    @staticmethod
    def _up_to(positions: torch.Tensor, tables: Sequence[torch.Tensor], pages: TorchPages) -> list[torch.Tensor]:
        """The blocks of the key tiles that tokens at these positions meet."""
        num_tiles = int(positions[-1]) // KEY_TILE + 1
        return [table[: num_tiles * KEY_TILE // pages.block_size] for table in tables]

    def _look_at_layers(self) -> tuple[int, dict[torch.nn.Module, KVLayer]]:
        """Return the vocabulary's size, and what each attention layer keeps, in the order in which they are called."""
        layers: dict[torch.nn.Module, KVLayer] = {}

        def look(call: AttentionCall) -> torch.Tensor:
            if call.module in layers:
                raise ModelError(f"attention: {type(call.module).__name__} attends twice in one pass")
            num_kv_heads, _, key_dim = call.key.shape
            layers[call.module] = KVLayer(num_kv_heads, key_dim, call.value.shape[-1], call.window)
            return attend_densely(call)

        ids = torch.zeros(2, dtype=torch.int64, device=self._device)
        with attending(look):
            logits = self._call(ids, torch.arange(2, device=self._device), 0)
        num_layers = self._module.config.get_text_config(decoder=True).num_hidden_layers
        if len(layers) != num_layers:
            raise ModelError(f"num_hidden_layers: of {num_layers} layers, {len(layers)} attend through the interface")
        return logits.shape[-1], layers

    def _compare_with_own_forward(self) -> None:
        """Raise ModelError unless pages give what the model gives by itself."""
        tokens = self._sample(min(_PROBE_TOKENS, self.max_context))
        (actual,) = self._run([self._alone(tokens)], self._sample_pages(len(tokens)), self._tile_sizes)
        self._module.set_attn_implementation("eager")
        try:
            ids = torch.from_numpy(tokens.astype(np.int64)).to(self._device)
            expected = self._call(ids, torch.arange(len(tokens), device=self._device), 0)
        finally:
            self._module.set_attn_implementation(IMPLEMENTATION)
        assert actual is not None
        difference, largest = float(np.abs(actual - expected).max()), float(np.abs(expected).max())
        if not difference <= OWN_FORWARD_TOLERANCE.get(self._dtype, LOW_PRECISION_TOLERANCE) * largest:
            raise ModelError(
                f"model_type: {self._module.config.model_type!r} is not supported: over pages, logits of up to "
                f"{largest:.3g} differ by {difference:.3g} from the model's own"
            )

    def _settle_tile_sizes(self) -> None:
        sizes = self._tile_sizes
        while len(sizes) > 1 and num_sample_tokens(sizes) > self.max_context:
            sizes = sizes[:-1]
        num_tokens = min(num_sample_tokens(sizes), self.max_context)
        tokens = self._sample(num_tokens)
        pages = self._sample_pages(num_tokens)

        def run(lengths: Sequence[int], sizes: Sequence[int]) -> Logits:
            parts = []
            for start, length in zip(starts(lengths), lengths, strict=True):
                (logits,) = self._run([self._alone(tokens[start : start + length], start)], pages, sizes)
                assert logits is not None
                parts.append(logits)
            return np.concatenate(parts)

        agreeing = agreeing_sizes(run, num_tokens, sizes)
        self._is_invariant = bool(agreeing)
        self._tile_sizes = agreeing or sizes
        if not agreeing:
            log.warning(
                "executor: with torch, this model's logits depend in their last bits on what is computed together; "
                "cached and cold, alone and in company agree within rounding only"
            )
        names = "+".join(map(str, self._tile_sizes)) if agreeing else "varying"
        digest = hashlib.blake2b(run([num_tokens], self._tile_sizes).tobytes(), digest_size=6).hexdigest()
        dtype = str(self._dtype).removeprefix("torch.")
        self._numerics_id = f"torch-{self._device.type}-{dtype}-tokens{names}-keys{KEY_TILE}-{digest}"

    def _sample(self, num_tokens: int) -> NDArray[np.int32]:
        return np.random.default_rng(0).integers(0, self._vocab_size, num_tokens, np.int32)

    def _sample_pages(self, num_tokens: int) -> TorchPages:
        num_blocks = -(-num_tokens // BLOCK_SIZES[0]) * len(self._layer_groups)
        return TorchPages(self._kv_layers, num_blocks, BLOCK_SIZES[0], self._dtype, self._device)

    def _alone(self, tokens: NDArray[np.int32], start: int = 0) -> Span:
        """A span whose sequence has the first pages of the sample pages, in each layer group."""
        table = array("i", range(1, -(-(start + len(tokens)) // BLOCK_SIZES[0]) + 1))
        return Span(tokens, start, [table] * len(self._layer_groups), num_logits=len(tokens))

    def _allocated_pages(self) -> TorchPages:
        if self._pages is None:
            raise RuntimeError("there are no KV pages yet; call allocate_kv first")
        return self._pages

    def _allocated_host_pages(self) -> TorchPages:
        if self._host_pages is None:
            raise RuntimeError("there are no host blocks yet; call allocate_host first")
        return self._host_pages


def _slots(positions: torch.Tensor, table: torch.Tensor, block_size: int) -> torch.Tensor:
    return table[positions // block_size] * block_size + positions % block_size

"""PrefixCache: prefixes kept between calls of Hugging Face's `generate()`.

    prefixes = PrefixCache(model)
    cache = prefixes.open(ids)                               finds the longest known prefix, loads it
    output = model.generate(ids, past_key_values=cache)      computes the rest; the prompt is kept
    prefixes.close(cache, output)                            the answer is kept too

A prefix is kept in pages of one block each, under a `KVCacheManager`. `generate` works on a copy of its own.
"""

from __future__ import annotations

import weakref
from typing import TYPE_CHECKING, Any

import torch
from transformers import DynamicCache

from anaphora.cache import KVCacheManager
from anaphora.engine.build import num_blocks_for
from anaphora.engine.torch_executor.modules import check_config
from anaphora.engine.torch_executor.pages import KVLayer, TorchPages, group_layers
from anaphora.identity import DEFAULT_NAMESPACE, Namespace

if TYPE_CHECKING:
    from transformers import PreTrainedConfig, PreTrainedModel

    from anaphora.cache import CacheStats
    from anaphora.cache.sequence import Sequence

DEFAULT_KV_MEMORY_BYTES = 1 << 30
BLOCK_SIZE = 16


class PrefixCache:
    """The prefixes of one model's prompts, for as long as this object lives. For one thread.

    model: a decoder of `transformers` whose layers have full attention or a sliding window.
    kv_memory_bytes: for the pages, which lie on the model's device.
    block_size: tokens in a block; hits are whole blocks.

    Raises:
        ModelError: a model of another kind.
        ValueError: memory for less than two blocks.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        kv_memory_bytes: int = DEFAULT_KV_MEMORY_BYTES,
        block_size: int = BLOCK_SIZE,
    ) -> None:
        check_config(model.config)
        self._config = model.config.get_text_config(decoder=True)
        layers = _look_at_layers(model, self._config)
        groups = group_layers(layers, model.dtype.itemsize)
        windows = [group.window for group in groups]
        num_blocks = num_blocks_for(kv_memory_bytes, groups, block_size)
        self.manager = KVCacheManager(num_blocks, block_size, windows=windows)
        self.pages = TorchPages(layers, num_blocks, block_size, model.dtype, model.device)
        self.group_of = {layer: number for number, group in enumerate(groups) for layer in group.layers}
        """By layer, which of a sequence's block tables is its."""
        self.windows = [layer.window for layer in layers]

    def open(self, input_ids: torch.Tensor, *, namespace: Namespace = DEFAULT_NAMESPACE) -> PrefixedCache:
        """Return a cache for one call of `generate`, with the longest known prefix of the prompt in it.

        input_ids: int64 [1, n], one prompt without padding. Several samples or beams of it may be drawn.
        namespace: prefixes are shared only within one.

        Raises:
            ValueError: several prompts, or none.
        """
        if input_ids.dim() != 2 or input_ids.shape[0] != 1 or not input_ids.shape[1]:
            raise ValueError(f"input_ids: expected one prompt, [1, n], got {list(input_ids.shape)}")
        sequence = self.manager.start(_packed(input_ids[0]), namespace)
        return PrefixedCache(self, sequence, self._config)

    def close(self, cache: PrefixedCache, output_ids: torch.Tensor | None = None) -> None:
        """Keep what was computed, and let go of the blocks.

        output_ids: what `generate` returned, [1, n] or [n], the prompt in front: without it only the prompt is kept.

        Raises:
            ValueError: output_ids do not begin with the prompt.
        """
        cache.finish(None if output_ids is None else output_ids.reshape(-1, output_ids.shape[-1])[0])

    def stats(self) -> CacheStats:
        """Return the counters as they stand: `queries` and `hits` are prompt tokens and those that were found."""
        return self.manager.stats()


class PrefixedCache(DynamicCache):  # type: ignore[misc]
    """What `generate` takes as `past_key_values`: a DynamicCache that begins with a prefix, and keeps what is added.

    Made by `PrefixCache.open`, for one call. A call that is given up on lets go of its blocks when this object goes.
    """

    def __init__(self, prefixes: PrefixCache, sequence: Sequence, config: PreTrainedConfig) -> None:
        super().__init__(config=config)
        self._prefixes = prefixes
        self._sequence = sequence
        manager = prefixes.manager
        num_tokens = sequence.num_tokens
        # Slots for what is left to compute; if the pool has none, what is found is used and nothing is kept.
        self._is_kept = manager.allocate(sequence, num_tokens - manager.lookup(sequence))
        if not self._is_kept:
            manager.allocate(sequence, 0)
        self.num_prompt_tokens = num_tokens
        self.num_cached_tokens = sequence.num_computed_tokens if sequence.is_admitted else 0
        """Prompt tokens whose KV was found: `generate` computes the others."""
        self._num_written = [self.num_cached_tokens] * len(self.layers)
        if self.num_cached_tokens:
            self._load(self.num_cached_tokens)
        weakref.finalize(self, manager.abort, sequence)

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, layer_idx: int, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Add the next tokens' KV, [batch, KV heads, n, size] each, as every cache does; and write it to the pages."""
        layer, batch = self.layers[layer_idx], key_states.shape[0]
        if layer.is_initialized and batch > 1 and layer.keys.shape[0] == 1:  # samples or beams of the one prompt
            layer.keys, layer.values = (each.expand(batch, -1, -1, -1) for each in (layer.keys, layer.values))
        if self._is_kept:
            self._write(layer_idx, key_states, value_states)
        states: tuple[torch.Tensor, torch.Tensor] = super().update(key_states, value_states, layer_idx, *args, **kwargs)
        return states

    def finish(self, output_ids: torch.Tensor | None) -> None:
        """See `PrefixCache.close`. Does nothing the second time."""
        manager, sequence = self._prefixes.manager, self._sequence
        if sequence.state == "finished":
            return
        if output_ids is not None:
            tokens, prompt = _packed(output_ids), bytes(sequence.tokens)
            if not tokens.startswith(prompt):
                raise ValueError("output_ids: expected the prompt that this cache was opened for, and what follows it")
            if self._is_kept:
                manager.append(sequence, tokens[len(prompt) :])
                self._commit()
        self._is_kept = False
        manager.finish(sequence)

    def _load(self, num_tokens: int) -> None:
        """Fill every layer with the last tokens that its window sees of a prefix."""
        pages, block_size = self._prefixes.pages, self._prefixes.pages.block_size
        for number, (layer, window) in enumerate(zip(self.layers, self._prefixes.windows, strict=True)):
            first = 0 if window is None else max(0, num_tokens - window + 1)
            table = self._sequence.block_tables[self._prefixes.group_of[number]]
            blocks = torch.tensor(
                table[first // block_size : num_tokens // block_size], device=pages.keys[number].device
            )
            keys, values = (each[first % block_size :] for each in pages.read(number, blocks))
            layer.update(keys.transpose(0, 1)[None], values.transpose(0, 1)[None])
            if window is not None:
                layer.cumulative_length = num_tokens

    def _write(self, number: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        manager, sequence, pages = self._prefixes.manager, self._sequence, self._prefixes.pages
        start, num_tokens = self._num_written[number], keys.shape[2]
        stop = start + num_tokens
        if start >= self.num_prompt_tokens and keys.shape[0] > 1:
            self._is_kept = False  # samples part after the prompt, and only one of them could go on in these blocks
            return
        if stop > len(sequence.block_table) * pages.block_size and not manager.allocate(
            sequence, stop - sequence.num_computed_tokens
        ):
            self._is_kept = False
            return
        table = torch.tensor(sequence.block_tables[self._prefixes.group_of[number]], device=keys.device)
        positions = torch.arange(start, stop, device=keys.device)
        slots = table[positions // pages.block_size] * pages.block_size + positions % pages.block_size
        pages.write(number, slots, keys[0].transpose(0, 1), values[0].transpose(0, 1))
        self._num_written[number] = stop
        if number == len(self._num_written) - 1 and sequence.num_computed_tokens < self.num_prompt_tokens:
            self._commit()

    def _commit(self) -> None:
        """Make findable what every layer has written and whose tokens are known."""
        sequence = self._sequence
        num_known = min(*self._num_written, sequence.num_tokens)
        self._prefixes.manager.commit(sequence, max(0, num_known - sequence.num_computed_tokens))


def _look_at_layers(model: PreTrainedModel, config: PreTrainedConfig) -> list[KVLayer]:
    """Run one token, and see what each layer keeps."""
    cache = DynamicCache(config=config)
    with torch.inference_mode():
        model(
            input_ids=torch.zeros(1, 1, dtype=torch.int64, device=model.device), past_key_values=cache, use_cache=True
        )
    return [
        KVLayer(
            num_kv_heads=layer.keys.shape[1],
            key_dim=layer.keys.shape[3],
            value_dim=layer.values.shape[3],
            window=getattr(layer, "sliding_window", None),
        )
        for layer in cache.layers
    ]


def _packed(ids: torch.Tensor) -> bytes:
    packed: bytes = ids.to("cpu", torch.int32).numpy().tobytes()
    return packed

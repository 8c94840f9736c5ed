"""An Engine for a model: which executor, which block size, how much memory for KV. The defaults are here."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias, TypedDict

from anaphora.cache import KVCacheManager
from anaphora.engine.joiners import DEFAULT_MAX_OVERTAKES
from anaphora.engine.loop import Engine
from anaphora.model.lora import read_lora

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from anaphora.cache.options import IndexKind
    from anaphora.engine.executor import Executor, LayerGroup
    from anaphora.engine.native.executor import WeightFormat
    from anaphora.engine.order import QueueOrderChoice
    from anaphora.identity import BlockDigests
    from anaphora.model import Model

log = logging.getLogger(__name__)

ExecutorKind: TypeAlias = Literal["auto", "native", "native-bf16", "native-q8", "reference", "torch"]

DEFAULT_KV_MEMORY_BYTES = 1 << 30
"""Memory for KV where there is plenty of it."""
FREE_MEMORY_SHARE = 0.5
"""The largest share of the free memory that the default takes."""
MIN_BLOCK_SIZE = 16
"""Smaller blocks hit a few more tokens, but cost more to keep and to read than those are worth."""


class EngineOptions(TypedDict, total=False):
    """The options of `build_engine`, for those who pass them on."""

    executor: ExecutorKind
    index: IndexKind
    kv_memory_bytes: int | None
    host_kv_memory_bytes: int
    max_num_seqs: int
    max_num_batched_tokens: int
    max_context: int | None
    queue_order: QueueOrderChoice
    max_group_overtakes: int
    seed: int | None
    events: bool
    digests: BlockDigests | None
    measure_residency: bool
    adapters: Mapping[str, str | Path]


def build_engine(
    model: Model,
    *,
    executor: ExecutorKind = "auto",
    index: IndexKind = "radix",
    kv_memory_bytes: int | None = None,
    host_kv_memory_bytes: int = 0,
    max_num_seqs: int = 64,
    max_num_batched_tokens: int = 512,
    max_context: int | None = None,
    queue_order: QueueOrderChoice = "fcfs",
    max_group_overtakes: int = DEFAULT_MAX_OVERTAKES,
    seed: int | None = None,
    events: bool = False,
    digests: BlockDigests | None = None,
    measure_residency: bool = False,
    adapters: Mapping[str, str | Path] | None = None,
) -> Engine:
    """Return an engine that runs `model`, with its KV pages allocated.

    executor: "native" is C++, compiled at first use, with weights as a GGUF file quantises them, others in bf16;
        "native-bf16" and "native-q8" are the same with all weights in bf16, or in 8 bits; "reference" is numpy,
        float32, several times slower; "torch" is transformers' own model, in float32 on a CPU, of any decoder-only
        architecture that it knows;
        "auto" is native where that can be built, and otherwise reference, with a line in the log that says why.
    index: how prefixes are found, "radix" or "hash"; with attention windows always "hash", which knows them.
    kv_memory_bytes: for KV; by default 1 GiB, or half of the free memory if that is less; at most what the machine has.
    host_kv_memory_bytes: for blocks that the KV pool has no room for, to be found again; 0 for none. Not with attention
        windows.
    max_num_seqs, max_num_batched_tokens, max_context, queue_order, max_group_overtakes, seed: as `Engine` has them.
    events: whether the manager records KV events, which somebody has to take then. digests: how those name blocks.
    measure_residency: whether it keeps the times of blocks.
    adapters: LoRA adapters in PEFT's format, folders by name, checked before anything else is done.

    Raises:
        ValueError: an unknown executor, index or order, a limit below 1, too little memory for one block, more than the
            machine has, or "native" or "torch" where they cannot be had; the message names the option and what is
            allowed.
        ModelError: the model is of an architecture that this executor does not run, or an adapter cannot be read, or
            not run on this model.
        MemoryError: the machine has that much, but this process does not get it.
    """
    if kv_memory_bytes is not None:
        _require_that_machine_has("kv_memory_bytes", kv_memory_bytes)
    _require_that_machine_has("host_kv_memory_bytes", host_kv_memory_bytes)
    if executor not in _EXECUTORS:
        raise ValueError(f"executor: {executor!r} is not known; allowed are {sorted(_EXECUTORS)}")
    if adapters and model.name in adapters:
        raise ValueError(f"adapter: {model.name!r} is the model's own name; choose another")
    if adapters and executor == "torch":
        raise ValueError("adapter: 'torch' runs none; native and reference do")
    loras = {name: read_lora(Path(path), model.shape) for name, path in (adapters or {}).items()}
    runner = _EXECUTORS[executor](model)
    block_size = choose_block_size(runner)
    windows = [group.window for group in runner.layer_groups]
    # Only now: what the executor itself takes is not free any more.
    memory = default_kv_memory_bytes() if kv_memory_bytes is None else kv_memory_bytes
    num_blocks = num_blocks_for(memory, runner.layer_groups, block_size)
    host_blocks = 0
    if host_kv_memory_bytes:
        if windows != [None]:
            raise ValueError("host_kv_memory_bytes: this model has attention windows, for which there is none")
        host_blocks = num_host_blocks_for(host_kv_memory_bytes, runner.layer_groups, block_size)
    engine = Engine(
        runner,
        KVCacheManager(
            num_blocks=num_blocks,
            block_size=block_size,
            index=index if windows == [None] else "hash",
            windows=windows,
            host_blocks=host_blocks,
            events=events,
            digests=digests,
            measure_residency=measure_residency,
        ),
        tokenizer=model.tokenizer,
        eos_token_ids=model.tokenizer.eos_token_ids,
        max_num_seqs=max_num_seqs,
        max_num_batched_tokens=max_num_batched_tokens,
        max_context=max_context,
        queue_order=queue_order,
        max_group_overtakes=max_group_overtakes,
        seed=seed,
    )
    for name, lora in loras.items():
        engine.adapters.load(name, lora)
    return engine


def choose_block_size(executor: Executor) -> int:
    """Return the smallest block size from MIN_BLOCK_SIZE up that the executor supports, or else its largest."""
    return min((size for size in executor.block_sizes if size >= MIN_BLOCK_SIZE), default=max(executor.block_sizes))


def num_blocks_for(kv_memory_bytes: int, groups: Iterable[LayerGroup], block_size: int) -> int:
    """Return how many blocks fit into `kv_memory_bytes`, the null block, which holds nobody's tokens, left out.

    Raises ValueError if that is none.
    """
    block_bytes = block_size * sum(group.kv_bytes_per_token for group in groups)
    num_blocks = kv_memory_bytes // block_bytes - 1
    if num_blocks < 1:
        raise ValueError(
            f"kv_memory_bytes: {kv_memory_bytes} is not enough; the least is {2 * block_bytes}, "
            f"two blocks of {block_size} tokens"
        )
    return num_blocks


def num_host_blocks_for(host_kv_memory_bytes: int, groups: Iterable[LayerGroup], block_size: int) -> int:
    """Return how many blocks fit into `host_kv_memory_bytes`. Raises ValueError if that is none."""
    block_bytes = block_size * sum(group.kv_bytes_per_token for group in groups)
    num_blocks = host_kv_memory_bytes // block_bytes
    if num_blocks < 1:
        raise ValueError(
            f"host_kv_memory_bytes: {host_kv_memory_bytes} is not enough; the least is {block_bytes}, "
            f"a block of {block_size} tokens"
        )
    return num_blocks


def default_kv_memory_bytes() -> int:
    """Return DEFAULT_KV_MEMORY_BYTES, or FREE_MEMORY_SHARE of the free memory if that is known and less."""
    free = _free_memory_bytes()
    return DEFAULT_KV_MEMORY_BYTES if free is None else min(DEFAULT_KV_MEMORY_BYTES, int(free * FREE_MEMORY_SHARE))


def _require_that_machine_has(option: str, size_bytes: int) -> None:
    """Raise ValueError for more than there is: pages are taken as they are written, so it would fail much later."""
    total = min((known for known in (_machine_bytes(), _cgroup_limit_bytes()) if known is not None), default=None)
    if total is not None and size_bytes > total:
        raise ValueError(
            f"{option}: {size_bytes / 2**30:,.1f} GiB is more than the memory of this machine, {total / 2**30:,.1f} GiB"
        )


def _free_memory_bytes() -> int | None:
    """What this process can still get: of the machine, and of the control group (container) that it is in."""
    known = [free for free in (_free_machine_bytes(), _free_cgroup_bytes()) if free is not None]
    return min(known, default=None)


def _free_machine_bytes() -> int | None:
    try:
        for line in Path("/proc/meminfo").read_text().splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
        return None
    except OSError:  # not Linux: the total is the best that the standard library knows
        return _machine_bytes()


def _machine_bytes() -> int | None:
    try:
        return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (AttributeError, OSError, ValueError):
        return None


def _free_cgroup_bytes() -> int | None:
    limit, used = _cgroup_limit_bytes(), _cgroup_bytes("current")
    return None if limit is None or used is None else max(0, limit - used)


def _cgroup_limit_bytes() -> int | None:
    return _cgroup_bytes("max")


def _cgroup_bytes(name: str) -> int | None:
    try:
        return int(Path(f"/sys/fs/cgroup/memory.{name}").read_text())
    except (OSError, ValueError):  # no cgroup v2, or the limit is "max"
        return None


# Executors are imported where they are used, so that an engine does not load those that it does not run.


def _auto(model: Model) -> Executor:
    from anaphora.engine.native import NativeExecutor, NativeUnavailableError  # noqa: PLC0415

    try:
        return NativeExecutor(model.shape, model.stored_weights)
    except NativeUnavailableError as error:
        log.warning("executor: running reference, which is slower, since native is not available: %s", error)
        return _reference(model)


def _native(model: Model, weight_format: WeightFormat | None = None) -> Executor:
    from anaphora.engine.native import NativeExecutor, NativeUnavailableError  # noqa: PLC0415

    try:
        if weight_format is None:
            return NativeExecutor(model.shape, model.stored_weights)
        return NativeExecutor(model.shape, model.weights, weight_format=weight_format)
    except NativeUnavailableError as error:
        raise ValueError(f"executor: 'native' is not available here: {error}") from None


def _reference(model: Model) -> Executor:
    from anaphora.engine.reference import ReferenceExecutor  # noqa: PLC0415

    return ReferenceExecutor(model.shape, model.weights)


def _torch(model: Model) -> Executor:
    try:
        from anaphora.engine.torch_executor import TorchExecutor  # noqa: PLC0415
    except ModuleNotFoundError as error:
        raise ValueError(
            f"executor: 'torch' needs the package {error.name}; pip install 'anaphora[torch]' brings it"
        ) from None
    return TorchExecutor.of(model)


_EXECUTORS: dict[str, Callable[[Model], Executor]] = {
    "auto": _auto,
    "native": _native,
    "native-bf16": partial(_native, weight_format="bf16"),
    "native-q8": partial(_native, weight_format="q8_0"),
    "reference": _reference,
    "torch": _torch,
}

"""Sizes that an engine is built with."""

from __future__ import annotations

import pytest

from anaphora.engine.build import (
    DEFAULT_KV_MEMORY_BYTES,
    build_engine,
    choose_block_size,
    default_kv_memory_bytes,
    num_blocks_for,
)
from anaphora.engine.executor import LayerGroup
from tests.engine.toy_executor import ToyExecutor


@pytest.mark.parametrize(
    ("supported", "chosen"),
    [((16, 32, 64), 16), ((1, 4, 16, 32), 16), ((32, 64), 32), ((8, 24), 24), ((1, 4, 8), 8)],
)
def test_the_block_size_is_the_smallest_from_16_up(supported: tuple[int, ...], chosen: int) -> None:
    assert choose_block_size(ToyExecutor(block_sizes=supported)) == chosen


def test_kv_memory_holds_that_many_blocks_and_the_null_block() -> None:
    groups = (LayerGroup((0, 1), kv_bytes_per_token=100), LayerGroup((2,), kv_bytes_per_token=50, window=64))
    assert num_blocks_for(150 * 16 * 11, groups, 16) == 10
    assert num_blocks_for(150 * 16 * 11 - 1, groups, 16) == 9
    assert num_blocks_for(150 * 16 * 2, groups, 16) == 1


def test_too_little_kv_memory_is_refused_with_the_least_that_would_do() -> None:
    with pytest.raises(ValueError, match="kv_memory_bytes: 3199 is not enough; the least is 3200, two blocks of 16"):
        num_blocks_for(3199, [LayerGroup((0,), kv_bytes_per_token=100)], 16)


def test_more_kv_memory_than_the_machine_or_its_container_has_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anaphora.engine.build._machine_bytes", lambda: 3 * 2**30)
    monkeypatch.setattr("anaphora.engine.build._cgroup_limit_bytes", lambda: 2 * 2**30)
    message = "kv_memory_bytes: 2.5 GiB is more than the memory of this machine, 2.0 GiB"
    with pytest.raises(ValueError, match=message):
        build_engine(None, kv_memory_bytes=5 * 2**29)  # type: ignore[arg-type]  # refused before it is looked at


def test_the_default_kv_memory_leaves_half_of_the_free_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("anaphora.engine.build._free_memory_bytes", lambda: 1_000_000)
    assert default_kv_memory_bytes() == 500_000
    for plenty in (1 << 40, None):
        monkeypatch.setattr("anaphora.engine.build._free_memory_bytes", lambda plenty=plenty: plenty)
        assert default_kv_memory_bytes() == DEFAULT_KV_MEMORY_BYTES


def test_free_memory_is_found_on_this_machine() -> None:
    assert 0 < default_kv_memory_bytes() <= DEFAULT_KV_MEMORY_BYTES

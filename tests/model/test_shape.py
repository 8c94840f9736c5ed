"""The shape refuses what cannot be run, and gives RoPE's frequencies."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from anaphora.model import ModelError
from anaphora.model.shape import DivisorsRope, LinearRope, Llama3Rope
from tests.tiny_models import tiny_shape


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("architecture", "mixtral"),
        ("num_layers", 0),
        ("hidden_size", "64"),
        ("vocab_size", True),
        ("rope_theta", 0.0),
        ("rms_norm_eps", float("nan")),
        ("num_kv_heads", 3),
        ("head_dim", 15),
        ("sliding_window", 0),
    ],
)
def test_a_field_out_of_range_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ModelError, match=f"^{field}: "):
        replace(tiny_shape(), **{field: value})


def test_frequencies_fall_geometrically_from_one() -> None:
    frequencies = tiny_shape(head_dim=8, rope_theta=10000.0).inverse_frequencies()
    assert frequencies.tolist() == pytest.approx([1.0, 0.1, 0.01, 0.001], rel=1e-15)


def test_linear_scaling_divides_every_frequency() -> None:
    frequencies = tiny_shape(head_dim=4, rope_theta=100.0, rope_scaling=LinearRope(4.0)).inverse_frequencies()
    assert frequencies.tolist() == pytest.approx([0.25, 0.025], rel=1e-15)


def test_divisors_divide_each_its_own_frequency() -> None:
    frequencies = tiny_shape(head_dim=4, rope_theta=100.0, rope_scaling=DivisorsRope((1.0, 8.0))).inverse_frequencies()
    assert frequencies.tolist() == pytest.approx([1.0, 0.0125], rel=1e-15)


def test_as_many_divisors_as_frequencies_are_needed() -> None:
    with pytest.raises(ModelError, match="rope_scaling: 1 divisors for 8 frequencies"):
        tiny_shape(rope_scaling=DivisorsRope((1.0,)))


def test_llama_3_scaling_keeps_short_waves_divides_long_ones_and_blends_between() -> None:
    """The definition of Llama 3.1's release, wave by wave."""
    scaling = Llama3Rope(factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0, original_max_context=8192)
    plain = tiny_shape(head_dim=128, rope_theta=500000.0).inverse_frequencies()
    scaled = tiny_shape(head_dim=128, rope_theta=500000.0, rope_scaling=scaling).inverse_frequencies()
    kinds = set()
    for before, after in zip(plain.tolist(), scaled.tolist(), strict=True):
        wavelength = 2 * math.pi / before
        if wavelength < 8192 / 4:
            kinds.add("short")
            assert after == before
        elif wavelength > 8192:
            kinds.add("long")
            assert after == pytest.approx(before / 8, rel=1e-15)
        else:
            kinds.add("between")
            smooth = (8192 / wavelength - 1.0) / 3.0
            assert after == pytest.approx((1 - smooth) * before / 8 + smooth * before, rel=1e-12)
    assert kinds == {"short", "between", "long"}

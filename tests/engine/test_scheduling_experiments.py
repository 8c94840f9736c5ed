"""Sixteen groups of prompts and room for nine of their prefixes: what each order makes of it, in exact numbers."""

from __future__ import annotations

import pytest
from benchmarks.scheduling.contest import NUM_SHARED, best_burst, burst, starvation
from benchmarks.scheduling.ours import OurOrder


def test_first_come_first_served_thrashes() -> None:
    assert burst(OurOrder("fcfs")) == 0


@pytest.mark.parametrize("order", ["lpm", "dfs"])
def test_lpm_and_dfs_compute_each_prefix_once_which_is_the_optimum(order: str) -> None:
    contestant = OurOrder(order)  # type: ignore[arg-type]
    assert burst(contestant) == best_burst() == 0.76
    stats = contestant.manager.stats()
    assert stats.hits == (320 - 16) * NUM_SHARED


def test_fair_reaches_95_percent_of_the_optimum() -> None:
    assert burst(OurOrder("fair")) >= 0.95 * best_burst()


@pytest.mark.parametrize(("order", "num_passes"), [("fcfs", 7), ("lpm", None), ("dfs", None), ("fair", 63)])
def test_under_hot_arrivals_a_cold_request_starves_but_for_fcfs_and_fair(order: str, num_passes: int | None) -> None:
    # fair: 256 in a round, 4 in a pass.
    assert starvation(OurOrder(order), max_passes=150) == num_passes  # type: ignore[arg-type]

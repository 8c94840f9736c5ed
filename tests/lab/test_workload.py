"""Made workloads: the same for the same seed, what they share known beforehand, readable by our own importers."""

from __future__ import annotations

import io
from itertools import pairwise
from pathlib import Path

import pytest

from anaphora.cli import main
from anaphora.lab.commands.workload import _KINDS
from anaphora.lab.encoding import EstimatingEncoder
from anaphora.lab.importers import open_requests
from anaphora.lab.simulate import Setting, run
from anaphora.lab.trace import build_trace
from anaphora.lab.workload import KINDS, Job, as_mooncake, as_openai, generate


def test_the_command_line_knows_every_kind() -> None:
    assert set(_KINDS) == set(KINDS)


@pytest.mark.parametrize("kind", KINDS)
def test_a_seed_gives_one_workload_in_order_of_time(kind: str) -> None:
    jobs = generate([kind], 10, 1.0, seed=7)
    assert jobs == generate([kind], 10, 1.0, seed=7) != generate([kind], 10, 1.0, seed=8)
    assert [job.time_s for job in jobs] == sorted(job.time_s for job in jobs)


def shared_tokens(jobs: list[Job]) -> int:
    """Tokens that an earlier prompt began with, counted piece by piece."""
    known: set[tuple[int, ...]] = set()
    total = 0
    for job in jobs:
        ids = tuple(piece.id for piece in job.pieces)
        depth = max((n for n in range(len(ids) + 1) if ids[:n] in known), default=0)
        total += sum(piece.num_tokens for piece in job.pieces[:depth])
        known |= {ids[:n] for n in range(1, len(ids) + 1)}
    return total


@pytest.mark.parametrize("kind", KINDS)
def test_a_trace_shares_what_its_pieces_share(kind: str, tmp_path: Path) -> None:
    jobs = generate([kind], 10, 1.0, seed=3)
    path = tmp_path / "trace.jsonl"
    path.write_text("\n".join(as_mooncake(jobs)))
    log = open_requests(path)
    trace = build_trace("t", log.requests(), EstimatingEncoder())
    assert log.report.num_bad == 0
    outcome = run(trace, Setting(block_size=512, counting="listed"))
    expected = shared_tokens(jobs)
    assert outcome.prompt_tokens == sum(job.num_tokens for job in jobs)
    # Whole blocks of 512 only, so up to a block less for each request.
    assert expected - 512 * len(jobs) <= outcome.cached_tokens <= expected


@pytest.mark.parametrize("kind", KINDS)
def test_requests_share_what_their_pieces_share(kind: str, tmp_path: Path) -> None:
    jobs = generate([kind], 3, 1.0, seed=3)
    path = tmp_path / "log.jsonl"
    path.write_text("\n".join(as_openai(jobs)))
    log = open_requests(path)
    assert log.format.name == "openai"
    trace = build_trace("t", log.requests(), EstimatingEncoder(), 16)
    assert len(trace.prompts) == len(jobs)
    assert [p.session for p in trace.prompts] == [job.session for job in jobs]
    assert run(trace, Setting(block_size=16)).hit_rate == pytest.approx(
        shared_tokens(jobs) / trace.num_tokens, abs=0.12
    )


def test_arrivals_keep_their_rate_and_bursts_their_spread() -> None:
    gaps = {}
    for burst in (1.0, 8.0):
        times = [job.time_s for job in generate(["shared-system"], 4000, 2.0, seed=1, burst=burst)]
        assert 4000 / times[-1] == pytest.approx(2.0, rel=0.15)
        differences = [b - a for a, b in pairwise(times)]
        mean = sum(differences) / len(differences)
        gaps[burst] = sum((d / mean - 1) ** 2 for d in differences) / len(differences)
    assert gaps[1.0] == pytest.approx(1, rel=0.2)
    assert gaps[8.0] == pytest.approx(8, rel=0.35)


def test_what_cannot_be_made_says_so() -> None:
    with pytest.raises(ValueError, match="kind: expected one of chat"):
        generate(["talk"], 1, 1.0, 1)
    with pytest.raises(ValueError, match="rate: expected a number above 0"):
        generate(["chat"], 1, 0.0, 1)


def test_the_command_writes_a_file_or_a_stream(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "w.jsonl"
    assert main(["workload", "chat", "rag", "--sessions", "5", "--out", str(path)]) == 0
    assert main(["workload", "chat", "rag", "--sessions", "5"]) == 0
    assert io.StringIO(capsys.readouterr().out).read() == path.read_text()
    assert main(["simulate", str(path), "--json"]) == 0

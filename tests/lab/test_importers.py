"""What each importer reads, what it leaves out, and what it says of what it cannot read."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import pytest

from anaphora.lab.importers import FORMATS, LogError, ReadReport, detect, detect_in, open_requests, read_records
from anaphora.lab.importers.fields import Fields
from anaphora.lab.importers.prometheus import read_metrics
from anaphora.lab.importers.source import lines
from anaphora.lab.importers.usage import events_of_sse, read_usage, usage_of_stream
from anaphora.lab.record import Usage

from .samples import ANTHROPIC_USAGE, SAMPLES, SHARED, SYSTEM, jsonl, openai_line


def read(data: bytes, name: str) -> tuple[list[Any], ReadReport]:
    report = ReadReport()
    return list(read_records(io.BufferedReader(io.BytesIO(data)), FORMATS[name], report)), report  # type: ignore[arg-type]


def test_there_is_a_sample_of_every_format() -> None:
    assert SAMPLES.keys() == FORMATS.keys()


@pytest.mark.parametrize("name", FORMATS)
def test_every_format_is_told_from_all_others(name: str) -> None:
    found = detect_in(SAMPLES[name])
    assert found is not None
    assert found.name == name


@pytest.mark.parametrize("name", [name for name, form in FORMATS.items() if form.layout == "json"])
def test_an_array_and_indented_documents_read_like_lines(name: str) -> None:
    if name in {"otlp", "sharegpt"}:
        documents = [json.loads(SAMPLES[name])] if name == "otlp" else json.loads(SAMPLES[name])
    else:
        documents = [json.loads(line) for line in SAMPLES[name].splitlines()]
    plain, _ = read(jsonl(*documents), name)
    for text in (
        json.dumps(documents),
        json.dumps(documents, indent=2),
        "\n".join(json.dumps(d, indent=1) for d in documents),
    ):
        records, report = read(text.encode(), name)
        assert report.num_bad == 0
        assert [_without_line(record) for record in records] == [_without_line(record) for record in plain]


def _without_line(record: Any) -> str:
    return repr(record).split(", ", 1)[1]


class TestReadings:
    def test_mooncake_times_are_milliseconds(self) -> None:
        records, _ = read(SAMPLES["mooncake"], "mooncake")
        assert [(r.time_s, r.length, r.blocks.ids) for r in records] == [(0.0, 1100, (0, 1, 2)), (0.9, 1300, (0, 1, 3))]

    def test_a_trace_whose_ids_do_not_fit_its_length_is_bad(self) -> None:
        _, report = read(jsonl({"timestamp": 0, "input_length": 1100, "hash_ids": [1]}), "mooncake")
        assert report.bad == [(1, "hash_ids: expected one id for each 512 of the prompt's 1100 tokens, got 1")]

    def test_bailian_knows_the_parent(self) -> None:
        records, _ = read(SAMPLES["bailian"], "bailian")
        assert [(r.request_id, r.parent) for r in records] == [("0", None), ("1", "0")]

    def test_weka_ids_mean_something_in_their_session_only(self) -> None:
        records, _ = read(SAMPLES["weka"], "weka")
        assert [(r.blocks.scope, r.blocks.block_size, r.length, r.end_s) for r in records] == [
            ("w", 64, 130, 1.5),
            ("w", 64, 128, None),
        ]

    def test_openai_keeps_what_was_not_reported_apart_from_zero(self) -> None:
        records, _ = read(SAMPLES["openai"], "openai")
        assert [r.usage.cached for r in records] == [0, 32, None]
        assert [part.path for part in records[0].parts] == ["messages[0].content", "messages[1].content"]

    def test_anthropic_counts_exclude_what_was_cached(self) -> None:
        records, _ = read(SAMPLES["anthropic"], "anthropic")
        assert records[0].usage == Usage(1505, 1200, 300, 200, 3)
        assert [(part.path, part.ttl_s) for part in records[0].parts] == [
            ("system[0].text", 3600),
            ("messages[0].content", None),
        ]

    def test_tools_come_first_whatever_the_order_of_keys(self) -> None:
        body = {
            "messages": [{"role": "user", "content": "q"}],
            "system": "s",
            "tools": [{"name": "t", "input_schema": {}, "cache_control": {"type": "ephemeral"}}],
        }
        records, _ = read(jsonl(body), "anthropic")
        assert [(part.path, part.ttl_s) for part in records[0].parts] == [
            ("tools[0]", 300),
            ("system", None),
            ("messages[0].content", None),
        ]

    @pytest.mark.parametrize(
        ("marker", "ttl_s"),
        [
            ({"cache_control": {"type": "ephemeral"}}, 300),
            ({"cache_control": {"type": "ephemeral", "ttl": "1h"}}, 3600),
            ({"prompt_cache_breakpoint": {"mode": "explicit"}}, 1800),
            ({"prompt_cache_breakpoint": {"mode": "explicit", "ttl": "12h"}}, 43_200),
            ({"cachePoint": {"type": "default"}}, 300),
        ],
    )
    def test_a_mark_lasts_as_long_as_its_own_api_says(self, marker: dict[str, Any], ttl_s: int) -> None:
        body = {"model": "m", "messages": [{"role": "user", "content": [{"type": "text", "text": "q", **marker}]}]}
        records, _ = read(jsonl(body), "openai")
        assert [part.ttl_s for part in records[0].parts] == [ttl_s]

    def test_a_litellm_hit_of_whole_answers_is_no_model_request(self) -> None:
        records, report = read(SAMPLES["litellm"], "litellm")
        assert [r.usage for r in records] == [Usage(1210, 1000, 200)]
        assert report.skipped == {"not a model's request": 1}

    def test_litellm_comes_as_csv_too(self) -> None:
        row = (
            b"request_id,call_type,spend,startTime,model,prompt_tokens,metadata\n"
            b"""q1,acompletion,0,2026-05-01T10:00:00Z,m,7,"{}"\n"""
        )
        assert detect_in(row) is FORMATS["litellm"]
        records, _ = read(row, "litellm")
        assert [r.usage for r in records] == [Usage(7)]

    def test_claude_code_counts_a_request_once(self) -> None:
        records, report = read(SAMPLES["claude-code"], "claude-code")
        assert [(r.request_id, r.usage) for r in records] == [
            ("r1", Usage(115, 100, 5, 0, 7)),
            ("r2", Usage(115, 100, 5, 0, 7)),
        ]
        assert report.num_duplicates == 1
        assert report.skipped == {"further lines of a request": 1, "synthetic": 1}

    def test_codex_counts_a_snapshot_once(self) -> None:
        records, report = read(SAMPLES["codex"], "codex")
        assert [r.usage for r in records] == [Usage(50, 40, output=2)] * 2
        assert report.num_duplicates == 1

    @pytest.mark.parametrize("name", ["langfuse", "otlp"])
    def test_observability_totals(self, name: str) -> None:
        records, _ = read(SAMPLES[name], name)
        assert [(r.usage.prompt, r.usage.cached, r.usage.written, r.usage.uncached) for r in records] == [
            (1210, 1000, 200, 10)
        ]

    def test_sharegpt_gives_a_request_for_each_turn_to_produce(self) -> None:
        records, _ = read(SAMPLES["sharegpt"], "sharegpt")
        assert [[part.role for part in r.parts] for r in records] == [["user"], ["user", "assistant", "user"]]

    def test_a_burstgpt_failure_is_left_out(self) -> None:
        records, _ = read(SAMPLES["burstgpt"], "burstgpt")
        assert [(r.time_s, r.length) for r in records] == [(5.0, 472)]

    def test_vllm_prompts_are_unquoted(self) -> None:
        records, report = read(SAMPLES["vllm"], "vllm")
        assert [(r.request_id, r.parts[0].text, r.length) for r in records] == [("chat-1", 'It\'s "here"\nnow', 5)]
        assert report.skipped == {"other lines": 1}

    def test_sglang_knows_its_extra_key(self) -> None:
        records, _ = read(SAMPLES["sglang"], "sglang")
        assert [(r.request_id, r.salt, r.length, r.parts[0].text) for r in records] == [("a1", "team", 2, "hello")]

    def test_kv_events_give_what_a_replica_holds_and_what_was_missed(self) -> None:
        states, _ = read(SAMPLES["kv-events"], "kv-events")
        assert [(s.replica, s.num_blocks, s.num_missed, s.num_unknown_removed) for s in states] == [
            ("p1", 2, 0, 0),
            ("p1", 1, 1, 1),
            ("p1", 0, 0, 0),
        ]

    def test_prometheus_counters(self) -> None:
        metrics = read_metrics(lines(io.BufferedReader(io.BytesIO(SAMPLES["prometheus"])), ReadReport()), ReadReport())  # type: ignore[arg-type]
        assert (metrics.hit_rate, metrics.usage, metrics.preemptions) == (0.4, 0.3, 2)

    def test_a_batch_gauge_is_not_a_hit_rate(self) -> None:
        text = (
            b"sglang:cache_hit_rate 0.0\n"
            b'sglang:cached_tokens_total{cache_source="device"} 4000000\n'
            b'sglang:cached_tokens_total{cache_source="host"} 600000\n'
            b"sglang:prompt_tokens_total 5000000\n"
        )
        metrics = read_metrics(lines(io.BufferedReader(io.BytesIO(text)), ReadReport()), ReadReport())  # type: ignore[arg-type]
        assert metrics.hit_rate == 0.92

    def test_a_run_is_what_came_between_two_scrapes(self) -> None:
        scrapes = [
            b"vllm:prefix_cache_queries_total 1000000\nvllm:prefix_cache_hits_total 0\n",
            b"vllm:prefix_cache_queries_total 1150000\nvllm:prefix_cache_hits_total 99600\n",
        ]
        first, second = (
            read_metrics(lines(io.BufferedReader(io.BytesIO(text)), ReadReport()), ReadReport())  # type: ignore[arg-type]
            for text in scrapes
        )
        assert second.rate_since(first) == pytest.approx(0.664)
        assert second.hit_rate == pytest.approx(0.0866, abs=1e-4)


class TestUsage:
    @pytest.mark.parametrize(
        ("usage", "expected"),
        [
            ({"prompt_tokens": 100}, Usage(100)),
            ({"prompt_tokens": 100, "prompt_tokens_details": None}, Usage(100)),
            ({"prompt_tokens": 100, "prompt_tokens_details": {}}, Usage(100)),
            ({"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 0}}, Usage(100, 0)),
            ({"prompt_tokens": 100, "prompt_tokens_details": {"cached_tokens": 64}}, Usage(100, 64)),
            ({"prompt_tokens": 9, "prompt_cache_hit_tokens": 4, "prompt_cache_miss_tokens": 5}, Usage(9, 4)),
            (
                {"input_tokens": 9, "input_tokens_details": {"cached_tokens": 4, "cache_write_tokens": 3}},
                Usage(9, 4, 3),
            ),
            (ANTHROPIC_USAGE, Usage(1505, 1200, 300, 200, 3)),
            ({"input_tokens": 9}, Usage(9)),
            (
                {"inputTokens": 1, "cacheReadInputTokens": 2, "cacheWriteInputTokens": 4, "outputTokens": 8},
                Usage(7, 2, 4, 0, 8),
            ),
            (
                {
                    "inputTokens": 1,
                    "cacheWriteInputTokens": 4,
                    "cacheDetails": [{"ttl": "1h", "inputTokens": 3}, {"ttl": "5m", "inputTokens": 1}],
                },
                Usage(5, None, 4, 3),
            ),
            ({"promptTokenCount": 9, "cachedContentTokenCount": 4, "candidatesTokenCount": 2}, Usage(9, 4, None, 0, 2)),
            ({"tokens": 9}, None),
        ],
    )
    def test_every_dialect_reads_into_one_meaning(self, usage: dict[str, Any], expected: Usage | None) -> None:
        assert read_usage(Fields(usage)) == expected

    def test_a_stream_keeps_details_that_later_events_leave_out(self) -> None:
        chunks = [
            {"usage": None},
            {"usage": {"prompt_tokens": 9888, "prompt_tokens_details": {"cached_tokens": 6752}}},
        ]
        assert usage_of_stream(chunks) == Usage(9888, 6752)
        start = {"message": {"usage": {"input_tokens": 10, "cache_read_input_tokens": 1000}}}
        assert usage_of_stream([start, {"usage": {"output_tokens": 5}}]) == Usage(1010, 1000, output=5)

    def test_server_sent_events_are_read(self) -> None:
        assert events_of_sse('event: x\ndata: {"a": 1}\n\ndata: [DONE]\n') == [{"a": 1}]


class TestDamage:
    def test_a_bad_line_is_counted_named_and_not_fatal(self) -> None:
        good = jsonl(openai_line(0, "secret words", 40, 0))
        data = good + b"{broken\n" + jsonl({"request": {"model": 3, "messages": []}}) + jsonl(openai_line(1, "b", 4, 9))
        records, report = read(data, "openai")
        assert len(records) == 1
        assert report.bad == [
            (2, "no JSON"),
            (3, "request.model: expected a string"),
            (4, "usage: cached and written tokens are more than the whole prompt"),
        ]

    def test_reasons_never_show_content(self) -> None:
        data = jsonl({"messages": "secret"}, {"messages": [{"role": "user", "content": 17}]}) + b'{"messages": secret\n'
        _, report = read(data, "openai")
        assert report.num_bad == 3
        assert "secret" not in repr(report)
        records, _ = read(jsonl(openai_line(0, "secret", 40, 0)), "openai")
        assert "secret" not in repr(records)
        assert SYSTEM not in repr(records)

    def test_a_repeated_request_id_counts_once(self) -> None:
        records, report = read(jsonl(openai_line(0, "a", 40, 0), openai_line(0, "a", 40, 0)), "openai")
        assert len(records) == 1
        assert report.num_duplicates == 1

    def test_csv_rows_of_another_width_are_bad(self) -> None:
        records, report = read(SAMPLES["azure"] + b"2026-05-01 10:00:00,5\n\n2026-05-01 10:00:01,5,6\n", "azure")
        assert [r.length for r in records] == [374, 5]
        assert report.bad == [(3, "2 columns where the header has 3")]

    def test_a_cut_off_array_gives_what_is_whole(self) -> None:
        records, report = read(b'[{"timestamp": 1, "input_length": 5, "hash_ids": [1]},\n {"timest', "mooncake")
        assert len(records) == 1
        assert report.bad == [(2, "no JSON, or cut off")]


class TestFiles:
    def test_compression_is_seen_from_the_file_itself(self, tmp_path: Path) -> None:
        packed = tmp_path / "log"
        packed.write_bytes(gzip.compress(SAMPLES["openai"]))
        log = open_requests(packed)
        assert log.format.name == "openai"
        assert len(list(log.requests())) == 3

    def test_zstd_is_read_where_the_package_is(self, tmp_path: Path) -> None:
        zstandard = pytest.importorskip("zstandard")
        packed = tmp_path / "log"
        data: bytes = zstandard.compress(SAMPLES["openai"])
        packed.write_bytes(data)
        assert len(list(open_requests(packed).requests())) == 3
        packed.write_bytes(data[:20] + b"\0" * 40)
        with pytest.raises(LogError, match="damaged"):
            list(open_requests(packed, "openai").requests())

    def test_damaged_compression_says_so(self, tmp_path: Path) -> None:
        packed = tmp_path / "log"
        packed.write_bytes(gzip.compress(SAMPLES["openai"] * 50)[:-20])
        with pytest.raises(LogError, match="damaged"):
            list(open_requests(packed, "openai").requests())

    def test_a_missing_or_unknown_file_says_so(self, tmp_path: Path) -> None:
        with pytest.raises(LogError, match="No such file"):
            open_requests(tmp_path / "nothing")
        other = tmp_path / "other"
        other.write_text("dear diary\n")
        with pytest.raises(LogError, match="--format"):
            open_requests(other)
        with pytest.raises(LogError, match="expected one of mooncake"):
            open_requests(other, "csv")


@pytest.mark.parametrize(
    ("file", "format_name", "expected"),
    [
        ("mooncake.jsonl", "mooncake", (3, 3900, None)),
        ("bailian.jsonl", "bailian", (2, 87, None)),
        ("openai_requests.jsonl", "openai", (3, 123, 64)),
        ("openai_batch.jsonl", "openai-batch", (2, None, None)),
        ("anthropic.jsonl", "anthropic", (2, 2410, 1200)),
        ("litellm_spendlogs.jsonl", "litellm", (1, 1210, 1000)),
        ("langfuse.jsonl", "langfuse", (1, 1210, 1000)),
        ("otlp.json", "otlp", (1, 1210, 1000)),
        ("claude_code.jsonl", "claude-code", (1, 115, 100)),
        ("vllm.log", "vllm", (1, 5, None)),
        ("sharegpt.json", "sharegpt", (2, None, None)),
        ("burstgpt.csv", "burstgpt", (1, 472, None)),
        ("azure.csv", "azure", (1, 374, None)),
    ],
)
def test_collected_samples_read_as_is_written_beside_them(
    file: str, format_name: str, expected: tuple[int, int | None, int | None]
) -> None:
    path = SHARED / "logs" / file
    if not path.is_file():
        pytest.skip(f"no collected samples at {path.parent}: this module's own cover the same formats")
    log = open_requests(path)
    requests = list(log.requests())
    lengths = [r.length for r in requests if r.length is not None]
    cached = [r.usage.cached for r in requests if r.usage is not None and r.usage.cached is not None]
    assert detect(path).name == format_name
    assert (len(requests), sum(lengths) if lengths else None, sum(cached) if cached else None) == expected
    assert log.report.num_bad == 0

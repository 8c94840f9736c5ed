"""The rules of Chrome's trace event format that Perfetto's importer goes by, checked over a whole trace.

Source: "Trace Event Format" (Chromium project, 2016), sections on duration, complete, instant, counter, async and
metadata events.
"""

from __future__ import annotations

from typing import Any

PHASES = {"X", "b", "e", "i", "C", "M"}
METADATA = {"process_name", "thread_name"}


def check_trace(events: list[dict[str, Any]]) -> None:
    """Assert that every event has what its phase needs, that complete events of a thread are apart or nested, and that
    async ones of an id open and close as brackets do, in time."""
    threads: dict[tuple[int, int], list[tuple[float, float]]] = {}
    brackets: dict[tuple[int, str, str], list[tuple[str, float]]] = {}
    for event in events:
        assert event["ph"] in PHASES, event
        assert isinstance(event["name"], str), event
        assert event["name"], event
        assert type(event["pid"]) is int, event
        if event["ph"] == "M":
            assert event["name"] in METADATA, event
            assert isinstance(event["args"]["name"], str), event
            continue
        time_us = event["ts"]
        assert isinstance(time_us, (int, float)), event
        assert time_us >= 0, event
        match event["ph"]:
            case "X":
                assert event["dur"] >= 0, event
                assert type(event["tid"]) is int, event
                threads.setdefault((event["pid"], event["tid"]), []).append((time_us, time_us + event["dur"]))
            case "i":
                assert event["s"] in {"g", "p", "t"}, event
            case "C":
                assert event["args"], event
                assert all(type(value) in {int, float} for value in event["args"].values()), event
            case "b" | "e":
                stack = brackets.setdefault((event["pid"], event["cat"], event["id"]), [])
                if event["ph"] == "b":
                    assert not stack or stack[-1][1] <= time_us, event
                    stack.append((event["name"], time_us))
                else:
                    name, began_us = stack.pop()
                    assert name == event["name"], event
                    assert began_us <= time_us, event
    for spans in threads.values():
        spans.sort(key=lambda span: (span[0], -span[1]))
        open_ends: list[float] = []
        for start, end in spans:
            while open_ends and open_ends[-1] <= start:
                open_ends.pop()
            assert not open_ends or end <= open_ends[-1], (start, end)
            open_ends.append(end)

"""Logs as JSON lines: times, names and numbers, never what a client sent."""

from __future__ import annotations

import logging
import sys
import traceback
from typing import Any

import msgspec

request_logger = logging.getLogger("anaphora.requests")


def log_request(**fields: Any) -> None:
    """Log the end of a call. `fields` are numbers and words of ours."""
    request_logger.info("request", extra={"fields": fields})


class JsonFormatter(logging.Formatter):
    """One object a line: `ts` (Unix seconds), `level`, `logger`, `message`, and what was logged as `fields`.

    `message` is the format as it stands in the code, without its arguments, and an exception is told by its type and
    the lines that it came through, without its message: both may hold parts of a prompt.
    """

    def format(self, record: logging.LogRecord) -> str:
        """Return the line."""
        line: dict[str, Any] = {
            "ts": round(record.created, 6),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.msg if isinstance(record.msg, str) else type(record.msg).__name__,
            **getattr(record, "fields", {}),
        }
        if record.exc_info and record.exc_info[0] is not None:
            line["error"] = record.exc_info[0].__name__
            line["stack"] = [
                f"{frame.filename}:{frame.lineno} {frame.name}" for frame in traceback.extract_tb(record.exc_info[2])
            ]
        return msgspec.json.encode(line).decode()


def log_as_json() -> None:
    """From now on everything that is logged is a line of JSON on stderr, with a line for each request."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    logging.basicConfig(level=logging.WARNING, handlers=[handler], force=True)
    request_logger.setLevel(logging.INFO)
    for name in ("uvicorn", "uvicorn.error", "uvicorn.access"):  # it brings handlers of its own
        logging.getLogger(name).handlers.clear()
        logging.getLogger(name).propagate = True

"""Request bodies: read under a size limit, decoded strictly, every fault named by its field."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import TypeVar

import msgspec

from anaphora.server.errors import ApiError

DEFAULT_LIMIT_BYTES = 8 * 2**20

_T = TypeVar("_T")
_AT_PATH = re.compile(r" - at `\$\.?(.*)`$", re.DOTALL)
_UNKNOWN_FIELD = re.compile(r"Object contains unknown field `(.*)`$", re.DOTALL)
_MISSING_FIELD = re.compile(r"Object missing required field `(.*)`$", re.DOTALL)
_WRONG_TYPE = re.compile(r", got `[^`]*`$")
"""What is of the right type but out of its range is told without what was got."""
_AT_BYTE = re.compile(r"\(byte (\d+)\)")
_NUM_BYTES_BEFORE = 40
_NUM_BYTES_AFTER = 10
_MAX_NAME_SHOWN = 100


async def read_body(chunks: AsyncIterator[bytes], content_length: str | None, limit_bytes: int) -> bytes:
    """Return the body, holding at most `limit_bytes` of it, whether or not the client announced its length.

    Raises:
        ApiError: 413 where the body is longer. Up to `limit_bytes` more are read and dropped first, so that a client
            that is still sending gets the answer and not a broken connection.
    """
    held: list[bytes] = []
    num_bytes = 0
    is_too_long = content_length is not None and content_length.isdecimal() and int(content_length) > limit_bytes
    async for chunk in chunks:
        num_bytes += len(chunk)
        is_too_long = is_too_long or num_bytes > limit_bytes
        if not is_too_long:
            held.append(chunk)
        elif num_bytes > 2 * limit_bytes:
            break
    if is_too_long:
        raise ApiError(413, f"The request body is over the limit of {limit_bytes} bytes.", code="body_too_large")
    return b"".join(held)


def decode_body(body: bytes, decoder: msgspec.json.Decoder[_T]) -> _T:
    """Decode a body into the decoder's struct.

    Raises:
        ApiError: 400 for what is no JSON, for wrong types, values out of their range, missing and unknown fields.
            Unknown ones at the top are refused in OpenAI's words.
    """
    try:
        return decoder.decode(body)
    except msgspec.ValidationError as error:
        raise _explain(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        message = f"The request body is not valid JSON: {error}{_surroundings(str(error), body)}"
        raise ApiError(400, message, code="invalid_json") from None
    except RecursionError:
        raise ApiError(400, "The request body is nested too deeply.", code="invalid_json") from None


def _surroundings(problem: str, body: bytes) -> str:
    """Where the fault is, in the body's own words: they tell the field, which a position does not."""
    at = _AT_BYTE.search(problem)
    if not at:
        return ""
    position = int(at.group(1))
    around = body[max(0, position - _NUM_BYTES_BEFORE) : position + _NUM_BYTES_AFTER]
    return f", in: {around.decode(errors='replace')}"


def _explain(problem: str) -> ApiError:
    at = _AT_PATH.search(problem)
    path = _shorten(at.group(1)) if at else ""
    problem = problem[: at.start()] if at else problem
    if unknown := _UNKNOWN_FIELD.match(problem):
        name = _shorten(unknown.group(1))
        if not path:
            return ApiError(400, f"Unrecognized request argument supplied: {name}")
        param = f"{path}.{name}"
        return ApiError(400, f"Unknown parameter: '{param}'.", param=param, code="unknown_parameter")
    if missing := _MISSING_FIELD.match(problem):
        param = f"{path}.{missing.group(1)}" if path else missing.group(1)
        message = f"Missing required parameter: '{param}'."
        return ApiError(400, message, param=param, code="missing_required_parameter")
    code = "invalid_type" if _WRONG_TYPE.search(problem) else "invalid_value"
    problem = problem[:1].lower() + problem[1:]
    if not path:
        return ApiError(400, f"The request body is not as it should be: {problem}", code=code)
    return ApiError(400, f"{path}: {problem}", param=path, code=code)


def _shorten(name: str) -> str:
    return name if len(name) <= _MAX_NAME_SHOWN else name[:_MAX_NAME_SHOWN] + "..."

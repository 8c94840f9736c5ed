"""Typed access to a JSON object that a stranger wrote: what is asked for, nothing, or an error that names the field."""

from __future__ import annotations

import math
from datetime import UTC, datetime

_LARGEST = 2**53
"""What JSON numbers carry exactly."""


class FieldError(ValueError):
    """A field is missing or is not what it must be. The message names the field, never its content."""


class Fields:
    """A JSON object, read by field name. `path` says where it stands in its document.

    Every method returns None for a field that is absent or null, and raises FieldError for one of another kind.
    """

    __slots__ = ("path", "values")

    def __init__(self, values: object, path: str = "") -> None:
        if not isinstance(values, dict):
            raise FieldError(f"{path or 'document'}: expected an object")
        self.values = values
        self.path = path

    def has(self, *names: str) -> bool:
        """Whether all these fields are there."""
        return all(name in self.values for name in names)

    def text(self, name: str) -> str | None:
        """A string."""
        value = self.values.get(name)
        if value is None or isinstance(value, str):
            return value
        raise self.wrong(name, "a string")

    def label(self, name: str) -> str | None:
        """A string or a number, as a non-empty string."""
        value = self.values.get(name)
        if value is None or value == "":
            return None
        if isinstance(value, (str, int)) and not isinstance(value, bool):
            return str(value)
        raise self.wrong(name, "a string or a whole number")

    def count(self, name: str) -> int | None:
        """A whole number from 0 up, also as a string of digits or a float without a fraction."""
        value = self.values.get(name)
        if value is None or value == "":
            return None
        number = _whole(value)
        if number is None or not 0 <= number <= _LARGEST:
            raise self.wrong(name, "a whole number from 0 up")
        return number

    def need_count(self, name: str) -> int:
        """A whole number that must be there."""
        number = self.count(name)
        if number is None:
            raise self.wrong(name, "a whole number from 0 up")
        return number

    def number(self, name: str) -> float | None:
        """A finite number, also as a string."""
        value = self.values.get(name)
        if value is None or value == "":
            return None
        number = finite(value)
        if number is None:
            raise self.wrong(name, "a number")
        return number

    def time_s(self, name: str) -> float | None:
        """A time as seconds since 1970: ISO 8601 (UTC unless it says otherwise), or a number of s, ms, us or ns."""
        value = self.values.get(name)
        if value is None or value == "":
            return None
        number = finite(value)
        if number is not None:
            return seconds(number)
        if isinstance(value, str):
            parsed = parse_time(value)
            if parsed is not None:
                return parsed
        raise self.wrong(name, "a time: ISO 8601, or a number")

    def child(self, name: str) -> Fields | None:
        """An object."""
        value = self.values.get(name)
        return None if value is None else Fields(value, f"{self.path}.{name}" if self.path else name)

    def items(self, name: str) -> list[object]:
        """A list; an empty one where there is none."""
        value = self.values.get(name)
        if value is None:
            return []
        if isinstance(value, list):
            return value
        raise self.wrong(name, "a list")

    def ids(self, name: str) -> tuple[int, ...]:
        """A list of integers that fit 64 bits."""
        items = self.items(name)
        # A token id or a block's name; True is an int to Python and to nobody else.
        if not set(map(type, items)) <= {int} or (items and not (min(items) >= -(2**63) and max(items) < 2**64)):  # type: ignore[type-var, operator]
            raise self.wrong(name, "a list of integers")
        return tuple(items)  # type: ignore[arg-type]

    def wrong(self, name: str, expected: str) -> FieldError:
        """The error for a field that is not what was expected."""
        return FieldError(f"{self.path}.{name}: expected {expected}" if self.path else f"{name}: expected {expected}")


def finite(value: object) -> float | None:
    """The number that a value is or spells, if it is one."""
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        return None
    try:
        number = float(value)
    except (ValueError, OverflowError):
        return None
    return number if math.isfinite(number) else None


def seconds(number: float) -> float:
    """Seconds of a time stamp whose unit its size gives away."""
    for smallest, per_second in ((1e17, 1e9), (1e14, 1e6), (1e11, 1e3)):
        if abs(number) >= smallest:
            return number / per_second
    return number


def parse_time(text: str) -> float | None:
    """Seconds since 1970 of an ISO 8601 time, UTC where no zone is given."""
    try:
        parsed = datetime.fromisoformat(text.strip())
    except ValueError:
        return None
    try:
        return (parsed if parsed.tzinfo else parsed.replace(tzinfo=UTC)).timestamp()
    except (OverflowError, ValueError):
        return None


def _whole(value: object) -> int | None:
    if isinstance(value, bool):
        return None
    if isinstance(value, int):
        return value
    if isinstance(value, float):
        return int(value) if math.isfinite(value) and value == int(value) else None
    if isinstance(value, str) and len(value) < 20 and value.isdecimal() and value.isascii():
        return int(value)
    return None

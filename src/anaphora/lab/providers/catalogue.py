"""Rules and prices, from `rules.toml` and whatever overrides it. Prices are exact decimals."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass, replace
from decimal import Decimal
from importlib.resources import files
from typing import TYPE_CHECKING, Any, Literal

from anaphora.lab.importers.source import LogError

if TYPE_CHECKING:
    from pathlib import Path

    from anaphora.lab.record import Usage

Kind = Literal["breakpoints", "messages", "automatic"]
_MILLION = Decimal(1_000_000)
_RULE_FIELDS = {
    "title": str,
    "as_of": object,
    "source": str,
    "kind": str,
    "minimum_tokens": int,
    "step_tokens": int,
    "lookback": int,
    "max_marks": int,
    "ttl_s": int,
    "write": (int, Decimal),
    "write_1h": (int, Decimal),
    "read": (int, Decimal),
}
_MODEL_FIELDS = {
    "provider": str,
    "input": (int, Decimal),
    "output": (int, Decimal),
    "read": (int, Decimal),
    "write": (int, Decimal),
    "minimum_tokens": int,
}


@dataclass(frozen=True, slots=True)
class Prices:
    """Dollars for a million tokens."""

    input: Decimal
    read: Decimal
    write: Decimal
    write_1h: Decimal

    def cost(self, uncached: int, read: int, write: int, write_1h: int) -> Decimal:
        """Dollars for a prompt of these parts, exact."""
        total = uncached * self.input + read * self.read + write * self.write + write_1h * self.write_1h
        return total / _MILLION

    def cost_of(self, usage: Usage) -> Decimal:
        """Dollars for a prompt as it was reported. What was not reported counts as not cached."""
        written = usage.written or 0
        return self.cost(usage.uncached, usage.cached or 0, written - usage.written_1h, usage.written_1h)


@dataclass(frozen=True, slots=True)
class Rules:
    """One provider's cache. See `rules.toml` for the fields."""

    name: str
    title: str
    as_of: str
    source: str
    kind: Kind
    minimum_tokens: int
    ttl_s: int
    write: Decimal
    write_1h: Decimal
    read: Decimal
    step_tokens: int = 1
    lookback: int = 20
    max_marks: int = 4

    def prices(self, input_price: Decimal, read: Decimal | None = None, write: Decimal | None = None) -> Prices:
        """Prices of a model with this input price. Writing is free of a fee where the rule's factor is 0: such tokens
        cost what uncached ones do."""
        writes = self.write or Decimal(1)
        factor_1h = self.write_1h or Decimal(1)
        return Prices(
            input_price,
            input_price * self.read if read is None else read,
            input_price * writes if write is None else write,
            input_price * factor_1h,
        )


class Catalogue:
    """All rules and models. `override`: a TOML file with the same tables, whose fields win.

    Raises LogError, naming table and field, for an override that is not of this form.
    """

    def __init__(self, override: Path | None = None) -> None:
        text = files("anaphora.lab.providers").joinpath("rules.toml").read_text()
        tables = tomllib.loads(text, parse_float=Decimal)
        if override is not None:
            try:
                theirs = tomllib.loads(override.read_text(), parse_float=Decimal)
            except (OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
                raise LogError(f"{override}: {error}") from None
            for kind, table in theirs.items():
                known = tables.get(kind)
                if known is None or not isinstance(table, dict):
                    raise LogError(f"{override}: {kind}: expected the tables providers and models")
                for name, row in table.items():
                    _check(override, kind, name, row)
                    known.setdefault(name, {}).update(row)
        self._models: dict[str, dict[str, Any]] = tables["models"]
        self.rules = {name: _rules(name, row, override) for name, row in tables["providers"].items()}
        for name, row in self._models.items():
            if row.get("provider") not in self.rules:
                raise LogError(f"{override}: models.{name}.provider: expected one of {', '.join(self.rules)}")

    def find_model(self, model: str | None) -> dict[str, Any] | None:
        """The row of a model: the longest of the names that its own contains."""
        wanted = (model or "").lower()
        names = [name for name in self._models if name in wanted]
        return self._models[max(names, key=len)] if names else None

    def rules_for(self, provider: str, model: str | None) -> Rules:
        """A provider's rules, with the model's own minimum."""
        rules, row = self.rules[provider], self.find_model(model)
        if row is not None and row["provider"] == provider and "minimum_tokens" in row:
            return replace(rules, minimum_tokens=row["minimum_tokens"])
        return rules

    def prices_of(self, model: str | None) -> Prices | None:
        """A model's prices; None for one that is not in the table, or is without prices."""
        row = self.find_model(model)
        if row is None or "input" not in row:
            return None
        rules = self.rules[row["provider"]]
        return rules.prices(Decimal(row["input"]), _decimal(row.get("read")), _decimal(row.get("write")))


def _decimal(value: int | Decimal | None) -> Decimal | None:
    return None if value is None else Decimal(value)


def _check(path: Path, kind: str, name: str, row: object) -> None:
    allowed: dict[str, Any] = _RULE_FIELDS if kind == "providers" else _MODEL_FIELDS
    if not isinstance(row, dict):
        raise LogError(f"{path}: {kind}.{name}: expected a table")
    for field, value in row.items():
        if field not in allowed:
            raise LogError(f"{path}: {kind}.{name}.{field}: expected one of {', '.join(allowed)}")
        if not isinstance(value, allowed[field]) or isinstance(value, bool):
            raise LogError(f"{path}: {kind}.{name}.{field}: expected another kind of value")
        if isinstance(value, (int, Decimal)) and value < (1 if field == "step_tokens" else 0):
            raise LogError(f"{path}: {kind}.{name}.{field}: expected a number from 0 up")


def _rules(name: str, row: dict[str, Any], path: Path | None) -> Rules:
    missing = [f for f in ("kind", "minimum_tokens", "ttl_s", "write", "write_1h", "read") if f not in row]
    if missing:
        raise LogError(f"{path}: providers.{name}.{missing[0]}: expected a value")
    if row["kind"] not in {"breakpoints", "messages", "automatic"}:
        raise LogError(f"{path}: providers.{name}.kind: expected breakpoints, messages or automatic")
    values = dict(row)
    for factor in ("write", "write_1h", "read"):
        values[factor] = Decimal(values[factor])
    values["as_of"] = str(values.get("as_of", "unknown"))
    return Rules(name, **{"title": name, "source": "unknown"} | values)

"""Which checks must find which broken manager."""

from __future__ import annotations

from collections.abc import Callable

from tests.conformance.toy_manager import ToyManager


class CaughtBy(dict[type[ToyManager], tuple[str, ...]]):
    """Each broken manager, and the checks that its fault is named after."""

    def add(self, *checks: str) -> Callable[[type[ToyManager]], type[ToyManager]]:
        def register(broken: type[ToyManager]) -> type[ToyManager]:
            self[broken] = checks
            return broken

        return register

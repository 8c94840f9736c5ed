"""EngineObserver: who watches an engine at work, as a trace does."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anaphora.engine.loop import Engine
    from anaphora.engine.request import Delta, Request


class EngineObserver(Protocol):
    """Called on the engine's thread, which waits meanwhile; must not raise."""

    def submitted(self, request: Request) -> None:
        """A request stands in the queue."""

    def stepped(self, started_s: float, ended_s: float, engine: Engine, deltas: Sequence[Delta]) -> None:
        """A step was run; `engine.last_batch` has its spans. Times are of the service's clock."""

    def ended(self, delta: Delta) -> None:
        """The last delta of a sample is on its way."""

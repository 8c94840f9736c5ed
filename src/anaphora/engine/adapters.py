"""Adapters by name, over an executor that runs them by digest."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anaphora.engine.executor import RunsAdapters
from anaphora.engine.request import RequestError
from anaphora.identity import Adapter

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from anaphora.engine.executor import Executor
    from anaphora.model import LoraAdapter


class Adapters:
    """The adapters of an engine. A name stands for whatever was loaded under it last.

    Blocks are kept apart by digest (`Namespace.adapter`), so those made with other weights of the same name are not
    found any more, and one adapter under two names shares them. A request keeps the weights that it began with: what no
    name stands for any more is forgotten once no live request uses it, at the next `load` or `unload`.

    in_use: returns the digests that live requests use.
    """

    def __init__(self, executor: Executor, in_use: Callable[[], Collection[str]]) -> None:
        self._executor = executor if isinstance(executor, RunsAdapters) else None
        self._in_use = in_use
        self._by_name: dict[str, Adapter] = {}
        self._num_loaded = 0

    @property
    def by_name(self) -> dict[str, Adapter]:
        """The adapters as they stand, in the order of their names' first loading."""
        return dict(self._by_name)

    def load(self, name: str, weights: LoraAdapter) -> Adapter:
        """Take an adapter in under a name, in place of what had that name. Between steps.

        Raises:
            ValueError: the name is empty, or the executor runs no adapters.
            MemoryError: there is not enough memory for it; what was loaded stays as it was.
        """
        if not name:
            raise ValueError("adapter: expected a non-empty name")
        if self._executor is None:
            raise ValueError("adapter: this executor runs none; native and reference do")
        self._executor.load_adapter(weights)
        self._num_loaded += 1
        adapter = Adapter(weights.digest, name=name, path=weights.path, lora_id=self._num_loaded)
        self._by_name[name] = adapter
        self._forget_unused()
        return adapter

    def unload(self, name: str) -> None:
        """Forget a name. Between steps. KeyError if there is none such."""
        del self._by_name[name]
        self._forget_unused()

    def named(self, name: str | None) -> Adapter | None:
        """Return the adapter of that name; for None, which is the model as it is, None.

        Raises:
            RequestError: there is none of that name.
        """
        if name is None:
            return None
        adapter = self._by_name.get(name)
        if adapter is None:
            allowed = ", ".join(map(repr, self._by_name)) or "none"
            raise RequestError("adapter", f"adapter: {name[:100]!r} is not loaded; loaded are {allowed}")
        return adapter

    def validate(self, adapter: Adapter | None) -> None:
        """Raise RequestError for an adapter that the executor does not have. May be called from any thread."""
        if adapter is not None and self._executor is not None and adapter.digest not in self._executor.adapters:
            raise RequestError("adapter", f"adapter: {adapter.name[:100]!r} ({adapter.digest[:32]}) is not loaded")

    def _forget_unused(self) -> None:
        assert self._executor is not None
        kept = {adapter.digest for adapter in self._by_name.values()} | set(self._in_use())
        for digest in set(self._executor.adapters) - kept:
            self._executor.unload_adapter(digest)

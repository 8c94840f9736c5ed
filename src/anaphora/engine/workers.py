"""Workers: a few threads that numpy's products are shared among, instead of the BLAS library's own.

A BLAS that runs threads of its own makes them meet in a spinning wait after every product; on a machine that does
something else too, that costs several times what it gains. These threads sleep when they have nothing to do.
"""

from __future__ import annotations

import os
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

from threadpoolctl import ThreadpoolController

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

Item = TypeVar("Item")
Result = TypeVar("Result")

MAX_THREADS = 16
"""More than this many share too little work for a model that fits this executor."""


class Workers:
    """`num_threads` threads, the caller's among them; by default one for each CPU that this process may use."""

    def __init__(self, num_threads: int | None = None) -> None:
        self.num_threads = num_threads or default_num_threads()
        self._pool = ThreadPoolExecutor(self.num_threads - 1, "anaphora-worker") if self.num_threads > 1 else None
        self._blas = ThreadpoolController()

    def alone(self) -> AbstractContextManager[Any]:
        """Within this context BLAS runs no threads of its own, in the whole process. Cost: some 10 us."""
        limits: AbstractContextManager[Any] = self._blas.limit(limits=1, user_api="blas")
        return limits

    def map(self, function: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
        """Return function(item) for each item, computed by all threads; the first exception is raised.

        Cost: some 30 us for each item after the first.
        """
        if self._pool is None or len(items) < 2:
            return [function(item) for item in items]
        others = [self._pool.submit(function, item) for item in items[1:]]
        try:
            first = function(items[0])
        finally:
            results = [other.result() for other in others]
        return [first, *results]


def default_num_threads() -> int:
    """Return the number of CPUs that this process may use, at most MAX_THREADS."""
    try:
        num_cpus = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        num_cpus = os.cpu_count() or 1
    return min(MAX_THREADS, num_cpus)

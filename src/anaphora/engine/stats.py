"""What an engine has counted."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class EngineStats:
    """Counters since the start; `num_running`, `num_waiting` and the block counts are of now. Times are in seconds.

    num_held: of those that wait, how many sat out the last step since it computed a prefix of theirs.

    step_s: in whole steps. execute_s: of that, in the executor.
    step_cpu_s: CPU time of the engine's thread in steps, the executor's part on that thread included, and of that:
    schedule_cpu_s: in the scheduler, with the manager's calls that it makes, and in finding groups;
    commit_cpu_s: in telling manager and queue what was computed, drawn and has ended.
    prompt_tokens, cached_tokens: of admitted requests, counted once, at their first admission. host_cached_tokens:
    those of the cached ones that came back from host memory.
    computed_prompt_tokens: prompt tokens that went through the executor, recomputed ones included; so without
    preemptions, prompt_tokens = cached_tokens + computed_prompt_tokens once everything has finished.
    """

    num_steps: int = 0
    step_s: float = 0.0
    execute_s: float = 0.0
    step_cpu_s: float = 0.0
    schedule_cpu_s: float = 0.0
    commit_cpu_s: float = 0.0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    host_cached_tokens: int = 0
    computed_prompt_tokens: int = 0
    output_tokens: int = 0
    num_preemptions: int = 0
    num_running: int = 0
    num_waiting: int = 0
    num_held: int = 0
    num_blocks: int = 0
    num_free_blocks: int = 0

    @property
    def manager_cpu_s(self) -> float:
        """CPU time in scheduler and manager: an upper bound of what caching costs."""
        return self.schedule_cpu_s + self.commit_cpu_s

    @property
    def kv_usage(self) -> float:
        """Share of the pool that running requests hold, 0 to 1. Cached blocks that nobody holds count as free."""
        return 1.0 - self.num_free_blocks / self.num_blocks

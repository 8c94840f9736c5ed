"""The load itself: each request leaves when it is due, whether earlier ones were answered or not."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from anaphora.lab.progress import ProgressBar

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anaphora.lab.load.endpoint import Answer, Endpoint
    from anaphora.lab.load.prompts import Prompts
    from anaphora.lab.trace import Prompt

LATE_S = 0.01
"""A request that leaves more than so much after it was due is reported as late."""


@dataclass(slots=True)
class Load:
    """What was sent and what came back. Times count from the start of the run, in seconds.

    due_s, sent_s: when each request should leave, and when it did. num_outputs: tokens asked for.
    """

    prompts: Sequence[Prompt]
    due_s: list[float]
    num_outputs: list[int]
    concurrency: int | None
    answers: list[Answer] = field(default_factory=list)
    started_s: float = 0.0
    ended_s: float = 0.0

    @property
    def sent_s(self) -> list[float]:
        """When each request left."""
        return [answer.sent_s - self.started_s for answer in self.answers]

    @property
    def lateness_s(self) -> list[float]:
        """How long after it was due each request left."""
        return [sent - due for sent, due in zip(self.sent_s, self.due_s, strict=True)]

    @property
    def duration_s(self) -> float:
        """From the start to the end of the last answer."""
        return self.ended_s - self.started_s


async def run_load(
    endpoint: Endpoint,
    prompts: Prompts,
    requests: Sequence[Prompt],
    due_s: list[float],
    *,
    max_output_tokens: int | None = None,
    default_output_tokens: int = 16,
    concurrency: int | None = None,
) -> Load:
    """Send every request when it is due. Bodies are made before that, so that making them delays nothing.

    concurrency: at most so many at a time; then a request that is due waits for an answer, and leaves late.
    max_output_tokens: none asks for more. default_output_tokens: where the trace does not say.
    """
    limit = max_output_tokens or 1 << 30
    num_outputs = [min(limit, each.num_output_tokens or default_output_tokens) for each in requests]
    load = Load(requests, due_s, num_outputs, concurrency)
    slots = asyncio.Semaphore(concurrency) if concurrency else None
    form = prompts.vocabulary.form
    tasks: list[asyncio.Task[Answer]] = []
    with ProgressBar(len(requests), "sending") as bar:

        def end(_: object) -> None:
            if slots is not None:
                slots.release()
            bar.advance()

        load.started_s = endpoint.clock()
        for request, due, num_output in zip(requests, due_s, num_outputs, strict=True):
            body = endpoint.body(form, prompts.spell(prompts.indices(request)), num_output)
            # Also where nothing is to wait for: answers are read meanwhile.
            await asyncio.sleep(max(0.0, load.started_s + due - endpoint.clock()))
            if slots is not None:
                await slots.acquire()
            task = asyncio.create_task(endpoint.send(form, body))
            task.add_done_callback(end)
            tasks.append(task)
        load.answers = list(await asyncio.gather(*tasks))
    load.ended_s = endpoint.clock()
    return load

"""What a server takes, and how fast it is: asked before the run, with prompts that nothing else has."""

from __future__ import annotations

import asyncio
from array import array
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING

import numpy as np

from anaphora.engine.cost_model import HardwareProfile, WorkModel
from anaphora.engine.executor import Batch, Span
from anaphora.lab.importers import LogError
from anaphora.lab.load.prompts import ORDINARY_TOKEN_IDS, Prompts, Vocabulary
from anaphora.model.shape import ModelShape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anaphora.lab.load.endpoint import Answer, Endpoint
    from anaphora.lab.load.prompts import Form

_WORDS = """
river stone light green walk north table seven paper field door hand cold bridge apple yellow often market window
garden letter train quiet branch metal story round under water about after again air all also animal another answer
any around ask away back because been before below between both boy build came can change city close come country
could day did different does down earth eat end enough even every example eye face family far father feet few find
first follow food form found four from gave girl give good great group grow half head help here high home house how
idea important into just keep kind know land large last late learn leave left life line list little live long look
made make man many mean men might mile miss more most mother mountain move much music must name near need never new
next night number off old once only open order other our out over own page part people place plant play point press
problem put question rain read real right road run same saw say school sea second see seem sentence set she should
show side small some something song soon sound spell stand start state still stop study such take talk tell than
that their them then there these thing think this those thought three through time together too took tree try turn
two until use very want was watch way well went were what when where which while white who why will with without
word work world would write year young your
"""
# Words that are one token each, with the space before them, in nearly every vocabulary; which are not is asked.
_MIN_WORDS = 16
_PROBE_NUMBER = 1 << 20
"""Probes count from here, so that none is a prompt of the run."""


async def find_vocabulary(
    endpoint: Endpoint, form: Form | None = None, token_ids: range = ORDINARY_TOKEN_IDS
) -> Vocabulary:
    """The first form that the server takes: token ids, text, chat; or whether it takes the one that is named.

    Raises LogError: it takes none of them, or for text, no word that it has is one token.
    """
    answer: Answer | None = None
    if form in {None, "ids"}:
        answer = await _ask(endpoint, "ids", list(token_ids[:8]))
        if answer.error is None and answer.prompt_tokens in {None, 8, 9}:
            return Vocabulary("ids", token_ids, num_added=(answer.prompt_tokens or 8) - 8)
    forms: tuple[Form, ...] = ("text", "chat") if form is None else (form,)
    for each in forms:
        if each == "ids":
            continue
        answer = await _ask(endpoint, each, " river")
        if answer.error is None:
            return await _find_words(endpoint, each, answer)
    assert answer is not None
    said = f": {answer.message}" if answer.message else ""
    raise LogError(f"{endpoint.url}: it does not take prompts: {answer.error or 'counted as another length'}{said}")


async def _find_words(endpoint: Endpoint, form: Form, one: Answer) -> Vocabulary:
    words = tuple(f" {word}" for word in dict.fromkeys(_WORDS.split()))
    if one.prompt_tokens is None:
        return Vocabulary(form, words=words)  # nobody can tell; the report says that lengths are not known
    for word in words[:_MIN_WORDS]:
        single, double = await _ask(endpoint, form, word), await _ask(endpoint, form, word * 2)
        if single.prompt_tokens is not None and double.prompt_tokens == single.prompt_tokens + 1:
            added = single.prompt_tokens - 1
            break
    else:
        raise LogError(f"{endpoint.url}: common words are not one token each for this model; try --send ids")
    usable: list[str] = []
    waiting = [words]
    while waiting:
        some = waiting.pop()
        answer = await _ask(endpoint, form, "".join(some))
        if answer.prompt_tokens == len(some) + added:
            usable += some
        elif len(some) > 1:
            half = len(some) // 2
            waiting += [some[half:], some[:half]]
        if len(waiting) > 8:  # nearly none is one token
            break
    if len(usable) < _MIN_WORDS:
        raise LogError(f"{endpoint.url}: too few common words are one token for this model; try --send ids")
    return Vocabulary(form, words=tuple(usable), num_added=added)


async def _ask(endpoint: Endpoint, form: Form, prompt: list[int] | str, num_output: int = 1) -> Answer:
    while True:
        answer = await endpoint.send(form, endpoint.body(form, prompt, num_output))
        if not endpoint.learn(answer):
            return answer


@dataclass(frozen=True, slots=True)
class Speed:
    """What a server's answers say of its steps. Seconds.

    overhead_s: of a request besides its steps: the network, the tokenizer. step_s: of a step, whatever is in it.
    span_s: for each request in it. token_s, pair_s: for each prompt token, and each pair of a token and one before it.
    """

    overhead_s: float
    step_s: float
    span_s: float
    token_s: float
    pair_s: float

    def model(self) -> tuple[ModelShape, HardwareProfile]:
        """The same as a shape and a machine for the engine's cost model: the shape is none of the model's own, the
        speeds are chosen so that its work takes the measured time."""
        shape = ModelShape("llama", 1, 64, 64, 1, 1, 64, 1, max_context=1 << 20, rope_theta=1e4, rms_norm_eps=1e-5)
        weights, per_token, per_pair = _work_of(shape)
        return shape, HardwareProfile(
            "the server as probed",
            self.span_s,
            weights / self.step_s if self.step_s > 0 else None,
            per_token / self.token_s if self.token_s > 0 else None,
            per_pair / self.pair_s if self.pair_s > 0 else None,
            None,
        )


def _work_of(shape: ModelShape) -> tuple[float, float, float]:
    """Bytes of weights, FLOPs of a token, FLOPs of a pair, as the cost model counts them."""
    work = WorkModel(shape)
    span = Span(np.zeros(1, np.int32), 0, [array("i", [1])])
    one = work.of(Batch([span]))
    return one.weight_bytes, one.flops, one.attention_flops


async def measure_speed(endpoint: Endpoint, prompts: Prompts, longest: int, max_step_tokens: int) -> Speed:
    """Ask for a few prompts that nobody has, one by one and then eight together, and fit a line to the times.

    longest: no probe is longer. max_step_tokens: what the server computes in a step; more takes several.
    A length that the server refuses is left out. Raises LogError: a probe failed. Cost: some twenty requests.
    """
    lengths = sorted({max(8, min(longest, num)) for num in (32, 128, 512, 1536)})
    number = _PROBE_NUMBER
    rows: list[tuple[int, float]] = []
    gaps: list[float] = []
    for _ in range(3):
        for length in lengths:
            number += 1
            answer = await _probe(endpoint, prompts, number, length, 8, may_refuse=length > lengths[0])
            if answer.error is not None:
                continue
            rows.append((length, answer.ttft_s or 0.0))
            gaps += answer.gaps_s
    together = await asyncio.gather(
        *(_probe(endpoint, prompts, number + 1 + n, min(32, longest), 24) for n in range(8))
    )
    # Of answers that are under way together: the first gaps are those of others' prompts.
    crowded = [gap for answer in together for gap in answer.gaps_s[8:]]
    alone = median(gaps) if gaps else 0.0
    per_span = max(0.0, (median(crowded) - alone) / 7) if crowded else 0.0
    token_s, pair_s, rest = _fit(rows, alone, max_step_tokens)
    step_s = max(0.0, alone - per_span)
    return Speed(max(0.0, rest), step_s, max(0.0, per_span - token_s), token_s, pair_s)


async def _probe(
    endpoint: Endpoint, prompts: Prompts, number: int, length: int, num_output: int, *, may_refuse: bool = False
) -> Answer:
    prompt = prompts.spell(prompts.unique(number, length))
    answer = await _ask(endpoint, prompts.vocabulary.form, prompt, num_output)
    if answer.error is not None and not (may_refuse and answer.error.startswith("HTTP 4")):
        raise LogError(f"{endpoint.url}: a probe of {length} tokens failed: {answer.error} {answer.message}".rstrip())
    return answer


def _fit(rows: Sequence[tuple[int, float]], step_s: float, max_step_tokens: int) -> tuple[float, float, float]:
    """Seconds a token, a pair, and besides steps; least squares of the relative errors of medians, none negative."""
    lengths = sorted({length for length, _ in rows})
    times = np.array([median(time for length, time in rows if length == each) for each in lengths])
    steps = np.array([-(-length // max_step_tokens) * step_s for length in lengths])
    counts = np.array(lengths, float)
    columns = np.stack([counts, counts * (counts + 1) / 2, np.ones(len(lengths))], axis=1)
    used = list(range(min(3, len(lengths))))
    found = np.zeros(3)
    while used:
        solution = np.linalg.lstsq(columns[:, used] / times[:, None], (times - steps) / times, rcond=None)[0]
        if (solution >= 0).all():
            found[used] = solution
            break
        used.pop(int(solution.argmin()))
    return float(found[0]), float(found[1]), float(found[2])

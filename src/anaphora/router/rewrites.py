"""Model names that become others on their way to a replica: InferenceModelRewrite."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

    from anaphora.router.resources import InferenceModelRewrite, RewriteTarget


@dataclass(frozen=True, slots=True)
class Rewrite:
    """What became of a model name. rule: the resource that says so."""

    target: str
    rule: str


@dataclass(frozen=True, slots=True)
class _Rule:
    name: str
    targets: Sequence[RewriteTarget]


class ModelRewrites:
    """Rules from several sources.

    A rule for a model by its name comes before one for every model; among equals the oldest resource's first, then the
    order in which they were given, which is llm-d's rule (pkg/epp/datastore, modelRewriteStore).
    """

    def __init__(self, rng: random.Random | None = None) -> None:
        self._rng = rng or random.Random()
        self._sources: dict[str, Sequence[InferenceModelRewrite]] = {}
        self._exact: dict[str, _Rule] = {}
        self._general: _Rule | None = None

    def set(self, source: str, rewrites: Sequence[InferenceModelRewrite]) -> None:
        """One source gives its resources, all of them."""
        self._sources[source] = rewrites
        every = [rewrite for given in self._sources.values() for rewrite in given]
        every.sort(key=lambda rewrite: rewrite.metadata.creation_timestamp or "")
        exact: dict[str, _Rule] = {}
        general: _Rule | None = None
        for rewrite in every:
            for rule in rewrite.spec.rules:
                kept = _Rule(rewrite.metadata.name, rule.targets)
                for match in rule.matches:
                    exact.setdefault(match.model.value, kept)
                if not rule.matches and general is None:
                    general = kept
        self._exact, self._general = exact, general

    def rewrite(self, model: str) -> Rewrite | None:
        """Return what a request for `model` is to ask for instead, None where no rule is about it.

        A target is drawn by weight. Without weights all are equal; where some have one, those without are never drawn.
        """
        rule = self._exact.get(model, self._general)
        if rule is None:
            return None
        weights = [target.weight or 0 for target in rule.targets]
        drawn = self._rng.choices(rule.targets, weights if any(weights) else None)[0]
        return Rewrite(drawn.model_rewrite, rule.name)

"""A log made ready to be explained, and runs of it under conditions of one's choice."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from anaphora.identity import Adapter, Namespace
from anaphora.lab.encoding import encode_parts
from anaphora.lab.expiry import Expiry
from anaphora.lab.explain.volatile import without
from anaphora.lab.replay import CacheReplay, Counting
from anaphora.lab.trace import Prompt, Trace, build_trace

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from anaphora.lab.encoding import Encoder
    from anaphora.lab.explain.volatile import Volatile
    from anaphora.lab.record import LoggedRequest

SPLITS = ("salt", "adapter", "tenant")


@dataclass(frozen=True, slots=True)
class Conditions:
    """What stands between a log's prompts and their reuse.

    block_size: in tokens; 1 with `serves_last_token` is the finest there is.
    splits: what keeps prompts apart besides the model, of SPLITS.
    replicas: None: as the log says; a number: dealt round-robin to so many.
    ttl_s: what was not used for so long is gone. capacity_blocks: of each replica. None: no bound.
    """

    block_size: int = 1
    serves_last_token: bool = False
    splits: tuple[str, ...] = ()
    replicas: int | None = 1
    ttl_s: float | None = None
    capacity_blocks: int | None = None


@dataclass(slots=True)
class Case:
    """Requests with content in order of time, and their prompts.

    trace: the prompts as the log has them: its own token ids or named blocks, else encoded text.
    """

    requests: list[LoggedRequest]
    trace: Trace
    encoder: Encoder
    num_without_content: int = 0

    @property
    def has_text(self) -> bool:
        """Whether differences can be looked at."""
        return bool(self.requests) and all(request.parts for request in self.requests)

    def prompts(self) -> list[Prompt]:
        """As the log has them."""
        return self.trace.prompts

    def text_prompts(self, kinds: Iterable[Volatile] = (), sections: Iterable[str] | None = None) -> list[Prompt]:
        """The same from text, with these kinds of change taken out, or with these sections only."""
        kinds = tuple(kinds)
        wanted = None if sections is None else set(sections)
        found = []
        for request, prompt in zip(self.requests, self.trace.prompts, strict=True):
            parts = without(request.parts, kinds) if kinds else request.parts
            if wanted is not None:
                parts = tuple(part for part in parts if part.section in wanted)
            encoded = encode_parts(parts, self.encoder)
            found.append(replace(prompt, units=encoded.ids, tail=None, num_tokens=encoded.num_tokens))
        return found

    def run(self, prompts: Sequence[Prompt], conditions: Conditions, unit: int = 1) -> list[int]:
        """Cached tokens of each request. Cost: about 50 us a request."""
        block_size = max(unit, conditions.block_size)
        num_blocks = conditions.capacity_blocks or sum(-(-p.num_tokens // block_size) + 1 for p in prompts) or 1
        counting: Counting = "listed" if conditions.serves_last_token else "engine"
        replicas: dict[object, CacheReplay] = {}
        expiry = None if conditions.ttl_s is None else Expiry(conditions.ttl_s, block_size, unit)
        found = []
        for number, (request, prompt) in enumerate(zip(self.requests, prompts, strict=True)):
            if not prompt.units:
                found.append(0)
                continue
            where = request.replica if conditions.replicas is None else number % conditions.replicas
            cache = replicas.get(where)
            if cache is None:
                cache = replicas[where] = CacheReplay(num_blocks, block_size, unit, counting=counting)
            placed = replace(prompt, namespace=_namespace(request, conditions.splits))
            num_cached = cache.serve(placed)
            found.append(num_cached if expiry is None else min(num_cached, expiry.use(placed, where)))
        return found


def _namespace(request: LoggedRequest, splits: tuple[str, ...]) -> Namespace:
    """Where a prompt may be shared; tenants are set apart as a salt would."""
    salt = request.salt if "salt" in splits else None
    if "tenant" in splits and request.tenant:
        salt = f"{salt or ''}\0{request.tenant}"
    adapter = Adapter(request.adapter) if "adapter" in splits and request.adapter else None
    return Namespace(model=request.model or "", adapter=adapter, salt=salt or None)


def prepare(name: str, requests: Iterable[LoggedRequest], encoder: Encoder, block_size: int | None) -> Case:
    """Read a log whole: its distinct texts stay in memory. Raises LogError as `build_trace` does."""
    kept: list[LoggedRequest] = []
    num_without = 0
    for request in requests:
        if any(part.text for part in request.parts) or request.token_ids or request.blocks:
            kept.append(request)
        else:
            num_without += 1
    # In order of time, as the trace sorts; requests without a time keep their place behind the one before.
    clock = 0.0
    keyed = []
    for request in kept:
        clock = clock if request.time_s is None else request.time_s
        keyed.append((clock, request))
    kept = [request for _, request in sorted(keyed, key=lambda pair: pair[0])]
    trace = build_trace(name, kept, encoder, block_size)
    return Case(kept, trace, encoder, num_without)

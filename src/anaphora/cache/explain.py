"""Explain: where the match of a prompt ended, and why."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from anaphora.cache.index import longest_part
from anaphora.tokens import TOKEN_BYTES, unpack

if TYPE_CHECKING:
    from anaphora.cache.host_tier import HostTier
    from anaphora.cache.index import Hit, PrefixIndex
    from anaphora.cache.sequence import Sequence
    from anaphora.identity import Namespace

Reason = Literal["complete", "nothing_cached", "diverged", "below_block", "evicted", "other_namespace", "not_cached"]


@dataclass(frozen=True, slots=True)
class Elsewhere:
    """Another namespace would have served more: the fields in which it differs, and how many tokens it would serve.

    The fields' values stay out of it: they may be other tenants' secrets.
    """

    fields: tuple[str, ...]
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Explanation:
    """Why a prompt would be served `num_cached_tokens` of its `num_tokens` tokens, and not more.

    reason:
        complete: every whole block before the last token.
        nothing_cached: nothing is known under this namespace.
        evicted: what comes next was cached, and has been evicted.
        diverged: another token is cached at `position`.
        below_block: the prompt agrees with what is cached to its end, but does not fill the block.
        other_namespace: what comes next is cached under another salt, adapter, model (`elsewhere`) only.
        not_cached: nobody has computed what comes next, as far as is remembered.
    position: the first token that was not equal to anything cached.
    prompt_token, cached_token: diverged: what stands there in the prompt, and in the cache.
    num_below_block: tokens before `position` that are equal but lie in a block that is not.
    elsewhere: other namespaces that would serve more, most first.
    num_host_tokens: of the cached tokens those in host memory, after those on the device.
    """

    num_tokens: int
    num_cached_tokens: int
    reason: Reason
    position: int
    prompt_token: int | None = None
    cached_token: int | None = None
    num_below_block: int = 0
    elsewhere: tuple[Elsewhere, ...] = ()
    num_host_tokens: int = 0


def explain(
    index: PrefixIndex, host: HostTier | None, sequence: Sequence, hit: Hit, num_cached_tokens: int, block_size: int
) -> Explanation:
    """Explain the hit of a sequence that has not been admitted, and has been looked up. Changes nothing.

    Cost: a lookup in each namespace, and what the index remembers of evictions.
    """
    num_host_blocks = 0 if host is None else len(sequence.host_blocks)
    num_blocks = hit.num_blocks + num_host_blocks
    rest = sequence.tokens[num_blocks * block_size * TOKEN_BYTES :][: block_size * TOKEN_BYTES]
    elsewhere = _elsewhere(index, sequence, num_blocks, block_size)
    if host is not None and num_host_blocks:
        branches = list(host.continuations(sequence, num_blocks))
        was_evicted = host.was_evicted(sequence, num_blocks)
    else:
        branches = list(index.continuations(sequence, hit))
        was_evicted = index.was_evicted(sequence, hit)
    block, num_equal = longest_part(rest, branches, 1)
    position = num_blocks * block_size + num_equal
    prompt_token = cached_token = None
    reason: Reason
    if num_cached_tokens >= (sequence.num_tokens - 1) // block_size * block_size:
        reason = "complete"
    elif was_evicted:
        reason = "evicted"
    elif branches and num_equal * TOKEN_BYTES == len(rest):
        reason = "below_block"
    elif branches:
        reason = "diverged"
        standing = next((tokens for tokens, found in branches if found == block), branches[0][0])
        prompt_token, cached_token = unpack(rest)[num_equal], unpack(standing)[num_equal]
    elif elsewhere:
        reason = "other_namespace"
    else:
        reason = "not_cached" if num_blocks or sequence.namespace in index.namespaces() else "nothing_cached"
    return Explanation(
        num_tokens=sequence.num_tokens,
        num_cached_tokens=num_cached_tokens,
        reason=reason,
        position=position,
        prompt_token=prompt_token,
        cached_token=cached_token,
        num_below_block=max(0, position - num_cached_tokens),
        elsewhere=elsewhere,
        num_host_tokens=num_host_blocks * block_size,
    )


def _elsewhere(index: PrefixIndex, sequence: Sequence, num_blocks: int, block_size: int) -> tuple[Elsewhere, ...]:
    own = sequence.namespace
    found: dict[tuple[str, ...], int] = {}
    try:
        for namespace in index.namespaces():
            if namespace == own:
                continue
            sequence.namespace = namespace
            most = index.find(sequence, (sequence.num_tokens - 1) // block_size).num_blocks
            if most > num_blocks:
                fields = _differing(own, namespace)
                found[fields] = max(found.get(fields, 0), most * block_size)
    finally:
        sequence.namespace = own
    return tuple(Elsewhere(fields, num) for fields, num in sorted(found.items(), key=lambda item: -item[1]))


def _differing(one: Namespace, other: Namespace) -> tuple[str, ...]:
    names = ("model", "kv_layout", "adapter", "salt", "generation")
    return tuple(name for name in names if getattr(one, name) != getattr(other, name))

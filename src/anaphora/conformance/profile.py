"""Profiles: what engines may decide differently and still be right.

A choice that a manager's profile declares is reported as such; behaviour that is not what the profile declares is a
failure, as is anything that breaks a rule, which no profile can allow.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal


@dataclass(frozen=True, slots=True)
class Profile:
    """One engine's choices. None means that the manager offers nothing to see it by; it is not tested then."""

    name: str
    shareable: Literal["at_allocation", "at_commit", "at_finish"]
    """When a full block can be found: once it is handed out, once its KV exists, or once its request has ended."""
    block_ids: Literal["append_only", "rewritten"]
    """Whether a running request's table only grows, or may be pointed at equal blocks elsewhere."""
    duplicates: Literal["kept", "dropped", "swapped"]
    """Content that two requests computed at once: both copies stay cached; only one does; one is given up at once and
    its holder's table rewritten."""
    granularity: Literal["block", "token"]
    """Whether a hit is a whole number of blocks."""
    last_token: Literal["recomputed", "cached"]
    """Whether a prompt that is cached whole still has its last token computed; without, where do logits come from?"""
    eviction: Literal["exact", "may_take_more"]
    """Whether making room forgets no more blocks than are needed."""
    order: Literal["lru", "other"]
    """What goes first among the prefixes that nobody holds."""
    lookups: Literal["read_only", "refresh"] | None = None
    """Whether asking what would be found changes what is evicted next."""
    digests: Literal["verified", "trusted"] | None = None
    """Whether a block found by its digest is compared with the tokens asked for."""
    adapter_identity: Literal["content", "name_and_path"] | None = None
    """What tells LoRA adapters apart: the digest of their weights, or what they are called and where they lie."""
    counting: Literal["at_admission", "at_lookup"] | None = None
    """Whether a request that is refused and asked for again counts once in the statistics, or each time."""
    unread: Literal["counted", "left_out"] | None = None
    """Whether a request that must not read the cache counts in the statistics."""

    def choices(self) -> dict[str, str | None]:
        """Return the choices by name."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name != "name"}


VLLM = Profile(
    name="vllm",
    shareable="at_allocation",
    block_ids="append_only",
    duplicates="kept",
    granularity="block",
    last_token="recomputed",
    eviction="exact",
    order="lru",
    lookups="read_only",
    digests="trusted",
    adapter_identity="name_and_path",
    counting="at_admission",
    unread="left_out",
)
SGLANG = Profile(
    name="sglang",
    shareable="at_commit",
    block_ids="rewritten",
    duplicates="swapped",
    granularity="block",
    last_token="recomputed",
    eviction="may_take_more",
    order="lru",
    lookups="refresh",
    digests="verified",
    adapter_identity="content",
    counting=None,
    unread=None,
)
ANAPHORA_RADIX = Profile(
    name="anaphora-radix",
    shareable="at_commit",
    block_ids="append_only",
    duplicates="dropped",
    granularity="block",
    last_token="recomputed",
    eviction="exact",
    order="lru",
    lookups="read_only",
    digests="verified",
    adapter_identity="content",
    counting="at_admission",
    unread="counted",
)
ANAPHORA_HASH = replace(ANAPHORA_RADIX, name="anaphora-hash", duplicates="kept")
PROFILES = {profile.name: profile for profile in (VLLM, SGLANG, ANAPHORA_RADIX, ANAPHORA_HASH)}
"""The ready ones, by name. Make another with `dataclasses.replace`."""

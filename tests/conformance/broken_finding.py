"""Managers with one fault each in what they find, and the checks that must catch it."""

from __future__ import annotations

from collections.abc import Hashable, Sequence

from anaphora.conformance import Prompt
from tests.conformance.caught_by import CaughtBy
from tests.conformance.other_choices import FindsBlocksOnceAllocated, ServesWholePrompts, SwapsCopies, TrustsDigests
from tests.conformance.toy_manager import Key, Request, ToyManager

CAUGHT_BY = CaughtBy(
    {
        # What others may choose is a fault in a manager that says that it does not.
        FindsBlocksOnceAllocated: ("not yet computed", "given up before computed"),
        ServesWholePrompts: ("whole prompt",),
        SwapsCopies: ("copies",),
        TrustsDigests: ("forged digest",),
    }
)

# -- what makes blocks equal ---------------------------------------------------------------------------------------


@CAUGHT_BY.add("salt", "names of blocks")
class IgnoresSalt(ToyManager):
    def identity(self, prompt: Prompt) -> Hashable:
        return prompt.namespace.adapter and prompt.namespace.adapter.digest


@CAUGHT_BY.add("adapter", "adapter replaced in place", "names of blocks")
class TellsAdaptersByName(ToyManager):
    def identity(self, prompt: Prompt) -> Hashable:
        return prompt.namespace.salt, prompt.namespace.adapter and prompt.namespace.adapter.name


@CAUGHT_BY.add("salt against adapter")
class JoinsFieldsAsText(ToyManager):
    def identity(self, prompt: Prompt) -> Hashable:
        lora = prompt.namespace.adapter
        return (lora.digest if lora else "") + (prompt.namespace.salt or "")


@CAUGHT_BY.add("media", "names of blocks")
class IgnoresMedia(ToyManager):
    def media(self, prompt: Prompt, end: int) -> Hashable:
        return ()


@CAUGHT_BY.add("media offset")
class IgnoresWhereMediaBegin(ToyManager):
    def media(self, prompt: Prompt, end: int) -> Hashable:
        return tuple(item.digest for item in prompt.media if item.offset < end)


@CAUGHT_BY.add("equal blocks elsewhere", "names of blocks")
class NamesBlocksWithoutTheirPast(ToyManager):
    def key(self, request: Request, position: int) -> Key:
        *rest, tokens = super().key(request, position)
        return *rest, position, tokens[-self.size :]


@CAUGHT_BY.add("parting inside a block")
class TakesFineDigestsForBlocks(ToyManager):
    """Names each block by the digest of the unit that begins it, half a block long."""

    def key(self, request: Request, position: int) -> Key:
        *rest, tokens = super().key(request, position)
        return *rest, tokens[: len(tokens) - self.size + self.size // 2]


@CAUGHT_BY.add("names of blocks")
class NamesDependOnTheRequest(ToyManager):
    def block_names(self, request: str) -> Sequence[bytes]:
        live = self.requests[request]
        return [f"{id(live)}/{position}".encode() for position in range(live.num_computed // self.size)]


@CAUGHT_BY.add("golden names")
class SaysThatItsNamesAreThoseOfVllm(ToyManager):
    digest_algorithm = "sha256"


# -- what is found -------------------------------------------------------------------------------------------------


@CAUGHT_BY.add("longer and shorter")
class FindsNothingOfLongerPrompts(ToyManager):
    """The whole prompt is the key: what one left behind is found by an equal one, or by a longer one as a whole."""

    def find(self, request: Request) -> list[int]:
        hit = super().find(request)
        is_whole = any(len(key[-1]) > (len(hit)) * self.size for key in self.content.values())  # type: ignore[arg-type]
        return [] if is_whole else hit


@CAUGHT_BY.add("past a gap")
class GoesOnPastAGap(ToyManager):
    def find(self, request: Request) -> list[int]:
        num_full = self.longest(request) // self.size
        blocks = [self.block_of(self.key(request, position)) for position in range(num_full)]
        return [block for block in blocks if block is not None] if request.prompt.reads_cache else []


@CAUGHT_BY.add("reads not wanted")
class ReadsWhenItMustNot(ToyManager):
    def find(self, request: Request) -> list[int]:
        return super().find(Request(Prompt(**{**fields(request.prompt), "reads_cache": True}), request.tokens))


@CAUGHT_BY.add("chunked prefill")
class FindsTheWholePromptAtItsFirstChunk(ToyManager):
    def admit(self, request: Request, num_tokens: int | None) -> int | None:
        return super().admit(request, None)

    def computed(self, request: str, num_tokens: int) -> None:
        super().computed(request, num_tokens)
        self.publish(self.requests[request], len(self.requests[request].prompt.token_ids))


@CAUGHT_BY.add("drafts")
class FindsDrafts(ToyManager):
    """Takes the slots of draft tokens for computed ones as soon as their tokens are known."""

    def append(self, request: str, token_ids: Sequence[int]) -> None:
        super().append(request, token_ids)
        live = self.requests[request]
        if live.is_running:
            self.publish(live, min(live.num_slots, len(live.tokens)))


@CAUGHT_BY.add("generated tokens")
class ForgetsWhatWasGenerated(ToyManager):
    def publish(self, request: Request, num_tokens: int) -> None:
        super().publish(request, min(num_tokens, len(request.prompt.token_ids)))


@CAUGHT_BY.add("partly filled block")
class SharesPartlyFilledBlocks(ToyManager):
    """Serves the beginning of a block that somebody filled further, and lets the reader go on in it."""

    def admit(self, request: Request, num_tokens: int | None) -> int | None:
        num_cached = super().admit(request, num_tokens)
        if num_cached is None:
            return None
        position = num_cached // self.size
        for block, held in self.tails.items():
            num_more = len(held) - num_cached
            if 0 < num_more < len(request.tokens) - num_cached and request.tokens[: len(held)] == held:
                self.release_last(request, position, block)
                request.num_computed = num_cached + num_more
                return request.num_computed
        return num_cached

    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.tails: dict[int, tuple[int, ...]] = {}

    def release_last(self, request: Request, position: int, block: int) -> None:
        own = request.table[position]
        if own != block:
            self.num_holders[own] -= 1
            self.free.insert(0, own)
            self.pin([block])
            request.table[position] = block

    def release(self, request: Request) -> None:
        if request.num_computed % self.size:
            self.tails[request.table[request.num_computed // self.size]] = request.tokens[: request.num_computed]
        super().release(request)


def fields(prompt: Prompt) -> dict[str, object]:
    return {name: getattr(prompt, name) for name in ("token_ids", "namespace", "media", "reads_cache")}

"""Managers with one fault each, and the checks that must find it."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Sequence

from anaphora.conformance import Prompt
from tests.conformance.other_choices import FindsBlocksOnceAllocated, ServesWholePrompts, SwapsCopies, TrustsDigests
from tests.conformance.toy_manager import Key, Request, ToyManager

CAUGHT_BY: dict[type[ToyManager], tuple[str, ...]] = {
    # What others may choose is a fault in a manager that says that it does not.
    FindsBlocksOnceAllocated: ("not yet computed", "given up before computed"),
    ServesWholePrompts: ("whole prompt",),
    SwapsCopies: ("copies",),
    TrustsDigests: ("forged digest",),
}
"""Each broken manager, and the checks that the fault is named after."""


def caught_by(*checks: str) -> Callable[[type[ToyManager]], type[ToyManager]]:
    def register(broken: type[ToyManager]) -> type[ToyManager]:
        CAUGHT_BY[broken] = checks
        return broken

    return register


# -- what makes blocks equal ---------------------------------------------------------------------------------------


@caught_by("salt", "names of blocks")
class IgnoresSalt(ToyManager):
    def identity(self, prompt: Prompt) -> Hashable:
        return prompt.namespace.adapter and prompt.namespace.adapter.digest


@caught_by("adapter", "adapter replaced in place", "names of blocks")
class TellsAdaptersByName(ToyManager):
    def identity(self, prompt: Prompt) -> Hashable:
        return prompt.namespace.salt, prompt.namespace.adapter and prompt.namespace.adapter.name


@caught_by("salt against adapter")
class JoinsFieldsAsText(ToyManager):
    def identity(self, prompt: Prompt) -> Hashable:
        lora = prompt.namespace.adapter
        return (lora.digest if lora else "") + (prompt.namespace.salt or "")


@caught_by("media", "names of blocks")
class IgnoresMedia(ToyManager):
    def media(self, prompt: Prompt, end: int) -> Hashable:
        return ()


@caught_by("media offset")
class IgnoresWhereMediaBegin(ToyManager):
    def media(self, prompt: Prompt, end: int) -> Hashable:
        return tuple(item.digest for item in prompt.media if item.offset < end)


@caught_by("equal blocks elsewhere", "names of blocks")
class NamesBlocksWithoutTheirPast(ToyManager):
    def key(self, request: Request, position: int) -> Key:
        *rest, tokens = super().key(request, position)
        return *rest, position, tokens[-self.size :]


@caught_by("parting inside a block")
class TakesFineDigestsForBlocks(ToyManager):
    """Names each block by the digest of the unit that begins it, half a block long."""

    def key(self, request: Request, position: int) -> Key:
        *rest, tokens = super().key(request, position)
        return *rest, tokens[: len(tokens) - self.size + self.size // 2]


@caught_by("names of blocks")
class NamesDependOnTheRequest(ToyManager):
    def block_names(self, request: str) -> Sequence[bytes]:
        live = self.requests[request]
        return [f"{id(live)}/{position}".encode() for position in range(live.num_computed // self.size)]


@caught_by("golden names")
class SaysThatItsNamesAreThoseOfVllm(ToyManager):
    digest_algorithm = "sha256"


# -- what is found -------------------------------------------------------------------------------------------------


@caught_by("longer and shorter")
class FindsNothingOfLongerPrompts(ToyManager):
    """The whole prompt is the key: what one left behind is found by an equal one, or by a longer one as a whole."""

    def find(self, request: Request) -> list[int]:
        hit = super().find(request)
        is_whole = any(len(key[-1]) > (len(hit)) * self.size for key in self.content.values())  # type: ignore[arg-type]
        return [] if is_whole else hit


@caught_by("past a gap")
class GoesOnPastAGap(ToyManager):
    def find(self, request: Request) -> list[int]:
        num_full = self.longest(request) // self.size
        blocks = [self.block_of(self.key(request, position)) for position in range(num_full)]
        return [block for block in blocks if block is not None] if request.prompt.reads_cache else []


@caught_by("reads not wanted")
class ReadsWhenItMustNot(ToyManager):
    def find(self, request: Request) -> list[int]:
        return super().find(Request(Prompt(**{**fields(request.prompt), "reads_cache": True}), request.tokens))


@caught_by("chunked prefill")
class FindsTheWholePromptAtItsFirstChunk(ToyManager):
    def admit(self, request: Request, num_tokens: int | None) -> int | None:
        return super().admit(request, None)

    def computed(self, request: str, num_tokens: int) -> None:
        super().computed(request, num_tokens)
        self.publish(self.requests[request], len(self.requests[request].prompt.token_ids))


@caught_by("drafts")
class FindsDrafts(ToyManager):
    """Takes the slots of draft tokens for computed ones as soon as their tokens are known."""

    def append(self, request: str, token_ids: Sequence[int]) -> None:
        super().append(request, token_ids)
        live = self.requests[request]
        if live.is_running:
            self.publish(live, min(live.num_slots, len(live.tokens)))


@caught_by("generated tokens")
class ForgetsWhatWasGenerated(ToyManager):
    def publish(self, request: Request, num_tokens: int) -> None:
        super().publish(request, min(num_tokens, len(request.prompt.token_ids)))


@caught_by("partly filled block")
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


# -- who gets which block ------------------------------------------------------------------------------------------


@caught_by("own hit")
class TakesBlocksBeforeItHoldsItsHit(ToyManager):
    def hold(self, request: Request, hit: list[int], num_new: int) -> None:
        new = self.take(num_new)
        self.pin(block for block in hit if block not in new)
        request.table = hit + new


@caught_by("pinned blocks", "all blocks held")
class DoesNotHoldHits(ToyManager):
    """Leaves a hit in the line for eviction."""

    def pin(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.num_holders[block] += 1

    def queue(self, block: int) -> None:
        if block not in self.free:
            super().queue(block)


@caught_by("readers come and go")
class LetsGoWithTheFirstReader(ToyManager):
    def release(self, request: Request) -> None:
        for block in request.table:
            self.num_holders[block] = min(self.num_holders[block], 1)
        super().release(request)


@caught_by("refused request")
class KeepsTheHitOfARefusedRequest(ToyManager):
    def refuse(self, request: Request, hit: list[int]) -> None:
        self.pin(hit)


@caught_by("refused request", "larger than the pool")
class EvictsForARequestThatDoesNotFit(ToyManager):
    def refuse(self, request: Request, hit: list[int]) -> None:
        for block in list(self.free):
            self.forget(block)


@caught_by("refused growth", "all blocks held")
class DropsARequestThatCannotGrow(ToyManager):
    def refuse(self, request: Request, hit: list[int]) -> None:
        if request.is_running:
            self.release(request)


@caught_by("larger than the pool")
class RaisesWhereARequestCannotFit(ToyManager):
    def refuse(self, request: Request, hit: list[int]) -> None:
        if len(request.tokens) > self.num_blocks * self.size:
            raise MemoryError("out of KV")


@caught_by("idle blocks", "blank blocks first")
class NeverEvicts(ToyManager):
    def queue(self, block: int) -> None:
        if block not in self.content:
            super().queue(block)


@caught_by("blank blocks first")
class EvictsBeforeItUsesBlankBlocks(ToyManager):
    def take(self, num_blocks: int) -> list[int]:
        self.free.sort(key=lambda block: block not in self.content)
        return super().take(num_blocks)


@caught_by("tail before head")
class EvictsHeadsFirst(ToyManager):
    def order_of_release(self, table: list[int]) -> list[int]:
        return table


@caught_by("order", "tail before head")
class EvictsTheNewestFirst(ToyManager):
    def queue(self, block: int) -> None:
        self.free.insert(sum(other not in self.content for other in self.free), block)


@caught_by("copies", "content after a copy")
class KnowsOneBlockPerContent(ToyManager):
    """A copy takes the place of the one before; when either goes, the content is unknown."""

    def forget(self, block: int) -> None:
        key = self.content.get(block)
        if key is not None:
            for other in list(self.known[self.digest(key)]):
                super().forget(other)

    def queue(self, block: int) -> None:
        key = self.content.get(block)
        if key is not None and len(self.known[self.digest(key)]) > 1:
            self.forget(block)
        super().queue(block)


@caught_by("copies given back", "content after a copy")
class LosesCopies(ToyManager):
    def queue(self, block: int) -> None:
        key = self.content.get(block)
        if key is None or self.block_of(key) == block:
            super().queue(block)


@caught_by("growth beside a reader")
class HoldsBlocksByRequestsNotByCount(ToyManager):
    """A writer's end frees its blocks though a reader came meanwhile."""

    def finish(self, request: str) -> None:
        live = self.requests.pop(request)
        for block in live.table:
            self.num_holders[block] = 1
        if live.is_running:
            self.release(live)


@caught_by("reset")
class ResetForgetsNothing(ToyManager):
    def forget_all(self) -> None:
        pass


@caught_by("reset under a request")
class ResetFreesWhatIsHeld(ToyManager):
    def reset(self) -> bool:
        self.forget_all()
        self.num_holders.clear()
        self.free = list(range(self.num_blocks))
        return True


# -- ends, weights, statistics -------------------------------------------------------------------------------------


@caught_by("abort in any state")
class LosesBlocksOfAnAbortedPrefill(ToyManager):
    def abort(self, request: str) -> None:
        live = self.requests.get(request)
        if live is not None and live.is_running and live.num_computed < len(live.prompt.token_ids):
            del self.requests[request]
        else:
            super().abort(request)


@caught_by("abort in any state", "abort while preempted")
class GivesBackTwice(ToyManager):
    def __init__(self, num_blocks: int, block_size: int) -> None:
        super().__init__(num_blocks, block_size)
        self.last_tables: dict[str, list[int]] = {}

    def abort(self, request: str) -> None:
        live = self.requests.pop(request, None)
        if live is not None and live.table:
            self.last_tables[request] = live.table
        for block in self.last_tables.get(request, ()):
            self.num_holders[block] -= 1
            if self.num_holders[block] <= 0:
                self.queue(block)

    def release(self, request: Request) -> None:
        self.last_tables.update({name: live.table for name, live in self.requests.items() if live is request})
        super().release(request)


@caught_by("preempted request", "preempted counts once")
class ForgetsThePreemptedOnesWork(ToyManager):
    def preempt(self, request: str) -> None:
        for block in self.requests[request].table:
            self.forget(block)
        super().preempt(request)


@caught_by("preempted counts once")
class CountsPreemptedRequestsAgain(ToyManager):
    def resume(self, request: str, num_tokens: int | None) -> int | None:
        num_cached = super().resume(request, num_tokens)
        self.count(len(self.requests[request].tokens), num_cached or 0)
        return num_cached


@caught_by("chunks count once")
class CountsChunksAsHits(ToyManager):
    def allocate(self, request: str, num_tokens: int) -> bool:
        ok = super().allocate(request, num_tokens)
        live = self.requests[request]
        if ok and live.num_computed < len(live.prompt.token_ids):
            self.count(len(live.tokens), live.num_computed)
        return ok


@caught_by("new weights")
class KeepsWhatOldWeightsComputed(ToyManager):
    def invalidate(self) -> None:
        pass


@caught_by("new weights")
class PublishesOnOldWeights(ToyManager):
    """Forgets what is cached; what runs publishes on, with the KV of old weights below it."""

    def invalidate(self) -> None:
        self.forget_all()


def fields(prompt: Prompt) -> dict[str, object]:
    return {name: getattr(prompt, name) for name in ("token_ids", "namespace", "media", "reads_cache")}

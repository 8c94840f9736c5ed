"""Managers with one fault each in who gets which block, how requests end, or what is counted."""

from __future__ import annotations

from collections.abc import Iterable

from tests.conformance.caught_by import CaughtBy
from tests.conformance.toy_manager import Request, ToyManager

CAUGHT_BY = CaughtBy()

# -- who gets which block ------------------------------------------------------------------------------------------


@CAUGHT_BY.add("own hit")
class TakesBlocksBeforeItHoldsItsHit(ToyManager):
    def hold(self, request: Request, hit: list[int], num_new: int) -> None:
        new = self.take(num_new)
        self.pin(block for block in hit if block not in new)
        request.table = hit + new


@CAUGHT_BY.add("pinned blocks", "all blocks held")
class DoesNotHoldHits(ToyManager):
    """Leaves a hit in the line for eviction."""

    def pin(self, blocks: Iterable[int]) -> None:
        for block in blocks:
            self.num_holders[block] += 1

    def queue(self, block: int) -> None:
        if block not in self.free:
            super().queue(block)


@CAUGHT_BY.add("readers come and go")
class LetsGoWithTheFirstReader(ToyManager):
    def release(self, request: Request) -> None:
        for block in request.table:
            self.num_holders[block] = min(self.num_holders[block], 1)
        super().release(request)


@CAUGHT_BY.add("refused request")
class KeepsTheHitOfARefusedRequest(ToyManager):
    def refuse(self, request: Request, hit: list[int]) -> None:
        self.pin(hit)


@CAUGHT_BY.add("refused request", "larger than the pool")
class EvictsForARequestThatDoesNotFit(ToyManager):
    def refuse(self, request: Request, hit: list[int]) -> None:
        for block in list(self.free):
            self.forget(block)


@CAUGHT_BY.add("refused growth", "all blocks held")
class DropsARequestThatCannotGrow(ToyManager):
    def refuse(self, request: Request, hit: list[int]) -> None:
        if request.is_running:
            self.release(request)


@CAUGHT_BY.add("larger than the pool")
class RaisesWhereARequestCannotFit(ToyManager):
    def refuse(self, request: Request, hit: list[int]) -> None:
        if len(request.tokens) > self.num_blocks * self.size:
            raise MemoryError("out of KV")


@CAUGHT_BY.add("idle blocks", "blank blocks first")
class NeverEvicts(ToyManager):
    def queue(self, block: int) -> None:
        if block not in self.content:
            super().queue(block)


@CAUGHT_BY.add("blank blocks first")
class EvictsBeforeItUsesBlankBlocks(ToyManager):
    def take(self, num_blocks: int) -> list[int]:
        self.free.sort(key=lambda block: block not in self.content)
        return super().take(num_blocks)


@CAUGHT_BY.add("tail before head")
class EvictsHeadsFirst(ToyManager):
    def order_of_release(self, table: list[int]) -> list[int]:
        return table


@CAUGHT_BY.add("order", "tail before head")
class EvictsTheNewestFirst(ToyManager):
    def queue(self, block: int) -> None:
        self.free.insert(sum(other not in self.content for other in self.free), block)


@CAUGHT_BY.add("copies", "content after a copy")
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


@CAUGHT_BY.add("copies given back", "content after a copy")
class LosesCopies(ToyManager):
    def queue(self, block: int) -> None:
        key = self.content.get(block)
        if key is None or self.block_of(key) == block:
            super().queue(block)


@CAUGHT_BY.add("growth beside a reader")
class HoldsBlocksByRequestsNotByCount(ToyManager):
    """A writer's end frees its blocks though a reader came meanwhile."""

    def finish(self, request: str) -> None:
        live = self.requests.pop(request)
        for block in live.table:
            self.num_holders[block] = 1
        if live.is_running:
            self.release(live)


@CAUGHT_BY.add("reset")
class ResetForgetsNothing(ToyManager):
    def forget_all(self) -> None:
        pass


@CAUGHT_BY.add("reset under a request")
class ResetFreesWhatIsHeld(ToyManager):
    def reset(self) -> bool:
        self.forget_all()
        self.num_holders.clear()
        self.free = list(range(self.num_blocks))
        return True


# -- ends, weights, statistics -------------------------------------------------------------------------------------


@CAUGHT_BY.add("abort in any state")
class LosesBlocksOfAnAbortedPrefill(ToyManager):
    def abort(self, request: str) -> None:
        live = self.requests.get(request)
        if live is not None and live.is_running and live.num_computed < len(live.prompt.token_ids):
            del self.requests[request]
        else:
            super().abort(request)


@CAUGHT_BY.add("abort in any state", "abort while preempted")
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


@CAUGHT_BY.add("preempted request", "preempted counts once")
class ForgetsThePreemptedOnesWork(ToyManager):
    def preempt(self, request: str) -> None:
        for block in self.requests[request].table:
            self.forget(block)
        super().preempt(request)


@CAUGHT_BY.add("preempted counts once")
class CountsPreemptedRequestsAgain(ToyManager):
    def resume(self, request: str, num_tokens: int | None) -> int | None:
        num_cached = super().resume(request, num_tokens)
        self.count(len(self.requests[request].tokens), num_cached or 0)
        return num_cached


@CAUGHT_BY.add("chunks count once")
class CountsChunksAsHits(ToyManager):
    def allocate(self, request: str, num_tokens: int) -> bool:
        ok = super().allocate(request, num_tokens)
        live = self.requests[request]
        if ok and live.num_computed < len(live.prompt.token_ids):
            self.count(len(live.tokens), live.num_computed)
        return ok


@CAUGHT_BY.add("new weights")
class KeepsWhatOldWeightsComputed(ToyManager):
    def invalidate(self) -> None:
        pass


@CAUGHT_BY.add("new weights")
class PublishesOnOldWeights(ToyManager):
    """Forgets what is cached; what runs publishes on, with the KV of old weights below it."""

    def invalidate(self) -> None:
        self.forget_all()

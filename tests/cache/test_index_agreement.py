"""Where no content is computed twice, the tree and the map are one cache: equal hits, equal room, equal victims."""

from __future__ import annotations

import random

import pytest

from anaphora import KVCacheManager, Namespace, Sequence

BLOCK_SIZE = 4
NUM_BLOCKS = 24
NAMESPACES = [Namespace(), Namespace(salt="x")]


@pytest.mark.parametrize("seed", range(60))
def test_the_tree_and_the_map_agree_step_by_step(seed: int) -> None:
    rng = random.Random(seed)
    managers = [KVCacheManager(NUM_BLOCKS, BLOCK_SIZE, index=kind) for kind in ("radix", "hash")]
    live: list[tuple[Sequence, Sequence]] = []
    prompts: list[tuple[Namespace, list[int]]] = []
    fresh = iter(range(1000, 10**6))
    for _ in range(200):
        action = rng.random()
        if action < 0.5 and len(live) < 4:
            namespace, known = rng.choice(prompts) if prompts and rng.random() < 0.8 else (rng.choice(NAMESPACES), [])
            # Fresh tokens at the end, never a whole number of blocks: nothing known is ever computed again.
            prompt = known[: rng.randrange(len(known) + 1)] if known else []
            prompt = [*prompt, *(next(fresh) for _ in range(rng.randrange(1, 12)))]
            pair = tuple(manager.start(prompt, namespace) for manager in managers)
            assert pair[0].num_cached_tokens == pair[1].num_cached_tokens
            missing = len(prompt) - pair[0].num_cached_tokens
            admitted = [m.allocate(s, missing) for m, s in zip(managers, pair, strict=True)]
            assert admitted[0] == admitted[1]
            if admitted[0]:
                for manager, sequence in zip(managers, pair, strict=True):
                    manager.commit(sequence, missing)
                live.append((pair[0], pair[1]))
                prompts.append((namespace, prompt))
        elif live and action < 0.75:
            pair = rng.choice(live)
            token = next(fresh)
            room = [m.allocate(s, 1) for m, s in zip(managers, pair, strict=True)]
            assert room[0] == room[1]
            if room[0]:
                for manager, sequence in zip(managers, pair, strict=True):
                    manager.append(sequence, [token])
                    manager.commit(sequence, 1)
        elif live:
            pair = live.pop(rng.randrange(len(live)))
            for manager, sequence in zip(managers, pair, strict=True):
                manager.finish(sequence)
        radix, hashed = managers
        for manager in managers:
            manager.check()
        assert radix.num_free_blocks == hashed.num_free_blocks
        assert radix.num_cached_blocks == hashed.num_cached_blocks
        assert radix.stats() == hashed.stats()
        for namespace, prompt in prompts[-12:]:
            assert radix.match(prompt, namespace) == hashed.match(prompt, namespace)

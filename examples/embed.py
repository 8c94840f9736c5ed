"""The cache in an engine of your own: what to call, and when. Run it: no package is needed."""

from anaphora import KVCacheManager, Namespace

manager = KVCacheManager(num_blocks=64, block_size=16)
handbook = list(range(1000, 1100))  # 100 tokens that every prompt begins with


def serve(question: list[int], tenant: str) -> None:
    """One request's life. `compute` stands for your model: it writes KV into the blocks of the table."""
    sequence = manager.start(handbook + question, Namespace(salt=tenant))
    if not manager.allocate(sequence, sequence.num_tokens - sequence.num_cached_tokens):
        raise RuntimeError("the pool is full: preempt someone, or wait")
    blocks = " ".join(map(str, sequence.block_table))
    print(f"{tenant}: {sequence.num_cached_tokens} of {sequence.num_tokens} tokens cached, blocks {blocks}")
    # compute(sequence.block_table, first=sequence.num_computed_tokens)
    manager.commit(sequence, sequence.num_tokens - sequence.num_computed_tokens)
    for token in (7, 8, 9):  # what the model generates
        manager.append(sequence, [token])
        manager.allocate(sequence, 1)
        # compute one token
        manager.commit(sequence, 1)
    manager.finish(sequence)


serve([1, 2, 3], tenant="acme")
serve([4, 5, 6], tenant="acme")
serve([4, 5, 6], tenant="globex")  # another tenant shares nothing
manager.check()
print(f"hit rate {manager.stats().hit_rate:.0%}")

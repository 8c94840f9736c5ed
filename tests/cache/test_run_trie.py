"""Runs and their names against a dict: per prefix, spelled block by block, the blocks that hold its last one."""

from __future__ import annotations

from array import array
from itertools import count

from hypothesis import given, settings
from hypothesis import strategies as st

from anaphora import KVCacheManager, Namespace, Sequence
from anaphora.cache.named_blocks import NamedBlocks
from anaphora.cache.run import CHECKSUM_STRIDE
from anaphora.cache.run_trie import RunTrie
from anaphora.cache.windows import Windows
from anaphora.identity import BlockDigests, MediaSpan, extra_keys

BLOCK_SIZE = 2
NUM_BLOCKS = 400
Prefix = tuple[object, ...]

_starter = KVCacheManager(1, BLOCK_SIZE, index="hash")


class Known:
    """What has been learned, both ways."""

    def __init__(self) -> None:
        self.digests = BlockDigests(b"0" * 16)
        self.trie = RunTrie(BLOCK_SIZE, 1, self.digests)
        self.named = NamedBlocks(NUM_BLOCKS, self.trie, None, Windows([None], BLOCK_SIZE), None)
        self.model: dict[Prefix, list[int]] = {}
        self.prefix_of: dict[int, Prefix] = {}
        self.name_of: dict[int, bytes] = {}
        self.standing: list[tuple[Sequence, Prefix]] = []
        self._blocks = count(1)

    @staticmethod
    def spell(sequence: Sequence) -> Prefix:
        """A prompt as its namespace and its whole blocks, each with its tokens and its media."""
        num_blocks = sequence.num_tokens // BLOCK_SIZE
        extras = extra_keys(Namespace(), sequence.media, 0, num_blocks, BLOCK_SIZE) or [None] * num_blocks
        size = BLOCK_SIZE * 4
        tokens = [bytes(sequence.tokens[i * size : (i + 1) * size]) for i in range(num_blocks)]
        return (sequence.namespace, *zip(tokens, extras, strict=True))

    def known(self) -> set[Prefix]:
        """Every beginning of what is cached, or where somebody stands."""
        ends = [*self.model, *(prefix for _, prefix in self.standing)]
        return {prefix[:end] for prefix in ends for end in range(2, len(prefix) + 1)}

    def insert(self, sequence: Sequence, stays: bool) -> None:
        spelled = self.spell(sequence)
        num_blocks = len(spelled) - 1
        root = self.trie.root(sequence.namespace)
        self.trie.stand(root, 0)
        path = self.trie.walk(sequence, root, 0, num_blocks)
        num_known = sum(end - first for _, first, end in path)
        assert num_known == max((len(p) - 1 for p in self.known() if p == spelled[: len(p)]), default=0)
        path += self.trie.add(sequence, path[-1].run if path else root, num_known, num_blocks)
        extras = extra_keys(sequence.namespace, sequence.media, 0, num_blocks, BLOCK_SIZE)
        digests = self.digests.chain(
            self.digests.root(sequence.namespace), sequence.tokens[: num_blocks * 8], 2, extras
        )
        at = 0
        for run, first, end in path:
            blocks = array("i", [next(self._blocks) for _ in range(first, end)])
            self.named.name(0, run, first, blocks)
            if sequence.media:
                self.trie.names(run, end, sequence.media)
            for block in blocks:
                at += 1
                self.prefix_of[block] = spelled[: at + 1]
                self.model.setdefault(spelled[: at + 1], []).append(block)
                self.name_of[block] = digests[at - 1]
        run, _, end = path[-1] if path else (root, 0, 0)
        self.trie.stand(run, end)
        self.trie.leave(root, 0)
        sequence.index_state = run, end
        self.standing.append((sequence, spelled))
        if not stays:
            self.leave(len(self.standing) - 1)

    def leave(self, number: int) -> None:
        sequence, _ = self.standing.pop(number)
        self.trie.leave(*sequence.index_state)

    def evict(self, blocks: list[int]) -> None:
        assert self.named.evict(array("i", blocks)) == len(blocks)
        for block in blocks:
            prefix = self.prefix_of.pop(block)
            self.model[prefix].remove(block)
            if not self.model[prefix]:
                del self.model[prefix]

    def check(self) -> None:
        standing: dict[object, int] = {}
        for sequence, _ in self.standing:
            standing[sequence.index_state] = standing.get(sequence.index_state, 0) + 1
        self.trie.check(standing)
        self.named.check()
        assert sorted(blocks for *_, blocks in self.trie.cached()) == sorted(self.model.values())
        assert self.num_positions() == len(self.known())

    def num_positions(self) -> int:
        return sum(run.num_blocks for run in self.trie.runs())


PROMPTS = st.lists(st.integers(0, 1), min_size=2, max_size=14)
MEDIA = st.sampled_from([None, (0, 1), (1, 4), (3, 2), (2, 6)])
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("insert"), PROMPTS, MEDIA, st.sampled_from("ab"), st.booleans(), st.sampled_from(["", "s"])),
        st.tuples(st.just("evict"), st.integers(1, 6), st.booleans(), st.randoms()),
        st.tuples(st.just("leave"), st.integers(0, 9)),
        st.tuples(st.just("name"), st.integers(0, 9)),
    ),
    max_size=30,
)


@settings(max_examples=500, deadline=None)
@given(STEPS)
def test_the_runs_spell_what_the_dict_says(steps):
    known = Known()
    for do, *arguments in steps:
        if do == "insert":
            prompt, place, image, stays, salt = arguments
            media = []
            if place is not None and sum(place) <= len(prompt):
                media = [MediaSpan(*place, image)]
            namespace = Namespace(salt=salt or None)
            known.insert(_starter.start(prompt, namespace, media=media), stays)
        elif do == "evict":
            num, in_order, chance = arguments
            blocks = sorted(known.prefix_of, reverse=True)
            if not in_order:
                chance.shuffle(blocks)
            known.evict(blocks[:num])
        elif do == "leave" and known.standing:
            known.leave(arguments[0] % len(known.standing))
        elif do == "name" and known.prefix_of:
            block = sorted(known.prefix_of)[arguments[0] % len(known.prefix_of)]
            assert (known.name_of[block], 0) in known.named.stored()
        known.check()
    assert sorted(known.named.stored()) == sorted((known.name_of[block], 0) for block in known.prefix_of)


def test_a_sequence_that_grows_block_by_block_is_one_run():
    manager = KVCacheManager(64, BLOCK_SIZE, index="hash")
    sequence = manager.start([1, 2, 3])
    for token in range(40):
        assert manager.allocate(sequence, sequence.num_tokens - sequence.num_computed_tokens)
        manager.commit(sequence, sequence.num_tokens - sequence.num_computed_tokens)
        manager.append(sequence, [token])
    trie = manager._index._trie
    assert [run.num_blocks for run in trie.runs()] == [0, 1, 20]


def test_what_is_cut_off_takes_no_memory():
    known = Known()
    known.insert(_starter.start([7] * 200), stays=False)
    for block in range(100, 1, -1):
        known.evict([block])
        (run,) = [run for run in known.trie.runs() if run.parent]
        assert len(run.key) <= 2 * run.num_blocks * BLOCK_SIZE * 4


def test_equal_tokens_have_equal_checksums_however_runs_divide_them():
    size = 5 * CHECKSUM_STRIDE
    tokens = list(range(BLOCK_SIZE * size))
    whole, divided = Known(), Known()
    whole.insert(_starter.start(tokens), stays=True)
    for end in (3, 2 * CHECKSUM_STRIDE, 3 * CHECKSUM_STRIDE + 1, size):
        divided.insert(_starter.start(tokens[: end * BLOCK_SIZE]), stays=True)
    for depth in range(1, size + 1):
        sums = set()
        for known in (whole, divided):
            run, position = known.trie.place(known.standing[-1][0].index_state[0], depth)
            sums.add(run.checksum(position, known.trie.width))
        assert len(sums) == 1

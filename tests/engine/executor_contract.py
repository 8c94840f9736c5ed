"""What every exact executor is held to: the same bits whatever the spans, the batch and the pages.

A test module subclasses these and gives a fixture `build`: a function from a shape to an executor of random weights,
the same one each time.
"""

from __future__ import annotations

from array import array
from dataclasses import replace
from functools import cache
from itertools import pairwise
from random import Random

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anaphora.engine.executor import Batch, Span
from anaphora.engine.grouping import shared_prefixes

from .dense_model import FAMILIES, LLAMA

NUM_TOKENS = 600  # more than two key tiles
NUM_BLOCKS = 200
BLOCK_SIZES = (16, 32, 64, 128)

# Layers of the size of a small real model, so that products take the blocked, threaded kernels.
REAL_LAYER = replace(
    LLAMA, num_layers=1, hidden_size=576, intermediate_size=1536, num_heads=9, num_kv_heads=3, head_dim=64
)
EXACT = {name: FAMILIES[name] for name in ("llama", "mistral", "mistral, wide window", "qwen2", "qwen3")}

each_family = pytest.mark.parametrize("family", EXACT)
# One test runs in several subclasses, on purpose.
inherited = settings(deadline=None, suppress_health_check=[HealthCheck.differing_executors])


@cache
def sequence(seed, num_tokens=NUM_TOKENS):
    tokens = np.random.default_rng(seed).integers(0, LLAMA.vocab_size, num_tokens, np.int32)
    tokens.setflags(write=False)
    return tokens


def run(executor, tokens, table, start=0, stop=None):
    """Logits of tokens[start:stop], as one span alone in its batch."""
    span = Span(tokens[start:stop], start, [array("i", table)], num_logits=len(tokens[start:stop]))
    return executor.execute(Batch([span])).logits[0]


@cache
def expected_logits(build, shape, seed, num_tokens=NUM_TOKENS):
    """The whole sequence at once, alone, in fresh pages."""
    build(shape).allocate_kv(NUM_BLOCKS, 16)
    return run(build(shape), sequence(seed, num_tokens), range(1, NUM_BLOCKS))


def assert_same_bits(actual, expected):
    np.testing.assert_array_equal(actual.view(np.uint32), expected.view(np.uint32))


def assert_same_bits_in_company(build, shape, block_size, num_sequences, seed):
    """Compute sequences in a random schedule of random spans, in scattered pages full of other sequences' KV."""
    random = Random(seed)
    expected = [expected_logits(build, shape, i) for i in range(num_sequences)]
    model = build(shape)
    blocks_each = -(-NUM_TOKENS // block_size)
    blocks = random.sample(range(1, num_sequences * blocks_each + 1), num_sequences * blocks_each)
    tables = [array("i", blocks[i * blocks_each : (i + 1) * blocks_each]) for i in range(num_sequences)]
    model.allocate_kv(len(blocks), block_size)
    for i, table in enumerate(tables):
        run(model, sequence(100 + i, blocks_each * block_size), random.sample(table, blocks_each))

    computed = [0] * num_sequences
    while unfinished := [i for i in range(num_sequences) if computed[i] < NUM_TOKENS]:
        members = random.sample(unfinished, random.randint(1, len(unfinished)))
        stops = [min(computed[i] + random.choice([1, 1, 7, 64, 200, 600]), NUM_TOKENS) for i in members]
        spans = [
            Span(sequence(i)[computed[i] : stop], computed[i], [tables[i]], num_logits=stop - computed[i])
            for i, stop in zip(members, stops, strict=True)
        ]
        output = model.execute(Batch(spans))
        for i, stop, logits in zip(members, stops, output.logits, strict=True):
            assert_same_bits(logits, expected[i][computed[i] : stop])
            computed[i] = stop


class ReturnsLogits:
    def test_of_the_last_rows_of_each_span_as_asked(self, build):
        model = build(LLAMA)
        tokens, expected = sequence(0)[:50], expected_logits(build, LLAMA, 0)
        model.allocate_kv(NUM_BLOCKS, 16)
        spans = [
            Span(tokens, 0, [array("i", range(1 + 4 * i, 5 + 4 * i))], num_logits=num_logits)
            for i, num_logits in enumerate([1, 0, 50, 3])
        ]
        one, none, everything, three = model.execute(Batch(spans)).logits
        assert none is None
        assert_same_bits(one, expected[49:50])
        assert_same_bits(everything, expected[:50])
        assert_same_bits(three, expected[47:50])

    def test_of_nothing_when_none_are_wanted(self, build):
        model = build(LLAMA)
        model.allocate_kv(NUM_BLOCKS, 16)
        assert model.execute(Batch([Span(sequence(0)[:9], 0, [array("i", [1])], num_logits=0)])).logits == [None]
        assert model.execute(Batch([])).logits == []


class SameBits:
    @each_family
    @settings(inherited, max_examples=15)
    @given(data=st.data())
    def test_however_a_sequence_is_cut_into_spans(self, build, family, data):
        shape, tokens = EXACT[family], sequence(0)
        expected, model = expected_logits(build, shape, 0), build(shape)
        cuts = data.draw(st.lists(st.integers(1, NUM_TOKENS - 1), max_size=20, unique=True).map(sorted))
        block_size = data.draw(st.sampled_from(BLOCK_SIZES))
        model.allocate_kv(NUM_BLOCKS, block_size)
        for start, stop in pairwise([0, *cuts, NUM_TOKENS]):
            assert_same_bits(run(model, tokens, range(1, NUM_BLOCKS), start, stop), expected[start:stop])

    @each_family
    def test_computed_token_by_token(self, build, family):
        shape, tokens = EXACT[family], sequence(0)
        expected, model = expected_logits(build, shape, 0), build(shape)
        model.allocate_kv(NUM_BLOCKS, 32)
        run(model, tokens, range(1, NUM_BLOCKS), 0, 240)
        for position in range(240, 280):
            logits = run(model, tokens, range(1, NUM_BLOCKS), position, position + 1)
            assert_same_bits(logits, expected[position : position + 1])

    @each_family
    @settings(inherited, max_examples=8)
    @given(block_size=st.sampled_from(BLOCK_SIZES), num_sequences=st.integers(2, 6), seed=st.integers(0, 2**32 - 1))
    def test_in_any_company_in_any_order_in_any_blocks_that_others_used_before(
        self, build, family, block_size, num_sequences, seed
    ):
        assert_same_bits_in_company(build, EXACT[family], block_size, num_sequences, seed)

    @each_family
    def test_after_a_prefix_was_copied_to_other_blocks(self, build, family):
        shape, tokens = EXACT[family], sequence(0)
        expected, model = expected_logits(build, shape, 0), build(shape)
        model.allocate_kv(NUM_BLOCKS, 16)
        run(model, tokens, range(1, 100), 0, 320)
        copies = [*range(150, 130, -1)]
        model.copy_blocks(list(zip(range(1, 21), copies, strict=True)))
        run(model, sequence(7), range(1, 100))  # overwrites the originals
        assert_same_bits(run(model, tokens, [*copies, *range(160, 180)], 320), expected[320:])

    def test_at_real_size_in_spans_and_alone(self, build):
        expected, model = expected_logits(build, REAL_LAYER, 0), build(REAL_LAYER)
        model.allocate_kv(NUM_BLOCKS, 64)
        cuts = [0, 1, 9, 26, 250, 257, 258, 388, 551, NUM_TOKENS]
        for start, stop in pairwise(cuts):
            assert_same_bits(run(model, sequence(0), range(1, 20), start, stop), expected[start:stop])

    def test_at_real_size_in_company(self, build):
        assert_same_bits_in_company(build, REAL_LAYER, block_size=16, num_sequences=4, seed=0)


class UsesPages:
    def test_a_prefix_computed_for_one_sequence_serves_another(self, build):
        model, first = build(LLAMA), sequence(0)
        second = np.concatenate([first[:256], sequence(1)[:44]])
        model.allocate_kv(NUM_BLOCKS, 16)
        cold = run(model, second, range(1, NUM_BLOCKS))
        model.allocate_kv(NUM_BLOCKS, 16)
        run(model, first, range(1, 100))
        warm = run(model, second, [*range(1, 17), *range(120, 140)], 256)
        assert_same_bits(warm, cold[256:])

    @pytest.mark.parametrize("poison", [np.nan, np.inf])
    def test_a_sequence_whose_numbers_break_down_leaves_others_untouched(self, build, poison):
        model = build(LLAMA, poison)  # token 52 is poisoned
        tokens = sequence(0)[:100] % 52
        model.allocate_kv(8, 16)
        expected = run(model, tokens, range(1, 9))
        model.allocate_kv(8, 16)
        broken = run(model, np.full(128, 52, np.int32), range(1, 9))
        assert not np.isfinite(broken).any()
        assert_same_bits(run(model, tokens, range(1, 9)), expected)

    def test_copies_are_made_one_after_the_other_so_a_copy_can_be_copied(self, build):
        model, tokens = build(LLAMA), sequence(0)[:16]
        model.allocate_kv(5, 16)
        run(model, tokens, [1])
        model.copy_blocks([(1, 2), (2, 3)])
        follow_up = np.append(tokens, np.int32(5))
        assert_same_bits(run(model, follow_up, [3, 4], 16), run(model, follow_up, [1, 5])[16:])

    def test_what_went_to_host_memory_comes_back_with_the_same_bits(self, build):
        model, tokens = build(LLAMA), sequence(0)[:64]
        model.allocate_kv(12, 16)
        follow_up = np.append(tokens, np.int32(5))
        expected = run(model, follow_up, range(1, 6))[64:]
        model.allocate_host(3)
        model.save_blocks([(1, 2), (2, 1), (2, 3)])
        run(model, sequence(1)[:32], [1, 2])  # overwrites what was saved
        model.load_blocks([(2, 9), (1, 1), (3, 10), (1, 10)])
        for second in (1, 10):
            assert_same_bits(run(model, follow_up, [9, second, 3, 4, 11], 64), expected)

    def test_blocks_of_host_memory_that_do_not_exist_are_refused(self, build):
        model = build(LLAMA)
        model.allocate_kv(8, 16)
        with pytest.raises(RuntimeError, match="allocate_host"):
            model.save_blocks([(1, 1)])
        with pytest.raises(ValueError, match=r"num_blocks: 0 .* at least 1"):
            model.allocate_host(0)
        model.allocate_host(4)
        with pytest.raises(ValueError, match=r"pairs: \(1, 5\) is not allowed; .* the target 1 .. 4"):
            model.save_blocks([(1, 5)])
        with pytest.raises(ValueError, match=r"pairs: \(5, 1\) is not allowed; the source must be 0 .. 4"):
            model.load_blocks([(5, 1)])
        model.allocate_kv(8, 16)
        with pytest.raises(RuntimeError, match="allocate_host"):
            model.load_blocks([(1, 1)])

    def test_no_pairs_is_no_copy(self, build):
        model = build(LLAMA)
        model.allocate_kv(4, 16)
        model.copy_blocks([])


class SharesPrefixes:
    """Groups of spans with leading blocks in common: named or not, the bits are the same."""

    @each_family
    @settings(inherited, max_examples=8)
    @given(
        block_size=st.sampled_from(BLOCK_SIZES),
        # How many tokens a sequence shares with an earlier one: up to 4 levels, most of them within a key tile.
        branches=st.lists(st.tuples(st.integers(0, 3), st.integers(0, NUM_TOKENS - 1)), min_size=1, max_size=5),
        seed=st.integers(0, 2**32 - 1),
    )
    def test_in_several_levels_in_any_schedule(self, build, family, block_size, branches, seed):
        self.assert_same_bits(build, EXACT[family], block_size, branches, seed)

    def test_at_real_size(self, build):
        self.assert_same_bits(build, REAL_LAYER, 16, [(0, 560), (0, 560), (1, 300), (0, 256), (0, 255)], 0)

    def assert_same_bits(self, build, shape, block_size, branches, seed):
        """Sequences that branch off others after whole blocks, computed in random spans beside each other."""
        random = Random(seed)
        sequences, parents, num_shared = [sequence(0)], [-1], [0]
        for parent, length in branches:
            parents.append(min(parent, len(sequences) - 1))
            num_shared.append(length // block_size * block_size)
            own = sequence(20 + len(sequences))
            sequences.append(np.concatenate([sequences[parents[-1]][: num_shared[-1]], own[num_shared[-1] :]]))
        model = build(shape)
        blocks_each = -(-NUM_TOKENS // block_size)
        expected = []
        for tokens in sequences:
            model.allocate_kv(blocks_each, block_size)
            expected.append(run(model, tokens, range(1, blocks_each + 1)))

        ids = random.sample(range(1, len(sequences) * blocks_each + 1), len(sequences) * blocks_each)
        tables = []
        for i, num_tokens in enumerate(num_shared):
            own = array("i", ids[i * blocks_each : (i + 1) * blocks_each])
            num_blocks = num_tokens // block_size
            tables.append(tables[parents[i]][:num_blocks] + own[num_blocks:] if i else own)
        model.allocate_kv(len(ids), block_size)
        computed = list(num_shared)
        for i, (tokens, table) in enumerate(zip(sequences, tables, strict=True)):
            # At least what others will read.
            read = [n for parent, n in zip(parents, num_shared, strict=True) if parent == i]
            stop = max([random.randint(computed[i], NUM_TOKENS - 1), *read])
            if stop > computed[i]:
                run(model, tokens, table, computed[i], stop)
                computed[i] = stop
        while unfinished := [i for i in range(len(sequences)) if computed[i] < NUM_TOKENS]:
            members = random.sample(unfinished, random.randint(1, len(unfinished)))
            stops = [min(computed[i] + random.choice([1, 1, 1, 5, 16, 17, 100]), NUM_TOKENS) for i in members]
            groups = shared_prefixes([tables[i] for i in members], block_size, random.choice([1, block_size, 256]))
            spans = [
                Span(sequences[i][computed[i] : stop], computed[i], [tables[i]], num_logits=stop - computed[i])
                for i, stop in zip(members, stops, strict=True)
            ]
            # Twice: the second time without groups, over the same pages.
            for shared in (groups, []):
                for i, stop, logits in zip(members, stops, model.execute(Batch(spans, shared)).logits, strict=True):
                    assert_same_bits(logits, expected[i][computed[i] : stop])
            for i, stop in zip(members, stops, strict=True):
                computed[i] = stop

    def test_logits_stand_in_the_order_of_the_spans(self, build):
        model, tokens = build(LLAMA), sequence(0)
        model.allocate_kv(NUM_BLOCKS, 16)
        run(model, tokens, range(1, 41))
        spans = [
            Span(tokens[300 + i : 301 + i], 300 + i, [array("i", range(1, 41))], num_logits=i != 2) for i in range(5)
        ]
        outputs = model.execute(Batch(spans, [((1, 2, 4), 17), ((1, 4), 18)])).logits
        assert outputs[2] is None
        for i in (0, 1, 3, 4):
            assert_same_bits(outputs[i], expected_logits(build, LLAMA, 0)[300 + i : 301 + i])


class Refuses:
    @pytest.mark.parametrize(
        ("shared", "message"),
        [
            ([((0,), 1)], r"shared\[0\]: members \(0,\) .* two or more of the 3 spans"),
            ([((0, 0), 1)], r"shared\[0\]: members \(0, 0\)"),
            ([((0, 3), 1)], r"shared\[0\]: members \(0, 3\)"),
            ([((-1, 0), 1)], r"shared\[0\]: members \(-1, 0\)"),
            ([((0, 1), 0)], r"shared\[0\]: 0 blocks in common .* the shortest member has 2"),
            ([((0, 1), 3)], r"shared\[0\]: 3 blocks in common"),
            ([((0, 1), 2)], r"shared\[0\]: spans 0 and 1 do not begin with the same 2 blocks"),
            ([((0, 1), 1), ((1, 2), 1)], r"shared\[1\]: members \(1, 2\) are neither apart"),
        ],
    )
    def test_groups_that_cannot_be(self, build, shared, message):
        model = build(LLAMA)
        model.allocate_kv(8, 16)
        spans = [Span(sequence(0)[:4], 16, [array("i", [1, 2 + i])]) for i in range(3)]
        with pytest.raises(ValueError, match=message):
            model.execute(Batch(spans, shared))

    @pytest.mark.parametrize(
        ("change", "message"),
        [
            ({"tokens": np.array([], np.int32)}, r"spans\[1\].tokens: expected int32"),
            ({"tokens": np.array([1, 2], np.int64)}, r"spans\[1\].tokens: expected int32"),
            ({"tokens": np.array([[1]], np.int32)}, r"spans\[1\].tokens: expected int32"),
            ({"tokens": np.array([1, 53], np.int32)}, r"spans\[1\].tokens: id 53 .* 0 \.\. 52"),
            ({"tokens": np.array([-1, 5], np.int32)}, r"spans\[1\].tokens: id -1 .* 0 \.\. 52"),
            ({"start": -1}, r"spans\[1\].start: positions -1 \.\. 18 .* 0 \.\. 2047"),
            ({"start": 2040}, r"spans\[1\].start: positions 2040 \.\. 2059 .* 0 \.\. 2047"),
            ({"start": 13}, r"spans\[1\].block_tables\[0\]: 33 tokens need 3 blocks of 16, got 2"),
            ({"block_tables": []}, r"spans\[1\].block_tables: expected 1 table"),
            ({"block_tables": [array("i", [3, 9])]}, r"spans\[1\].block_tables\[0\]: block 9 .* 1 \.\. 8"),
            ({"block_tables": [array("i", [0, 3])]}, r"spans\[1\].block_tables\[0\]: block 0 .* 1 \.\. 8"),
            ({"num_logits": 21}, r"spans\[1\].num_logits: 21 .* 0 \.\. 20"),
            ({"num_logits": -1}, r"spans\[1\].num_logits: -1 .* 0 \.\. 20"),
            ({"adapter": "lora"}, r"spans\[1\].adapter: 'lora'"),
        ],
    )
    def test_a_bad_span_naming_its_field_before_anything_is_written(self, build, change, message):
        model = build(LLAMA)
        model.allocate_kv(8, 16)
        good = Span(sequence(0)[:20], 0, [array("i", [1, 2])])
        follow_up = Span(sequence(0)[20:21], 20, [array("i", [1, 2])])
        before = model.execute(Batch([follow_up])).logits[0]
        with pytest.raises(ValueError, match=message):
            model.execute(Batch([good, replace(Span(sequence(1)[:20], 0, [array("i", [3, 4])]), **change)]))
        assert_same_bits(model.execute(Batch([follow_up])).logits[0], before)

    @pytest.mark.parametrize("pair", [(1, 0), (1, 9), (9, 1), (-1, 1)])
    def test_copies_of_blocks_that_do_not_exist(self, build, pair):
        model = build(LLAMA)
        model.allocate_kv(8, 16)
        with pytest.raises(ValueError, match=rf"pairs: \({pair[0]}, {pair[1]}\)"):
            model.copy_blocks([(1, 2), pair])

    def test_pages_of_other_sizes(self, build):
        with pytest.raises(ValueError, match=r"block_size: 24 .* \(16, 32, 64, 128\)"):
            build(LLAMA).allocate_kv(8, 24)
        with pytest.raises(ValueError, match=r"num_blocks: 0 .* at least 1"):
            build(LLAMA).allocate_kv(0, 16)

    def test_work_before_there_are_pages(self, build):
        model = build.__wrapped__(LLAMA)
        with pytest.raises(RuntimeError, match="allocate_kv"):
            model.execute(Batch([]))
        with pytest.raises(RuntimeError, match="allocate_kv"):
            model.copy_blocks([(1, 2)])

"""The two loops in C give what their pure forms give, to the bit, and leave to them what is unusual."""

from __future__ import annotations

import ctypes
import gc
import os
import random
import shutil
import subprocess
import sys
import threading
import tracemalloc
from array import array
from pathlib import Path

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from anaphora import Adapter, Namespace, compiled, tokens
from anaphora.compiled import absent
from anaphora.identity import BlockDigests, MediaSpan, VllmDigests, extra_keys

needs_c = pytest.mark.skipif(not compiled.IN_USE, reason="the loops in C are not built, or ANAPHORA_PURE is set")

KEY = bytes(range(40))
NAMES = {"pickle": VllmDigests("sha256"), "cbor": VllmDigests("sha256_cbor"), "blake2b": BlockDigests(KEY)}
# Around every boundary at which an encoding changes its size.
SIGNED_EDGES = [n + d for n in (0, 24, 2**8, 2**15, 2**16, 2**24, 2**30, 2**31 - 2, -(2**31) + 1) for d in (-1, 0, 1)]
EDGES = [*SIGNED_EDGES, *(-n for n in SIGNED_EDGES if n > -(2**31))]
INT32 = st.sampled_from(EDGES) | st.integers(0, 2**18) | st.integers(-(2**31), 2**31 - 1)


def before_and_after(kind, block_size):
    if kind == "blake2b":
        return KEY, b"block"
    opening = b"\x94(" if block_size > 3 else b"\x94"
    ends = {1: b"\x85", 2: b"\x86", 3: b"\x87"}
    if kind == "pickle":
        return opening, ends.get(block_size, b"t") + b"\x94N\x87\x94."
    head = bytes([0x80 | block_size]) if block_size < 24 else b"\x98" + bytes([block_size])
    return head, b"\xf6"


def little_endian(ids):
    packed = array("i", ids)
    if sys.byteorder == "big":
        packed.byteswap()
    return packed.tobytes()


@st.composite
def chains(draw):
    """Kind, parent, ids of whole blocks, block size."""
    block_size = draw(st.integers(1, 64))
    pattern = draw(st.lists(INT32, min_size=1, max_size=40))
    size = block_size * draw(st.integers(0, 5))
    return (
        draw(st.sampled_from(list(NAMES))),
        draw(st.binary(min_size=32, max_size=32)),
        (pattern * size)[:size],
        block_size,
    )


@needs_c
class TestChain:
    @settings(deadline=None)
    @given(chains(), st.booleans())
    @example(("pickle", bytes(32), EDGES * 64, 64), True)
    @example(("cbor", bytes(32), EDGES * 64, 64), False)
    def test_every_chain_has_the_digests_of_the_pure_form(self, form, chain, portable):
        kind, parent, ids, block_size = chain
        found = compiled.chain(
            kind, parent, little_endian(ids), block_size, *before_and_after(kind, block_size), portable
        )
        with form("pure"):
            assert found == NAMES[kind].chain(parent, ids, block_size)

    @settings(deadline=None)
    @given(st.sampled_from(list(NAMES)), st.data())
    def test_blocks_that_hold_more_than_ids_have_them_too(self, form, kind, data):
        block_size, num_blocks = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 8))
        size = block_size * num_blocks
        ids = data.draw(st.lists(INT32, min_size=size, max_size=size))
        namespace = Namespace(
            adapter=data.draw(st.none() | st.just(Adapter("w", name="a", path="/a"))),
            salt=data.draw(st.none() | st.sampled_from(["s", "salt" * 80])),
        )
        starts = data.draw(st.sets(st.integers(0, size - 1), max_size=3))
        media = tuple(MediaSpan(start, 1, "image") for start in sorted(starts))
        extras = extra_keys(namespace, media, 0, num_blocks, block_size)
        names = NAMES[kind]
        found = names.chain(names.root(namespace), ids, block_size, extras)
        with form("pure"):
            assert found == names.chain(names.root(namespace), ids, block_size, extras)

    @pytest.mark.parametrize("kind", NAMES)
    @pytest.mark.parametrize("num_ids", [4080, 4096, 4112, 16_368, 16_384, 16_400])
    def test_long_chains_have_no_seam(self, form, kind, num_ids):
        ids = array("i", (i * 7919 % 150_000 - 100 for i in range(num_ids)))
        found = NAMES[kind].chain(bytes(32), ids, 16)
        with form("pure"):
            assert found == NAMES[kind].chain(bytes(32), ids, 16)
        assert len(found) == num_ids // 16

    @pytest.mark.parametrize("kind", NAMES)
    def test_messages_of_every_length_are_padded_right(self, form, kind):
        for block_size in range(1, 200):
            ids = [7] * block_size
            found = NAMES[kind].chain(bytes(32), ids, block_size)
            with form("pure"):
                assert found == NAMES[kind].chain(bytes(32), ids, block_size)

    @pytest.mark.parametrize("size", [16, 31, 32, 63, 64])
    def test_keys_of_every_length_are_absorbed_alike(self, form, size):
        found = BlockDigests(bytes(range(size))).chain(bytes(32), [1, 2, 3, 4], 2)
        with form("pure"):
            assert found == BlockDigests(bytes(range(size))).chain(bytes(32), [1, 2, 3, 4], 2)

    @pytest.mark.parametrize(
        "arguments",
        [
            (bytes(31), bytes(8), 2, b"", b""),
            (bytearray(32), bytes(8), 2, b"", b""),
            (bytes(32), bytearray(8), 2, b"", b""),
            (bytes(32), bytes(8), 3, b"", b""),
            (bytes(32), bytes(7), 1, b"", b""),
            (bytes(32), bytes(8), 0, b"", b""),
            (bytes(32), bytes(8), -1, b"", b""),
            (bytes(32), bytes(8), 2, "", b""),
            (bytes(32), bytes(8), 2, b"", None),
        ],
    )
    def test_what_is_unusual_is_left_to_the_pure_form(self, arguments):
        assert [compiled.chain(kind, *arguments) for kind in NAMES] == [None] * 3

    def test_limits_of_the_forms_are_left_to_the_pure_form(self):
        ids = bytes(4 * 14_000)
        assert compiled.chain("pickle", bytes(32), ids, 14_000, b"", b"") is None
        assert compiled.chain("blake2b", bytes(32), ids, 4, bytes(65), b"") is None
        assert compiled.chain("blake2b", bytes(32), ids, 4, b"", bytes(17)) is None

    def test_large_blocks_are_pickled_and_refused_by_size_as_in_the_pure_form(self, form):
        names = VllmDigests("sha256")
        for ids in ([2**20] * 12_000, [1] * 20_000):
            found = names.chain(bytes(32), ids, len(ids))
            with form("pure"):
                assert found == names.chain(bytes(32), ids, len(ids))
        with pytest.raises(ValueError, match="does not fit one frame"):
            names.chain(bytes(32), [2**20] * 13_200, 13_200)

    def test_an_unknown_kind_is_refused(self):
        with pytest.raises(ValueError, match="kind: expected 'pickle', 'cbor' or 'blake2b', got 'md5'"):
            compiled.chain("md5", bytes(32), bytes(8), 2, b"", b"")

    def test_other_threads_run_during_a_long_chain(self):
        ids = bytes(4 * 400_000)
        may_run, ran = threading.Event(), threading.Event()
        other = threading.Thread(target=lambda: may_run.wait() and ran.set())
        before = sys.getswitchinterval()
        sys.setswitchinterval(1000)  # only who lets go of the interpreter lets others run
        try:
            other.start()
            may_run.set()
            for _ in range(100):
                compiled.chain("blake2b", bytes(32), ids, 16, KEY, b"block")
                if ran.is_set():
                    break
            assert ran.is_set()
        finally:
            sys.setswitchinterval(before)
            other.join()

    def test_threads_do_not_disturb_each_other(self):
        prompts = [array("i", [seed] * 32_768) for seed in range(4)]
        alone = [[names.chain(bytes(32), ids, 16) for names in NAMES.values()] for ids in prompts]
        together: list[object] = [None] * 4

        def run(i: int) -> None:
            for _ in range(5):
                together[i] = [names.chain(bytes(32), prompts[i], 16) for names in NAMES.values()]

        threads = [threading.Thread(target=run, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert together == alone


class Index:
    """Something that can stand for an integer, and acts when it is asked to."""

    def __init__(self, acts=lambda: None):
        self.acts = acts

    def __index__(self):
        self.acts()
        return 5


@needs_c
class TestPack:
    @given(st.lists(INT32, max_size=300))
    @example(EDGES)
    def test_every_list_and_tuple_of_ids_is_packed_as_by_the_pure_form(self, ids):
        assert compiled.pack(ids) == compiled.pack(tuple(ids)) == tokens._pack_integers(ids)

    @pytest.mark.parametrize(
        "unusual", [True, Index(), 2**31, -(2**31) - 1, 2**63, 2**64, -(2**64), 10**40, 1.0, None, "1", b"1", [1]]
    )
    @pytest.mark.parametrize("position", [0, 1, 2000])
    def test_what_is_unusual_is_left_to_the_pure_form(self, form, unusual, position):
        ids = [1] * position + [unusual, 3]
        assert compiled.pack(ids) is None
        with form("pure"):
            expected = outcome(ids)
        assert outcome(ids) == expected

    @pytest.mark.parametrize("other", [range(3), {1, 2}, "123", None, 5, array("q", [1]), iter([1]), b"1234"])
    def test_only_lists_tuples_and_int32_buffers_are_packed(self, other):
        assert compiled.pack(other) is None

    def test_int32_buffers_without_gaps_are_packed_and_others_left_to_the_pure_form(self):
        ids = array("i", range(-5, 5))
        grid = memoryview(ids).cast("B").cast("i", (2, 5))
        for buffer in (ids, memoryview(ids), memoryview(ids)[2:7], array("i")):
            assert compiled.pack(buffer) == bytes(buffer)
        for buffer in (memoryview(ids)[::2], grid, memoryview(ids).cast("B"), bytearray(8), array("I", [1])):
            assert compiled.pack(buffer) is None
        own = array("i", [1])
        assert compiled.pack(own) == bytes(own)
        own.append(1)  # nobody holds its buffer any more

    def test_types_made_from_lists_and_ints_decide_for_themselves(self):
        class Ids(list):
            def __len__(self):
                return 1

        class Id(int):
            pass

        assert compiled.pack(Ids([1, 2])) is None
        assert compiled.pack([Id(1)]) is None
        assert tokens.pack([Id(1)]) == tokens.pack([1])

    def test_integers_of_numpy_are_packed_by_the_pure_form(self):
        np = pytest.importorskip("numpy")
        assert compiled.pack([np.int64(1)]) is None
        assert tokens.pack([np.int64(1), 2]) == tokens.pack([1, 2])

    def test_no_code_of_an_id_runs_while_a_list_is_read(self):
        ids: list[object] = [1] * 100
        ids[50] = Index(ids.clear)
        assert compiled.pack(ids) is None
        assert len(ids) == 100


def outcome(ids):
    try:
        return tokens.pack(ids)
    except (TypeError, ValueError) as error:
        return type(error), str(error)


@needs_c
def test_nothing_is_leaked_by_answers_refusals_or_errors():
    parent, ids, numbers, huge = bytes(32), bytes(4 * 64), list(range(1000, 1200)), [1, 2, 2**40]

    def rounds(count: int) -> None:
        for _ in range(count):
            compiled.pack(numbers)
            compiled.pack(huge)
            for kind in NAMES:
                compiled.chain(kind, parent, ids, 16, b"", b"")
                compiled.chain(kind, parent, ids, 15, b"", b"")
            with pytest.raises(ValueError, match="kind"):
                compiled.chain("none", parent, ids, 16, b"", b"")
            with pytest.raises(TypeError):
                compiled.chain("cbor", parent)

    rounds(10)
    counts = [sys.getrefcount(value) for value in (parent, ids, numbers, numbers[0], huge[-1])]
    tracemalloc.start()
    try:
        rounds(10)
        gc.collect()
        before, _ = tracemalloc.get_traced_memory()
        rounds(200)
        gc.collect()
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 2000
    assert [sys.getrefcount(value) for value in (parent, ids, numbers, numbers[0], huge[-1])] == counts


class TestAbsence:
    def test_what_stands_in_declines_everything(self):
        assert absent.pack([1]) is None
        assert absent.chain("cbor", bytes(32), bytes(8), 2, b"\x82", b"\xf6") is None

    def test_the_environment_can_leave_c_out(self):
        script = "from anaphora import compiled, tokens; print(compiled.IN_USE, list(tokens.pack([1])))"
        environment = {**os.environ, "ANAPHORA_PURE": "1"}
        ran = subprocess.run(
            [sys.executable, "-c", script], env=environment, capture_output=True, text=True, check=True
        )
        assert ran.stdout == f"False {list(array('i', [1]).tobytes())}\n"


@pytest.fixture(scope="module")
def hashes(tmp_path_factory):
    """The extension's hashes, compiled by themselves."""
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("no C compiler")
    library = tmp_path_factory.mktemp("hashes") / "hashes.so"
    headers = Path(compiled.__file__).parent
    source = Path(__file__).with_name("hashes.c")
    options = ["-std=c11", "-O2", "-Wall", "-Wextra", "-Werror", "-shared", "-fPIC", f"-I{headers}"]
    subprocess.run([compiler, *options, str(source), "-o", str(library)], check=True)
    return ctypes.CDLL(str(library))


class TestPublishedVectors:
    @pytest.mark.parametrize("portable", [False, True])
    @pytest.mark.parametrize(
        ("message", "expected"),
        [
            (b"", "e3b0c44298fc1c149afbf4c8996fb92427ae41e4649b934ca495991b7852b855"),
            (b"abc", "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"),
            (
                b"abcdbcdecdefdefgefghfghighijhijkijkljklmklmnlmnomnopnopq",
                "248d6a61d20638b8e5c026930c3e6039a33ce45964ff2167f6ecedd419db06c1",
            ),
            (
                b"abcdefghbcdefghicdefghijdefghijkefghijklfghijklmghijklmnhijklmnoijklmnopjklmnopqklmnopqrlmnopqrsmnopqrst"
                b"nopqrstu",
                "cf5b16a778af8380036ce59e7b0492370b249b11e8f07a51afac45037afee9d1",
            ),
            (b"a" * 10**6, "cdc76e5c9914fb9281a1c7e284d73e67f1809a48a497200e046d39ccc7112cd0"),
        ],
    )
    def test_sha256_has_the_digests_of_nist(self, hashes, portable, message, expected):
        digest = ctypes.create_string_buffer(32)
        padded = ctypes.create_string_buffer(message, len(message) + 72)
        hashes.sha256(int(portable), padded, ctypes.c_size_t(len(message)), digest)
        assert digest.raw.hex() == expected

    def test_blake2b_passes_the_self_test_of_rfc_7693(self, hashes):
        """Appendix E: all digests of four sizes, of messages of six, with and without a key, digested in turn."""

        def blake2b(message: bytes, size: int, key: bytes = b"") -> bytes:
            digest = ctypes.create_string_buffer(size)
            whole = key.ljust(128, b"\0") + message if key else message
            hashes.blake2b(ctypes.c_size_t(len(key)), whole, ctypes.c_size_t(len(whole)), digest, ctypes.c_size_t(size))
            return digest.raw

        def sequence(length: int, seed: int) -> bytes:
            a, b = 0xDEAD4BAD * seed % 2**32, 1
            values = bytearray()
            for _ in range(length):
                a, b = b, (a + b) % 2**32
                values.append(b >> 24)
            return bytes(values)

        digests = b""
        for size in (20, 32, 48, 64):
            for length in (0, 3, 128, 129, 255, 1024):
                message = sequence(length, length)
                digests += blake2b(message, size) + blake2b(message, size, sequence(size, size))
        expected = "c23a7800d98123bd10f506c61e29da5603d763b8bbad2e737f5e765a7bccd475"
        assert blake2b(digests, 32).hex() == expected

    def test_both_ways_through_sha256_agree_on_every_length(self, hashes):
        source = random.Random(0)
        for length in range(300):
            message = source.randbytes(length)
            found = set()
            for portable in (0, 1):
                digest = ctypes.create_string_buffer(32)
                padded = ctypes.create_string_buffer(message, length + 72)
                hashes.sha256(portable, padded, ctypes.c_size_t(length), digest)
                found.add(digest.raw)
            assert len(found) == 1

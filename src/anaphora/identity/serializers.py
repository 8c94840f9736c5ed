"""How vLLM writes a block down before it digests it: pickle (protocol 5) or canonical CBOR, byte for byte.

What is written is the triple (parent digest, token ids, extra keys). Both forms write an integer as an opcode that
tells its size, then that many bytes; which of the two it is makes no difference to how a whole prompt is encoded fast.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import defaultdict
from struct import Struct, unpack
from typing import TYPE_CHECKING, ClassVar, TypeAlias

from anaphora.tokens import TOKEN_BYTES

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

ExtraKeys: TypeAlias = "tuple[ExtraKey, ...]"
ExtraKey: TypeAlias = "str | bytes | int | ExtraKeys"


class Tag(str):
    """A word that stands in vLLM's source: one object in its process, however often a block's extra keys repeat it."""

    __slots__ = ()


_CHUNK_IDS = 4096
"""Ids encoded at once: enough to spread the cost of the calls, few enough to stay in the processor's cache."""
_IS_ZERO = bytes([1]) + bytes(255)


class Serializer(ABC):
    """Writes triples. One triple is head, parent digest, opening, ids, closing, in this order."""

    _BIG_ENDIAN: ClassVar[bool]
    _OPCODES: ClassVar[bytes]
    """A translation of 0, 1, 2 to the opcodes of an integer of four bytes, of two, of one."""
    _IS_IMMEDIATE: ClassVar[bytes]
    """A translation of bytes to 1 where an integer of that value is written without an opcode, to 0 elsewhere."""

    @abstractmethod
    def document(self, text: str) -> bytes:
        """Return a document that holds one text and nothing else."""

    @abstractmethod
    def integer(self, value: int) -> bytes:
        """Return one integer of up to 64 bits."""

    @abstractmethod
    def heads(self, parent_size: int, block_size: int) -> Mapping[int, bytes]:
        """Return a triple's first bytes, before the parent's own, by the length of ids and closing together."""

    @abstractmethod
    def opening(self, block_size: int) -> bytes:
        """Return what stands between the parent and the ids."""

    @abstractmethod
    def closing(self, block_size: int, extra_keys: ExtraKeys) -> bytes:
        """Return what follows the ids; no extra keys are written as None."""

    def id_blocks(self, ids: Sequence[int], block_size: int) -> list[bytes]:
        """Return the ids of each block, written one by one. Cost: about 0.2 us an id."""
        write = self.integer
        return [b"".join(map(write, ids[i : i + block_size])) for i in range(0, len(ids), block_size)]

    def packed_blocks(self, packed: bytes, block_size: int) -> list[bytes]:
        """Return the ids of each block, from little-endian int32 bytes of whole blocks.

        Cost: 5 us, and 0.5 us a block of 16 ids; where some are negative, as `id_blocks`.
        """
        width = max(_CHUNK_IDS // block_size, 1) * block_size * TOKEN_BYTES
        blocks: list[bytes] = []
        for start in range(0, len(packed), width):
            chunk = packed[start : start + width]
            if chunk[3::TOKEN_BYTES].isascii():  # no sign bit
                blocks += self._lay_out(chunk, block_size)
            else:
                blocks += self.id_blocks(unpack(f"<{len(chunk) // TOKEN_BYTES}i", chunk), block_size)
        return blocks

    def _lay_out(self, packed: bytes, block_size: int) -> list[bytes]:
        """Encode ids of 0 or more without touching any of them in Python.

        Every id is laid out in five lanes of 16 bits: its opcode and four bytes, each with a second byte that is 1
        where the encoding leaves it out. Read as UTF-16 those are characters beyond Latin-1, which an encoder drops.
        """
        num_ids = len(packed) // TOKEN_BYTES
        lowest, second, third, fourth = (packed[column::TOKEN_BYTES] for column in range(TOKEN_BYTES))
        # One byte an id, 1 where the id needs no more than two bytes, than one, than the byte itself. As integers the
        # columns can be combined at once.
        is_two = _where(third, _IS_ZERO) & _where(fourth, _IS_ZERO)
        is_one = _where(second, _IS_ZERO) & is_two
        is_immediate = _where(lowest, self._IS_IMMEDIATE) & is_one
        sizes = (is_two + is_one).to_bytes(num_ids, "little")
        without_high, without_second = is_two.to_bytes(num_ids, "little"), is_one.to_bytes(num_ids, "little")
        lanes = bytearray(10 * num_ids)
        lanes[0::10] = sizes.translate(self._OPCODES)
        lanes[1::10] = is_immediate.to_bytes(num_ids, "little")
        fourth_at, third_at, second_at, lowest_at = (2, 4, 6, 8) if self._BIG_ENDIAN else (8, 6, 4, 2)
        lanes[fourth_at::10], lanes[fourth_at + 1 :: 10] = fourth, without_high
        lanes[third_at::10], lanes[third_at + 1 :: 10] = third, without_high
        lanes[second_at::10], lanes[second_at + 1 :: 10] = second, without_second
        lanes[lowest_at::10] = lowest
        text = lanes.decode("utf-16-le")
        width = 5 * block_size
        return [text[i : i + width].encode("latin-1", "ignore") for i in range(0, 5 * num_ids, width)]


def _where(column: bytes, table: bytes) -> int:
    return int.from_bytes(column.translate(table), "little")


class PickleSerializer(Serializer):
    """Pickle, protocol 5, as CPython's C implementation writes it.

    Pickle writes an object that recurs as a reference, and goes by its place in memory, so its bytes depend on which
    equal strings are one object. Here `Tag`s are one object each and everything else is its own, as in a server that
    has read its requests from the wire.
    """

    _BIG_ENDIAN = False
    _OPCODES = b"JMK".ljust(256, b"\0")
    _IS_IMMEDIATE = bytes(256)

    def document(self, text: str) -> bytes:
        """Frame and text."""
        body = _pickled_text(text) + b"."
        return _frame(len(body)) + body

    def integer(self, value: int) -> bytes:
        """BININT1, BININT2, BININT or LONG1."""
        if 0 <= value < 2**8:
            return _pickled_u8(b"K", value)
        if 0 <= value < 2**16:
            return _pickled_u16(b"M", value)
        if -(2**31) <= value < 2**31:
            return _pickled_i32(b"J", value)
        # One bit more than the magnitude holds the sign; -2**63 needs none beyond its own.
        num_bytes = (value if value >= 0 else ~value).bit_length() // 8 + 1
        return b"\x8a%c" % num_bytes + value.to_bytes(num_bytes, "little", signed=True)

    def heads(self, parent_size: int, block_size: int) -> Mapping[int, bytes]:
        """Protocol, frame, and the parent's opcode: the frame says how many bytes follow."""
        return _PickleHeads(parent_size, len(self.opening(block_size)))

    def opening(self, block_size: int) -> bytes:
        """The parent is memoized, and a tuple of more than three begins with a mark."""
        return b"\x94(" if block_size > 3 else b"\x94"

    def closing(self, block_size: int, extra_keys: ExtraKeys) -> bytes:
        """The tuple of ids is memoized, extra keys follow, and the triple ends."""
        extras = _PickledExtras().sequence(extra_keys) if extra_keys else b"N"
        return _TUPLE_ENDS.get(block_size, b"t") + b"\x94" + extras + b"\x87\x94."


_pickled_u8, _pickled_u16, _pickled_i32 = (Struct(form).pack for form in ("<cB", "<cH", "<ci"))
_TUPLE_ENDS = {1: b"\x85", 2: b"\x86", 3: b"\x87"}
_MAX_FRAME_BYTES = 64 * 1024


class _PickledExtras:
    """Writes one block's extra keys, and numbers what pickle memoizes on the way."""

    def __init__(self) -> None:
        self._num_memoized = 2  # the parent and the tuple of ids
        self._tags: dict[Tag, int] = {}

    def sequence(self, items: ExtraKeys) -> bytes:
        written = b"".join(map(self._item, items))
        self._num_memoized += 1
        mark = b"(" if len(items) > 3 else b""
        return mark + written + _TUPLE_ENDS.get(len(items), b"t") + b"\x94"

    def _item(self, item: ExtraKey) -> bytes:
        if isinstance(item, tuple):
            return self.sequence(item)
        if isinstance(item, int):
            return PickleSerializer().integer(item)
        if isinstance(item, Tag):
            if item in self._tags:
                return b"h%c" % self._tags[item]
            self._tags[item] = self._num_memoized
        self._num_memoized += 1
        return b"C%c" % len(item) + item + b"\x94" if isinstance(item, bytes) else _pickled_text(item)


def _pickled_text(text: str) -> bytes:
    encoded = text.encode("utf-8", "surrogatepass")
    size = len(encoded)
    return (b"\x8c%c" % size if size < 256 else b"X" + size.to_bytes(4, "little")) + encoded + b"\x94"


def _frame(num_bytes: int) -> bytes:
    if num_bytes > _MAX_FRAME_BYTES:
        raise ValueError(
            f"block_size: a block of {num_bytes} pickled bytes does not fit one frame of {_MAX_FRAME_BYTES}"
        )
    return b"\x80\x05\x95" + num_bytes.to_bytes(8, "little")


class _PickleHeads(dict[int, bytes]):
    def __init__(self, parent_size: int, opening_size: int) -> None:
        self._parent = b"C%c" % parent_size
        self._num_fixed = len(self._parent) + parent_size + opening_size

    def __missing__(self, num_bytes: int) -> bytes:
        head = self[num_bytes] = _frame(self._num_fixed + num_bytes) + self._parent
        return head


class CborSerializer(Serializer):
    """CBOR (RFC 8949) in its deterministic form: definite lengths, shortest heads, no tags."""

    _BIG_ENDIAN = True
    _OPCODES = b"\x1a\x19\x18".ljust(256, b"\0")
    _IS_IMMEDIATE = bytes(value < 24 for value in range(256))

    def document(self, text: str) -> bytes:
        """The text alone."""
        return _cbor_item(text)

    def integer(self, value: int) -> bytes:
        """Major type 0, or 1 below zero."""
        return _cbor_head(0x00, value) if value >= 0 else _cbor_head(0x20, ~value)

    def heads(self, parent_size: int, block_size: int) -> Mapping[int, bytes]:
        """An array of three, and the parent's head, whatever follows."""
        head = b"\x83" + _cbor_head(0x40, parent_size)
        return defaultdict(lambda: head)

    def opening(self, block_size: int) -> bytes:
        """The head of the array of ids."""
        return _cbor_head(0x80, block_size)

    def closing(self, block_size: int, extra_keys: ExtraKeys) -> bytes:
        """The extra keys."""
        return _cbor_item(extra_keys) if extra_keys else b"\xf6"


def _cbor_item(item: ExtraKey) -> bytes:
    if isinstance(item, tuple):
        return _cbor_head(0x80, len(item)) + b"".join(map(_cbor_item, item))
    if isinstance(item, int):
        return CborSerializer().integer(item)
    if isinstance(item, bytes):
        return _cbor_head(0x40, len(item)) + item
    try:
        encoded = item.encode()
    except UnicodeEncodeError:
        # The text itself stays out of the message: it may be a salt.
        raise ValueError("salt, adapter or media digest: CBOR cannot hold a text with a lone surrogate") from None
    return _cbor_head(0x60, len(encoded)) + encoded


def _cbor_head(major: int, value: int) -> bytes:
    if value < 24:
        return _cbor_immediate(major | value)
    if value < 2**8:
        return _cbor_u8(major | 24, value)
    if value < 2**16:
        return _cbor_u16(major | 25, value)
    if value < 2**32:
        return _cbor_u32(major | 26, value)
    return _cbor_u64(major | 27, value)


_cbor_immediate, _cbor_u8, _cbor_u16, _cbor_u32, _cbor_u64 = (
    Struct(form).pack for form in (">B", ">BB", ">BH", ">BI", ">BQ")
)

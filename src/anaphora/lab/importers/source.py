"""A file as a stream of lines or JSON documents: compressed or not, in bounded memory, with what was wrong counted."""

from __future__ import annotations

import csv
import gzip
import io
import json
import zlib
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

MAX_DOCUMENT_BYTES = 64 * 2**20
"""A longer line or document is counted as bad, so that no file can take all memory."""
_CHUNK = 1 << 16
_NUM_NAMED = 20


class LogError(Exception):
    """A log cannot be read at all; the message says why and what to do."""


@dataclass(slots=True)
class ReadReport:
    """What became of a file's lines.

    bad: the first 20 bad lines, each with the reason; never with content. num_bad counts all.
    skipped: lines that are none of the importer's business, by kind. duplicates: records that were there before.
    """

    format: str = ""
    num_lines: int = 0
    num_records: int = 0
    num_bad: int = 0
    num_duplicates: int = 0
    bad: list[tuple[int, str]] = field(default_factory=list)
    skipped: Counter[str] = field(default_factory=Counter)

    def note_bad(self, line: int, reason: str) -> None:
        """Count a line that could not be read."""
        self.num_bad += 1
        if len(self.bad) < _NUM_NAMED:
            self.bad.append((line, reason))

    def as_dict(self) -> dict[str, object]:
        """Plain data for JSON."""
        return {
            "format": self.format,
            "lines": self.num_lines,
            "records": self.num_records,
            "bad_lines": self.num_bad,
            "bad": [{"line": line, "reason": reason} for line, reason in self.bad],
            "duplicates": self.num_duplicates,
            "skipped": dict(self.skipped),
        }


class Document(NamedTuple):
    """A JSON value and the line on which it begins."""

    line: int
    value: object


@contextmanager
def open_log(path: Path) -> Iterator[io.BufferedReader]:
    """The bytes of a file, decompressed by what they begin with: gzip, zstd, or plain.

    Raises LogError: it cannot be opened, or zstd without the package zstandard. Damage further on ends the stream
    with LogError too.
    """
    try:
        raw = path.open("rb")
    except OSError as error:
        raise LogError(f"{path}: {error.strerror}") from None
    with raw:
        magic = raw.read(4)
        raw.seek(0)
        try:
            if magic[:2] == b"\x1f\x8b":
                yield io.BufferedReader(gzip.GzipFile(fileobj=raw))
            elif magic == b"\x28\xb5\x2f\xfd":
                yield _open_zstd(path, raw)
            else:
                yield raw
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise LogError(f"{path}: the compressed data is damaged: {error}") from None
        except OSError as error:
            raise LogError(f"{path}: {error.strerror or error}") from None


def _open_zstd(path: Path, raw: io.BufferedReader) -> io.BufferedReader:
    try:
        import zstandard  # noqa: PLC0415  (an optional package)
    except ModuleNotFoundError:
        raise LogError(f"{path}: zstd needs the package zstandard: pip install zstandard, or decompress it") from None
    return io.BufferedReader(_ZstdFile(raw, zstandard.ZstdDecompressor().decompressobj, zstandard.ZstdError))


class _Decompressor(Protocol):
    eof: bool
    unused_data: bytes

    def decompress(self, data: bytes) -> bytes: ...


class _ZstdFile(io.RawIOBase):
    """Frames of zstd, one after another. Unlike the package's own reader it notices when the last one is cut off."""

    def __init__(self, raw: io.BufferedReader, new_frame: Callable[[], Any], error: type[Exception]) -> None:
        self._raw = raw
        self._new_frame = new_frame
        self._frame: _Decompressor | None = None
        self._error = error
        self._ready = b""
        self._rest = b""

    def readable(self) -> bool:
        """It is."""
        return True

    def readinto(self, buffer: memoryview) -> int:  # type: ignore[override]
        """Put the next bytes into the buffer; 0 at the end."""
        while not self._ready:
            data = self._rest or self._raw.read(_CHUNK)
            self._rest = b""
            if not data:
                if self._frame is not None:
                    raise EOFError("it is cut off")
                return 0
            self._frame = self._frame or self._new_frame()
            try:
                self._ready = self._frame.decompress(data)
            except self._error:
                raise EOFError("a frame of zstd is broken") from None
            if self._frame.eof:
                self._rest, self._frame = self._frame.unused_data, None
        num = min(len(buffer), len(self._ready))
        buffer[:num] = self._ready[:num]
        self._ready = self._ready[num:]
        return num


def lines(stream: io.BufferedReader, report: ReadReport) -> Iterator[tuple[int, str]]:
    """Lines with their numbers, blank ones left out; bytes that are no UTF-8 become U+FFFD. Bounded memory."""
    number = 0
    while line := stream.readline(MAX_DOCUMENT_BYTES):
        number += 1
        report.num_lines = number
        if len(line) == MAX_DOCUMENT_BYTES and not line.endswith(b"\n"):
            report.note_bad(number, f"longer than {MAX_DOCUMENT_BYTES >> 20} MiB")
            while rest := stream.readline(_CHUNK):
                if rest.endswith(b"\n"):
                    break
            continue
        text = line.decode("utf-8-sig" if number == 1 else "utf-8", "replace").strip()
        if text:
            yield number, text


def documents(stream: io.BufferedReader, report: ReadReport) -> Iterator[Document]:
    """JSON values: one a line, or the elements of one array, or values that each take several lines.

    A line that is no JSON is counted as bad. Memory: the longest document.
    """
    numbered = lines(stream, report)
    first = next(numbered, None)
    if first is None:
        return
    if first[1].startswith("["):
        # A file of JSON lists, one a line, is read as their elements too.
        yield from _decode(first[0], first[1][1:], numbered, report, ",]")
        return
    second = next(numbered, None)
    numbered = chain([] if second is None else [second], numbered)
    if first[1].startswith("{") and not _is_json(first[1]) and second is not None and not _is_json(second[1]):
        yield from _decode(*first, numbered, report, "")
        return
    for line in chain([first], numbered):
        try:
            yield Document(line[0], json.loads(line[1]))
        except (ValueError, RecursionError):
            report.note_bad(line[0], "no JSON")


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True


def _decode(
    line: int, buffer: str, numbered: Iterator[tuple[int, str]], report: ReadReport, separators: str
) -> Iterator[Document]:
    decoder = json.JSONDecoder()
    needed = 0  # a buffer shorter than this has been tried
    while True:
        buffer = buffer.lstrip(" \t\r\n" + separators)
        if buffer and len(buffer) >= needed:
            try:
                value, end = decoder.raw_decode(buffer)
            except RecursionError:
                report.note_bad(line, "nested too deeply")
                return
            except ValueError:
                needed = len(buffer) * 2  # so that a document of n lines is not parsed n times
            else:
                yield Document(line, value)
                buffer, needed = buffer[end:], 0
                if not buffer.strip(" \t\r\n" + separators):
                    buffer = ""
                continue
        following = next(numbered, None)
        if following is None:
            if needed and len(buffer) < needed:
                needed = 0
                try:
                    value, end = decoder.raw_decode(buffer)
                except (ValueError, RecursionError):
                    pass
                else:
                    yield Document(line, value)
                    buffer = buffer[end:]
                    continue
            if buffer.strip(" \t\r\n" + separators):
                report.note_bad(line, "no JSON, or cut off")
            return
        if not buffer:
            line = following[0]
        if len(buffer) + len(following[1]) > MAX_DOCUMENT_BYTES:
            report.note_bad(line, f"longer than {MAX_DOCUMENT_BYTES >> 20} MiB")
            return
        buffer = f"{buffer}\n{following[1]}" if buffer else following[1]


def rows(stream: io.BufferedReader, report: ReadReport) -> Iterator[tuple[int, dict[str, str]]]:
    """Rows of a CSV file with a header, as {column: text}. A field may span lines, up to the largest document."""
    csv.field_size_limit(MAX_DOCUMENT_BYTES)
    text = io.TextIOWrapper(stream, "utf-8-sig", "replace", newline="")
    reader = csv.reader((line.replace("\0", "\ufffd") for line in text), strict=False)
    header: list[str] | None = None
    try:
        while True:
            first = reader.line_num + 1
            try:
                row = next(reader)
            except StopIteration:
                return
            except csv.Error as error:
                report.note_bad(first, f"no CSV: {error}")
                continue
            report.num_lines = reader.line_num
            if not any(row):
                continue
            if header is None:
                header = [name.strip() for name in row]
            elif len(row) != len(header):
                report.note_bad(first, f"{len(row)} columns where the header has {len(header)}")
            else:
                yield first, dict(zip(header, row, strict=True))
    finally:
        text.detach()

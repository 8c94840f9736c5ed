"""Files from strangers: whatever is in them, the model loads, or a ModelError says what is wrong."""

from __future__ import annotations

import json
import re
import struct
from pathlib import Path
from typing import Any

import gguf
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from anaphora.model import ModelError, load_model
from tests.tiny_models import tiny_shape, write_gguf_model, write_hf_model


def header_of_tensor(name: str, dimensions: tuple[int, ...], kind: int) -> bytes:
    """As it stands in a GGUF file; the innermost dimension first."""
    encoded = name.encode()
    numbers = struct.pack(f"<I{len(dimensions)}Q", len(dimensions), *dimensions)
    return struct.pack("<Q", len(encoded)) + encoded + numbers + struct.pack("<I", kind)


def with_changed_tensor(path: Path, name: str, old: tuple[int, ...], new: tuple[int, ...], kind: int = 0) -> Path:
    data = path.read_bytes()
    before, after = header_of_tensor(name, old, 0), header_of_tensor(name, new, kind)
    assert data.count(before) == 1
    path.write_bytes(data.replace(before, after))
    return path


def with_number(path: Path, key: str, old: int, new: int) -> Path:
    """A GGUF file with another uint32 value of a key."""
    encoded = key.encode()
    start = struct.pack("<Q", len(encoded)) + encoded + struct.pack("<I", 4)
    data = path.read_bytes()
    before = start + struct.pack("<I", old)
    assert data.count(before) == 1
    path.write_bytes(data.replace(before, start + struct.pack("<I", new)))
    return path


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return write_gguf_model(tmp_path / "tiny.gguf")


@pytest.mark.parametrize(
    ("new", "kind", "message"),
    [
        ((96, 32), 0, "tensor 'blk.1.ffn_down.weight' has shape [32, 96]; expected [64, 96]"),
        ((2**32, 2**32), 0, "tensor 'blk.1.ffn_down.weight' ends after the file does"),
        ((2**63, 2), 0, "tensor 'blk.1.ffn_down.weight' ends after the file does"),
        ((96, 64), 999, "tensor 'blk.1.ffn_down.weight': quantisation 999 is not known"),
        ((96, 64), int(gguf.GGMLQuantizationType.I32), "tensor 'blk.1.ffn_down.weight': quantisation I32 is not"),
        ((96, 64), int(gguf.GGMLQuantizationType.Q4_K), "96 columns are no whole number of Q4_K blocks"),
    ],
)
def test_a_tensor_that_cannot_be_is_refused_by_name(file: Path, new: tuple[int, ...], kind: int, message: str) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        load_model(with_changed_tensor(file, "blk.1.ffn_down.weight", (96, 64), new, kind))


@pytest.mark.parametrize(
    ("key", "old", "new", "message"),
    [
        ("llama.block_count", 2, 2**32 - 1, "tensor 'blk.2.attn_norm.weight' is missing"),
        ("llama.block_count", 2, 0, "num_layers: 0 is not allowed"),
        ("llama.context_length", 512, 2**32 - 1, "max_context: 4294967295 is not allowed"),
        ("llama.attention.head_count", 4, 0, "a number is missing or wrong"),
        ("llama.attention.head_count", 4, 3, "does not divide the 3 query heads"),
        ("llama.feed_forward_length", 96, 2**31, "expected [2147483648, 64]"),
    ],
)
def test_a_size_that_the_tensors_do_not_bear_out_is_refused(
    file: Path, key: str, old: int, new: int, message: str
) -> None:
    with pytest.raises(ModelError, match=re.escape(message)):
        load_model(with_number(file, key, old, new))


@pytest.mark.parametrize("alignment", [0, 2**32 - 1])
def test_an_alignment_that_cannot_be_is_refused(tmp_path: Path, alignment: int) -> None:
    path = write_gguf_model(tmp_path / "tiny.gguf", metadata={"general.alignmenX": "...."})
    old = struct.pack("<Q", 17) + b"general.alignmenX" + struct.pack("<IQ", 8, 4) + b"...."
    new = struct.pack("<Q", 17) + b"general.alignment" + struct.pack("<IQ", 10, alignment) + b"...."
    data = path.read_bytes()
    assert data.count(old) == 1
    path.write_bytes(data.replace(old, new[:-4]))  # 4 bytes shorter, which no reader of the header minds
    with pytest.raises(ModelError):
        load_model(path)


def test_lists_within_lists_have_an_end(file: Path) -> None:
    data = file.read_bytes()
    key = struct.pack("<Q", 4) + b"deep"
    nested = struct.pack("<I", 9) + struct.pack("<IQ", 9, 1) * 100_000
    num_keys = struct.unpack_from("<Q", data, 16)[0]
    file.write_bytes(data[:16] + struct.pack("<Q", num_keys + 1) + key + nested + data[24:])
    with pytest.raises(ModelError, match="not a GGUF file, or damaged"):
        load_model(file)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"shape": [-64]}, "'model.norm.weight': damaged: its sizes"),
        ({"shape": ["64"]}, "'model.norm.weight': damaged: its sizes"),
        ({"shape": [2**40, 2**40]}, "'model.norm.weight': damaged or truncated"),
        ({"shape": [32]}, "'model.norm.weight': damaged or truncated"),
        ({"data_offsets": [0, 2**63]}, "'model.norm.weight': damaged or truncated"),
        ({"data_offsets": [-128, 0]}, "'model.norm.weight': damaged: its sizes"),
        ({"data_offsets": [0]}, "not a safetensors file, or damaged"),
        ({"dtype": "F8_E4M3"}, "dtype F8_E4M3 is not supported"),
    ],
)
def test_a_safetensors_entry_that_cannot_be_is_refused(tmp_path: Path, change: dict[str, Any], message: str) -> None:
    path = write_hf_model(tmp_path) / "model.safetensors"
    data = path.read_bytes()
    end = 8 + int.from_bytes(data[:8], "little")
    header = json.loads(data[8:end])
    header["model.norm.weight"] |= change
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data[end:])
    with pytest.raises(ModelError, match=re.escape(message)):
        load_model(tmp_path)


def test_a_header_longer_than_its_file_is_refused(tmp_path: Path) -> None:
    path = write_hf_model(tmp_path) / "model.safetensors"
    path.write_bytes((2**62).to_bytes(8, "little") + path.read_bytes()[8:])
    with pytest.raises(ModelError, match="the file ends before its header does"):
        load_model(tmp_path)


@pytest.fixture(scope="module")
def intact(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf_model(tmp_path_factory.mktemp("intact") / "tiny.gguf")


@settings(deadline=None, max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(at=st.floats(0, 0.2), value=st.binary(min_size=1, max_size=8))
def test_any_bytes_of_a_header_overwritten_load_or_are_refused(
    tmp_path: Path, intact: Path, at: float, value: bytes
) -> None:
    data = bytearray(intact.read_bytes())
    start = int(at * len(data))
    data[start : start + len(value)] = value
    path = tmp_path / "changed.gguf"
    path.write_bytes(data)
    try:
        model = load_model(path)
    except ModelError:
        return
    assert len(list(model.weights.layers)) == tiny_shape().num_layers

"""What the laboratory wants of a model: its tokenizer, or the size of its KV. Weights are not loaded."""

from __future__ import annotations

import tomllib
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from anaphora.lab.importers.source import LogError

if TYPE_CHECKING:
    from anaphora.engine.cost_model import HardwareProfile
    from anaphora.model.shape import ModelShape
    from anaphora.model.tokenizer import Tokenizer

_BYTES_PER_VALUE = 2


def kv_bytes_per_token(reference: str) -> int:
    """Bytes that one token's KV takes: of a model in the table `models.toml`, by name, or of one on this machine.

    Raises LogError: it is neither.
    """
    _, row = _row(reference)
    if row is not None:
        if "kv_bytes_per_token" in row:
            return row["kv_bytes_per_token"]
        return 2 * row["layers"] * row["kv_heads"] * row["head_dim"] * _BYTES_PER_VALUE
    shape = read_shape(reference)
    return 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * _BYTES_PER_VALUE


def model_shape(reference: str) -> ModelShape:
    """The whole shape of a model: of the table where it has it, else of the files. Raises LogError."""
    from anaphora.model.shape import ModelShape  # noqa: PLC0415  (numpy)

    name, row = _row(reference)
    if row is None:
        return read_shape(reference)
    if "hidden" not in row:
        raise LogError(f"model: the table has no whole shape of {name}; give the path of its files")
    return ModelShape(
        "llama",
        row["layers"],
        row["hidden"],
        row["intermediate"],
        row["heads"],
        row["kv_heads"],
        row["head_dim"],
        row["vocabulary"],
        max_context=1 << 17,
        rope_theta=10_000.0,
        rms_norm_eps=1e-5,
    )


def hardware(reference: str) -> HardwareProfile:
    """A machine by its name in `hardware.toml`, or by the file that `anaphora calibrate` wrote. Raises LogError."""
    from anaphora.engine.cost_model import HardwareProfile  # noqa: PLC0415  (numpy)

    table = tomllib.loads(files("anaphora.lab").joinpath("hardware.toml").read_text())
    if reference in table:
        return HardwareProfile(name=reference, **table[reference])
    try:
        return HardwareProfile.load(Path(reference))
    except (OSError, ValueError) as error:
        raise LogError(f"--hardware: one of {', '.join(table)}, or a profile's file: {error}") from None


def _row(reference: str) -> tuple[str, dict[str, int] | None]:
    table = tomllib.loads(files("anaphora.lab").joinpath("models.toml").read_text())
    wanted = reference.lower().rpartition("/")[2]
    for name, row in table.items():
        if name.lower() == wanted:
            return name, row
    if not Path(reference).expanduser().exists():
        raise LogError(f"model: {reference!r} is no file or folder here, and none of {', '.join(table)}")
    return reference, None


def read_shape(reference: str) -> ModelShape:
    """The shape of a model on this machine. Raises LogError where it cannot be read."""
    from anaphora.model import ModelError, gguf_file, gguf_tokenizer, hf_folder  # noqa: PLC0415  (numpy and more)

    path = Path(reference).expanduser()
    try:
        if path.is_dir():
            return hf_folder.read_shape(path)
        file = gguf_file.GGUFFile(path)
        tokenizer = gguf_tokenizer.read_tokenizer(file.metadata)
        return gguf_file.read_shape(file, tokenizer.eos_token_ids, tokenizer.bos_token_id)
    except (ModelError, OSError) as error:
        raise LogError(f"model: {error}") from None


def read_tokenizer(reference: str) -> tuple[str, Tokenizer]:
    """Name and tokenizer of a model on this machine: a GGUF file or a folder. Raises LogError."""
    from anaphora.model import ModelError, gguf_file, gguf_tokenizer, hf_folder  # noqa: PLC0415  (tokenizers and more)

    path = Path(reference).expanduser()
    try:
        if path.is_dir():
            return path.resolve().name, hf_folder.read_tokenizer(path, hf_folder.read_shape(path))
        if path.is_file():
            return path.stem, gguf_tokenizer.read_tokenizer(gguf_file.GGUFFile(path).metadata)
    except (ModelError, OSError) as error:
        raise LogError(f"tokenizer: {error}") from None
    raise LogError(f"tokenizer: {reference!r} is no GGUF file and no folder in Hugging Face's form")

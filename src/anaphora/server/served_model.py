"""The model behind the API: its names, its text side and its limits."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING

from anaphora.server.errors import ApiError

if TYPE_CHECKING:
    from anaphora.engine.adapters import Adapters
    from anaphora.engine.grammars import Grammars
    from anaphora.engine.loop import Engine
    from anaphora.identity import Adapter
    from anaphora.model import ChatTemplate, Model, Tokenizer


@dataclass(frozen=True, slots=True)
class ServedModel:
    """One model as clients see it.

    name: what requests call it.
    revision: names its weights; part of every prefix's identity.
    max_context: the longest sequence, in tokens, prompt and output together, that the model may see.
    max_request_tokens: the same, or what the KV pool can hold if that is less.
    created: Unix seconds, when serving began.
    grammars: the engine's, which compiles the schemas that requests bring.
    adapters: its LoRA adapters, each a model of its own to clients; None for none.
    """

    name: str
    revision: str
    max_context: int
    max_request_tokens: int
    tokenizer: Tokenizer
    chat_template: ChatTemplate | None
    created: int = 0
    grammars: Grammars | None = None
    adapters: Adapters | None = None

    @classmethod
    def of(cls, model: Model, engine: Engine) -> ServedModel:
        """`model` as `engine` runs it, from now on."""
        return cls(
            name=model.name,
            revision=model.revision,
            max_context=engine.max_context,
            max_request_tokens=engine.max_request_tokens,
            tokenizer=model.tokenizer,
            chat_template=model.chat_template,
            created=int(time.time()),
            grammars=engine.grammars,
            adapters=engine.adapters,
        )

    def require(self, name: str) -> Adapter | None:
        """Return the adapter that clients call `name`, None for the model itself; raise a 404 for any other name."""
        if name == self.name:
            return None
        adapters = {} if self.adapters is None else self.adapters.by_name
        if name not in adapters:
            served = ", ".join(f"'{each}'" for each in (self.name, *adapters))
            raise ApiError(
                404,
                f"The model '{name[:100]}' does not exist; this server has {served}.",
                param="model",
                code="model_not_found",
            )
        return adapters[name]

    def encode(self, text: str, path: str, *, add_bos: bool = False) -> bytes:
        """Return the ids of a prompt, the field at `path`. Raises a 400 for a text that is too long whatever its tokens
        are, before time is spent on it."""
        least = len(text.encode("utf-8", "surrogatepass")) // self.tokenizer.longest_token_bytes
        if least > self.max_request_tokens:
            raise ApiError(
                400,
                f"{path}: the text has at least {least} tokens; "
                f"the longest request is {self.max_request_tokens} tokens",
                param=path,
                code="context_length_exceeded",
            )
        return self.tokenizer.encode(text, add_bos=add_bos)

    def describe_all(self) -> list[dict[str, object]]:
        """What GET /v1/models lists: the model and its adapters."""
        adapters = {} if self.adapters is None else self.adapters.by_name
        return [self.describe(), *map(self.describe, adapters.values())]

    def describe(self, adapter: Adapter | None = None) -> dict[str, object]:
        """The model, or one of its adapters, as an entry of GET /v1/models."""
        parent = {} if adapter is None else {"parent": self.name}
        return {
            "id": self.name if adapter is None else adapter.name,
            "object": "model",
            "created": self.created,
            "owned_by": "anaphora",
            "max_model_len": self.max_request_tokens,
            **parent,
        }

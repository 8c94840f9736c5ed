"""A model on disk and in memory: shape, weights, tokenizer, chat template."""

from anaphora.model.chat_template import ChatTemplate, ChatTemplateError
from anaphora.model.errors import ModelError
from anaphora.model.load import Model, load_model
from anaphora.model.lora import LoraAdapter, LowRank, read_lora
from anaphora.model.shape import ModelShape
from anaphora.model.tokenizer import Detokenizer, Tokenizer
from anaphora.model.weights import LayerWeights, QuantisedMatrix, StoredWeights, Weights

__all__ = [
    "ChatTemplate",
    "ChatTemplateError",
    "Detokenizer",
    "LayerWeights",
    "LoraAdapter",
    "LowRank",
    "Model",
    "ModelError",
    "ModelShape",
    "QuantisedMatrix",
    "StoredWeights",
    "Tokenizer",
    "Weights",
    "load_model",
    "read_lora",
]

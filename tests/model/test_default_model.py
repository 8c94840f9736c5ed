"""SmolLM2-135M-Instruct as shipped: its shape, llama.cpp's ids, its chat format."""

from __future__ import annotations

import numpy as np
import pytest

from anaphora.model import Model
from anaphora.tokens import unpack

pytestmark = pytest.mark.model

# Ids that llama.cpp's server (xllamacpp 2026.10, /tokenize) gave for the same file.
LLAMA_CPP_IDS = [
    ("\n\n 7", True, [8866, 39]),
    ("2024-12-01", True, [34, 32, 34, 36, 29, 33, 34, 29, 32, 33]),
    ("Hello, world! I'll don't", True, [19556, 28, 905, 17, 339, 3060, 1326, 982]),
    ("Grüße, naïve café e\u0301", True, [27302, 7170, 34878, 85, 28, 15486, 46494, 37366, 297, 151, 219]),
    (
        "中文字 日本語 한국어",
        True,
        [28589, 29184, 36518, 17097, 241, 115, 40993, 179, 120, 248, 216, 33085, 246, 181, 130, 251, 183, 240, 129],
    ),
    (
        "👩‍👩‍👧 🇫🇷",
        True,
        [10813, 235, 119, 321, 231, 10813, 235, 119, 321, 231, 10813, 235, 117, 15107, 225, 121, 10813, 225, 132],
    ),
    (
        "def f(x):\n\t\tif x:\n\t\t\treturn  x**2  # ½",
        True,
        [1604, 275, 24, 104, 727, 3354, 197, 342, 1792, 42, 3558, 197, 5406, 216, 1792, 828, 34, 216, 907, 216, 16738],
    ),
    ("a  b   c\r\n\r\n", True, [81, 216, 278, 256, 265, 18682]),
    ("<|im_start|>user\nhi<|im_end|>", True, [1, 4093, 198, 6004, 2]),
    (
        "<|im_start|>user\nhi<|im_end|>",
        False,
        [44, 108, 306, 79, 3738, 108, 46, 4093, 198, 6004, 44, 108, 306, 79, 486, 108, 46],
    ),
    ("  <|im_end|>  <|endoftext|>!", True, [256, 2, 256, 0, 17]),
    (
        "  <|im_end|>  <|endoftext|>!",
        False,
        [216, 2067, 108, 306, 79, 486, 108, 46, 216, 2067, 108, 486, 1714, 2692, 108, 46, 17],
    ),
]


@pytest.mark.parametrize(("text", "parse_special", "ids"), LLAMA_CPP_IDS)
def test_ids_are_those_of_llama_cpp(default_model: Model, text: str, parse_special: bool, ids: list[int]) -> None:
    tokenizer = default_model.tokenizer
    assert unpack(tokenizer.encode(text, parse_special=parse_special)).tolist() == ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_shape_is_that_of_the_release(default_model: Model) -> None:
    shape = default_model.shape
    assert (shape.architecture, shape.num_layers, shape.hidden_size, shape.intermediate_size) == (
        "llama",
        30,
        576,
        1536,
    )
    assert (shape.num_heads, shape.num_kv_heads, shape.head_dim) == (9, 3, 64)
    assert (shape.vocab_size, shape.max_context, shape.rope_theta) == (49152, 8192, 100000.0)
    assert shape.rms_norm_eps == pytest.approx(1e-5)
    assert shape.ties_embeddings
    assert shape.eos_token_ids == (2, 0)


def test_it_is_named_as_its_makers_named_it(default_model: Model) -> None:
    assert default_model.name == "SmolLM2-135M-Instruct"


def test_weights_are_float32_and_embeddings_are_the_output(default_model: Model) -> None:
    weights = default_model.weights
    assert weights.output is weights.embedding
    assert weights.embedding.dtype == weights.layers[29].down.dtype == np.float32
    assert weights.embedding.shape == (49152, 576)


def test_its_template_writes_the_system_prompt_that_it_was_trained_with(default_model: Model) -> None:
    template = default_model.chat_template
    assert template is not None
    assert template.render([{"role": "user", "content": "hi"}]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    )
    own = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "hi"}]
    assert template.render(own, add_generation_prompt=False) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    )

"""LoRA adapters in PEFT's format: read whole, or refused by the name of what is wrong."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest

from anaphora.model import ModelError, read_lora
from anaphora.model.lora import TARGETS
from tests.tiny_adapters import random_tensors, tensor_name, write_adapter
from tests.tiny_models import tiny_shape

SHAPE = tiny_shape()


def digest_of(folder):
    return read_lora(folder, SHAPE).digest


class TestReads:
    def test_every_pair_with_its_scale(self, tmp_path):
        adapter = read_lora(write_adapter(tmp_path, SHAPE, rank=4, lora_alpha=6), SHAPE)
        tensors = random_tensors(SHAPE, rank=4)
        assert (adapter.rank, adapter.scale, adapter.path) == (4, 1.5, str(tmp_path))
        assert [list(layer) for layer in adapter.layers] == [sorted(TARGETS)] * 2
        for number, layer in enumerate(adapter.layers):
            for target, pair in layer.items():
                np.testing.assert_array_equal(pair.a, tensors[tensor_name(number, target, "A")])
                np.testing.assert_array_equal(pair.b, tensors[tensor_name(number, target, "B")])

    def test_the_scale_of_rank_stabilised_adapters(self, tmp_path):
        folder = write_adapter(tmp_path, SHAPE, rank=3, lora_alpha=6, use_rslora=True)
        assert read_lora(folder, SHAPE).scale == 6 / math.sqrt(3)

    def test_some_targets_in_some_layers(self, tmp_path):
        tensors = {name: array for name, array in random_tensors(SHAPE, targets=("q", "v")).items() if ".1." in name}
        folder = write_adapter(tmp_path, SHAPE, targets=("q", "v"), tensors=tensors, layers_to_transform=[1])
        assert [list(layer) for layer in read_lora(folder, SHAPE).layers] == [[], ["q", "v"]]

    def test_targets_given_by_a_pattern(self, tmp_path):
        folder = write_adapter(tmp_path, SHAPE, targets=("o",), target_modules=r".*\.o_proj")
        assert [list(layer) for layer in read_lora(folder, SHAPE).layers] == [["o"], ["o"]]


class TestDigest:
    def test_is_the_same_for_the_same_numbers_wherever_they_lie(self, tmp_path):
        assert digest_of(write_adapter(tmp_path / "a", SHAPE)) == digest_of(
            write_adapter(tmp_path / "b", SHAPE, task_type=None, lora_dropout=0.0)
        )

    def test_changes_with_any_number_and_with_the_scale(self, tmp_path):
        tensors = random_tensors(SHAPE)
        tensors[tensor_name(1, "down", "B")][5, 3] += 1e-3
        folders = [
            write_adapter(tmp_path / "a", SHAPE),
            write_adapter(tmp_path / "b", SHAPE, tensors=tensors),
            write_adapter(tmp_path / "c", SHAPE, lora_alpha=9),
        ]
        assert len({digest_of(folder) for folder in folders}) == 3

    def test_tells_targets_of_the_same_size_apart(self, tmp_path):
        tensors = random_tensors(SHAPE, targets=("k",))
        moved = {name.replace("k_proj", "v_proj"): array for name, array in tensors.items()}
        k = write_adapter(tmp_path / "k", SHAPE, targets=("k",), tensors=tensors)
        v = write_adapter(tmp_path / "v", SHAPE, targets=("v",), tensors=moved)
        assert digest_of(k) != digest_of(v)

    def test_is_of_the_numbers_in_memory_which_the_file_does_not_reach(self, tmp_path):
        adapter = read_lora(write_adapter(tmp_path, SHAPE), SHAPE)
        path = tmp_path / "adapter_model.safetensors"
        with path.open("r+b") as file:  # in place
            file.seek(-1000, 2)
            file.write(bytes(1000))
        again = read_lora(tmp_path, SHAPE)
        assert again.digest != adapter.digest
        expected = random_tensors(SHAPE)
        for number, layer in enumerate(adapter.layers):
            for target, pair in layer.items():
                np.testing.assert_array_equal(pair.b, expected[tensor_name(number, target, "B")])


class TestRefuses:
    @pytest.mark.parametrize(
        ("config", "message"),
        [
            ({"peft_type": "IA3"}, "peft_type: 'IA3' is not supported, only 'LORA'"),
            ({"use_dora": True}, "use_dora: True is not allowed; DoRA"),
            ({"modules_to_save": ["lm_head"]}, r"modules_to_save: \['lm_head'\]"),
            ({"bias": "all"}, "bias: all is not allowed"),
            ({"rank_pattern": {"q_proj": 8}}, "rank_pattern"),
            ({"alpha_pattern": {"q_proj": 8}}, "alpha_pattern"),
            ({"fan_in_fan_out": True}, "fan_in_fan_out"),
            ({"r": 0}, "r: 0 is not allowed; it must be a whole number from 1 to 1024"),
            ({"r": True}, "r: True"),
            ({"r": 1 << 40}, "r: 1099511627776"),
            ({"r": None}, "r: None"),
            ({"lora_alpha": "16"}, "lora_alpha: '16'"),
            ({"lora_alpha": math.inf}, "lora_alpha: inf"),
            ({"use_rslora": "yes"}, "use_rslora: 'yes'"),
            ({"target_modules": ["q_proj", "lm_head"]}, "target_modules: 'lm_head' cannot be adapted; .* down_proj"),
            ({"target_modules": []}, "target_modules: expected"),
            ({"layers_to_transform": [2]}, "layers_to_transform: expected layers from 0 to 1"),
            ({"r": 5}, r"shape \[4, 96\]; with rank 5 this model needs \[5, 96\]"),
        ],
    )
    def test_what_the_config_asks_for_by_its_field(self, tmp_path, config, message):
        folder = write_adapter(tmp_path, SHAPE, **config)
        with pytest.raises(ModelError, match=message) as refused:
            read_lora(folder, SHAPE)
        assert str(tmp_path) in str(refused.value)

    def test_tensors_of_another_model(self, tmp_path):
        folder = write_adapter(tmp_path, tiny_shape(hidden_size=128, num_layers=1))
        with pytest.raises(ModelError, match=r"has shape \[128, 4\]; with rank 4 this model needs \[64, 4\]"):
            read_lora(folder, SHAPE)
        deeper = write_adapter(tmp_path, tiny_shape(num_layers=3))
        with pytest.raises(ModelError, match=r"layers.2\..* the model has 2 layers"):
            read_lora(deeper, SHAPE)

    @pytest.mark.parametrize(
        ("name", "message"),
        [
            ("base_model.model.lm_head.lora_A.weight", "adapts what cannot be adapted here; allowed are q, k"),
            ("base_model.model.model.layers.0.self_attn.q_proj.lora_magnitude_vector", "DoRA is not supported"),
            ("base_model.model.model.layers.00.self_attn.q_proj.lora_A.weight", "cannot be adapted"),
            ("x" * 10_000, "cannot be adapted"),
        ],
    )
    def test_other_tensors(self, tmp_path, name, message):
        folder = write_adapter(tmp_path, SHAPE, tensors=random_tensors(SHAPE) | {name: np.ones((4, 64), np.float32)})
        with pytest.raises(ModelError, match=message) as refused:
            read_lora(folder, SHAPE)
        assert len(str(refused.value)) < 600

    def test_a_pair_of_which_a_half_is_missing(self, tmp_path):
        tensors = random_tensors(SHAPE)
        del tensors[tensor_name(1, "up", "B")]
        with pytest.raises(ModelError, match=r"layer 1, up: lora_B of .*up_proj.lora_A.weight' is missing"):
            read_lora(write_adapter(tmp_path, SHAPE, tensors=tensors), SHAPE)

    def test_a_target_that_a_layer_lacks(self, tmp_path):
        tensors = random_tensors(SHAPE)
        for half in "AB":
            del tensors[tensor_name(0, "v", half)]
        with pytest.raises(ModelError, match=r"layer 0, v: missing, although adapter_config\.json lists it"):
            read_lora(write_adapter(tmp_path, SHAPE, tensors=tensors), SHAPE)

    @pytest.mark.parametrize("value", [math.nan, math.inf])
    def test_numbers_that_are_not_finite(self, tmp_path, value):
        tensors = random_tensors(SHAPE)
        tensors[tensor_name(0, "q", "A")][0, 0] = value
        with pytest.raises(ModelError, match="not finite"):
            read_lora(write_adapter(tmp_path, SHAPE, tensors=tensors), SHAPE)

    @pytest.mark.parametrize("size", [0, 4, 100, 5000])
    def test_a_truncated_file(self, tmp_path, size):
        folder = write_adapter(tmp_path, SHAPE)
        path = folder / "adapter_model.safetensors"
        path.write_bytes(path.read_bytes()[:size])
        with pytest.raises(ModelError, match="damaged"):
            read_lora(folder, SHAPE)

    @pytest.mark.parametrize("text", ["", "{", "[]", "[" * 100_000, "\udcff"])
    def test_a_config_that_is_no_json_object(self, tmp_path, text):
        folder = write_adapter(tmp_path, SHAPE)
        (folder / "adapter_config.json").write_text(text, errors="surrogateescape")
        with pytest.raises(ModelError, match=r"adapter_config\.json"):
            read_lora(folder, SHAPE)

    def test_what_is_not_there(self, tmp_path):
        with pytest.raises(ModelError, match=r"expected a folder with adapter_config\.json"):
            read_lora(tmp_path / "none", SHAPE)
        with pytest.raises(ModelError, match=r"adapter_config\.json: missing"):
            read_lora(tmp_path, SHAPE)
        (tmp_path / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA", "r": 1, "lora_alpha": 1}))
        with pytest.raises(ModelError, match=r"adapter_model\.safetensors: missing"):
            read_lora(tmp_path, SHAPE)

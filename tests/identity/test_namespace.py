from __future__ import annotations

import os
import pickle
import subprocess
import sys

import pytest

from anaphora import Adapter, Namespace
from anaphora.identity import DEFAULT_NAMESPACE


def test_namespaces_are_equal_exactly_if_every_field_is():
    fields = [{"model": "m"}, {"salt": "m"}, {"kv_layout": "m"}, {"adapter": Adapter("m")}, {"generation": 1}, {}]
    namespaces = [Namespace(**one) for one in fields]
    assert len(set(namespaces)) == len(fields)
    assert [Namespace(**one) for one in fields] == namespaces
    assert Namespace() == DEFAULT_NAMESPACE


def test_an_adapter_is_its_weights_whatever_it_is_called():
    assert Adapter("aa", name="s", path="/p", lora_id=1) == Adapter("aa", name="t", path="/q", lora_id=2)
    assert Adapter("aa", name="s", lora_id=1) != Adapter("bb", name="s", lora_id=1)
    with pytest.raises(ValueError, match=r"adapter\.digest"):
        Adapter("")


@pytest.mark.parametrize(("salt", "error"), [("", ValueError), (7, TypeError), (b"a", TypeError)])
def test_a_salt_is_a_non_empty_string_or_none(salt, error):
    with pytest.raises(error, match="salt: expected"):
        Namespace(salt=salt)


@pytest.mark.parametrize(
    ("kind", "fields", "named"),
    [
        (Namespace, {"model": None}, "model"),
        (Namespace, {"kv_layout": b"bf16"}, "kv_layout"),
        (Namespace, {"generation": 1.5}, "generation"),
        (Namespace, {"adapter": "lora"}, "adapter"),
        (Adapter, {"digest": b"aa"}, "adapter.digest"),
        (Adapter, {"digest": "aa", "name": 5}, "adapter.name"),
        (Adapter, {"digest": "aa", "lora_id": "1"}, "adapter.lora_id"),
    ],
)
def test_a_field_of_another_type_is_refused(kind, fields, named):
    with pytest.raises(TypeError, match=named):
        kind(**fields)


def test_the_salt_is_not_shown():
    assert "tenant-7" not in repr(Namespace(salt="tenant-7"))


def test_a_namespace_from_another_process_is_found_in_a_dictionary_here():
    make = "import pickle, sys; from anaphora import Namespace; "
    make += "sys.stdout.buffer.write(pickle.dumps(Namespace(model='m', salt='s')))"
    for seed in ("0", "1"):
        made = subprocess.run(
            [sys.executable, "-c", make], env={**os.environ, "PYTHONHASHSEED": seed}, capture_output=True, check=True
        )
        assert pickle.loads(made.stdout) in {Namespace(model="m", salt="s")}

"""How the native executor's library comes about: compiled once into the cache folder, or done without."""

from __future__ import annotations

import logging
import sys
from pathlib import Path

import pytest

from anaphora.engine import build
from anaphora.engine.native import NativeExecutor, NativeUnavailableError, library
from anaphora.engine.reference import ReferenceExecutor
from anaphora.model import load_model
from tests.engine.dense_model import LLAMA, random_weights
from tests.tiny_models import write_hf_model

COMPILER = """#!{python}
import pathlib, sys
with open({log!r}, "a") as log:
    print(*sys.argv[1:], file=log)
if "--version" in sys.argv:
    print("cc {version}")
elif {fails}:
    sys.exit("x.cpp:1: error: I do not know C++")
else:
    pathlib.Path(sys.argv[sys.argv.index("-o") + 1]).write_text("no library")
"""


@pytest.fixture
def fresh(tmp_path, monkeypatch):
    """A machine without a library; calls of its compiler, if there is one, are lines of `calls`."""
    monkeypatch.setenv("ANAPHORA_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PATH", str(tmp_path / "bin"))
    monkeypatch.delenv("CXX", raising=False)
    library.load_library.cache_clear()
    yield tmp_path
    library.load_library.cache_clear()


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("model")
    write_hf_model(folder)
    return load_model(folder)


def add_compiler(folder: Path, name="c++", *, fails=False, version=1) -> Path:
    calls = folder / "calls"
    (folder / "bin").mkdir(exist_ok=True)
    program = folder / "bin" / name
    program.write_text(COMPILER.format(python=sys.executable, log=str(calls), fails=fails, version=version))
    program.chmod(0o755)
    return calls


def test_without_a_compiler_it_says_what_it_looked_for(fresh):
    with pytest.raises(NativeUnavailableError, match=r"no C\+\+ compiler found; looked for c\+\+, g\+\+, clang\+\+"):
        library.load_library()


def test_a_failing_compiler_is_quoted_and_nothing_is_left_behind(fresh):
    add_compiler(fresh, fails=True)
    with pytest.raises(NativeUnavailableError, match=r"could not compile .*\.cpp: x.cpp:1: error: I do not know C\+\+"):
        library.load_library()
    assert list((fresh / "cache" / "native").iterdir()) == []


def test_a_cache_folder_that_cannot_be_written_is_named(fresh):
    add_compiler(fresh)
    (fresh / "cache").write_text("a file")
    with pytest.raises(NativeUnavailableError, match=r"cache/native: "):
        library.load_library()


def test_it_is_compiled_once_for_each_compiler_and_kept_under_a_name_of_its_own(fresh, caplog):
    def names():
        with pytest.raises(NativeUnavailableError, match="native: "):
            library.load_library()  # what this compiler makes cannot be loaded
        return {path.name for path in (fresh / "cache" / "native").iterdir()}

    calls = add_compiler(fresh)
    first = names()
    assert len(first) == 1
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    calls.write_text("")
    assert names() == first
    assert calls.read_text().split() == ["--version"]
    add_compiler(fresh, version=2)
    assert len(names()) == 2


def test_auto_is_reference_where_there_is_no_compiler_and_says_so_in_a_line(fresh, model, caplog):
    engine = build.build_engine(model, kv_memory_bytes=1 << 20)
    assert isinstance(engine.executor, ReferenceExecutor)
    assert [record.getMessage() for record in caplog.records] == [
        "executor: running reference, which is slower, since native is not available: "
        "no C++ compiler found; looked for c++, g++, clang++ (or set CXX)"
    ]


def test_native_is_refused_where_there_is_no_compiler(fresh, model):
    with pytest.raises(ValueError, match="executor: 'native' is not available here: no C"):
        build.build_engine(model, executor="native", kv_memory_bytes=1 << 20)


def test_auto_is_native_where_there_is_a_compiler_and_names_say_how_weights_are_kept(model):
    try:
        NativeExecutor(LLAMA, random_weights(LLAMA))
    except NativeUnavailableError as error:
        pytest.skip(f"the native executor is not available: {error}")
    engine = build.build_engine(model, kv_memory_bytes=1 << 20)
    assert isinstance(engine.executor, NativeExecutor)
    assert "-stored-bf16-" in engine.executor.numerics_id
    for kind, kept in (("native", "-stored-bf16-"), ("native-bf16", "-bf16-"), ("native-q8", "-q8_0-")):
        numerics_id = build.build_engine(model, executor=kind, kv_memory_bytes=1 << 20).executor.numerics_id
        assert kept in numerics_id
        assert ("stored" in numerics_id) == (kind == "native")

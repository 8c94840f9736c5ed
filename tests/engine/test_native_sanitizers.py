"""The native executor's C++ under the compiler's sanitizers: no stray access, no undefined operation, no data race.

Compiling for them takes minutes, so it must be asked for: with ANAPHORA_SANITIZERS=1 in the environment.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from anaphora.engine.native import NativeUnavailableError, native_paths
from anaphora.engine.native.library import find_compiler

if not os.environ.get("ANAPHORA_SANITIZERS"):
    pytest.skip("ANAPHORA_SANITIZERS is not set; compiling for them takes minutes", allow_module_level=True)
try:
    PATHS = native_paths()
except NativeUnavailableError as error:
    pytest.skip(f"the native executor is not available: {error}", allow_module_level=True)

# In a process of its own, which has the sanitizer's runtime loaded before everything else.
WORK = """
import sys
from array import array
from dataclasses import replace
from itertools import cycle
import numpy as np
from anaphora.engine.executor import Batch, Span
from anaphora.engine.native import NativeExecutor, library
from anaphora.model import LoraAdapter, LowRank
from anaphora.model.lora import projection_sizes
from tests.engine.dense_model import FAMILIES, LLAMA, random_weights

library.FLAGS = (*library.FLAGS, "-g", "-O1", *sys.argv[2:])
# It loads the library, so not before.
from tests.engine.test_native_stored import KINDS, SHAPE, stored_weights

tokens = np.random.default_rng(0).integers(0, 53, 700, np.int32)


def adapter(shape, rank, targets):
    ones = {t: LowRank(np.ones((rank, n), np.float32), np.ones((m, rank), np.float32) / 64)
            for t, (m, n) in projection_sizes(shape).items() if t in targets}
    return LoraAdapter("", f"rank {rank}", rank, 0.1, (ones,) * shape.num_layers)


def span(start, count, first_block, num_shared=0, num_logits=1):
    table = [*range(1, num_shared + 1), *range(first_block, first_block + 44 - num_shared)]
    return Span(tokens[start : start + count], start, [array("i", table)], num_logits)


odd = replace(LLAMA, hidden_size=33, intermediate_size=17, head_dim=6)
cases = [(shape, random_weights(shape), "bf16") for shape in [*FAMILIES.values(), odd]]
cases += [(odd, random_weights(odd), "q8_0"), *((SHAPE, stored_weights(SHAPE, kind), "bf16") for kind in KINDS)]
for shape, weights, weight_format in cases:
    executor = NativeExecutor(shape, weights, 3, sys.argv[1], weight_format)
    executor.allocate_kv(400, 16)
    executor.execute(Batch([span(0, 600, 1, num_logits=600)]))
    executor.execute(Batch([span(600, 1, 1)]))  # few pieces: each tile for itself
    shared = [((0, 1, 2, 3), 32), ((1, 2), 36)]
    executor.execute(Batch([span(576 + i, 1 + 5 * i, 50 + 50 * i, 36) for i in range(4)] + [span(0, 90, 300)], shared))
    executor.load_adapter(adapter(shape, 3, "qvo"))
    executor.load_adapter(adapter(shape, 40, ("k", "gate", "down")))
    spans = [span(0, 5 + 60 * i, 1 + 50 * i) for i in range(6)]
    for each, digest in zip(spans, cycle([None, "rank 3", "rank 40"])):
        each.adapter = digest
    executor.execute(Batch(spans))
    executor.unload_adapter("rank 3")
    executor.copy_blocks([(1, 399), (399, 400)])
    executor.allocate_host(3)
    executor.save_blocks([(1, 3), (400, 1)])
    executor.load_blocks([(3, 1), (1, 400)])
    assert np.isfinite(executor.execute(Batch([span(600, 1, 1)])).logits[0]).all()
print("done")
"""
SANITIZERS = {
    "address": (("libasan.so", "libubsan.so"), ("-fsanitize=address,undefined", "-fno-sanitize-recover=undefined")),
    "thread": (("libtsan.so",), ("-fsanitize=thread",)),
}


def runtime(name: str) -> str:
    path = subprocess.run(
        [find_compiler(), f"-print-file-name={name}"], capture_output=True, text=True, check=True
    ).stdout.strip()
    if not Path(path).is_absolute() or not Path(path).exists():
        pytest.skip(f"the compiler has no {name}")
    return path


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize("sanitizer", SANITIZERS)
def test_nothing_to_report(sanitizer, path, tmp_path_factory):
    libraries, flags = SANITIZERS[sanitizer]
    root = Path(__file__).parents[2]
    environment = {
        **os.environ,
        "LD_PRELOAD": " ".join(map(runtime, libraries)),
        "PYTHONPATH": os.pathsep.join([str(root / "src"), str(root)]),
        # One build for all paths.
        "ANAPHORA_CACHE": str(tmp_path_factory.getbasetemp() / sanitizer),
        # Python keeps memory to its end on purpose.
        "ASAN_OPTIONS": "detect_leaks=0",
        "TSAN_OPTIONS": "halt_on_error=1",
        "OPENBLAS_NUM_THREADS": "1",
    }
    done = subprocess.run(
        [sys.executable, "-c", WORK, path, *flags], env=environment, capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout.strip()) == (0, "done"), done.stderr[-4000:]

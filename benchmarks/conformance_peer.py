"""Running the conformance kit under the interpreter of another engine's environment, which need not have Anaphora."""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

SOURCES = Path(__file__).parents[1] / "src"


def run_peer(engine: str, factory: str, environment: Mapping[str, str]) -> int:
    """Run the kit on a factory in this folder; return its exit code: 1 if a check failed.

    The interpreter is that of --python, or of ENGINE_PYTHON in the environment; other arguments are the kit's.
    """
    variable = f"{engine.upper()}_PYTHON"
    parser = argparse.ArgumentParser(
        description=f"Run the conformance kit on {engine}'s code.", epilog="Other arguments are those of the kit."
    )
    parser.add_argument("--python", default=os.environ.get(variable), help=f"interpreter of {engine}'s environment")
    args, kit_args = parser.parse_known_args()
    if not args.python:
        parser.error(f"--python, or {variable} in the environment: the interpreter of an environment with {engine}")
    path = os.pathsep.join([str(SOURCES), str(Path(__file__).parent)])
    command = [args.python, "-m", "anaphora.conformance", factory, *kit_args]
    return subprocess.run(command, env={**os.environ, **environment, "PYTHONPATH": path}, check=False).returncode

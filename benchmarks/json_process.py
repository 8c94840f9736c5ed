"""A process of its own that answers JSON lines, as every contestant of a benchmark is. Standard library alone."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from tempfile import TemporaryFile
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

REPOSITORY = Path(__file__).resolve().parents[1]


class JsonProcess:
    """The driver's end: one line asked, one line answered. Raises RuntimeError, with what it printed, if it dies."""

    def __init__(
        self, name: str, python: str, module: str, arguments: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> None:
        self.name = name
        self._log = TemporaryFile("w+")  # noqa: SIM115 - lives as long as the process
        self._process = subprocess.Popen(
            [python, "-m", module, *arguments],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            cwd=REPOSITORY,
            env=env,
            text=True,
        )

    def ask(self, **request: Any) -> dict[str, Any]:
        """Send a request and wait for its answer."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self.receive()

    def receive(self) -> dict[str, Any]:
        """Wait for a line that was not asked for, as the first one."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            status = self._process.wait()
            self._log.seek(0)
            raise RuntimeError(f"{self.name}: its process ended with {status}: {self._log.read()[-2000:]}")
        message: dict[str, Any] = json.loads(line)
        return message

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()
        self._log.close()

"""The native executor: a whole step in one C++ call, compiled at first use. docs/native.md explains it."""

from anaphora.engine.native.executor import NativeExecutor
from anaphora.engine.native.library import NativeUnavailableError, native_paths

__all__ = ["NativeExecutor", "NativeUnavailableError", "native_paths"]

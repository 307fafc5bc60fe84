"""Kernels ready to launch: compiled on first use by the NVRTC that CuPy has loaded, kept by device, source and constants.

CuPy's own way from source to kernel always adds -ftz=true, which would flush the subnormal floats that carry
small FP8 values, so the cubin is made here, with the options that the tests compile with, and CuPy loads it.
Cubins lie beside CuPy's, in CUPY_CACHE_DIR or ~/.cupy/kernel_cache, named by a hash of the whole source text,
the options, the architecture and the compiler's version. The sources include no CUDA headers, so none have
to be found.

CuPy is imported when the first kernel is asked for, not when this module is.
"""

from __future__ import annotations

import functools
import hashlib
import os
import tempfile
from pathlib import Path
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
        arch = cupy().cuda.Device().compute_capability
        defines = KERNELS[source].defines(choices, f"sm_{arch}")
        options = (*OPTIONS, *(f"-D{name}={value}" for name, value in defines.items()))
        if f"sm_{arch}a" in KERNELS[source].architectures:
            arch += "a"  # with the instructions that no later architecture has
        path = _cubin(source, sources.expand(source), options, arch)
        found = _modules[key] = cupy().RawModule(path=str(path))
    return found


def _cubin(source: str, text: str, options: tuple[str, ...], arch: str) -> Path:
    """The compiled file for an architecture: the kept one, or a new one."""
    key = repr((text, options, arch, cupy().cuda.nvrtc.getVersion()))
    path = _cache_folder() / f"corekern-{hashlib.sha256(key.encode()).hexdigest()}.cubin"
    if not path.exists():
        binary = _compile(source, text, (*options, f"-arch=sm_{arch}"))
        # Written aside and renamed: another process may read or write the same file.
        with tempfile.NamedTemporaryFile(dir=path.parent, delete=False) as file:
            file.write(binary)
        os.replace(file.name, path)
    return path


def _compile(source: str, text: str, options: tuple[str, ...]) -> bytes:
    """The cubin of a text; CuPy's own function for this knows no architecture-specific targets such as sm_90a."""
    nvrtc = cupy().cuda.nvrtc
    program = nvrtc.createProgram(text, source, (), ())
    try:
        nvrtc.compileProgram(program, options)
        return nvrtc.getCUBIN(program)
    except nvrtc.NVRTCError as error:
        raise RuntimeError(f"{source}, {options}:\n{nvrtc.getProgramLog(program)}") from error
    finally:
        nvrtc.destroyProgram(program)


@functools.cache
def _cache_folder() -> Path:
    """Where CuPy keeps its cubins, or for this process a folder of its own where that cannot be written."""
    folder = Path(os.environ.get("CUPY_CACHE_DIR") or Path.home() / ".cupy" / "kernel_cache")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder):
            return folder
    except OSError:
        return Path(tempfile.mkdtemp(prefix="corekern-"))

"""Running the kernels' own sources on the CPU, compiled by g++: a check of bits and bounds without a GPU.

    >>> run = kernel("encode.cu", "encode_flat", arch=700, VALUE="float32", FORMAT="fp8_e4m3")  # doctest: +SKIP

gives an object that is called like a CuPy RawKernel and reads NumPy arrays. `emulate.cuh` stands in for CUDA
and `ptx_emulated.cuh` for the instructions, with which the sources' own arithmetic is compared: `arch` below
890 takes the paths without FP8 conversion. A misaligned access, which a device would refuse, ends the
process. What this cannot show is a race, or how fast anything is.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from corekern.cuda import sources
from corekern.cuda.kernels import KERNELS

# Contraction off: only what the sources write as an FMA is one. Aliasing: vectors are loaded through casts.
_FLAGS = (
    "-std=c++17",
    "-O2",
    "-march=native",
    "-ffp-contract=off",
    "-fno-strict-aliasing",
    "-shared",
    "-fPIC",
    "-w",
)


def compiler() -> str | None:
    """Where g++ is, or None."""
    return shutil.which("g++")


class Kernel:
    """One entry of a compiled source; called as kernel(grid, block, arguments)."""

    def __init__(self, launch: Any, threads: int) -> None:
        self._launch = launch
        self._threads = threads

    def __call__(self, grid: tuple[int, ...], block: tuple[int, ...], arguments: tuple) -> None:
        """Runs the grid. Arguments are NumPy scalars, and arrays of one struct; addresses are uint64."""
        if block != (self._threads,) or len(grid) != 1:
            raise ValueError(f"emulated kernels take one-dimensional blocks of {self._threads}, not {block}")
        holders = [np.ascontiguousarray(argument) for argument in arguments]
        parameters = (ctypes.c_void_p * len(holders))(*(h.ctypes.data for h in holders))
        self._launch(ctypes.c_uint(grid[0]), parameters)


def kernel(source: str, entry: str, *, arch: int = 700, **choices: str) -> Kernel:
    """The emulated kernel `entry`, specialised as by `loader.kernel`, for `arch` such as 700 or 900.

    Raises:
        RuntimeError: when there is no g++, or the source does not compile.
    """
    text = sources.expand(source, ptx="ptx_emulated.cuh")
    library = compile_text(text, source, arch=arch, **choices)
    return Kernel(getattr(library, f"launch_{entry}"), KERNELS[source].constants["THREADS"])


def compile_text(text: str, source: str, *, arch: int = 700, **choices: str) -> ctypes.CDLL:
    """The library made of `text`, an expanded and perhaps changed `source`; its first choices by default."""
    family = KERNELS[source]
    chosen = {name: values[0] for name, values in family.choices.items()} | choices
    defines = {**family.defines(chosen, f"sm_{arch // 10}"), "TARGET_ARCH": str(arch)}
    return _library(text, family.entries, tuple(defines.items()))


@functools.cache
def _directory() -> tempfile.TemporaryDirectory:
    return tempfile.TemporaryDirectory(prefix="corekern-emulate-")


@functools.cache
def _library(text: str, entries: tuple[str, ...], defines: tuple[tuple[str, str], ...]) -> ctypes.CDLL:
    gpp = compiler()
    if gpp is None:
        raise RuntimeError("emulating kernels needs g++")
    program = [
        f"#define HAS_BARRIERS {int('__syncthreads' in text)}",
        sources.expand("emulate.cuh"),
        text,
    ]
    for entry in entries:
        body = f"run({entry}, blocks, parameters);"
        program.append(f'extern "C" void launch_{entry}(unsigned blocks, void** parameters) {{ {body} }}')
    name = hashlib.sha256(repr((program, defines)).encode()).hexdigest()[:16]
    path = Path(_directory().name, name)
    path.with_suffix(".cpp").write_text("\n".join(program))
    command = [gpp, *_FLAGS, *(f"-D{k}={v}" for k, v in defines), "-o", f"{path}.so", f"{path}.cpp"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"does not compile for the CPU, with {dict(defines)}:\n{done.stderr}")
    return ctypes.CDLL(f"{path}.so")

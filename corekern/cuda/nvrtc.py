"""Compiling the kernels without CuPy or a GPU: NVRTC through `cuda.bindings`.

For tests and for `corekern doctor --kernels`; running a kernel goes through `loader.py`. Needs the packages
`cuda-bindings` and `nvidia-cuda-nvrtc-cu12` (or -cu13) and no driver.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from corekern.cuda import sources

# What loader.py compiles with too: both ways make the same program.
OPTIONS = ("--std=c++17", "--device-as-default-execution-space")


class CompileError(RuntimeError):
    """NVRTC refused a source; the message is its log."""


@dataclass(frozen=True)
class Resources:
    """What one kernel occupies, as the assembler reports it."""

    registers: int
    """Registers a thread."""
    shared_bytes: int
    """Static shared memory a block."""
    stack_bytes: int
    """Local memory a thread: arrays indexed at run time, and spills."""
    spill_bytes: int
    """Bytes stored to and loaded from local memory because registers ran out."""
    losses: str = ""
    """What the assembler says it gave up, such as matrix products that overlap."""


@dataclass(frozen=True)
class Compiled:
    """A cubin and the resources of each of its kernels, by entry name."""

    cubin: bytes
    resources: dict[str, Resources]


def compile_cubin(source: str, arch: str, defines: Mapping[str, str]) -> Compiled:
    """Compile a source of this package for one architecture.

    Args:
        source: a file of this package, such as "encode.cu".
        arch: an architecture such as "sm_90".
        defines: the `-D` constants; see `kernels.Family.defines`.

    Raises:
        ImportError: when NVRTC or its bindings are not installed.
        CompileError: when it does not compile.
    """
    return compile_text(sources.expand(source), source, arch, defines)


def compile_text(text: str, name: str, arch: str, defines: Mapping[str, str]) -> Compiled:
    """As `compile_cubin`, for CUDA C++ given as text; `name` is what errors call it."""
    cubin, log = _compile(text, name, arch, defines, "CUBIN")
    return Compiled(cubin, read_log(log))


def compile_ptx(source: str, arch: str, defines: Mapping[str, str]) -> bytes:
    """The PTX of a source for one architecture; a driver compiles it for any later one."""
    return _compile(sources.expand(source), source, arch.replace("sm_", "compute_"), defines, "PTX")[0]


def _compile(text: str, name: str, arch: str, defines: Mapping[str, str], what: str) -> tuple[bytes, str]:
    nvrtc = _bindings()
    options = [
        *OPTIONS,
        f"--gpu-architecture={arch}",
        "--ptxas-options=-v",
        *(f"-D{constant}={value}" for constant, value in defines.items()),
    ]
    _, program = _checked(nvrtc.nvrtcCreateProgram(text.encode(), name.encode(), 0, [], []))
    try:
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [o.encode() for o in options])
        written = _read(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program)
        log = written.rstrip(b"\0").decode(errors="replace")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise CompileError(f"{name} for {arch} with {dict(defines)}:\n{log}")
        size, content = (getattr(nvrtc, f"nvrtcGet{what}{part}") for part in ("Size", ""))
        return _read(size, content, program), log
    finally:
        nvrtc.nvrtcDestroyProgram(program)


# The assembler's lines for one kernel, in this order, among others:
#   ptxas info    : Compiling entry function 'encode_flat' for 'sm_90'
#   ptxas         .     0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
#   ptxas info    : Used 40 registers, used 1 barriers, 400 bytes smem
_ENTRY = re.compile(r"Compiling entry function '(\w+)'")
_STACK = re.compile(r"(\d+) bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads")
_USED = re.compile(r"Used (\d+) registers")
_SHARED = re.compile(r"(\d+) bytes smem")


def read_log(log: str) -> dict[str, Resources]:
    """The resources of each kernel in the log that `--ptxas-options=-v` makes.

    Raises:
        ValueError: when a kernel's figures are missing from it: an absent figure must not read as zero.
    """
    found = {}
    for part in log.split("Compiling entry function ")[1:]:
        entry = _ENTRY.match("Compiling entry function " + part)
        stack, used = _STACK.search(part), _USED.search(part)
        if not (entry and stack and used):
            raise ValueError(f"the assembler's log lacks a kernel's figures: {part.strip()!r}")
        line = part[used.start() :].splitlines()[0]
        shared = _SHARED.search(line)
        found[entry[1]] = Resources(
            registers=int(used[1]),
            shared_bytes=int(shared[1]) if shared else 0,
            stack_bytes=int(stack[1]),
            spill_bytes=int(stack[2]) + int(stack[3]),
            losses="; ".join(line for line in log.splitlines() if "Potential Performance Loss" in line),
        )
    return found


def version() -> tuple[int, int]:
    """The NVRTC that `compile_cubin` uses, as (major, minor)."""
    _, major, minor = _checked(_bindings().nvrtcVersion())
    return major, minor


def refuse(arch: str) -> str | None:
    """Why this NVRTC cannot compile for an architecture, or None."""
    if arch == "sm_70" and version() >= (13, 0):
        return "CUDA 12 is the last with sm_70"
    if arch in ("sm_100", "sm_120") and version() < (12, 8):
        return f"NVRTC {version()} does not know {arch}"
    return None


def _bindings():
    try:
        from cuda.bindings import nvrtc

        nvrtc.nvrtcVersion()  # loads the library, which the bindings alone do not
    except Exception as error:  # each release of the bindings has its own exception for a missing library
        raise ImportError(
            "compiling kernels without a GPU needs NVRTC: pip install 'cuda-bindings<13' nvidia-cuda-nvrtc-cu12"
        ) from error
    return nvrtc


def _checked(result: tuple) -> tuple:
    if result[0].value != 0:
        raise RuntimeError(f"NVRTC: {result[0].name}")
    return result


def _read(size, content, program) -> bytes:
    _, count = _checked(size(program))
    buffer = bytes(count)
    _checked(content(program, buffer))
    return buffer

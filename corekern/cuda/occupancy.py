"""What every kernel occupies on every architecture, from the compiler alone: no GPU is needed.

`corekern doctor --kernels` prints it. Registers and spills are the assembler's, warps an SM follow from the limits of the
CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass

from corekern.cuda import nvrtc
from corekern.cuda.grouped_mma import SHARED_KIB
from corekern.cuda.kernels import ARCHITECTURES, KERNELS

REGISTERS = 65536  # of an SM, on all of them


@dataclass(frozen=True)
class Limits:
    """What an SM has, beside its shared memory (`grouped_mma.SHARED_KIB`)."""

    warps: int
    blocks: int
    reserved_bytes: int
    """Of shared memory, for each block."""


LIMITS = {
    "sm_70": Limits(64, 32, 0),
    "sm_75": Limits(32, 16, 0),
    "sm_80": Limits(64, 32, 1024),
    "sm_86": Limits(48, 16, 1024),
    "sm_89": Limits(48, 24, 1024),
    "sm_90": Limits(64, 32, 1024),
    "sm_100": Limits(64, 32, 1024),
    "sm_120": Limits(48, 24, 1024),
}


@dataclass(frozen=True)
class Kernel:
    """One entry of one specialisation on one architecture."""

    source: str
    entry: str
    specialisation: dict[str, str]
    architecture: str
    threads: int
    registers: int
    shared_bytes: int
    """Static and dynamic."""
    spill_bytes: int
    warps: int
    """Resident on an SM."""
    occupancy: float
    """Of the warps an SM can have."""


def resident_warps(arch: str, threads: int, registers: int, shared_bytes: int) -> int:
    """Warps on an SM when blocks of a kernel fill it; 0 when not even one fits.

    Registers are given out to a warp in units of 256, and warps to an SM's four parts.

    >>> resident_warps("sm_90", 256, 32, 0), resident_warps("sm_90", 512, 128, 232448), resident_warps("sm_75", 256, 64, 0)
    (64, 16, 32)
    """
    arch = arch.rstrip("af")
    limits, (_, shared_kib) = LIMITS[arch], SHARED_KIB[arch]
    warps = -(-threads // 32)
    by_registers = REGISTERS // (-(-registers * 32 // 256) * 256) // 4 * 4 // warps
    by_shared = (shared_kib << 10) // max(1, shared_bytes + limits.reserved_bytes)
    return warps * min(limits.blocks, limits.warps // warps, by_registers, by_shared)


def kernels(
    architectures: Iterable[str] = ARCHITECTURES, sources: Iterable[str] = tuple(KERNELS)
) -> Iterator[Kernel]:
    """Compiles and yields every kernel, in as many processes as there are cores.

    Args:
        architectures: such as "sm_90".
        sources: of `kernels.KERNELS`.

    Raises:
        ImportError: NVRTC or its bindings are not installed.
        nvrtc.CompileError: a kernel does not compile.
    """
    wanted = [
        (source, arch, specialisation)
        for source in sources
        for arch in KERNELS[source].architectures
        if arch.rstrip("af") in set(architectures) and nvrtc.refuse(arch) is None
        for specialisation in KERNELS[source].specialisations(arch)
    ]
    # Spawned, not forked: the caller may hold threads of other libraries.
    with ProcessPoolExecutor(os.cpu_count(), multiprocessing.get_context("spawn")) as pool:
        for found in pool.map(_compile, wanted):
            yield from found


def _compile(case: tuple[str, str, dict[str, str]]) -> list[Kernel]:
    source, arch, specialisation = case
    family = KERNELS[source]
    compiled = nvrtc.compile_cubin(source, arch, family.defines(specialisation, arch))
    block = family.shape(arch, specialisation) if family.shape else None
    threads = block.threads if block else family.constants["THREADS"]
    found = []
    for entry, used in compiled.resources.items():
        shared = used.shared_bytes + (block.shared_bytes if block else 0)
        warps = resident_warps(arch, threads, used.registers, shared)
        found.append(
            Kernel(
                source,
                entry,
                specialisation,
                arch,
                threads,
                used.registers,
                shared,
                used.spill_bytes,
                warps,
                warps / LIMITS[arch.rstrip("af")].warps,
            )
        )
    return found


def render(found: Iterable[Kernel]) -> Iterator[str]:
    """A line a kernel, under a heading."""
    row = "{:18} {:20} {:8} {:>7} {:>9} {:>8} {:>6} {:>5} {:>5}  {}".format
    yield row(
        "source", "kernel", "arch", "threads", "registers", "shared", "spills", "warps", "occ.", "constants"
    )
    for k in found:
        constants = " ".join(k.specialisation.values())
        yield row(
            k.source, k.entry, k.architecture, k.threads, k.registers, k.shared_bytes, k.spill_bytes, k.warps,
            f"{k.occupancy:.0%}", constants,
        )  # fmt: skip

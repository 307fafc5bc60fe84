"""What one block of `grouped_mma.cu` is made of, by architecture: how many tokens a step, how many on their way.

The kernel is the same everywhere; shared memory is not. So its constants are chosen here, for the launcher, the
compile tests and `corekern doctor --kernels` alike.
"""

from __future__ import annotations

from dataclasses import dataclass

SOURCE = "grouped_mma.cu"

# KiB of shared memory: what one block may have, and what an SM has for all of them (CUDA C++ Programming Guide,
# "Technical Specifications per Compute Capability"). An architecture that is not here is taken for the least of
# those with asynchronous copies.
SHARED_KIB = {
    "sm_70": (96, 96), "sm_72": (96, 96), "sm_75": (64, 64), "sm_80": (163, 164), "sm_86": (99, 100),
    "sm_87": (163, 164), "sm_89": (99, 100), "sm_90": (227, 228), "sm_100": (227, 228), "sm_103": (227, 228),
    "sm_120": (99, 100), "sm_121": (99, 100),
}  # fmt: skip
_RESERVED = 1024  # bytes of an SM's that each block costs beside its own
_SLICE_STATES = 48 * 32  # bytes of a slice of the combine's states, one a fold


@dataclass(frozen=True)
class Shape:
    """The constants of one specialisation."""

    step: int
    """Tokens a step."""
    stages: int
    """Buffers of K and of V."""
    resident: int
    """Blocks an SM, for which the compiler keeps registers."""
    threads: int
    shared_bytes: int

    def defines(self) -> dict[str, str]:
        return {
            "STEP": str(self.step),
            "STAGES": str(self.stages),
            "RESIDENT": str(self.resident),
            "SHARED_BYTES": str(self.shared_bytes),
        }


def number_of(arch: str) -> int:
    """80 of "sm_80"."""
    return int(arch.removeprefix("sm_").rstrip("af"))


def lanes_on(arch: str) -> tuple[int, ...]:
    """How many (row, query head) pairs a block may have; the instructions of sm_70 make 16 at once."""
    return (16, 32, 48) if number_of(arch) < 75 else (8, 16, 24, 32, 48)


def shape(arch: str, choices: dict[str, str]) -> Shape | None:
    """The shape of a specialisation, or None where there is none.

    Bits depend on the step, so that is the same for every number of lanes: the longest with which the most lanes fit. Two
    blocks an SM come before one where registers allow it, since one computes while the other waits; then many stages.

    >>> choices = {"HEAD_DIM": "256", "LANES": "48", "FORMAT": "fp8_e4m3", "VALUE": "float16", "SEGMENTS": "128",
    ...            "LEGACY": "0"}
    >>> [(s.step, s.stages, s.resident) for s in (shape(a, choices) for a in ("sm_70", "sm_75", "sm_80", "sm_90"))]
    [(64, 1, 1), (32, 1, 1), (64, 3, 1), (64, 4, 1)]
    """
    if choices["FORMAT"] == "bfloat16" and number_of(arch) < 80:
        return None
    block_limit, sm_limit = (kib << 10 for kib in SHARED_KIB.get(arch.rstrip("af"), (99, 100)))
    stages = (4, 3, 2) if number_of(arch) >= 80 else (1,)
    step = next(
        step
        for lanes in reversed(lanes_on(arch))
        for step in (64, 32)
        if _shared_bytes(choices | {"LANES": str(lanes)}, step, stages[-1]) <= block_limit
    )
    lanes, head_dim = int(choices["LANES"]), int(choices["HEAD_DIM"])
    threads = 256 if head_dim >= 128 else 128
    # Two blocks of 256 threads leave a thread 128 registers. More than 24 numerators want more, and so do the fragments of
    # sm_70 and what the compiler makes of sm_100 and later.
    many = head_dim // 16 // (threads // 32) * lanes // 2 > 24 or not 75 <= number_of(arch) < 100
    for resident in (1,) if many else (2, 1):
        limit = block_limit if resident == 1 else sm_limit // resident - _RESERVED
        for count in stages:
            needed = _shared_bytes(choices, step, count)
            if lanes in lanes_on(arch) and needed <= limit:
                return Shape(step, count, resident, threads, needed)
    return None


def _shared_bytes(choices: dict[str, str], step: int, stages: int) -> int:
    """As in grouped_mma.cu."""
    head_dim, lanes = int(choices["HEAD_DIM"]), int(choices["LANES"])
    size = 1 if choices["FORMAT"].startswith("fp8") else 2
    bf16 = choices["FORMAT"] == "bfloat16"
    query_parts = 2 if bf16 and choices["VALUE"] == "float16" else 1
    parts = 1 if choices["LEGACY"] == "1" else 3 if bf16 else 2
    places = stages + 1
    used = 2 * stages * step * head_dim * size
    used += query_parts * 2 * lanes * head_dim + parts * 2 * lanes * step
    used += places * step * 8 + 5 * 4 * lanes + places * 8 + 72
    used = max(used, int(choices["SEGMENTS"]) // 8 * _SLICE_STATES + 72)
    return -(-used // 16) * 16

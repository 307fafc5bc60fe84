"""Every kernel this package compiles, as data: its source, its entry points, and its specialisations.

The launchers take their constants from here, the compile tests build all of it for every architecture, and
`corekern doctor --kernels` lists it.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from corekern.cuda import grouped_mma

ARCHITECTURES = ("sm_70", "sm_75", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")

FP8 = ("fp8_e4m3", "fp8_e5m2")
VALUES = ("float16", "bfloat16", "float32")


@dataclass(frozen=True)
class Family:
    """One `.cu` file and the constants it can be compiled with."""

    source: str
    entries: tuple[str, ...]
    hot: tuple[str, ...]
    """The entries that carry the traffic: none of their registers may spill."""
    constants: dict[str, int]
    """`-D` constants that every specialisation shares; launchers compute their grids from them."""
    choices: dict[str, tuple[str, ...]]
    """`-D` constants with several values: a specialisation has one of each."""
    architectures: tuple[str, ...] = ARCHITECTURES
    registers: int = 64
    """The most that a thread may take: eight blocks of 256 threads fill an SM at 32, four still hide memory's latency."""
    examples: tuple[dict[str, str], ...] | None = None
    """Where there are too many combinations to compile them all: those that the tests compile and `doctor` lists."""
    shape: Callable[[str, dict[str, str]], Any] | None = None
    """(architecture, specialisation) to an object with `threads`, `shared_bytes` and more `defines()`, or None where there
    is no such kernel. Without it a block has `constants["THREADS"]` threads and no dynamic shared memory."""

    def specialisations(self, arch: str) -> Iterator[dict[str, str]]:
        """The examples, or every combination of `choices`, that there are on an architecture."""
        wanted = self.examples
        if wanted is None:
            combinations = itertools.product(*self.choices.values())
            wanted = tuple(dict(zip(self.choices, values, strict=True)) for values in combinations)
        for specialisation in wanted:
            if self.shape is None or self.shape(arch, specialisation) is not None:
                yield specialisation

    def defines(self, specialisation: dict[str, str], arch: str) -> dict[str, str]:
        """The `-D` constants of one specialisation."""
        more = self.shape(arch, specialisation).defines() if self.shape else {}
        return {**{name: str(value) for name, value in self.constants.items()}, **more, **specialisation}


@dataclass(frozen=True)
class Block:
    """Threads and dynamic shared memory of a block, where nothing else depends on the architecture."""

    threads: int
    shared_bytes: int

    def defines(self) -> dict[str, str]:
        return {"SHARED_LIMIT": str(self.shared_bytes)}


def grouped_sm90_block(arch: str, specialisation: dict[str, str]) -> Block:
    """Two warpgroups for the scores, and one for each 128 dims of the values; all the shared memory of an SM."""
    return Block(512 if int(specialisation["HEAD_DIM"]) >= 128 else 384, 232448)


# 256 threads: eight blocks fill an SM of any architecture but for sm_75, sm_86, sm_89 and sm_120 (four and
# six). UNROLL is the items a thread loads before it converts the first, within the 32 registers that eight
# blocks leave a thread: two of 16 bytes are 64 KiB in flight an SM, and four of 4 or 8 codes 32 or 64 KiB;
# latency x bandwidth asks for about 20 KiB on an H200.
THREADS = 256
ENCODE_UNROLL = 2
DECODE_UNROLL = 4

_GROUPED_CHOICES = {
    "HEAD_DIM": ("64", "128", "256"),
    "LANES": ("8", "16", "24", "32", "48"),
    "FORMAT": FP8,
    "VALUE": ("float16", "bfloat16"),
    "MAPS": ("0", "1"),
    "SEGMENTS": ("8", "16", "32", "64", "128"),
}
_GROUPED_EXAMPLE = {
    "HEAD_DIM": "256",
    "LANES": "48",
    "FORMAT": "fp8_e4m3",
    "VALUE": "float16",
    "SEGMENTS": "128",
}

KERNELS: dict[str, Family] = {
    family.source: family
    for family in (
        Family(
            source="encode.cu",
            entries=("encode_flat", "encode_rows", "encode_any"),
            hot=("encode_flat", "encode_rows"),
            constants={"THREADS": THREADS, "UNROLL": ENCODE_UNROLL},
            choices={"VALUE": (*VALUES, "float64"), "FORMAT": FP8},
        ),
        Family(
            source="decode.cu",
            entries=("decode_flat", "decode_rows", "decode_any"),
            hot=("decode_flat", "decode_rows"),
            constants={"THREADS": THREADS, "UNROLL": DECODE_UNROLL},
            choices={"VALUE": VALUES, "FORMAT": FP8},
        ),
        Family(
            source="cache_write.cu",
            entries=("cache_write_vector", "cache_write_any"),
            hot=("cache_write_vector",),
            constants={"THREADS": THREADS},
            choices={"VALUE": VALUES, "FORMAT": (*FP8, *VALUES)},
        ),
        Family(
            source="cache_gather.cu",
            entries=("cache_gather_vector", "cache_gather_any"),
            hot=("cache_gather_vector",),
            constants={"THREADS": THREADS},
            choices={"VALUE": VALUES, "FORMAT": (*FP8, *VALUES)},
        ),
        Family(
            source="grouped_sm90.cu",
            entries=("grouped_attention",),
            hot=("grouped_attention",),
            constants={},
            shape=grouped_sm90_block,
            choices=_GROUPED_CHOICES | {"LEGACY": ("0", "1")},
            architectures=("sm_90a",),
            registers=128,  # 512 threads have the whole register file
            examples=tuple(
                _GROUPED_EXAMPLE | {"MAPS": "1", "LEGACY": "0"} | changes
                for changes in (
                    {},
                    {"LEGACY": "1"},
                    {"VALUE": "bfloat16"},
                    {"FORMAT": "fp8_e5m2"},
                    {"LANES": "8"},
                    {"LANES": "24", "SEGMENTS": "64"},
                    {"HEAD_DIM": "128"},
                    {"HEAD_DIM": "64", "LANES": "16"},
                )
            ),
        ),
        Family(
            source=grouped_mma.SOURCE,
            entries=("grouped_attention",),
            hot=("grouped_attention",),
            constants={},
            choices={
                **{name: values for name, values in _GROUPED_CHOICES.items() if name != "MAPS"},
                "FORMAT": (*FP8, "float16", "bfloat16"),
                "LEGACY": ("0", "1"),
            },
            registers=255,
            shape=grouped_mma.shape,
            examples=tuple(
                _GROUPED_EXAMPLE | {"LEGACY": "0"} | changes
                for changes in (
                    {},
                    {"FORMAT": "float16"},
                    {"FORMAT": "bfloat16", "HEAD_DIM": "128", "LANES": "16"},
                    {"HEAD_DIM": "64", "LANES": "32", "LEGACY": "1"},
                )
            ),
        ),
    )
}

"""The element formats that a KV cache may hold: their facts and their names.

FP8 codes are held as uint8; float16, bfloat16 and float32 are held as themselves. The facts of
E4M3FN and E5M2 are those of "FP8 Formats for Deep Learning" (Micikevicius et al., 2022) as
ml_dtypes implements them.
"""

from __future__ import annotations

from dataclasses import dataclass

import ml_dtypes
import numpy as np


@dataclass(frozen=True)
class Format:
    """What a KV element is: its name, how it is stored, and the limits of its values."""

    name: str
    storage: np.dtype
    """The dtype in which arrays of this format are held (uint8 for FP8)."""
    value: np.dtype
    """The dtype that names the values themselves (ml_dtypes for FP8 and bfloat16)."""
    max: float
    """Largest finite value."""
    smallest: float
    """Smallest positive (subnormal) value."""
    has_infinity: bool

    @property
    def is_fp8(self) -> bool:
        return self.storage == np.uint8

    @property
    def itemsize(self) -> int:
        """Bytes an element."""
        return self.storage.itemsize


BFLOAT16 = np.dtype(ml_dtypes.bfloat16)


def _format(name: str, value: np.dtype | type, *, fp8: bool = False) -> Format:
    value = np.dtype(value)
    info = ml_dtypes.finfo(value)
    return Format(
        name=name,
        storage=np.dtype(np.uint8) if fp8 else value,
        value=value,
        max=float(info.max),
        smallest=float(info.smallest_subnormal),
        has_infinity=name != "fp8_e4m3",
    )


FORMATS: dict[str, Format] = {
    f.name: f
    for f in (
        _format("fp8_e4m3", ml_dtypes.float8_e4m3fn, fp8=True),
        _format("fp8_e5m2", ml_dtypes.float8_e5m2, fp8=True),
        _format("float16", np.float16),
        _format("bfloat16", BFLOAT16),
        _format("float32", np.float32),
    )
}

# Names other projects use for the same formats.
ALIASES = {
    "fp8": "fp8_e4m3",
    "e4m3": "fp8_e4m3",
    "e5m2": "fp8_e5m2",
    "float8_e4m3fn": "fp8_e4m3",
    "float8_e5m2": "fp8_e5m2",
    "fp16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
    "fp32": "float32",
    "float": "float32",
}

BACKENDS = ("cpu", "cuda")


def get_format(dtype: str | Format | np.dtype | type, *, argument: str = "dtype") -> Format:
    """The `Format` that a name, a NumPy dtype or a `Format` stands for.

    Args:
        dtype: a name ("fp8", "fp8_e4m3", "fp8_e5m2", "float16", "bfloat16", "float32" or one of their
            aliases), or a NumPy or ml_dtypes dtype. uint8 names no format: pass the name instead.
        argument: what the error message calls it.

    Raises:
        ValueError: when no such format exists.

    >>> get_format("fp8").name, get_format("fp8").max, get_format("fp8").smallest == 2**-9
    ('fp8_e4m3', 448.0, True)
    """
    if isinstance(dtype, Format):
        return dtype
    if isinstance(dtype, str):
        name = ALIASES.get(dtype, dtype)
        if name in FORMATS:
            return FORMATS[name]
    else:
        try:
            value = np.dtype(dtype)
        except TypeError:
            value = None
        for f in FORMATS.values():
            if value == f.value:
                return f
    raise ValueError(f"{argument}: {dtype!r} is no KV format; use one of {', '.join(FORMATS)} (or fp8)")


def resolve_kv_dtype(
    name: str, checkpoint: str | None = None, *, backend: str = "cuda", arch: str | None = None
) -> str:
    """The KV cache format that a runtime's `kv_cache_dtype` setting means.

    The alias "fp8" means "fp8_e4m3" on every backend and architecture. (It once meant E5M2 on the
    sm_70 Flash path; an explicit "fp8_e5m2" still selects that.) A format that the checkpoint states
    wins over the alias and over "auto"; an explicit name wins over the checkpoint.

    Args:
        name: "auto", "fp8", or an explicit format name.
        checkpoint: the format the checkpoint's quantization config resolved to, or None.
        backend: "cpu" or "cuda".
        arch: a CUDA architecture such as "sm_90", or None. sm_70 is the oldest supported.

    Returns:
        A name in `FORMATS`, or "auto" when nothing more is known.

    Raises:
        ValueError: for an unknown name, backend, or architecture.

    >>> resolve_kv_dtype("fp8", arch="sm_70")
    'fp8_e4m3'
    >>> resolve_kv_dtype("fp8", checkpoint="fp8_e5m2")
    'fp8_e5m2'
    >>> resolve_kv_dtype("fp8_e5m2", checkpoint="fp8_e4m3")
    'fp8_e5m2'
    >>> resolve_kv_dtype("auto")
    'auto'
    """
    if backend not in BACKENDS:
        raise ValueError(f"backend: {backend!r} is not one of {', '.join(BACKENDS)}")
    if arch is not None:
        digits = arch.removeprefix("sm_").rstrip("af")
        if not digits.isdigit() or int(digits) < 70:
            raise ValueError(f"arch: {arch!r} is not a supported CUDA architecture (sm_70 or later)")
    if checkpoint is not None:
        checkpoint = get_format(checkpoint, argument="checkpoint").name
    if name == "auto":
        return checkpoint or "auto"
    resolved = get_format(name, argument="name").name
    return checkpoint or resolved if name == "fp8" else resolved

"""Logits kept in FP32 from the head's product to whoever ranks them.

A float16 result rounds a logit of 20 by up to 2^-7: candidates that far apart tie or swap, and a rerank of draft
candidates sees it first. The operands stay float16 or bfloat16; their products are exact in float32, and sums and
results are float32. Nothing beyond float32 accumulation is done: for a sum over k elements

    |error| <= k * 2^-24 * sum |hidden * lm_head|  (+ O(k^2 2^-48))

whatever the order of the sum; blocked sums, as every matrix product's, come far below it.
"""

from __future__ import annotations

import os
import threading
from collections import Counter
from dataclasses import dataclass
from typing import Any

import numpy as np

from corekern import arrays, routing

HALF = tuple(dtype for dtype in arrays.FLOATS if dtype.itemsize == 2)
IDS = (np.dtype(np.int32), np.dtype(np.int64))
VARIABLE = "COREKERN_FP32_LOGITS"

_calls: Counter[str] = Counter()
_lock = threading.Lock()


@dataclass(frozen=True)
class ModelDefaults:
    """What a model asks for where its user says nothing."""

    fp32_logits: bool = False
    reason: str = ""


# By the name under which a runtime serves the model. What is not here has the global defaults.
MODELS = {
    "qwen3.8-dflash2": ModelDefaults(
        fp32_logits=True,
        reason="its drafter reranks candidates whose logits differ by less than float16's step",
    ),
}


def model_defaults(model: str | None) -> ModelDefaults:
    """The defaults of a model, by its name (case and a leading "organisation/" do not matter); else the global ones.

    >>> model_defaults("qwen3.8-dflash2").fp32_logits, model_defaults("some-other").fp32_logits
    (True, False)
    """
    name = (model or "").rsplit("/", 1)[-1].lower()
    return MODELS.get(name, ModelDefaults())


@dataclass(frozen=True)
class LogitPrecision:
    """What logits are kept in, and who said so."""

    fp32: bool
    source: str


def resolve_fp32_logits(model: str | None = None, setting: bool | None = None) -> LogitPrecision:
    """Whether logits are kept in FP32: an explicit setting, else COREKERN_FP32_LOGITS, else the model's, else no.

    Args:
        model: the model's name; see `model_defaults`.
        setting: what the user asked for; None for nothing.

    Raises:
        TypeError: setting is no bool.
        ValueError: the environment variable is neither 0 nor 1.

    >>> resolve_fp32_logits("qwen3.8-dflash2", setting=False).fp32
    False
    """
    if setting is not None:
        if not isinstance(setting, bool | np.bool_):
            raise TypeError(f"setting: expected a bool or None, got {type(setting).__name__}")
        return LogitPrecision(bool(setting), "explicit setting")
    variable = os.environ.get(VARIABLE, "")
    if variable:
        if variable not in ("0", "1"):
            raise ValueError(f"{VARIABLE}: {variable!r} is not 0 or 1")
        return LogitPrecision(variable == "1", f"{VARIABLE}={variable}")
    defaults = model_defaults(model)
    if defaults.fp32_logits:
        return LogitPrecision(True, f"default of {model}")
    return LogitPrecision(False, "global default")


def dense_logits(hidden: Any, lm_head: Any, *, out: Any = None) -> Any:
    """hidden @ lm_head.T with float32 accumulation and float32 results.

    Args:
        hidden: (rows, hidden_size) float16 or bfloat16, last axis contiguous.
        lm_head: (vocab_size, hidden_size) of hidden's dtype and device, last axis contiguous.
        out: (rows, vocab_size) float32, contiguous; made when None.

    Returns:
        `out`, or a new array: (rows, vocab_size) float32.

    Raises:
        TypeError, ValueError: an argument that is not as above; one line that names it.

    The product is the library's: cuBLAS on a GPU, NumPy's BLAS on the CPU, where the head is widened block by block.
    A row's bits may depend on how many rows there are, as that library chooses.

    >>> dense_logits(np.ones((1, 4096), np.float16), np.full((2, 4096), 1.0009765625, np.float16)).tolist()
    [[4100.0, 4100.0]]
    """
    states, head, device = _check_operands(hidden, lm_head)
    shape = (len(states), len(head))
    target = _output(out, shape, device, {"hidden": states, "lm_head": head})
    routing.backend(_backend(device)).dense(states, head, target)
    _count("dense_logits")
    return arrays.give_back(target, hidden) if out is None else out


def candidate_logits(
    hidden: Any, lm_head: Any, candidate_ids: Any, *, out: Any = None, validate: bool | None = None
) -> Any:
    """The logits of a few candidates a row, with float32 accumulation and float32 results.

    Args:
        hidden, lm_head: as in `dense_logits`.
        candidate_ids: (rows, candidates) int32 or int64, each row's own tokens. An id outside [0, vocab_size), as -1
            in unused places, is no candidate: its logit is -inf.
        out: (rows, candidates) float32, contiguous; made when None.
        validate: raise for ids outside [0, vocab_size), for which a GPU is waited for. None reads COREKERN_VALIDATE.

    Returns:
        `out`, or a new array: (rows, candidates) float32.

    Raises:
        TypeError, ValueError: an argument that is not as above; one line that names it.

    >>> head = np.eye(4, dtype=np.float16)
    >>> candidate_logits(np.float16([[1, 2, 3, 4]]), head, np.int32([[3, 0, -1]])).tolist()
    [[4.0, 1.0, -inf]]
    """
    states, head, device = _check_operands(hidden, lm_head)
    ids = arrays.adopt(candidate_ids, "candidate_ids")
    arrays.check_same_device(hidden=states, candidate_ids=ids)
    arrays.check_array(ids, "candidate_ids", shape=(len(states), "candidates"), dtypes=IDS)
    target = _output(out, ids.shape, device, {"hidden": states, "lm_head": head, "candidate_ids": ids})
    if arrays.should_validate(validate):
        _check_ids(arrays.to_host(ids), len(head))
    if ids.size:
        routing.backend(_backend(device)).candidates(states, head, ids, target)
    _count("candidate_logits")
    return arrays.give_back(target, hidden) if out is None else out


def logit_calls() -> dict[str, int]:
    """How many calls of `dense_logits` and `candidate_logits` this process has run; those never run are left out."""
    with _lock:
        return dict(_calls)


def _count(function: str) -> None:
    with _lock:
        _calls[function] += 1


def _backend(device: str) -> str:
    return "cpu.logits" if device == "cpu" else "cuda.logits"


def _check_operands(hidden: Any, lm_head: Any) -> tuple[Any, Any, str]:
    states, head = arrays.adopt(hidden, "hidden"), arrays.adopt(lm_head, "lm_head")
    device = arrays.check_same_device(hidden=states, lm_head=head)
    arrays.check_array(states, "hidden", shape=("rows", "hidden_size"), dtypes=HALF, contiguous_last=True)
    size = states.shape[1]
    arrays.check_array(
        head, "lm_head", shape=("vocab_size", size), dtypes=(states.dtype,), contiguous_last=True
    )
    for name, array in (("hidden", states), ("lm_head", head)):
        if not array.size:
            raise ValueError(f"{name}: shape {array.shape} is empty")
        if len(array) > 1 and array.strides[0] < array.shape[1] * array.itemsize:
            raise ValueError(f"{name}: its rows overlap or run backwards (strides {array.strides})")
    return states, head, device


def _output(out: Any, shape: tuple[int, ...], device: str, inputs: dict[str, Any]) -> Any:
    if out is None:
        return arrays.new_output(device, shape, np.float32)
    target = arrays.adopt(out, "out")
    arrays.check_same_device(hidden=inputs["hidden"], out=target)
    arrays.check_output(target, "out", shape=shape, dtypes=(np.dtype(np.float32),), inputs=inputs)
    if not target.flags.c_contiguous:
        raise ValueError(f"out: is not contiguous (strides {target.strides})")
    return target


def _check_ids(ids: np.ndarray, vocab_size: int) -> None:
    bad = np.argwhere((ids < 0) | (ids >= vocab_size))
    if len(bad):
        row, place = bad[0]
        raise ValueError(
            f"candidate_ids: row {row}, candidate {place} is {ids[row, place]}, outside [0, {vocab_size})"
        )

"""The FP32 state of attention over part of the tokens, and how states are merged.

A state is never normalised: three arrays, whose merge is exact in the maximum and loses one rounding an
element in the others. Division happens once, at the end.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class PartialState:
    """Attention over some of the tokens, before division.

    With scores s in base 2 (q . k * softmax_scale * log2(e)):

        maximum   = max of s                    (rows, q_heads) float32, -inf where nothing was seen
        sum       = sum of 2^(s - maximum)      (rows, q_heads) float32
        numerator = sum of 2^(s - maximum) * v  (rows, q_heads, head_dim) float32
    """

    numerator: Any
    maximum: Any
    sum: Any

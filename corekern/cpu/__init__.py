"""The CPU backend: numba kernels on NumPy arrays.

Arguments are checked before they come here. numba cannot name FP8, float16 or bfloat16, so each
format travels as a storage view whose type names it: see `storage`.
"""

from corekern.cpu.attention import attention, attention_state, finalize, merge, plan_attention
from corekern.cpu.cache import gather_cache, write_cache
from corekern.cpu.codec import decode, encode

__all__ = [
    "attention",
    "attention_state",
    "decode",
    "encode",
    "finalize",
    "gather_cache",
    "merge",
    "plan_attention",
    "write_cache",
]

"""The portable CUDA backend: numba-cuda kernels that run on any GPU from sm_70.

It takes everything that is legal, and is a second implementation that the hand-written kernels are checked
against. Arguments are checked before they come here: CuPy arrays, or NumPy arrays in numba-cuda's simulator
(NUMBA_ENABLE_CUDASIM=1, set before numba is imported).
"""

try:
    import numba.cuda.core  # noqa: F401 - numba's own, older numba.cuda has none
except ImportError as error:
    raise ImportError(
        "corekern.simt needs numba-cuda: pip install 'corekern[cuda12]' or 'corekern[cuda13]'"
    ) from error

from corekern.simt.attention import attention, attention_state, finalize, merge, plan_attention, plan_launch
from corekern.simt.codec import decode, encode

__all__ = [
    "attention",
    "attention_state",
    "decode",
    "encode",
    "finalize",
    "merge",
    "plan_attention",
    "plan_launch",
]

"""The CUDA backend: our own kernels on CuPy arrays.

Arguments are checked before they come here. Importing this package imports no CuPy: the first launch does.
"""

from corekern.cuda.cache import gather_cache, write_cache
from corekern.cuda.codec import decode, encode

__all__ = ["decode", "encode", "gather_cache", "write_cache"]

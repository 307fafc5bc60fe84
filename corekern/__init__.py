"""Attention over FP8 (E4M3) paged KV caches, with FP32 state."""

from corekern.formats import FORMATS, Format, get_format, resolve_kv_dtype

__version__ = "0.1.0"
PRECISION_REVISION = 4

__all__ = ["FORMATS", "PRECISION_REVISION", "Format", "__version__", "get_format", "resolve_kv_dtype"]

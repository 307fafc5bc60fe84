"""The CUDA C++ sources of this package, each with its own includes written into it.

One text a translation unit means that whoever caches a compiled kernel by its source text (CuPy does, on
disk) sees a change in an included `.cuh`, and that no compiler needs an include path. The sources use no
CUDA header either: what C++ cannot spell is inline PTX, in `ptx.cuh`.
"""

from __future__ import annotations

import functools
import re
from importlib import resources

_INCLUDE = re.compile(r'^#include "([\w.]+)"$', re.MULTILINE)


@functools.cache
def expand(name: str, **instead: str) -> str:
    """The text of source `name` with each `#include "x"` replaced by x, the first time it is met.

    Args:
        name: a file of this package, such as "encode.cu".
        instead: for an include of NAME.cuh, the file to take in its place, as NAME="file".
    """
    seen: set[str] = set()

    def text(file: str) -> str:
        if file in seen:
            return ""
        seen.add(file)
        body = resources.files(__package__).joinpath(file).read_text(encoding="utf-8")
        return _INCLUDE.sub(lambda m: text(instead.get(m[1].removesuffix(".cuh"), m[1])), body)

    return text(name).replace("#pragma once\n", "")

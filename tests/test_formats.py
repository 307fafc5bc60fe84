"""Format facts and names, and the examples in the documentation."""

import doctest
import importlib

import ml_dtypes
import numpy as np
import pytest

import corekern
from corekern import FORMATS, get_format, resolve_kv_dtype

# From "FP8 Formats for Deep Learning", table 1, and IEEE 754.
FACTS = {
    "fp8_e4m3": (np.uint8, ml_dtypes.float8_e4m3fn, 448.0, 2.0**-9, False, 1),
    "fp8_e5m2": (np.uint8, ml_dtypes.float8_e5m2, 57344.0, 2.0**-16, True, 1),
    "float16": (np.float16, np.float16, 65504.0, 2.0**-24, True, 2),
    "bfloat16": (ml_dtypes.bfloat16, ml_dtypes.bfloat16, (2 - 2.0**-7) * 2.0**127, 2.0**-133, True, 2),
    "float32": (np.float32, np.float32, (2 - 2.0**-23) * 2.0**127, 2.0**-149, True, 4),
}


def test_every_format_has_its_facts_checked():
    assert set(FORMATS) == set(FACTS)


@pytest.mark.parametrize("name", FACTS)
def test_facts(name):
    f = FORMATS[name]
    assert f.name == name
    assert (f.storage, f.value, f.max, f.smallest, f.has_infinity, f.itemsize) == FACTS[name]
    assert f.is_fp8 == (name in ("fp8_e4m3", "fp8_e5m2"))


@pytest.mark.parametrize(
    ("given", "name"),
    [
        ("fp8", "fp8_e4m3"),
        ("e4m3", "fp8_e4m3"),
        ("float8_e4m3fn", "fp8_e4m3"),
        (ml_dtypes.float8_e4m3fn, "fp8_e4m3"),
        (np.dtype(ml_dtypes.float8_e4m3fn), "fp8_e4m3"),
        ("fp8_e5m2", "fp8_e5m2"),
        ("e5m2", "fp8_e5m2"),
        ("float8_e5m2", "fp8_e5m2"),
        (ml_dtypes.float8_e5m2, "fp8_e5m2"),
        ("half", "float16"),
        ("fp16", "float16"),
        (np.float16, "float16"),
        ("bf16", "bfloat16"),
        (ml_dtypes.bfloat16, "bfloat16"),
        ("fp32", "float32"),
        ("float", "float32"),
        (np.dtype("float32"), "float32"),
        (FORMATS["fp8_e5m2"], "fp8_e5m2"),
    ],
    ids=str,
)
def test_names_and_dtypes(given, name):
    assert get_format(given) is FORMATS[name]


@pytest.mark.parametrize(
    "given",
    ["fp4", "", "FP8", "int8", np.uint8, np.float64, ml_dtypes.float8_e4m3fnuz, None, 7, [1]],
    ids=str,
)
def test_unknown_formats_are_refused(given):
    with pytest.raises(ValueError, match=r"^kv: .* is no KV format; use one of fp8_e4m3, ") as error:
        get_format(given, argument="kv")
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("arch", [None, "sm_70", "sm_75", "sm_80", "sm_90", "sm_90a", "sm_120f"])
@pytest.mark.parametrize("backend_name", ["cpu", "cuda"])
@pytest.mark.parametrize(
    ("name", "checkpoint", "resolved"),
    [
        ("fp8", None, "fp8_e4m3"),  # on every backend and architecture, sm_70 included
        ("fp8", "fp8_e4m3", "fp8_e4m3"),
        ("fp8", "fp8_e5m2", "fp8_e5m2"),
        ("fp8", "bfloat16", "bfloat16"),
        ("fp8", "fp8", "fp8_e4m3"),
        ("fp8_e4m3", None, "fp8_e4m3"),
        ("fp8_e4m3", "fp8_e5m2", "fp8_e4m3"),
        ("fp8_e5m2", None, "fp8_e5m2"),
        ("fp8_e5m2", "fp8_e4m3", "fp8_e5m2"),
        ("auto", None, "auto"),
        ("auto", "fp8_e5m2", "fp8_e5m2"),
        ("auto", "fp8", "fp8_e4m3"),
        ("auto", "float16", "float16"),
        ("bf16", None, "bfloat16"),
        ("float16", "fp8_e4m3", "float16"),
    ],
)
def test_resolve_kv_dtype(name, checkpoint, backend_name, arch, resolved):
    assert resolve_kv_dtype(name, checkpoint, backend=backend_name, arch=arch) == resolved


@pytest.mark.parametrize(
    ("arguments", "argument"),
    [
        ({"name": "fp9"}, "name"),
        ({"name": "fp8", "checkpoint": "auto"}, "checkpoint"),
        ({"name": "fp8_e4m3", "checkpoint": "int4"}, "checkpoint"),
        ({"name": "fp8", "backend": "rocm"}, "backend"),
        ({"name": "fp8", "arch": "sm_61"}, "arch"),
        ({"name": "fp8", "arch": "gfx90a"}, "arch"),
        ({"name": "auto", "arch": ""}, "arch"),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(f"{v}" for v in value.values()),
)
def test_resolve_kv_dtype_errors(arguments, argument):
    with pytest.raises(ValueError, match=f"^{argument}: ") as error:
        resolve_kv_dtype(**arguments)
    assert "\n" not in str(error.value)


def test_public_names_exist_and_are_documented():
    for name in corekern.__all__:
        assert getattr(corekern, name) is not None
        if callable(getattr(corekern, name)):
            assert getattr(corekern, name).__doc__, name


@pytest.mark.parametrize(
    ("module", "at_least"),
    [
        ("formats", 2),
        ("codec", 3),
        ("cache", 1),
        ("attention", 2),
        ("logits", 5),
        ("evidence", 1),
        ("instruments.acceptance", 2),
        ("instruments.intervals", 5),
        ("instruments.report", 1),
        ("instruments.routes", 2),
        ("instruments.trace", 4),
    ],
)
def test_documentation_examples(module, at_least):
    results = doctest.testmod(importlib.import_module(f"corekern.{module}"))
    assert results.failed == 0
    assert results.attempted >= at_least  # an example that is not found proves nothing

"""What is installed here, which devices there are, and which routes attention would take on them."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
from dataclasses import asdict, dataclass

from corekern import PRECISION_REVISION, __version__, arrays, routing

# What each optional package is for, by distribution names of which one is enough.
OPTIONAL = {
    "cupy": (("cupy-cuda12x", "cupy-cuda13x", "cupy"), "CUDA arrays and kernels"),
    "numba-cuda": (("numba-cuda",), "the portable CUDA route"),
    "gguf": (("gguf",), "the demo's model file"),
    "tokenizers": (("tokenizers",), "the demo's tokenizer"),
    "matplotlib": (("matplotlib",), "plots"),
}
REQUIRED = ("numpy", "numba", "llvmlite", "ml_dtypes")


@dataclass(frozen=True)
class Device:
    kind: str
    """"cpu" or "cuda"."""
    name: str
    usable: bool
    note: str


def report() -> dict:
    """Everything `corekern doctor` prints, as plain data."""
    found = devices()
    return {
        "corekern": __version__,
        "precision_revision": PRECISION_REVISION,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": {name: _version(name) for name in REQUIRED}
        | {name: _version(*names) for name, (names, _) in OPTIONAL.items()},
        "environment": {
            name: os.environ[name]
            for name in ("COREKERN_NUM_THREADS", "COREKERN_VALIDATE", "COREKERN_FP32_LOGITS")
            if name in os.environ
        },
        "devices": [asdict(device) for device in found],
        "routes": {
            device.kind: {kind: routing.explain(problem) for kind, problem in _examples(device.kind).items()}
            for device in found
            if device.usable
        },
    }


def devices() -> list[Device]:
    """The CPU, and CUDA whether or not it can be used."""
    from corekern.cpu.threads import num_threads
    from corekern.cpu.tile import ROWS

    vectors = "AVX-512" if ROWS == 8 else "128- or 256-bit vectors"
    cpu = Device("cpu", cpu_name(), True, f"{num_threads()} threads, {vectors}")
    return [cpu, _cuda_device()]


def _cuda_device() -> Device:
    if importlib.util.find_spec("cupy") is None:
        how = "pip install 'corekern[cuda12]' or 'corekern[cuda13]'"
        return Device("cuda", "none", False, f"CuPy is not installed ({how})")
    try:
        import cupy

        count = cupy.cuda.runtime.getDeviceCount()
        properties = cupy.cuda.runtime.getDeviceProperties(0)
    except Exception as error:  # CuPy raises its own types, or ImportError when libraries are missing
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        return Device(
            "cuda", "none", False, f"CuPy is installed but finds no usable driver or device: {reason}"
        )
    architecture = f"sm_{properties['major']}{properties['minor']}"
    memory = properties["totalGlobalMem"] / 2**30
    return Device(
        "cuda", properties["name"].decode(), True, f"{architecture}, {memory:.0f} GiB, {count} device(s)"
    )


def _examples(device: str) -> dict[str, routing.AttentionProblem]:
    """The calls that a decoder makes most: what `routes` is shown for."""
    device = "cpu" if device == "cpu" else "cuda:0"
    return {
        f"{what}, {kv_dtype} KV": routing.AttentionProblem(
            device=device,
            rows=rows,
            requests=1,
            q_heads=6,
            kv_heads=1,
            head_dim=256,
            page_size=3296,
            q_dtype="float16",
            kv_dtype=kv_dtype,
            max_query_len=rows,
            compute_capability=arrays.compute_capability(device),
        )
        for what, rows in (("decode, 1 row", 1), ("verify, 8 rows", 8), ("prefill, 512 rows", 512))
        for kv_dtype in ("fp8_e4m3", "float16")
    }


def _version(*names: str) -> str | None:
    for name in names:
        try:
            return f"{importlib.metadata.version(name)}" + (f" ({name})" if len(names) > 1 else "")
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def cpu_name() -> str:
    try:
        with open("/proc/cpuinfo") as lines:
            return next(line.split(":", 1)[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def render(data: dict) -> str:
    """The report for a person."""
    lines = [
        f"corekern {data['corekern']} (precision revision {data['precision_revision']}), "
        f"Python {data['python']}, {data['platform']}",
        "",
        "packages",
    ]
    for name, version in data["packages"].items():
        purpose = OPTIONAL[name][1] if name in OPTIONAL else ""
        missing = f"not installed{': ' + purpose if purpose else ''}"
        lines.append(f"  {name:12} {version or missing}")
    lines += [f"  {name}={value}" for name, value in data["environment"].items()]
    lines += ["", "devices"]
    for device in data["devices"]:
        lines.append(f"  {device['kind']:5} {device['name']}: {device['note']}")
    for kind, examples in data["routes"].items():
        lines += ["", f"routes on {kind} (6 query heads, 1 KV head, head_dim 256, page 3296)"]
        for example, reasons in examples.items():
            taken = next((name for name, reason in reasons.items() if reason == "taken"), "none")
            lines.append(f"  {example:28} -> {taken}")
            lines += [f"  {'':28}    {n}: {why}" for n, why in reasons.items() if why != "taken"]
    return "\n".join(lines)

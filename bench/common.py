"""What every benchmark shares: samples and their summary, the environment, the results file."""

from __future__ import annotations

import datetime
import hashlib
import importlib.metadata
import itertools
import json
import platform
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from corekern import doctor
from corekern.cpu.threads import num_threads

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "bench" / "results"
PACKAGES = (
    "numpy",
    "numba",
    "llvmlite",
    "ml_dtypes",
    "torch",
    "triton",
    "cupy-cuda12x",
    "cupy-cuda13x",
    "numba-cuda",
)


def summary(samples_us: list[float]) -> dict:
    """Median, 10th and 90th percentile, and all samples, in microseconds."""
    return {
        "median_us": round(float(np.median(samples_us)), 3),
        "p10_us": round(float(np.percentile(samples_us, 10)), 3),
        "p90_us": round(float(np.percentile(samples_us, 90)), 3),
        "samples_us": [round(s, 3) for s in samples_us],
    }


def time_together(calls: dict[str, Callable[[], object]], repeats: int, warm_up: int = 2) -> dict[str, dict]:
    """Host times of calls that take turns, so that a slow phase of the machine hits all of them."""
    for call in calls.values():
        for _ in range(warm_up):
            call()
    samples: dict[str, list[float]] = {name: [] for name in calls}
    for repeat in range(repeats):
        show_progress(repeat, repeats)
        for name, call in calls.items():
            begin = time.perf_counter()
            call()
            samples[name].append((time.perf_counter() - begin) * 1e6)
    show_progress(repeats, repeats)
    return {name: summary(s) for name, s in samples.items()}


def show_progress(done: int, total: int) -> None:
    """A counter on a terminal's error stream; nothing when piped."""
    if sys.stderr.isatty():
        print(
            f"\r{done}/{total}" if done < total else "\r" + " " * 20 + "\r",
            end="",
            file=sys.stderr,
            flush=True,
        )


def environment(**more) -> dict:
    """The machine, the versions and the command, for a results file."""
    packages = {}
    for name in PACKAGES:
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "cpu": cpu_name(),
        "python": platform.python_version(),
        "packages": packages,
        "source_hash": source_hash(),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "command": _command(),
        **more,
    }


def _command() -> str:
    """How this was run, without the places on this machine that files were read from and written to."""
    places = ("--output", "--path", "--plot")
    kept = [
        argument
        for before, argument in itertools.pairwise(sys.argv)
        if before not in places and argument.split("=")[0] not in places
    ]
    return " ".join(["python -m", _module(), *kept])


def cpu_name() -> str:
    return f"{doctor.cpu_name()}, {num_threads()} threads"


def source_hash() -> str:
    """SHA-256 over the library's sources, names and contents."""
    digest = hashlib.sha256()
    for path in sorted((ROOT / "corekern").rglob("*")):
        if path.suffix in (".py", ".cu", ".cuh", ".json"):
            digest.update(path.relative_to(ROOT).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def write_results(name: str, cases: list[dict], output: str | None = None, **env) -> Path:
    """Writes {"env", "cases"} to `output`, or to bench/results/<name>.json."""
    path = Path(output) if output else RESULTS / f"{name}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({"env": environment(**env), "cases": cases}, indent=1) + "\n")
    return path


def card_name(xp: Any) -> str:
    """ "cpu" for NumPy, the current GPU's name for CuPy."""
    if xp is np:
        return "cpu"
    return xp.cuda.runtime.getDeviceProperties(xp.cuda.runtime.getDevice())["name"].decode()


def results_name(bench: str, card: str) -> str:
    """
    >>> results_name("codec", "NVIDIA H200"), results_name("codec", "cpu")
    ('codec-h200', 'codec-cpu')
    """
    return f"{bench}-{card.split()[-1].lower()}"


def relative_l2(value: np.ndarray, reference: np.ndarray) -> float:
    reference = np.asarray(reference, np.float64)
    return float(np.linalg.norm(np.asarray(value, np.float64) - reference) / np.linalg.norm(reference))


def _commit() -> str | None:
    found = subprocess.run(["git", "rev-parse", "--short", "HEAD"], cwd=ROOT, capture_output=True, text=True)
    return found.stdout.strip() or None


def _module() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return spec.name if spec else Path(sys.argv[0]).name

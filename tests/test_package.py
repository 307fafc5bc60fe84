"""The package as a user meets it: what importing it costs, and that the README's commands are those CI runs."""

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from corekern import arrays, doctor

ROOT = Path(__file__).resolve().parent.parent


def run_python(code: str) -> str:
    return subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout


def test_importing_the_package_imports_no_compiler_and_no_framework():
    loaded = run_python("import corekern, sys; print(*sys.modules)").split()
    for heavy in ("numba", "cupy", "torch", "jax", "llvmlite", "matplotlib"):
        assert heavy not in loaded


def test_every_public_name_exists():
    import corekern

    assert sorted(corekern.__all__) == sorted(set(corekern.__all__))
    for name in corekern.__all__:
        assert getattr(corekern, name) is not None


def readme_commands() -> list[str]:
    blocks = re.findall(r"```sh\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)
    return [line for block in blocks for line in block.splitlines()]


def test_ci_runs_the_readmes_test_command():
    # The script makes its environment another way, in a folder that it removes, so that part differs.
    (command,) = [line for line in readme_commands() if "pytest" in line and "venv" in line]
    _, install_and_test = command.split(". .venv/bin/activate && ")
    assert install_and_test in (ROOT / ".ci" / "run").read_text().splitlines()


def python_snippets() -> list[str]:
    return re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)


def test_the_readmes_cpu_example_runs():
    (example,) = [code for code in python_snippets() if "cupy" not in code and "qsa" not in code]
    found: dict = {}
    exec(example, found)
    assert found["out"].shape == (4, 9, 64)
    assert found["lengths"].tolist() == [61, 62, 63, 64]


def test_the_readmes_sparse_example_runs():
    (example,) = [code for code in python_snippets() if "qsa" in code]
    found: dict = {}
    exec(example, found)
    assert found["out"].shape == (300, 24, 128)
    assert np.isfinite(found["out"].astype(np.float32)).all()
    assert found["packed"][:, -1].tolist() == [min(n, 64 + n % 4) for n in range(1, 301)]


@pytest.mark.gpu
def test_the_readmes_cupy_example_runs(capsys):
    (example,) = [code for code in python_snippets() if "cupy" in code]
    exec(example, {})
    assert capsys.readouterr().out.split() == ["(2,", "8,", "128)", "grouped_fp32"]


@pytest.mark.parametrize("arguments", [["--version"], ["doctor"], ["doctor", "--json"]], ids=" ".join)
def test_commands_run(arguments):
    done = subprocess.run([sys.executable, "-m", "corekern.cli", *arguments], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "corekern" in done.stdout


def test_without_a_command_there_is_help_and_exit_status_2():
    done = subprocess.run([sys.executable, "-m", "corekern.cli"], capture_output=True, text=True)
    assert done.returncode == 2
    assert "doctor" in done.stdout


def test_the_readmes_tables_are_those_of_the_results_files():
    done = subprocess.run([sys.executable, "-m", "bench.tables", "--check"], cwd=ROOT)
    assert done.returncode == 0, "run python -m bench.tables"


def test_doctor_asks_what_the_first_gpu_can(monkeypatch):
    monkeypatch.setattr(arrays, "_capability", {0: 75}.__getitem__)
    problems = doctor._examples("cuda").values()
    assert {(p.device, p.compute_capability) for p in problems} == {("cuda:0", 75)}

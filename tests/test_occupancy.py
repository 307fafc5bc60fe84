"""The table of what kernels occupy: its arithmetic, and the command that prints it."""

import json

import pytest

from corekern import cli
from corekern.cuda import nvrtc, occupancy

try:
    nvrtc.version()
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)


@pytest.mark.parametrize(
    ("arch", "threads", "registers", "shared_bytes", "warps"),
    [
        ("sm_90", 256, 32, 0, 64),  # the limit of warps
        ("sm_90", 256, 33, 0, 48),  # 40 registers a thread are given: 51 warps, six blocks of eight
        ("sm_90", 512, 128, 232448, 16),  # one block has all shared memory
        ("sm_90a", 512, 128, 232448, 16),
        ("sm_80", 128, 32, 40 << 10, 16),  # 164 KiB / 41: four blocks
        ("sm_70", 128, 32, 40 << 10, 8),  # 96 KiB / 40: two
        ("sm_86", 32, 32, 0, 16),  # the limit of blocks
        ("sm_75", 1024, 65, 0, 0),  # does not fit at all
    ],
)
def test_resident_warps(arch, threads, registers, shared_bytes, warps):
    assert occupancy.resident_warps(arch, threads, registers, shared_bytes) == warps


def test_the_command_lists_kernels(capsys):
    arguments = ["doctor", "--kernels", "--arch", "sm_70", "--source", "cache_gather.cu"]
    assert cli.main([*arguments, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert {kernel["entry"] for kernel in found} == {"cache_gather_vector", "cache_gather_any"}
    assert all(k["architecture"] == "sm_70" and k["registers"] > 0 and 0 < k["occupancy"] <= 1 for k in found)


def test_grouped_kernels_fit_an_sm():
    found = list(occupancy.kernels(["sm_90"], ["grouped_sm90.cu"]))
    assert found
    assert all(k.architecture == "sm_90a" and k.warps >= 12 for k in found)


@pytest.mark.parametrize("option", ["--arch", "--source"])
def test_unknown_names(option, capsys):
    assert cli.main(["doctor", "--kernels", option, "sm_42"]) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"corekern doctor: {option}: sm_42 is not one of ")
    assert error.count("\n") == 1

"""Every kernel compiles for every architecture, without a GPU, and the hot ones spill nothing.

NVRTC is called once for each specialisation and architecture, by as many processes as there are cores
(inside one process NVRTC compiles one program at a time).
"""

import multiprocessing
import os
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from types import SimpleNamespace

import pytest

from corekern.cuda import loader, nvrtc, sources
from corekern.cuda.kernels import KERNELS

try:
    nvrtc.version()
except ImportError as error:
    pytest.skip(str(error), allow_module_level=True)

CASES = [
    pytest.param(family.source, arch, specialisation, id=f"{family.source[:-3]}-{arch}-{'-'.join(specialisation.values())}")
    for family in KERNELS.values()
    for arch in family.architectures
    for specialisation in family.specialisations(arch)
]  # fmt: skip


def compile_resources(source: str, arch: str, specialisation: dict[str, str]) -> dict | str:
    """Each kernel's resources, or the compiler's complaint; runs in a process of its own."""
    try:
        return nvrtc.compile_cubin(source, arch, KERNELS[source].defines(specialisation, arch)).resources
    except nvrtc.CompileError as error:
        return str(error)


def check_no_spills(resources: dict[str, nvrtc.Resources], entries: tuple[str, ...]) -> None:
    for entry in entries:
        assert resources[entry].spill_bytes == 0, f"{entry} spills: {resources[entry]}"
        assert resources[entry].stack_bytes == 0, f"{entry} keeps arrays in local memory: {resources[entry]}"
        assert not resources[entry].losses


@pytest.fixture(scope="module")
def compiled(request):
    """Results to come of the selected tests, by their case."""
    wanted = {
        _key(*(item.callspec.params[name] for name in ("source", "arch", "specialisation")))
        for item in request.session.items
        if item.module is request.module and "specialisation" in getattr(item, "fixturenames", ())
    }
    # Spawned, not forked: the parent may hold threads of other libraries.
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(os.cpu_count(), context) as pool:
        yield {key: pool.submit(compile_resources, key[0], key[1], dict(key[2])) for key in sorted(wanted)}


def _key(source, arch, specialisation):
    return source, arch, tuple(specialisation.items())


@pytest.mark.parametrize(("source", "arch", "specialisation"), CASES)
def test_compiles_without_spills(compiled, source, arch, specialisation):
    if reason := nvrtc.refuse(arch):
        pytest.skip(reason)
    resources = compiled[_key(source, arch, specialisation)].result()
    assert not isinstance(resources, str), resources
    family = KERNELS[source]
    assert set(resources) == set(family.entries)
    check_no_spills(resources, family.hot)
    for used in resources.values():
        assert used.registers <= family.registers
        assert used.shared_bytes <= 48 << 10  # what a block has without asking


# The checks above can fail

SPILLING = """
extern "C" __global__ void __launch_bounds__(1024, 2) hungry(float* x) {
    float kept[96];
    for (int i = 0; i < 96; ++i) kept[i] = x[i * 1024 + threadIdx.x];
    __syncthreads();
    for (int i = 0; i < 96; ++i) x[i * 1024 + threadIdx.x] = kept[i] * kept[95 - i];
}
"""


def test_a_kernel_that_spills_is_caught():
    resources = nvrtc.compile_text(SPILLING, "hungry.cu", "sm_90", {}).resources
    assert resources["hungry"].spill_bytes > 0
    with pytest.raises(AssertionError, match="hungry spills"):
        check_no_spills(resources, ("hungry",))


def test_a_kernel_that_does_not_compile_is_caught():
    with pytest.raises(nvrtc.CompileError, match=r"broken\.cu for sm_80 .*\n(.*\n)*.*undefined"):
        nvrtc.compile_text('extern "C" __global__ void f() { missing(); }', "broken.cu", "sm_80", {})


def test_a_log_without_figures_is_refused():
    log = "ptxas info    : Compiling entry function 'f' for 'sm_90'\nptxas info    : Used 10 registers\n"
    with pytest.raises(ValueError, match="lacks a kernel's figures"):
        nvrtc.read_log(log)


def test_shared_memory_is_read():
    text = """extern "C" __global__ void f(int* x) {
        __shared__ int tile[100];
        tile[threadIdx.x] = x[threadIdx.x];
        __syncthreads();
        x[threadIdx.x] = tile[99 - threadIdx.x];
    }"""
    assert nvrtc.compile_text(text, "f.cu", "sm_90", {}).resources["f"].shared_bytes == 400


# Sources


@pytest.mark.parametrize("source", KERNELS)
def test_sources_need_no_header(source):
    assert "#include" not in sources.expand(source)


def test_a_changed_header_changes_the_text_that_is_compiled():
    assert sources.expand("encode.cu") != sources.expand("encode.cu", ptx="ptx_emulated.cuh")


def test_flags_that_change_bits_are_refused(monkeypatch):
    family = KERNELS["decode.cu"]
    defines = family.defines(next(family.specialisations("sm_70")), "sm_70")
    for flag in ("-ftz=true", "-prec-div=false", "--use_fast_math"):
        monkeypatch.setattr(nvrtc, "OPTIONS", ("--std=c++17", flag))
        with pytest.raises(nvrtc.CompileError, match="compile without"):
            nvrtc.compile_cubin("decode.cu", "sm_70", defines)


# Loading


class FakeCuPy:
    """As much of CuPy as the loader uses, over NVRTC as the tests call it."""

    def __init__(self):
        self.compiled = []
        self.current = 0
        self.cuda = SimpleNamespace(
            Device=lambda: SimpleNamespace(compute_capability="90"),
            runtime=SimpleNamespace(getDevice=lambda: self.current),
            nvrtc=SimpleNamespace(
                getVersion=nvrtc.version,
                createProgram=lambda text, name, headers, names: [text, name, None],
                compileProgram=self._compile,
                getCUBIN=lambda program: program[2],
                destroyProgram=list.clear,
                NVRTCError=nvrtc.CompileError,
            ),
        )

    def _compile(self, program, options):
        text, name, _ = program
        self.compiled.append(name)
        assert options[: len(nvrtc.OPTIONS)] == nvrtc.OPTIONS
        assert options[-1] == "-arch=sm_90"
        defines = dict(option.removeprefix("-D").split("=") for option in options[len(nvrtc.OPTIONS) : -1])
        program[2] = nvrtc.compile_text(text, name, "sm_90", defines).cubin

    def RawModule(self, path):
        content = Path(path).read_bytes()
        assert content.startswith(b"\x7fELF")
        return SimpleNamespace(get_function=lambda entry: (entry, entry.encode() in content, path))


def test_a_kernel_is_compiled_once_and_kept_on_disk(monkeypatch, tmp_path):
    fake = FakeCuPy()
    monkeypatch.setitem(sys.modules, "cupy", fake)
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "kept"))
    for name in ("_modules", "_kernels"):
        monkeypatch.setattr(loader, name, {})
    loader._cache_folder.cache_clear()

    def load(entry="decode_any", value="float16"):
        return loader.kernel("decode.cu", entry, VALUE=value, FORMAT="fp8_e4m3")

    first = load()
    assert first[:2] == ("decode_any", True)
    assert load() is first
    assert load("decode_rows")[1:] == (True, first[2])
    assert fake.compiled == ["decode.cu"]
    assert load(value="float32")[2] != first[2]
    assert len(fake.compiled) == 2
    # Another device of the same kind, then another process: from disk.
    fake.current = 1
    assert load() == first
    loader._kernels.clear(), loader._modules.clear()
    assert load() == first
    assert len(fake.compiled) == 2
    # A changed header is another program.
    expand = sources.expand
    monkeypatch.setattr(sources, "expand", lambda name: expand(name) + "\n// changed\n")
    loader._kernels.clear(), loader._modules.clear()
    assert load()[2] != first[2]
    assert len(fake.compiled) == 3
    loader._cache_folder.cache_clear()


def test_a_folder_that_cannot_be_written_is_done_without(monkeypatch, tmp_path):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUPY_CACHE_DIR", str(tmp_path / "file"))
    loader._cache_folder.cache_clear()
    assert loader._cache_folder().is_dir()
    loader._cache_folder.cache_clear()


# Importing


def test_importing_the_backend_imports_no_cupy():
    code = "import sys, corekern.cuda; sys.exit('cupy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code]).returncode == 0


def test_a_missing_cupy_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "cupy", None)
    with pytest.raises(ImportError, match=r"pip install 'corekern\[cuda12\]'.*corekern\[cuda13\]") as error:
        loader.cupy()
    assert "\n" not in str(error.value)

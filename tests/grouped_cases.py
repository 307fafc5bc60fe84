"""Problems for grouped attention, and what the portable schedule compiles for them.

    python tests/grouped_cases.py FOLDER

writes that, for architectures that are not at hand, as PTX, which the driver of a newer GPU compiles for itself. So
test_grouped_mma_gpu.py, given COREKERN_TEST_PTX=FOLDER, runs the code of sm_70, sm_75 and sm_80 there.
"""

import hashlib
import os
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

from corekern.cuda import grouped, nvrtc, sources
from corekern.cuda.kernels import KERNELS
from corekern.routing import AttentionProblem

VERIFY = {"rows": (8,), "q_heads": 6, "head_dim": 256}
CASES = {
    "q8-page-16": VERIFY | {"seq_lens": (500,), "page_size": 16},
    "q8-page-784": VERIFY | {"seq_lens": (20000,), "page_size": 784},
    "decode": {"rows": (1,), "seq_lens": (3000,), "q_heads": 6, "head_dim": 256, "page_size": 3296},
    "bfloat16": VERIFY | {"seq_lens": (4000,), "page_size": 784, "q_dtype": "bfloat16"},
    "e5m2": VERIFY | {"seq_lens": (4000,), "page_size": 784, "kv_dtype": "fp8_e5m2"},
    "kv-float16": VERIFY | {"seq_lens": (4000,), "page_size": 784, "kv_dtype": "float16"},
    "kv-float16-q-bfloat16": VERIFY | {"seq_lens": (900,), "page_size": 64, "kv_dtype": "float16", "q_dtype": "bfloat16"},
    "kv-bfloat16": VERIFY | {"seq_lens": (4000,), "page_size": 784, "kv_dtype": "bfloat16"},
    "kv-bfloat16-q-bfloat16": VERIFY
    | {"seq_lens": (900,), "page_size": 64, "kv_dtype": "bfloat16", "q_dtype": "bfloat16"},
    "two-kv-heads": {"rows": (4,), "seq_lens": (5000,), "q_heads": 24, "kv_heads": 2, "head_dim": 256, "page_size": 784},
    "d128": {"rows": (8,), "seq_lens": (9000,), "q_heads": 8, "kv_heads": 2, "head_dim": 128, "page_size": 64},
    "d128-kv-float16": {"rows": (3,), "seq_lens": (900,), "q_heads": 8, "head_dim": 128, "page_size": 24, "kv_dtype": "float16"},
    "d64-page-24": {"rows": (4,), "seq_lens": (9000,), "q_heads": 4, "head_dim": 64, "page_size": 24},
    "batch": {"rows": (3, 0, 8, 1), "seq_lens": (700, 50, 9000, 64), "q_heads": 6, "head_dim": 256, "page_size": 784,
              "extra_rows": 2},
}  # fmt: skip
# Only with what the GPU's own architecture compiles.
MORE = {
    "one-token": {"seq_lens": (1,), "q_heads": 6, "head_dim": 256, "page_size": 3296},
    "q8-page-1": VERIFY | {"seq_lens": (300,), "page_size": 1},
    "q16": {"rows": (16,), "seq_lens": (3000,), "q_heads": 6, "head_dim": 256, "page_size": 800},
    "q4-group-6": {"rows": (4,), "seq_lens": (900,), "q_heads": 6, "head_dim": 256, "page_size": 48},
    "group-16": {"rows": (2,), "seq_lens": (700,), "q_heads": 16, "head_dim": 256, "page_size": 64},
    "group-16-bfloat16": {"rows": (16,), "seq_lens": (700,), "q_heads": 16, "head_dim": 128, "page_size": 64, "kv_dtype": "bfloat16"},
    "d64-kv-bfloat16": {"rows": (5,), "seq_lens": (700,), "q_heads": 3, "head_dim": 64, "page_size": 17, "kv_dtype": "bfloat16"},
    "batch-2-heads": {"rows": (4, 4, 4), "seq_lens": (8192, 300, 8191), "q_heads": 24, "kv_heads": 2, "head_dim": 256,
                      "page_size": 784},
    "many-requests": {"rows": (2,) * 40, "seq_lens": tuple(range(100, 4100, 100)), "q_heads": 8, "kv_heads": 2, "head_dim": 128,
                      "page_size": 16, "kv_dtype": "float16"},
}  # fmt: skip
FOREIGN = ("sm_70", "sm_75", "sm_80")


def as_problem(case: dict, arch: str) -> AttentionProblem:
    """As `corekern.paged_attention` sees `helpers.make_problem(0, **case)`."""
    rows = case.get("rows", (1,))
    kv_dtype, q_dtype = case.get("kv_dtype", "fp8_e4m3"), case.get("q_dtype", "float16")
    return AttentionProblem(
        "cuda:0", sum(rows), len(rows), case["q_heads"], case.get("kv_heads", 1), case["head_dim"], case["page_size"],
        q_dtype, kv_dtype, max(rows), int(arch.removeprefix("sm_")),
    )  # fmt: skip


def ptx_path(folder: str, source: str, arch: str, choices: dict[str, str]) -> Path:
    key = repr((sources.expand(source), sorted(KERNELS[source].defines(choices, arch).items())))
    return Path(folder) / f"{arch}-{hashlib.sha256(key.encode()).hexdigest()[:16]}.ptx"


def write(path: Path, source: str, arch: str, choices: dict[str, str]) -> None:
    if not path.exists():
        defines = KERNELS[source].defines(choices, arch)
        path.write_bytes(nvrtc.compile_ptx(source, arch, defines))


def main(folder: str) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    wanted = {}
    for arch in FOREIGN:
        for case in CASES.values():
            problem = as_problem(case, arch)
            if grouped.refuse(problem) is None:
                chosen = grouped.schedule(problem, arch, maps=False, legacy=False)
                path = ptx_path(folder, chosen.source, arch, chosen.choices)
                wanted[path] = (chosen.source, arch, chosen.choices)
    with ProcessPoolExecutor(os.cpu_count()) as pool:
        for made in [pool.submit(write, path, *what) for path, what in wanted.items()]:
            made.result()
    for path in set(Path(folder).glob("*.ptx")) - set(wanted):
        path.unlink()
    print(f"{len(wanted)} in {folder}")


if __name__ == "__main__":
    main(sys.argv[1])

"""How fast FP8 encode and decode are: ours, ml_dtypes, a NumPy table, torch where it is installed.

python -m bench.codec [--size 67108864] [--repeats 15] [--output FILE]
"""

from __future__ import annotations

import argparse

import numpy as np

import corekern
from bench.common import time_together, write_results


def cpu_cases(size: int, repeats: int) -> list[dict]:
    """float32 <-> E4M3 and E5M2 on `size` elements, all sides taking turns."""
    x = np.random.default_rng(0).standard_normal(size, np.float32)
    return [case for dtype in ("fp8_e4m3", "fp8_e5m2") for case in _cases(x, dtype, repeats)]


def _cases(x: np.ndarray, dtype: str, repeats: int) -> list[dict]:
    value_dtype = corekern.get_format(dtype).value
    values = np.empty_like(x)
    codes = corekern.encode(x, dtype)
    assert np.array_equal(codes, x.astype(value_dtype).view(np.uint8))
    table = np.arange(256, dtype=np.uint8).view(value_dtype).astype(np.float32)
    torch_encode, torch_decode = _torch_calls(x, codes, values, dtype)
    encoders = {
        "ours": lambda: corekern.encode(x, dtype, out=codes),
        "ml_dtypes": lambda: x.astype(value_dtype),
        **torch_encode,
    }
    decoders = {
        "ours": lambda: corekern.decode(codes, dtype, out=values),
        "ml_dtypes": lambda: np.copyto(values, codes.view(value_dtype)),
        "numpy_table": lambda: np.take(table, codes, out=values, mode="clip"),
        **torch_decode,
    }
    cases = []
    for what, calls in (("encode", encoders), ("decode", decoders)):
        times = time_together(calls, repeats)
        ours = times.pop("ours")
        cases.append(
            {
                "name": f"codec/{what}/{dtype}/float32",
                "elements": x.size,
                "ours": ours,
                "peers": times,
                "ours_gelements_per_s": round(x.size / ours["median_us"] / 1e3, 3),
            }
        )
    return cases


def _torch_calls(x, codes, values, dtype) -> tuple[dict, dict]:
    try:
        import torch
    except ImportError:
        return {}, {}
    fp8 = torch.float8_e4m3fn if dtype == "fp8_e4m3" else torch.float8_e5m2
    tx, tc, tv = torch.from_numpy(x), torch.from_numpy(codes).view(fp8), torch.from_numpy(values)
    return {"torch": lambda: tx.to(fp8)}, {"torch": lambda: tv.copy_(tc)}


def report(cases: list[dict]) -> None:
    for case in cases:
        print(f"{case['name']:32} ours {case['ours_gelements_per_s']:6.2f} G elements/s", end="")
        for peer, time in case["peers"].items():
            print(f"   {time['median_us'] / case['ours']['median_us']:5.1f}x {peer}", end="")
        print()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--size", type=int, default=1 << 26, help="elements, on the CPU (default 2^26)")
    parser.add_argument("--repeats", type=int, default=15, help="on the CPU")
    parser.add_argument("--quick", action="store_true", help="5 samples a case instead of 30, on a GPU")
    parser.add_argument("--output", help="results file (default bench/results/codec-<card>.json)")
    options = parser.parse_args()
    if options.device == "cuda":
        from bench import codec_cuda

        codec_cuda.measure(options.quick, options.output)
        return
    cases = cpu_cases(options.size, options.repeats)
    report(cases)
    print("wrote", write_results("codec-cpu", cases, options.output, card="cpu"))


if __name__ == "__main__":
    main()

"""Time of a step on rows in a GPU's memory, beside what the GPU copies in that time, and PyTorch.

A step is unique ids, find, gather, segment sum of the gradients and row-wise Adagrad, on a million
ids drawn Zipf(1.05); all rows are on the device. `make gpu-bench` builds the program that times it
(ops/cuda/step_bench.cu) and runs this. Figures are medians of events over batches used in turn:

  gather         its time, and its bytes (each id's row read and written) per second over those of
                 a copy of as many bytes in the same run
  step           the same of the whole step: gather, gradients read, sums written and read, rows
                 read and written
  pool           the rows of each ten ids summed to one, in the place of gather: its bytes are each
                 id's row read, and each bag's sum written
  pooled_sum     the segment sum of gradients of those
  index_select   PyTorch: torch.unique, index_select, index_add_ of the gradients by key, row-wise
                 Adagrad on the rows by index_add_
  embedding_bag  PyTorch: embedding_bag(sparse=True) forward and backward, and SGD with the sparse
                 gradient

Where torch is not installed its columns are missing; a case that the GPU has no memory for says so.
Beside what there is a target for stands whether it is met: gather at 70 % of a copy, the step at
50 %, PyTorch's ways at twice the step's time. The last line counts them. Where one is missed, or no
case ran, this exits with 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile

import numpy as np
from zipf import zipf_ids

_EXPONENT = 1.05

# Targets: of a copy's bytes per second, and of PyTorch's time.
_SHARES = {"gather": 0.7, "step": 0.5}
_TIMES_FASTER = 2.0


def torch_times(path: str, n: int, rows: int, dim: int) -> dict[str, float]:
    """Medians in milliseconds of PyTorch's ways to make the step."""
    import torch
    from torch.nn import functional

    ids = torch.from_numpy(np.fromfile(path, np.int64).reshape(-1, n)).cuda()
    weight = torch.zeros(rows, dim, device="cuda")
    accumulator = torch.full((rows,), 0.1, device="cuda")
    gradient = torch.full((n, dim), 0.0115, device="cuda")
    offsets = torch.arange(n, device="cuda")

    def index_select(batch: torch.Tensor) -> None:
        keys, key_of = torch.unique(batch, return_inverse=True)
        weight.index_select(0, batch)
        sums = torch.zeros(len(keys), dim, device="cuda").index_add_(0, key_of, gradient)
        accumulator.index_add_(0, keys, (sums * sums).mean(1))
        rate = 0.01 / (accumulator.index_select(0, keys) + 1e-7).sqrt()
        weight.index_add_(0, keys, sums * rate[:, None], alpha=-1)

    def embedding_bag(batch: torch.Tensor) -> None:
        trained = weight.detach().requires_grad_()
        out = functional.embedding_bag(batch, trained, offsets, mode="sum", sparse=True)
        out.backward(gradient)
        weight.add_(trained.grad, alpha=-0.01)

    def median(step) -> float:
        times = []
        for repeat in range(7 * len(ids)):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            step(ids[repeat % len(ids)])
            end.record()
            torch.cuda.synchronize()
            times.append(begin.elapsed_time(end))
        return float(np.median(times[len(ids) :]))

    return {step.__name__: median(step) for step in (index_select, embedding_bag)}


def has_torch() -> bool:
    check = "import torch, sys; sys.exit(not torch.cuda.is_available())"
    return subprocess.run([sys.executable, "-c", check], capture_output=True).returncode == 0


def run_json(command: list[str]) -> dict:
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        return {"error": (done.stderr.strip().splitlines() or ["failed"])[-1]}
    return json.loads(done.stdout)


def step_bytes(n: int, keys: int, dim: int) -> int:
    """What a step reads and writes, ids and indices left out."""
    of_ids = 3 * n * dim  # gather reads and writes, segment sum reads
    of_keys = 2 * keys * dim + 4 * keys * (dim + 1)  # sums, then rows and records
    return 4 * (of_ids + of_keys)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("program", help="the step_bench that was built")
    parser.add_argument("--ids", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, nargs="+", default=[10_000_000, 100_000_000])
    parser.add_argument("--dims", type=int, nargs="+", default=[16, 64, 128, 256])
    parser.add_argument("--batches", type=int, default=8, help="different ones, used in turn")
    parser.add_argument("--torch", nargs=4, metavar=("FILE", "N", "ROWS", "DIM"))
    args = parser.parse_args()
    if args.torch:
        print(json.dumps(torch_times(args.torch[0], *map(int, args.torch[1:]))))
        return
    sys.stdout.reconfigure(line_buffering=True)  # killed in a later case, it has said the others
    with_torch = has_torch()
    if not with_torch:
        print("no torch that sees a GPU here: its columns are missing")
    print(f"{args.ids:,} ids, Zipf({_EXPONENT})")
    met = []
    for rows in args.rows:
        with tempfile.NamedTemporaryFile() as file:
            rng = np.random.default_rng(1)
            zipf_ids(rng, rows, _EXPONENT, (args.batches, args.ids)).tofile(file.name)
            for dim in args.dims:
                case = [file.name, str(args.ids), str(rows), str(dim)]
                times = run_json([args.program, *case])
                if with_torch:
                    torch_case = [sys.executable, __file__, args.program, "--torch", *case]
                    times["torch"] = run_json(torch_case)
                met += report(args.ids, rows, dim, times)
    print(f"\n{sum(met)} of {len(met)} targets met")
    sys.exit(0 if met and all(met) else 1)


def judged(value: float, target: float, met: list[bool]) -> str:
    """Whether a figure reaches its target, which `met` takes in."""
    met.append(value >= target)
    return "met" if met[-1] else "missed"


def report(n: int, rows: int, dim: int, times: dict) -> list[bool]:
    """Prints a case's figures; returns which of its targets are met."""
    met: list[bool] = []
    print(f"\n{rows:,} rows, dim {dim}")
    if "error" in times:
        print(f"  {times['error']}")
        return met
    copied = times["copied_gb_s"] * 1e6  # bytes in a millisecond
    moved = {
        "gather": 8 * n * dim,
        "step": step_bytes(n, times["keys"], dim),
        "pool": 4 * (n + times["bags"]) * dim,
    }
    print(f"  {times['keys']:,} keys a batch; a copy moves {times['copied_gb_s']:,.0f} GB/s")
    of_a_step = ("unique", "find", "gather", "segment_sum", "update", "unpin", "step")
    for verb in (*of_a_step, "pool", "pooled_sum"):
        line = f"  {verb:14} {times[verb]:8.3f} ms"
        if verb in moved:
            share = moved[verb] / times[verb] / copied
            line += f" {share:6.0%} of a copy"
        if verb in _SHARES:
            line += f", {_SHARES[verb]:.0%}: {judged(share, _SHARES[verb], met)}"
        print(line)
    for way, ms in times.get("torch", {}).items():
        if way == "error":
            print(f"  {way:14} {ms}")
            continue
        ratio = ms / times["step"]
        print(
            f"  {way:14} {ms:8.3f} ms {ratio:6.1f} times the step,"
            f" {_TIMES_FASTER:g}: {judged(ratio, _TIMES_FASTER, met)}"
        )
    return met


if __name__ == "__main__":
    main()

"""Time of one training step on one table in one process, beside FBGEMM's and TensorFlow's own.

A step is lookup, backward pass and row-wise Adagrad update of 13,312 ids drawn Zipf(1.05) from
1,000,000, dim 64, and with --sweep of other widths, batches and key counts.

  table       Het>TableLookup and Het>TableApply: what a layer does without a strategy
  cache       a worker's cache over a shard in this process: all rows cached, staleness 100
  FBGEMM      its CPU TBE, row-wise Adagrad in its backward pass
  TensorFlow  tf.gather, and the sparse Adagrad op on the same ids with duplicates summed

A round runs every program once, each in a process of its own, one after the other, so that a
noisy machine hits them alike; figures are medians over the rounds, ratios medians of each round's
own. glibc's mmap and trim thresholds are raised for all: else page faults decide.

"one call" is a tf.function called once a step, "in a loop" the same step within tf.while_loop
(FBGEMM: Python calls it either way). FBGEMM gets an environment of its own in build/peers, by pip;
where that cannot be, the others run without it.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import subprocess
import sys
import tempfile

import numpy as np
from absl import app, flags
from zipf import zipf_ids

_IDS = flags.DEFINE_integer("ids", 13_312, "ids in a batch")
_ROWS = flags.DEFINE_integer("rows", 1_000_000, "keys that ids are drawn from")
_DIM = flags.DEFINE_integer("dim", 64, "columns of a row")
_EXPONENT = flags.DEFINE_float("exponent", 1.05, "of the Zipf distribution")
_SWEEP = flags.DEFINE_bool("sweep", False, "also other widths, batches, exponents and key counts")
_THREADS = flags.DEFINE_list("threads", ["1", "2"], "threads of a program")
_PROGRAMS = flags.DEFINE_list("programs", ["FBGEMM", "table", "cache", "TensorFlow"], "to run")
_ROUNDS = flags.DEFINE_integer("rounds", 7, "processes of each program", lower_bound=1)
_STEPS = flags.DEFINE_integer("steps", 100, "timed steps of a process")
_JSON = flags.DEFINE_string("json", None, "where to write the figures")

_HERE = pathlib.Path(__file__).resolve().parent
_PEER = _HERE.parent / "build/peers/fbgemm-1.8.0"
_PEER_PACKAGES = ["torch==2.13.0", "fbgemm-gpu-cpu==1.8.0", "numpy"]
_BATCHES = 20  # different ones, used in turn
_GLIBC = "glibc.malloc.mmap_threshold=1073741824:glibc.malloc.trim_threshold=4294967296"
_PARTS = {"forward": "forward", "step": "one call", "loop": "in a loop"}


@dataclasses.dataclass(frozen=True)
class Case:
    """What a step is of."""

    ids: int
    rows: int
    dim: int
    exponent: float

    def __str__(self) -> str:
        return f"{self.ids:,} ids, Zipf({self.exponent:g}) of {self.rows:,}, dim {self.dim}"


def cases() -> list[Case]:
    """The workload of the flags, and what --sweep varies of it, one thing at a time."""
    main_case = Case(_IDS.value, _ROWS.value, _DIM.value, _EXPONENT.value)
    varied = [
        *({"dim": dim} for dim in (16, 32, 128, 256)),
        *({"ids": ids} for ids in (1_024, 4_096, 102_400)),
        {"exponent": 0.0},
        {"ids": 102_400, "exponent": 0.0},
        {"rows": 20_000_000},
    ]
    sweep = [dataclasses.replace(main_case, **change) for change in varied if _SWEEP.value]
    return [main_case, *sweep]


def fbgemm_python() -> str | None:
    """The Python of FBGEMM's environment, made now if it is not there; None: it cannot be made."""
    python = _PEER / "bin/python"
    made = _PEER / "made"
    if not made.exists():
        commands = [
            [sys.executable, "-m", "venv", str(_PEER)],
            [str(python), "-m", "pip", "install", "-q", *_PEER_PACKAGES],
        ]
        for command in commands:
            done = subprocess.run(command, capture_output=True, text=True)
            if done.returncode != 0:
                said = (done.stderr or done.stdout).strip().splitlines()
                print(f"FBGEMM is left out: {' '.join(command)}: {said[-1] if said else ''}")
                return None
        made.touch()
    return str(python)


def run_program(program: str, python: str, threads: int, ids: pathlib.Path, case: Case) -> dict:
    """Milliseconds of each part of a step, from a process of its own."""
    peer = program == "FBGEMM"
    command = [
        *(python, str(_HERE / ("local_step_fbgemm.py" if peer else "local_step_program.py"))),
        *(program, str(ids), str(case.rows), str(case.dim), str(threads), str(_STEPS.value)),
    ]
    # Both of FBGEMM's thread pools read OMP_NUM_THREADS.
    environment = os.environ | {"GLIBC_TUNABLES": _GLIBC, "OMP_NUM_THREADS": str(threads)}
    done = subprocess.run(
        command, env=environment | {"TF_CPP_MIN_LOG_LEVEL": "2"}, capture_output=True, text=True
    )
    if done.returncode != 0:
        raise RuntimeError(f"{program} failed: {done.stderr[-2000:]}")
    return json.loads(done.stdout.splitlines()[-1])


def measure(case: Case, threads: int, pythons: dict[str, str]) -> dict[str, list[dict]]:
    """What each program said in each round."""
    rng = np.random.default_rng(1)
    said: dict[str, list[dict]] = {program: [] for program in pythons}
    with tempfile.TemporaryDirectory() as directory:
        path = pathlib.Path(directory) / "ids.npy"
        np.save(path, zipf_ids(rng, case.rows, case.exponent, (_BATCHES, case.ids)))
        for round_ in range(_ROUNDS.value):
            turn = list(pythons) if round_ % 2 == 0 else list(reversed(pythons))
            for program in turn:
                said[program].append(run_program(program, pythons[program], threads, path, case))
    return said


def summary(said: dict[str, list[dict]], beside: str) -> dict[str, dict[str, tuple[float, float]]]:
    """For each program and part: median milliseconds, median ratio to the step of `beside`."""
    unit = [each["step"] for each in said[beside]]
    return {
        program: {
            part: (
                float(np.median([each[part] for each in rounds])),
                float(np.median([each[part] / u for each, u in zip(rounds, unit, strict=True)])),
            )
            for part in _PARTS
            if part in rounds[0]
        }
        for program, rounds in said.items()
    }


def main(argv: list[str]) -> None:
    del argv
    pythons = dict.fromkeys(_PROGRAMS.value, sys.executable)
    if "FBGEMM" in pythons:
        python = fbgemm_python()
        pythons = ({"FBGEMM": python} if python else {}) | {
            program: sys.executable for program in pythons if program != "FBGEMM"
        }
    beside = next(iter(pythons))
    figures = []
    for case in cases():
        for threads in map(int, _THREADS.value):
            # The peers of the main workload alone: the others are about FBGEMM.
            chosen = {p: y for p, y in pythons.items() if case == cases()[0] or p != "TensorFlow"}
            said = measure(case, threads, chosen)
            medians = summary(said, beside)
            print(f"\n{case}, {threads} threads, {_ROUNDS.value} rounds; x: of {beside}'s step")
            print(f"{'':12}" + "".join(f"{name + ' ms':>16}{'x':>7}" for name in _PARTS.values()))
            for program, parts in medians.items():
                cells = [
                    f"{parts[p][0]:16.3f}{parts[p][1]:7.2f}" if p in parts else " " * 23
                    for p in _PARTS
                ]
                print(f"{program:12}" + "".join(cells), flush=True)
            figures.append(
                {"case": dataclasses.asdict(case), "threads": threads, "beside": beside}
                | {"medians": medians, "rounds": said}
            )
            if _JSON.value:
                pathlib.Path(_JSON.value).write_text(json.dumps(figures, indent=1))


if __name__ == "__main__":
    app.run(main)

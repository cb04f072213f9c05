"""What a training program is told, and how it and the benchmark keep step.

A training program is a process of its own, `python -m netns.train_... JOB`, since what it needs
differs (tf_keras has an environment of its own) and since it has to be on a host of the network.
It gets a `Job` as JSON. At every beginning and end of an epoch it says so and waits until the
benchmark has read its counters, through `Session` in the program and `Program` in the benchmark:
a line of JSON on stdout, an empty one on stdin.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, TextIO


@dataclasses.dataclass(frozen=True)
class Job:
    """One training.

    Attributes:
      train: file of batches (`criteo_shape.write_batches`) to train on.
      held_out: the same of samples that the AUC is measured on.
      epochs: epochs; the first is for warming up.
      steps: of an epoch, of all workers.
      workers: number of workers.
      worker: which of them this program is, where every worker has a program (`train_alone`).
      steps_per_execution: steps that a worker takes at a time.
      batch: samples of a step.
      dim: columns of a row.
      hidden: widths of the hidden layers.
      learning_rate: of Adagrad, for rows and dense layers alike.
      row_optimizer: of HetEmbedding, "rowwise_adagrad" or "adagrad"; tf_keras has the latter.
      seed: of the initial values.
      cache: arguments of CacheConfig, or None.
      strategy: further arguments of HetParameterServerStrategy.
      wire_dtype: of HetEmbedding.
      location_aware: whether examples go to the worker that caches most of their rows.
      hot: of het_tf.data.hot_batches: hot rows in percent, and batches of a phase. None: not used.
    """

    train: str
    held_out: str
    epochs: int
    steps: int
    workers: int
    worker: int
    steps_per_execution: int
    batch: int
    dim: int
    hidden: tuple[int, ...]
    learning_rate: float
    row_optimizer: str
    seed: int
    cache: dict[str, Any] | None
    strategy: dict[str, Any]
    wire_dtype: str
    location_aware: bool = False
    hot: tuple[float, int] | None = None

    def to_json(self) -> str:
        """For `from_json`."""
        return json.dumps(dataclasses.asdict(self))

    @classmethod
    def from_json(cls, text: str) -> Job:
        """The inverse of `to_json`."""
        fields = json.loads(text)
        return cls(**fields | {"hidden": tuple(fields["hidden"])})


class Session:
    """The training program's end. Stdout is its own: what others print goes to stderr."""

    def __init__(self) -> None:
        self._out = os.fdopen(os.dup(sys.stdout.fileno()), "w")
        os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
        self._began = 0.0

    def begin_epoch(self) -> None:
        """Waits until the epoch may begin."""
        self._wait("begin")
        self._began = time.perf_counter()

    def end_epoch(self) -> None:
        """Says how long the epoch took, and waits until counters are read."""
        self._wait("end", seconds=time.perf_counter() - self._began)

    def report(self, **figures: Any) -> None:
        """Reports what belongs to the epoch that has ended."""
        self._wait("report", **figures)

    def _wait(self, event: str, **fields: Any) -> None:
        print(json.dumps({"event": event, **fields}), file=self._out, flush=True)
        if not sys.stdin.readline():
            os._exit(1)  # The benchmark has gone.


class Program:
    """The benchmark's end of a session: a training program that runs."""

    def __init__(self, command: list[str], env: dict[str, str], log: TextIO):
        """Starts the program.

        Args:
          command: with the job as its last argument.
          env: its environment.
          log: what it prints goes there.
        """
        self.process = subprocess.Popen(
            command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=log, text=True
        )

    def await_event(self, check: Callable[[], None]) -> dict[str, Any] | None:
        """What the program says next; None when it has ended.

        Args:
          check: called every second; what it raises ends the wait.
        """
        assert self.process.stdout is not None
        # It says one line, then waits: none can be in the buffer while nothing is in the pipe.
        while not select.select([self.process.stdout], [], [], 1.0)[0]:
            check()
        line = self.process.stdout.readline()
        return json.loads(line) if line else None

    def go_on(self) -> None:
        """Lets the program go on after an event."""
        assert self.process.stdin is not None
        # If it has ended, `await_event` will say so.
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write("\n")
            self.process.stdin.flush()

    def close(self) -> None:
        """Kills the program, if it still runs."""
        self.process.kill()
        self.process.wait()
        for end in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                if end is not None:
                    end.close()

"""Servers that are no LocalCluster's, which go on when a training program ends."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence


def free_address(stack: contextlib.ExitStack) -> str:
    """An address whose port nobody else is given until `stack` is closed.

    A server that is told to share ports (TF_GRPC_REUSE_PORT) can listen there.
    """
    port = stack.enter_context(socket.socket())
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    port.bind(("", 0))
    return f"localhost:{port.getsockname()[1]}"


class Servers:
    """Parameter servers and workers, started with `python -m het_tf.server`.

    Attributes:
      processes: of all, by job.
    """

    def __init__(self, stack: contextlib.ExitStack, num_ps: int = 1, num_workers: int = 1):
        """Starts them, to be killed when `stack` is closed."""
        self._stack = stack
        numbers = {"ps": num_ps, "worker": num_workers}
        self._cluster = {job: [self.address() for _ in range(n)] for job, n in numbers.items()}
        self.processes: dict[str, list[subprocess.Popen]] = {job: [] for job in numbers}
        for job, addresses in self._cluster.items():
            for index in range(len(addresses)):
                server = subprocess.Popen(
                    [sys.executable, "-m", "het_tf.server"],
                    env=self._environment(self._cluster, job, index),
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                )
                self.processes[job].append(server)
                stack.callback(server.wait)
                stack.callback(server.kill)

    def address(self) -> str:
        """A `free_address`, for as long as the servers are there."""
        return free_address(self._stack)

    def start(self, arguments: Sequence[object], chief: str) -> subprocess.Popen:
        """Starts a Python program that uses them.

        Args:
          arguments: of Python.
          chief: where the program listens, an `address`.
        """
        program = subprocess.Popen(
            [sys.executable, *map(str, arguments)],
            env=self._environment({**self._cluster, "chief": [chief]}, "chief", 0),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._stack.callback(program.wait)
        self._stack.callback(program.kill)
        return program

    def _environment(self, cluster, job: str, index: int) -> dict[str, str]:
        task = {"cluster": cluster, "task": {"type": job, "index": index}}
        return {**os.environ, "TF_GRPC_REUSE_PORT": "1", "TF_CONFIG": json.dumps(task)}

"""Servers that no LocalCluster starts, which go on when a training program ends."""

from __future__ import annotations

import contextlib
import json
import os
import socket

from program_runner import Program


def free_address(stack: contextlib.ExitStack) -> str:
    """An address whose port nobody else is given until `stack` is closed.

    A server that is told to share ports (TF_GRPC_REUSE_PORT) can listen there.
    """
    port = stack.enter_context(socket.socket())
    port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    port.bind(("", 0))
    return f"localhost:{port.getsockname()[1]}"


class Servers:
    """Parameter servers and workers, each a program that runs `het_tf.server`.

    Attributes:
      processes: of all, by job.
    """

    def __init__(self, stack: contextlib.ExitStack, num_ps: int = 1, num_workers: int = 1):
        """Starts them, to be killed when `stack` is closed."""
        self._stack = stack
        numbers = {"ps": num_ps, "worker": num_workers}
        self._cluster = {job: [self.address() for _ in range(n)] for job, n in numbers.items()}
        self.processes = {
            job: [
                self._started(job, index, self._cluster, "-m", "het_tf.server")
                for index in range(number)
            ]
            for job, number in numbers.items()
        }

    def address(self) -> str:
        """A `free_address`, for as long as the servers are there."""
        return free_address(self._stack)

    def start(self, *arguments: object, chief: str) -> Program:
        """Starts a training program that uses them.

        Args:
          *arguments: of `Program`.
          chief: where the program listens, an `address`.
        """
        return self._started("chief", 0, {**self._cluster, "chief": [chief]}, *arguments)

    def _started(self, job, index, cluster, *arguments) -> Program:
        task = {"cluster": cluster, "task": {"type": job, "index": index}}
        environment = {"TF_GRPC_REUSE_PORT": "1", "TF_CONFIG": json.dumps(task)}
        program = Program(*arguments, env={**os.environ, **environment})
        self._stack.callback(program.wait)
        self._stack.callback(program.kill)
        return program

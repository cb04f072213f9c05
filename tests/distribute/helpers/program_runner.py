"""Runs programs that import TensorFlow, without the seconds that importing it takes."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import re
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Mapping
from typing import IO, Any

import pytest

_TEMPLATE = pathlib.Path(__file__).with_name("program_template.py")
PROGRAMS = pathlib.Path(__file__).parents[1] / "programs"


@functools.cache
def _template() -> socket.socket:
    """Where requests for programs go; the template ends with this process."""
    requests, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with other:
        subprocess.Popen(
            [sys.executable, _TEMPLATE],
            env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # a library of NumPy's begins threads
            stdin=other,
        )
    return requests


class Program:
    """A program that was started, with what `subprocess.Popen` has for a process.

    It is forked from a process that has imported TensorFlow and Keras, and nothing of het_tf.

    Attributes:
      pid: process id.
      returncode: as in `subprocess.Popen`.
      stdin: text that it reads.
      stdout: text that it writes, unless that goes to a file.
    """

    def __init__(
        self,
        *arguments: object,
        cwd: os.PathLike[str] | str = ".",
        env: Mapping[str, str] | None = None,
        stdout: IO[bytes] | None = None,
    ):
        """Starts it.

        Args:
          *arguments: of Python: the path of a file, "-c" or "-m", and so on.
          cwd: working directory.
          env: its environment, except for what is read while TensorFlow is imported; None: the
            environment of this process.
          stdout: a file for what it writes.
        """
        request = {
            "arguments": [str(argument) for argument in arguments],
            "cwd": os.path.abspath(cwd),
            "env": dict(os.environ if env is None else env),
        }
        self.returncode: int | None = None
        self._errors = os.fdopen(os.memfd_create("stderr"), "rb")
        read, stdin = os.pipe()
        self.stdin = os.fdopen(stdin, "w")
        status, write_status = os.pipe()
        self._status = os.fdopen(status, "rb", buffering=0)
        passed = [read, self._errors.fileno(), write_status]
        closed = [read, write_status]
        if stdout is None:
            read_stdout, written = os.pipe()
            self.stdout = os.fdopen(read_stdout)
            closed.append(written)
        else:
            written = stdout.fileno()
        passed.insert(1, written)
        socket.send_fds(_template(), [json.dumps(request).encode()], passed)
        for descriptor in closed:
            os.close(descriptor)
        self.pid = int(self._status.readline())

    def poll(self) -> int | None:
        """`returncode`, now."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.returncode = int(self._status.readline())
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits until it has ended; its `returncode`.

        Raises:
          subprocess.TimeoutExpired: it did not end within `timeout` seconds.
        """
        if self.returncode is None:
            select.select([self._status], [], [], timeout)
            if self.poll() is None:
                raise subprocess.TimeoutExpired(f"program {self.pid}", timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def errors(self) -> str:
        """What it has written to stderr."""
        descriptor = self._errors.fileno()
        return os.pread(descriptor, os.fstat(descriptor).st_size, 0).decode(errors="replace")

    def communicate(self, line: str = "", timeout: float = 600.0) -> tuple[str, str]:
        """Writes `line`, closes stdin and waits for the end; what it wrote to stdout and stderr.

        Raises:
          subprocess.TimeoutExpired: it did not end within `timeout` seconds, and was killed.
        """
        timer = threading.Timer(timeout, self.kill)
        timer.start()
        with self.stdin:
            self.stdin.write(line)
        said = self.stdout.read()
        self.wait()
        if not timer.is_alive():
            raise subprocess.TimeoutExpired(f"program {self.pid}", timeout, said, self.errors())
        timer.cancel()
        return said, self.errors()


def run(
    program: os.PathLike[str] | str,
    *arguments: str,
    cwd: os.PathLike[str] | str = ".",
    env: Mapping[str, str] | None = None,
    timeout: float = 1500.0,
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run([sys.executable, program, *arguments])` as a `Program`, with what it wrote.

    Args:
      program: path of a Python file.
      arguments: of its command line.
      cwd: working directory.
      env: as of `Program`.
      timeout: seconds, after which it is killed.

    Raises:
      subprocess.TimeoutExpired: it was.
    """
    command = [os.path.abspath(program), *arguments]
    # A file: processes that it leaves behind may keep its stdout open.
    with tempfile.NamedTemporaryFile() as stdout:
        started = Program(*command, cwd=cwd, env=env, stdout=stdout)
        started.stdin.close()
        try:
            started.wait(timeout)
        except subprocess.TimeoutExpired:
            started.kill()
            started.wait()
            said = pathlib.Path(stdout.name).read_text(errors="replace")
            raise subprocess.TimeoutExpired(command, timeout, said, started.errors()) from None
        said = pathlib.Path(stdout.name).read_text(errors="replace")
    return subprocess.CompletedProcess(command, started.returncode, said, started.errors())


def result_of(program: str, *arguments: str, timeout: float = 1500.0) -> Any:
    """The JSON that a program of tests/distribute/programs prints last.

    The test fails with the error that the program raised, or says where it hung until
    `faulthandler` ended it.
    """
    ended = run(PROGRAMS / program, *arguments, timeout=timeout)
    if ended.returncode != 0:
        print(ended.stderr)
        why = _where_it_hung(ended.stderr) or _what_it_raised(ended.stderr)
        pytest.fail(f"{program} ended with {ended.returncode}: {why}", pytrace=False)
    return json.loads(ended.stdout.splitlines()[-1])


def _where_it_hung(errors: str) -> str:
    """The calls of the main thread, which `faulthandler` names last, from the innermost on."""
    _, timed_out, stacks = errors.rpartition("Timeout (")
    stack = stacks.rpartition("(most recent call first):")[2] if timed_out else ""
    calls = re.findall(r'File ".*?([^/"]+)", line (\d+) in (.+)', stack)
    named = (f"{name} ({file}:{line})" for file, line, name in calls[:20])
    return "hung in " + " < ".join(named) if calls else ""


def _what_it_raised(errors: str) -> str:
    # After what it raised, TensorFlow may log pages about servers that end.
    raised = errors.rpartition("Traceback (most recent call last):")[2]
    return next((line for line in raised.splitlines() if re.match(r"[\w.]+(: |$)", line)), "")

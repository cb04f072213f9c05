"""Running programs that import TensorFlow, without the seconds that importing it takes."""

from __future__ import annotations

import functools
import json
import os
import pathlib
import re
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping
from typing import Any

import pytest

_TEMPLATE = pathlib.Path(__file__).with_name("program_template.py")
PROGRAMS = pathlib.Path(__file__).parents[1] / "programs"


@functools.cache
def _template() -> subprocess.Popen:
    # Ends with this process, whose end of the pipe is then closed.
    return subprocess.Popen(
        [sys.executable, _TEMPLATE],
        env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # a library of NumPy's: forked while alone
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        bufsize=0,
    )


def run(
    program: os.PathLike[str] | str,
    *arguments: str,
    cwd: os.PathLike[str] | str = ".",
    env: Mapping[str, str] | None = None,
    timeout: float = 1500.0,
) -> subprocess.CompletedProcess[str]:
    """`subprocess.run([sys.executable, program, *arguments])`, with what it wrote.

    It is forked from a process that has imported TensorFlow and Keras, and nothing of het_tf.

    Args:
      program: path of a Python file.
      arguments: of its command line.
      cwd: working directory.
      env: its environment, but for what is read when TensorFlow is imported; None: this process's.
      timeout: seconds, after which it is killed.

    Raises:
      subprocess.TimeoutExpired: it was.
    """
    command = [os.path.abspath(program), *arguments]
    with tempfile.NamedTemporaryFile() as stdout, tempfile.NamedTemporaryFile() as stderr:
        request = {
            "arguments": command,
            "cwd": os.path.abspath(cwd),
            "env": dict(os.environ if env is None else env),
            "stdout": stdout.name,
            "stderr": stderr.name,
        }
        template = _template()
        template.stdin.write(json.dumps(request).encode() + b"\n")
        pid = int(template.stdout.readline())
        ended, _, _ = select.select([template.stdout], [], [], timeout)
        if not ended:
            os.kill(pid, signal.SIGKILL)
        status = int(template.stdout.readline())
        said = [file.read().decode(errors="replace") for file in (stdout, stderr)]
    if not ended:
        raise subprocess.TimeoutExpired(command, timeout, *said)
    return subprocess.CompletedProcess(command, status, *said)


def result_of(program: str, timeout: float = 1500.0) -> Any:
    """The JSON that a program of tests/distribute/programs prints last.

    The test fails with the error that the program raised, if it raised one.
    """
    ended = run(PROGRAMS / program, timeout=timeout)
    if ended.returncode != 0:
        print(ended.stderr)
        # After what it raised, TensorFlow may log pages about servers that end.
        raised = ended.stderr.rpartition("Traceback (most recent call last):")[2]
        lines = (line for line in raised.splitlines() if re.match(r"[\w.]+(: |$)", line))
        pytest.fail(f"{program} ended with {ended.returncode}: {next(lines, '')}", pytrace=False)
    return json.loads(ended.stdout.splitlines()[-1])

"""The process from which the programs of tests are forked; `program_runner` starts it.

Importing TensorFlow and Keras takes 3 s of CPU and is the same for every program. This process
imports nothing of het_tf, because that begins threads, which a forked process would lack.
"""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import runpy
import signal
import socket
import sys

MAX_REQUEST = 1 << 20  # bytes


def wait_for_request() -> dict[str, object]:
    """Forks for each request; returns its content in the forked process.

    A request is one message on stdin, a socket of type SOCK_SEQPACKET: the arguments of `run` as
    JSON, with four file descriptors. Three become stdin, stdout and stderr of the program. The
    fourth receives two lines: the process id, and the status, as `subprocess.Popen.returncode`.
    """
    import keras  # noqa: F401  TensorFlow, too

    if len(os.listdir("/proc/self/task")) > 1:
        raise RuntimeError("an import began threads, which a forked process would lack")
    requests = socket.socket(fileno=os.dup(0))
    signal.signal(signal.SIGCHLD, lambda *_: _reap())
    while True:
        message, descriptors, _, _ = socket.recv_fds(requests, MAX_REQUEST, 4)
        if not message:
            os._exit(0)
        if os.fork() == 0:
            requests.close()
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            _fork_program(*descriptors)
            return json.loads(message)
        for descriptor in descriptors:
            os.close(descriptor)


def _reap() -> None:
    with contextlib.suppress(ChildProcessError):
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass


def _fork_program(stdin: int, stdout: int, stderr: int, status: int) -> None:
    """Returns in the process of the program; this process waits for that and reports its end."""
    pid = os.fork()
    if pid == 0:
        os.close(status)
        for standard, descriptor in enumerate((stdin, stdout, stderr)):
            os.dup2(descriptor, standard)
            os.close(descriptor)
        return
    for descriptor in (0, stdin, stdout, stderr):
        os.close(descriptor)
    os.write(status, b"%d\n" % pid)
    ended = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
    os.write(status, b"%d\n" % ended)
    os._exit(0)


def run(arguments: list[str], cwd: str, env: dict[str, str]) -> None:
    """As `python arguments...`, where the first is the path of a file, "-c" or "-m"."""
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    first, *rest = arguments
    is_option = first in ("-c", "-m")
    sys.argv = arguments[1:] if is_option else arguments
    folder = cwd if is_option else str(pathlib.Path(first).parent)
    sys.path[:1] = [folder, str(pathlib.Path(__file__).parent)]
    if first == "-m":
        runpy.run_module(rest[0], run_name="__main__", alter_sys=True)
        return
    code = rest[0] if first == "-c" else pathlib.Path(first).read_bytes()
    compiled = compile(code, "<string>" if first == "-c" else first, "exec")
    # Programs run in the module that is called __main__, as Python does: other processes send
    # objects of its classes.
    namespace = sys.modules["__main__"].__dict__
    namespace.clear()
    namespace.update(__name__="__main__", __spec__=None)
    if first != "-c":
        namespace["__file__"] = first
    exec(compiled, namespace)


if __name__ == "__main__":
    run(**wait_for_request())

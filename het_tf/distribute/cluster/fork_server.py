"""Program that forks the servers of a `LocalCluster`. `ServerTemplate` runs it.

Importing TensorFlow takes seconds of CPU and is the same for all tasks. One process therefore
imports it and forks for every server. Forking is safe while the process has a single thread. If an
import has started other threads, the forked process executes Python again and imports everything.

The program is run by its path, so that Python searches neither the working directory nor this
folder for modules.
"""

from __future__ import annotations

import ctypes
import json
import os
import pathlib
import select
import signal
import socket
import sys
import types
from typing import Any

_ROOT = pathlib.Path(__file__).resolve().parents[3]
_PR_SET_PDEATHSIG = 1  # prctl(2): sets the signal that a process gets when its parent ends.


def _import_server() -> types.ModuleType:
    """Imports `het_tf.server` without Keras, to save time and to avoid threads."""
    sys.path[0] = str(_ROOT)
    sys.modules["keras"] = None  # TensorFlow works without Keras.
    # These packages import modules that need Keras. Empty packages replace them.
    for name in ("het_tf", "het_tf.distribute"):
        package = types.ModuleType(name)
        package.__path__ = [str(_ROOT.joinpath(*name.split(".")))]
        sys.modules[name] = package
    from het_tf import ops, server

    ops.load()
    return server


def _end_with(parent: int) -> None:
    """Makes the kernel kill this process when its parent ends, even if this process hangs."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # The parent ended before the call.
        os._exit(1)


def _become_server(
    server: types.ModuleType, has_threads: bool, env: dict[str, str], log: str
) -> None:
    os.setsid()  # Ctrl-C reaches only the program, which then closes the cluster.
    signal.set_wakeup_fd(-1)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    written = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o666)
    for descriptor, standard in ((os.open(os.devnull, os.O_RDONLY), 0), (written, 1), (written, 2)):
        os.dup2(descriptor, standard)
    os.environ.clear()
    os.environ.update(env)
    if has_threads:
        os.execve(sys.executable, [sys.executable, "-m", "het_tf.server"], env)
    from het_tf.compat import gpu_probe

    gpu_probe.look_for_devices()  # Called after the fork, because it starts to use the GPUs.
    server.main([])


def main() -> None:
    """Forks a server for every request, and reports servers that end.

    Messages are lines of JSON on stdin, which is a socket. A request is {"env", "log"}. The replies
    are {"started": process id}, in the order of requests, and {"ended": process id, "status"}. A
    status is that of `subprocess.Popen.returncode`. The process ends when the other end of the
    socket is closed. The system closes it when the program ends. The servers end with this process.
    """
    server = _import_server()
    has_threads = len(os.listdir("/proc/self/task")) > 1
    program = socket.socket(fileno=os.dup(0))
    # SIGCHLD writes a byte into this pipe, because Python restarts interrupted system calls.
    ended, tell_ended = os.pipe()
    os.set_blocking(tell_ended, False)
    signal.set_wakeup_fd(tell_ended, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    requests = b""
    inputs: list[Any] = [program, ended]
    this = os.getpid()

    def say(**message: Any) -> None:
        # If the program is gone, this raises an error, which ends this process.
        program.sendall(json.dumps(message).encode() + b"\n")

    while True:
        ready, _, _ = select.select(inputs, [], [])
        if ended in ready:
            os.read(ended, 4096)
            for pid, status in _ended_children():
                say(ended=pid, status=status)
        if program not in ready:
            continue
        received = program.recv(65536)
        if not received:
            return
        *lines, requests = (requests + received).split(b"\n")
        for line in lines:
            request = json.loads(line)
            pid = os.fork()
            if pid == 0:
                _end_with(this)
                program.close()
                os.close(ended)
                os.close(tell_ended)
                _become_server(server, has_threads, **request)
                return
            say(started=pid)


def _ended_children() -> list[tuple[int, int]]:
    """Returns process id and status of the children that ended since the last call."""
    children: list[tuple[int, int]] = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return children
        if pid == 0:
            return children
        children.append((pid, os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main()

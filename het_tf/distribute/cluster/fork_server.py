"""The process that the servers of a `LocalCluster` are forked from; `server_processes` runs it.

Importing TensorFlow takes seconds of CPU, and does not depend on which task a server runs. So one
process imports it, and forks for each server. That is safe while it has a single thread; should an
import have begun others, the forked process imports everything anew.

Run by its path: neither the working directory nor this folder is searched for modules.
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
_PR_SET_PDEATHSIG = 1  # Of prctl(2): the signal that a process gets when its parent has ended.


def _import_server() -> types.ModuleType:
    """`het_tf.server` without Keras: less to import, and nothing that begins threads."""
    sys.path[0] = str(_ROOT)
    sys.modules["keras"] = None  # type: ignore[assignment]  # TensorFlow does without.
    for name in ("het_tf", "het_tf.distribute"):  # What they import themselves needs it.
        package = types.ModuleType(name)
        package.__path__ = [str(_ROOT.joinpath(*name.split(".")))]
        sys.modules[name] = package
    from het_tf import ops, server

    ops.load()
    return server


def _end_with(parent: int) -> None:
    """Has the kernel kill this process when its parent ends, also where this process hangs."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # It ended before.
        os._exit(1)


def _become_server(
    server: types.ModuleType, has_threads: bool, env: dict[str, str], log: str
) -> None:
    os.setsid()  # Ctrl-C is for the program, which then closes the cluster.
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

    gpu_probe.look_for_devices()  # After the fork: it begins to use them.
    server.main([])


def main() -> None:
    """Forks a server for each request, and tells of those that end.

    Messages are lines of JSON on stdin, a socket. In: {"env", "log"}. Out: {"started": process id}
    in the order of requests, and {"ended": process id, "status"}, a status as
    `subprocess.Popen.returncode`. Ends when the other end of the socket is closed, as the system
    does when the program ends, and servers end with it.
    """
    server = _import_server()
    has_threads = len(os.listdir("/proc/self/task")) > 1
    program = socket.socket(fileno=os.dup(0))
    ended, tell_ended = os.pipe()  # A byte for each child that ends: signals end no system call.
    os.set_blocking(tell_ended, False)
    signal.set_wakeup_fd(tell_ended, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    requests = b""
    this = os.getpid()

    def say(**message: Any) -> None:
        # Where nobody listens any longer, this raises, which ends this process, too.
        program.sendall(json.dumps(message).encode() + b"\n")

    while True:
        ready, _, _ = select.select([program, ended], [], [])
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
    """Process id and status of the children that ended since the last call."""
    found = []
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return found
        if pid == 0:
            return found
        found.append((pid, os.waitstatus_to_exitcode(status)))


if __name__ == "__main__":
    main()

"""Server processes of this machine, which are forked from one that has imported TensorFlow."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import queue
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Mapping

# Path of the program that servers are forked from.
TEMPLATE = pathlib.Path(__file__).with_name("server_template.py")


class ServerProcess:
    """A server, with what `subprocess.Popen` has for a process.

    Attributes:
      pid: process id.
      returncode: of a process that ended, as in `subprocess.Popen`; None while it runs.
    """

    def __init__(self, pid: int, changed: threading.Condition):
        """Of a process that `changed` is notified of when it ends."""
        self.pid = pid
        self.returncode: int | None = None
        self._changed = changed

    def poll(self) -> int | None:
        """`returncode`, now."""
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Waits until the process has ended; its `returncode`.

        Raises:
          subprocess.TimeoutExpired: it did not end within `timeout` seconds.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: self.returncode is not None, timeout):
                raise subprocess.TimeoutExpired(f"server process {self.pid}", timeout)
        return self.returncode

    def send_signal(self, number: int) -> None:
        """Sends a signal, unless the process has ended."""
        if self.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def terminate(self) -> None:
        """Sends SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Sends SIGKILL."""
        self.send_signal(signal.SIGKILL)


class ServerTemplate:
    """Starts servers. Methods may be called from any thread; servers end with it."""

    def __init__(self, env: Mapping[str, str], log: pathlib.Path):
        """Begins to import TensorFlow.

        Args:
          env: environment variables that are read when it is imported.
          log: where it writes what goes wrong.
        """
        self._log = log
        self._changed = threading.Condition()
        self._running: dict[int, ServerProcess] = {}  # guarded by _changed
        self._starting = threading.Lock()  # Answers come in the order of requests.
        self._started: queue.SimpleQueue[ServerProcess | None] = queue.SimpleQueue()
        self._socket, other = socket.socketpair()
        with other, open(log, "ab") as file:
            self._process = subprocess.Popen(
                [sys.executable, str(TEMPLATE)],
                # A library of NumPy's would begin threads.
                env={**env, "OPENBLAS_NUM_THREADS": "1"},
                stdin=other,
                stdout=file,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this process.
            )
        threading.Thread(target=self._listen, name="het-servers", daemon=True).start()

    def start(self, env: Mapping[str, str], log: pathlib.Path, timeout: float) -> ServerProcess:
        """Starts the server of the task that TF_CONFIG of `env` says; it writes to `log`.

        Raises:
          RuntimeError: TensorFlow could not be imported, or not within `timeout` seconds.
        """
        request = json.dumps({"env": dict(env), "log": os.path.abspath(log)}).encode() + b"\n"
        with self._starting:
            try:
                self._socket.sendall(request)
                process = self._started.get(timeout=timeout)
            except OSError:
                process = None
            except queue.Empty:
                raise self._error(f"took more than {timeout:g} s") from None
        if process is None:
            raise self._error(f"exited with status {self._process.wait()}")
        return process

    def _error(self, what: str) -> RuntimeError:
        return RuntimeError(
            f"The process that imports TensorFlow for the servers {what}. Its log, {self._log}:\n"
            f"{self._log.read_text(errors='replace')[-3000:]}"
        )

    def close(self) -> None:
        """Ends it, and all servers."""
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)
        self._process.kill()
        self._process.wait()

    def _listen(self) -> None:
        with self._socket, contextlib.suppress(OSError), self._socket.makefile("rb") as lines:
            for line in lines:
                self._note(json.loads(line))
        # Its servers end with it.
        with self._changed:
            for process in self._running.values():
                process.returncode = -signal.SIGKILL
            self._running.clear()
            self._changed.notify_all()
        self._started.put(None)

    def _note(self, message: Mapping[str, int]) -> None:
        with self._changed:
            if "started" in message:
                process = ServerProcess(message["started"], self._changed)
                self._running[process.pid] = process
                self._started.put(process)
            else:
                self._running.pop(message["ended"]).returncode = message["status"]
                self._changed.notify_all()

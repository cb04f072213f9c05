"""Probing tasks."""

from __future__ import annotations

import ctypes
import pickle
import socket
import struct
import threading
import time

import pytest

from het_tf.distribute import health
from het_tf.distribute.health import HealthMonitor, TaskState
from het_tf.distribute.watching import ServerLostError


def test_refused_when_nobody_listens():
    with socket.socket() as reserved:
        reserved.bind(("localhost", 0))
        address = f"localhost:{reserved.getsockname()[1]}"
        assert health.probe(address, timeout=5) is TaskState.REFUSED


def test_silent_when_only_the_kernel_answers():
    with socket.create_server(("localhost", 0)) as listening:
        address = f"localhost:{listening.getsockname()[1]}"
        assert health.probe(address, timeout=1) is TaskState.SILENT


@pytest.mark.parametrize("how", ["it closes", "it resets"])
def test_refused_when_the_process_ends_meanwhile(how):
    with socket.create_server(("localhost", 0)) as listening:

        def end():
            connection, _ = listening.accept()
            if how == "it resets":  # what a process leaves that had not read all
                linger = struct.pack("ii", 1, 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            connection.close()

        ends = threading.Thread(target=end)
        ends.start()
        address = f"localhost:{listening.getsockname()[1]}"
        assert health.probe(address, timeout=30) is TaskState.REFUSED
        ends.join()


def test_a_host_without_an_address_is_not_a_process_that_is_gone():
    assert health.probe("no-such-host.invalid:1", timeout=5) is TaskState.UNREACHABLE


def test_up_when_a_server_answers(cluster):
    for addresses in cluster.addresses.values():
        assert all(health.probe(address) is TaskState.UP for address in addresses)


def wait_until(holds) -> None:
    deadline = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_monitor_notices_loss_and_return(monkeypatch):
    monkeypatch.setattr(health, "PROBE_INTERVAL", 0.01)
    state = {"now": TaskState.UP}
    monkeypatch.setattr(health, "probe", lambda address: state["now"])
    down = threading.Event()
    seen = []

    def on_down(task, state):
        seen.append((task, state))
        down.set()

    task = ("ps", 0)
    monitor = HealthMonitor({task: "host:1"}, on_down, lost_after=1e6)
    with monitor:
        assert monitor.failing() == {}
        state["now"] = TaskState.SILENT
        assert down.wait(300)
        assert monitor.failing() == {task: TaskState.SILENT}
        assert monitor.lost("ps") == {}
        state["now"] = TaskState.UP
        wait_until(lambda: not monitor.failing())
    assert seen == [(task, TaskState.SILENT)]
    state["now"] = TaskState.SILENT
    # Of many probes: counted from the last that was answered.
    monitor = HealthMonitor({task: "host:1"}, None, lost_after=0.5)
    with monitor:
        wait_until(lambda: monitor.lost("ps"))
        assert monitor.lost("ps") == {task: TaskState.SILENT}
        assert monitor.lost("worker") == {}
    assert monitor.failing() == monitor.lost("ps") == {}  # It would not notice that it is back.


def test_a_call_that_holds_the_interpreter_is_cut_off_from_a_task_that_hangs(monkeypatch):
    """As calls of TensorFlow's: nothing of Python runs until it returns."""
    monkeypatch.setattr(health, "PROBE_INTERVAL", 0.05)
    monkeypatch.setattr(health, "PROBE_TIMEOUT", 0.2)
    libc = ctypes.PyDLL(None)  # keeps the lock in calls
    with (
        socket.create_server(("localhost", 0)) as hangs,
        socket.create_connection(hangs.getsockname()) as connection,
        HealthMonitor({("worker", 0): f"localhost:{hangs.getsockname()[1]}"}, lost_after=0.5) as of,
    ):
        byte = ctypes.create_string_buffer(1)
        assert libc.recv(connection.fileno(), byte, 1, 0) == 0
        wait_until(of.failing)
        assert of.lost("worker") == {("worker", 0): TaskState.SILENT}


def test_what_names_a_lost_server_goes_from_process_to_process():
    error = ServerLostError("Parameter server 0 is gone", ": restart it", "socket closed")
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error) == "Parameter server 0 is gone: restart it (socket closed)"
    assert again.what == "Parameter server 0 is gone"

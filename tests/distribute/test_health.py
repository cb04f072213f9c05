"""Probing tasks."""

from __future__ import annotations

import contextlib
import ctypes
import pickle
import socket
import struct
import threading
import time
from collections.abc import Iterator

import pytest

from het_tf.distribute.failures import probes
from het_tf.distribute.failures.cluster_health import ServerLostError
from het_tf.distribute.failures.probes import HealthMonitor, TaskState


def test_refused_when_nobody_listens():
    with socket.socket() as reserved:
        reserved.bind(("localhost", 0))
        address = f"localhost:{reserved.getsockname()[1]}"
        assert probes.probe(address, timeout=5) is TaskState.REFUSED


def test_silent_when_only_the_kernel_answers():
    with socket.create_server(("localhost", 0)) as listening:
        address = f"localhost:{listening.getsockname()[1]}"
        assert probes.probe(address, timeout=1) is TaskState.SILENT


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
        assert probes.probe(address, timeout=30) is TaskState.REFUSED
        ends.join()


def test_a_host_without_an_address_is_not_a_process_that_is_gone():
    assert probes.probe("no-such-host.invalid:1", timeout=5) is TaskState.UNREACHABLE


def test_a_server_that_does_not_come_back_is_waited_for_so_many_seconds(cluster):
    with socket.socket() as reserved:
        reserved.bind(("localhost", 0))
        nobody = f"localhost:{reserved.getsockname()[1]}"
        up = {("ps", 0): cluster.addresses["ps"][0]}
        began = time.monotonic()
        assert not probes.wait_until_up(up | {("ps", 1): nobody}, within=1)
        assert 1 <= time.monotonic() - began < 60
    assert probes.wait_until_up(up, within=0)


def test_up_when_a_server_answers(cluster):
    for addresses in cluster.addresses.values():
        assert all(probes.probe(address) is TaskState.UP for address in addresses)


def wait_until(holds) -> None:
    deadline = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@contextlib.contextmanager
def task() -> Iterator[tuple[str, threading.Event]]:
    """The address of what listens, and whether it answers."""
    answers, held = threading.Event(), []
    answers.set()
    with socket.create_server(("localhost", 0)) as listening:

        def serve():
            with contextlib.suppress(OSError):
                while True:
                    held.append(listening.accept()[0])
                    if answers.is_set():
                        held.pop().sendall(b"x")

        serving = threading.Thread(target=serve)
        serving.start()
        yield f"localhost:{listening.getsockname()[1]}", answers
        listening.shutdown(socket.SHUT_RDWR)
        serving.join()


@pytest.fixture
def _impatient(monkeypatch):
    monkeypatch.setattr(probes, "PROBE_INTERVAL", 0.05)
    monkeypatch.setattr(probes, "PROBE_TIMEOUT", 0.2)


@pytest.mark.usefixtures("_impatient")
def test_monitor_notices_loss_and_return():
    seen = []
    with task() as (address, answers):
        monitor = HealthMonitor({("ps", 0): address}, lambda *found: seen.append(found), 1e6)
        with monitor:
            assert monitor.failing() == {}
            for times in (1, 2):
                answers.clear()
                wait_until(lambda times=times: len(seen) == times)
                assert monitor.failing() == {("ps", 0): TaskState.SILENT}
                assert monitor.lost("ps") == {}
                answers.set()
                wait_until(lambda: not monitor.failing())
                time.sleep(1)  # for who tells of it
        assert seen == 2 * [(("ps", 0), TaskState.SILENT)]
        # Of many probes: counted from the last that was answered.
        answers.clear()
        monitor = HealthMonitor({("ps", 0): address}, lost_after=0.5)
        assert monitor.seconds_left(("ps", 0)) == 2  # at least
        with monitor:
            wait_until(lambda: monitor.lost("ps"))
            assert monitor.lost("ps") == {("ps", 0): TaskState.SILENT}
            assert monitor.lost("worker") == {}
        assert monitor.failing() == monitor.lost("ps") == {}  # It would not notice a return.


@pytest.mark.usefixtures("_impatient")
def test_a_call_that_holds_the_interpreter_is_cut_off_from_a_task_that_hangs():
    """As calls of TensorFlow's: nothing of Python runs until it returns."""
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

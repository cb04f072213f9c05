"""The processes of a LocalCluster, which are forked from one that has imported TensorFlow."""

from __future__ import annotations

import contextlib
import json
import os
import pathlib
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable

import pytest
from program_runner import PROGRAMS, Program

from het_tf.distribute import LocalCluster
from het_tf.distribute.cluster.local_cluster import TEMPLATE, ServerTemplate


def parent(pid: int) -> int:
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"PPid:\t(\d+)", status)[1])


def wait_until(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300
    while not holds():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def marked(mark: str) -> list[str]:
    """Process ids of those that began with an environment variable MARK of this value."""
    found = []
    for process in pathlib.Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"\0MARK={mark}\0" in f"\0{(process / 'environ').read_text(errors='replace')}":
                found.append(process.name)
    return found


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A cluster that is started where modules with the names of imported ones lie.

    A server that imported one of them would not start.
    """
    folder = tmp_path_factory.mktemp("working directory")
    for name in ("random.py", "het_tf.py", "health.py"):
        folder.joinpath(name).write_text("raise RuntimeError('from the working directory')")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        running = LocalCluster(2, 1)
        running.start()
    yield running
    running.close()


def test_servers_are_forked_and_can_be_killed_and_restarted(cluster):
    processes = [cluster.process(*task) for task in (("worker", 0), ("worker", 1), ("ps", 0))]
    (template,) = {parent(process.pid) for process in processes}
    ps = processes[2]
    assert ps.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        ps.wait(timeout=0.01)
    # A server says that it serves a little after it listens.
    wait_until(lambda: cluster.log("ps", 0).count("ps 0 serves") == 1)
    ps.send_signal(signal.SIGSTOP)  # It would not end of SIGTERM.
    cluster.kill_ps(0)
    assert ps.wait(0) == ps.poll() == ps.returncode == -signal.SIGKILL
    ps.kill()  # Does nothing, as it does for a Popen.
    cluster.restart_ps(0)
    assert parent(cluster.process("ps", 0).pid) == template
    wait_until(lambda: cluster.log("ps", 0).count("ps 0 serves") == 2)
    cluster.terminate_worker(1)
    assert processes[1].returncode == 0


def test_servers_end_with_the_process_that_they_are_forked_from(cluster):
    worker = cluster.process("worker", 0)
    template = parent(worker.pid)
    os.kill(template, signal.SIGKILL)
    assert worker.wait(300) == -signal.SIGKILL
    with pytest.raises(RuntimeError, match=r"exited with status -9. Its log, .*servers.log"):
        cluster.restart_worker(0)
    assert not pathlib.Path(f"/proc/{template}").exists()


def test_servers_end_whose_program_died_while_they_were_started(tmp_path):
    program, other = socket.socketpair()
    mark = str(tmp_path)
    with other:
        template = subprocess.Popen(
            [sys.executable, TEMPLATE],
            env={**os.environ, "MARK": mark},
            stdin=other,
            start_new_session=True,
        )
    cluster = {"worker": ["localhost:0"], "ps": ["localhost:0"]}
    tf_config = json.dumps({"cluster": cluster, "task": {"type": "worker", "index": 0}})
    request = {"env": {**os.environ, "TF_CONFIG": tf_config}, "log": str(tmp_path / "log")}
    program.sendall(json.dumps(request).encode() + b"\n")
    program.close()
    template.wait(300)
    wait_until(lambda: not marked(mark))


@pytest.mark.exhaustive
def test_a_program_that_is_killed_at_any_moment_leaves_no_server(tmp_path):
    for i in range(4):
        mark = f"{tmp_path}-{i}"
        program = Program(PROGRAMS / "start_and_wait_program.py", mark)
        time.sleep(random.uniform(0, 5))
        program.kill()
        program.wait()
        wait_until(lambda mark=mark: not marked(mark))


@pytest.mark.exhaustive
def test_where_an_import_begins_a_thread_servers_import_for_themselves(tmp_path):
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(1e6,), daemon=True)"
    (tmp_path / "sitecustomize.py").write_text(f"{code}.start()\n")
    template = ServerTemplate({**os.environ, "PYTHONPATH": str(tmp_path)}, tmp_path / "log")
    try:
        # It runs without TF_CONFIG, of which it would complain after seconds of importing.
        server = template.start({}, tmp_path / "server-log", timeout=300)
        command = pathlib.Path(f"/proc/{server.pid}/cmdline")
        wait_until(lambda: command.read_bytes().split(b"\0")[1:3] == [b"-m", b"het_tf.server"])
    finally:
        template.close()


def test_a_server_that_dies_at_start_shows_its_log():
    # The cluster has reserved its port.
    with (
        pytest.raises(
            RuntimeError, match=r"ps 0 exited with status 1. The end of its log"
        ) as error,
        LocalCluster(1, 1, env={"TF_GRPC_REUSE_PORT": "0"}),
    ):
        pass
    assert "Could not start gRPC server" in str(error.value)


def test_what_keeps_tensorflow_from_being_imported_is_shown():
    with (
        pytest.raises(RuntimeError, match=r"exited with status 1(.|\n)*/no/such/python"),
        LocalCluster(1, 1, env={"PYTHONHOME": "/no/such/python"}),
    ):
        pass

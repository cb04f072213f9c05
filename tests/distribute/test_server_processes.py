"""The processes of a LocalCluster, which are forked from one that has imported TensorFlow."""

from __future__ import annotations

import pathlib
import re
import signal
import subprocess
import sys
import time

import pytest

from het_tf.distribute import LocalCluster

ROOT = pathlib.Path(__file__).parents[2]


def parent(pid: int) -> int:
    status = pathlib.Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"PPid:\t(\d+)", status)[1])


def wait_until_said(cluster: LocalCluster, times: int) -> None:
    """Until a server has said so often that it serves, which is a little after it listens."""
    while cluster.log("ps", 0).count("ps 0 serves") < times:
        assert cluster.process("ps", 0).poll() is None
        time.sleep(0.01)


def test_servers_are_forked_and_can_be_killed_and_restarted():
    with LocalCluster(2, 1) as cluster:
        processes = [cluster.process(*task) for task in (("worker", 0), ("worker", 1), ("ps", 0))]
        (template,) = {parent(process.pid) for process in processes}
        ps = processes[2]
        assert ps.poll() is None
        with pytest.raises(subprocess.TimeoutExpired):
            ps.wait(timeout=0.01)
        wait_until_said(cluster, 1)
        ps.send_signal(signal.SIGSTOP)  # It would not end of SIGTERM.
        cluster.kill_ps(0)
        assert ps.wait(0) == ps.poll() == ps.returncode == -signal.SIGKILL
        ps.kill()  # Does nothing, as it does for a Popen.
        cluster.restart_ps(0)
        assert parent(cluster.process("ps", 0).pid) == template
        wait_until_said(cluster, 2)
        cluster.terminate_worker(1)
        assert processes[1].returncode == 0
    assert processes[0].poll() == -signal.SIGKILL
    assert not pathlib.Path(f"/proc/{template}").exists()


def test_servers_end_with_the_process_that_they_are_forked_from():
    with LocalCluster(1, 1) as cluster:
        worker = cluster.process("worker", 0)
        subprocess.run(["kill", "-9", str(parent(worker.pid))], check=True)
        assert worker.wait(300) == -signal.SIGKILL
        with pytest.raises(RuntimeError, match=r"exited with status -9. Its log, .*servers.log"):
            cluster.restart_worker(0)


def test_where_an_import_begins_a_thread_servers_import_for_themselves(tmp_path):
    code = "import threading, time\nthreading.Thread(target=time.sleep, args=(1e6,), daemon=True)"
    (tmp_path / "sitecustomize.py").write_text(f"{code}.start()\n")
    with LocalCluster(1, 1, env={"PYTHONPATH": str(tmp_path)}) as cluster:
        pid = cluster.process("worker", 0).pid
        command = pathlib.Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
        assert command[1:3] == [b"-m", b"het_tf.server"]


def test_modules_in_the_working_directory_are_not_imported(tmp_path):
    for name in ("random.py", "het_tf.py", "health.py"):
        (tmp_path / name).write_text("raise RuntimeError('imported from the working directory')")
    program = tmp_path / "programs" / "program.py"
    program.parent.mkdir()
    program.write_text(
        "import het_tf\n"
        "with het_tf.distribute.LocalCluster(1, 1) as cluster:\n"
        "    print(cluster.process('ps', 0).poll())"
    )
    ended = subprocess.run(
        [sys.executable, program],
        cwd=tmp_path,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert ended.stdout == "None\n"


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

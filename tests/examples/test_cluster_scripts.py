"""The scripts of examples/clusters: every server gets its task, and all end with the program."""

from __future__ import annotations

import contextlib
import os
import pathlib
import signal
import socket
import stat
import subprocess
import sys

import pytest
from standalone import free_address

from het_tf.distribute.cluster.tf_config import TaskConfig, read_tf_config

ROOT = pathlib.Path(__file__).parents[2]
HOSTS, SLURM = (ROOT / "examples" / "clusters" / name for name in ("hosts.sh", "slurm.sh"))
# Seconds after which a process that should have ended has hung.
HUNG = 300

PROGRAM = """
import keras, numpy as np, het_tf
with het_tf.distribute.open_cluster(0, 0) as cluster:  # LocalCluster would refuse this.
    strategy = het_tf.distribute.HetParameterServerStrategy(cluster.resolver)
    with strategy.scope():
        embedding = het_tf.layers.HetEmbedding(2)
        model = het_tf.keras.Sequential(
            [embedding, keras.layers.Flatten(), keras.layers.Dense(1)]
        )
        model.compile("adam", "mse")
    model.fit(np.array([[1, 2], [2, 3]]), np.ones([2, 1]), batch_size=1, verbose=0)
    print("rows", embedding.table.size(), flush=True)
"""

# Instead of ssh: runs the command here.
SSH = 'shift; exec sh -c "$*"'
# Instead of a server: says its task, and ends as `--exit_with_parent` does.
SERVER = 'echo "$* $TF_CONFIG"; exec cat'
FAILS_ONCE = f'mkdir "$MARK" 2>/dev/null && exit 1; {SERVER}'
FAILS = "exit 1"


def write_program(path: pathlib.Path, lines: str) -> pathlib.Path:
    """Writes a script of bash."""
    path.write_text(f"#!/bin/bash\n{lines}\n")
    path.chmod(stat.S_IRWXU)
    return path


def split(output: str) -> list[tuple[str, TaskConfig]]:
    """Commands, and the tasks that they were given."""
    parts = [line.partition(" {") for line in output.splitlines() if " {" in line]
    return [(command, read_tf_config("{" + config)) for command, _, config in parts]


def names(tasks: list[tuple[str, TaskConfig]]) -> list[tuple[str, int]]:
    return sorted((task.task_type, task.task_index) for _, task in tasks)


# hosts.sh


@pytest.fixture
def start(tmp_path):
    """Returns a function that starts hosts.sh with a program; all that it starts writes to stdout.

    `communicate` returns when all of that has ended.
    """
    with contextlib.ExitStack() as stack:

        def start(program: str, server: str = SERVER, **env: str) -> subprocess.Popen:
            env |= {
                "SSH": str(write_program(tmp_path / "ssh", SSH)),
                "PYTHON": str(write_program(tmp_path / "python", server)),
                "MARK": str(tmp_path / "mark"),
            }
            arguments = ["p0,p1:7", "w0,w1,p0:8", "c", "bash", "-c", program]
            script = subprocess.Popen(
                # Where pytest runs in the background, SIGINT is ignored.
                ["env", "--default-signal=INT", HOSTS, *arguments],
                env=os.environ | env,
                start_new_session=True,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                text=True,
            )
            stack.callback(script.wait)
            stack.callback(script.kill)
            return script

        yield start


def test_hosts_get_their_tasks(start):
    # The program ends when all servers have said their tasks.
    script = start('echo "program $TF_CONFIG"; read line')
    said = [script.stdout.readline() for _ in range(6)]
    rest, _ = script.communicate("\n", timeout=HUNG)
    assert rest == ""
    assert script.returncode == 0
    tasks = split("".join(said))
    workers = [("worker", i) for i in range(3)]
    assert names(tasks) == [("chief", 0), ("ps", 0), ("ps", 1), *workers]
    cluster = {"ps": ["p0:2222", "p1:7"], "worker": ["w0:2222", "w1:2222", "p0:8"]}
    for command, task in tasks:
        assert task.cluster == cluster | {"chief": ["c:2222"]}
        is_chief = task.task_type == "chief"
        assert command == ("program" if is_chief else "-m het_tf.server --exit_with_parent")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
@pytest.mark.parametrize("server", [SERVER, FAILS], ids=["serves", "fails"])
def test_servers_end_with_a_program_that_is_interrupted(start, number, server):
    script = start("echo started; exec cat", server)
    while script.stdout.readline() != "started\n":
        pass
    if number == signal.SIGINT:  # As a terminal sends it.
        os.killpg(script.pid, number)
    else:
        script.send_signal(number)
    script.communicate(timeout=HUNG)
    assert script.returncode == -number


def test_servers_end_with_a_program_that_fails(start):
    script = start("exit 3")
    script.communicate(timeout=HUNG)
    assert script.returncode == 3


def test_a_server_that_fails_is_started_again(start):
    script = start("read line", FAILS_ONCE)
    said = [script.stdout.readline() for _ in range(5)]
    _, errors = script.communicate("\n", timeout=HUNG)
    assert len(names(split("".join(said)))) == 5
    assert errors.count("failed, and is started again") == 1


def test_hosts_without_a_program_are_refused():
    ended = subprocess.run([HOSTS, "p0", "w0", "c"], capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert "usage: " in ended.stderr


def test_a_program_trains_on_hosts(tmp_path):
    env = os.environ | {
        "SSH": str(write_program(tmp_path / "ssh", SSH)),
        "PYTHON": sys.executable,
        "TF_GRPC_REUSE_PORT": "1",
    }
    with contextlib.ExitStack() as stack:
        hosts = [free_address(stack) for _ in range(3)]
        ended = subprocess.run(
            [HOSTS, *hosts, sys.executable, "-c", PROGRAM],
            cwd=tmp_path,
            env=env,
            capture_output=True,
            text=True,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "rows 3" in ended.stdout.splitlines()


# slurm.sh

# What Slurm's commands do for the script.
COMMANDS = {
    "scontrol": 'for i in $(seq "$SLURM_NNODES"); do echo "node$i"; done',
    # Every task is a group of processes, and gets the signals of srun.
    "srun": """trap 'for task in $(jobs -p); do kill -- -$task; done' TERM
        for i in $(seq 0 $((SLURM_NNODES - 1))); do SLURM_PROCID=$i setsid "$@" & done
        wait""",
}


def write_slurm(folder: pathlib.Path, nodes: int, **commands: str) -> dict[str, str]:
    """Writes Slurm's commands; the environment of a job that finds them."""
    for name, lines in (COMMANDS | commands).items():
        write_program(folder / name, lines)
    job = {"SLURM_JOB_ID": "123456", "SLURM_JOB_NODELIST": "nodes", "SLURM_NNODES": str(nodes)}
    return {**os.environ, **job, "PATH": f"{folder}:{os.environ['PATH']}"}


@pytest.mark.parametrize(
    ("ps", "hosts"),
    [({}, ["node1", "node2", "node3"]), ({"PS": "1"}, ["node1", "node2"])],
    ids=["2", "1"],
)
def test_nodes_of_slurm_get_their_tasks(tmp_path, ps, hosts):
    env = write_slurm(tmp_path, 6, python='echo "$* $TF_CONFIG"') | ps
    program = ["bash", "-c", 'echo "program $TF_CONFIG"; read line']
    script = subprocess.Popen(
        [SLURM, *program], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    said = [script.stdout.readline() for _ in range(7)]
    script.communicate("\n", timeout=HUNG)
    assert script.returncode == 0
    tasks = split("".join(said))
    num_ps = len(hosts) - 1
    servers = [("ps", i) for i in range(num_ps)] + [("worker", i) for i in range(6 - num_ps)]
    assert names(tasks) == [("chief", 0), *servers]
    for command, task in tasks:
        assert task.cluster == tasks[0][1].cluster
        assert command == ("program" if task.task_type == "chief" else "-m het_tf.server")
    cluster = tasks[0][1].cluster
    assert [a.split(":")[0] for a in cluster["ps"] + cluster["worker"]][: len(hosts)] == hosts
    assert cluster["chief"][0].split(":")[0] == "node1"


@pytest.mark.parametrize("ps", ["0", "6"])
def test_a_job_without_room_for_its_tasks_is_refused(tmp_path, ps):
    env = write_slurm(tmp_path, 6) | {"PS": ps}
    ended = subprocess.run([SLURM, "true"], env=env, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert f"not PS={ps} and 6 nodes" in ended.stderr


def free_ports(stack: contextlib.ExitStack, number: int) -> int:
    """The first of `number` ports from 10000 to 19999 that nobody else is given meanwhile."""
    for first in range(10000, 20000 - number, number):
        with contextlib.ExitStack() as held:
            try:
                for port in range(first, first + number):
                    held.enter_context(socket.socket()).bind(("", port))
            except OSError:
                continue
        with contextlib.suppress(OSError):
            for port in range(first, first + number):
                bound = stack.enter_context(socket.socket())
                bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
                bound.bind(("", port))
            return first
    raise OSError("no free ports")


@pytest.mark.exhaustive
def test_a_program_trains_on_nodes_of_slurm(tmp_path):
    local = 'for i in $(seq "$SLURM_NNODES"); do echo localhost; done'
    env = write_slurm(tmp_path, 3, scontrol=local, python=f'exec {sys.executable} "$@"')
    with contextlib.ExitStack() as stack:
        port = free_ports(stack, 4)
        ended = subprocess.run(
            [SLURM, "python", "-c", PROGRAM],
            cwd=tmp_path,
            env=env | {"PS": "1", "SLURM_JOB_ID": str(port), "TF_GRPC_REUSE_PORT": "1"},
            capture_output=True,
            text=True,
            check=False,
        )
    assert ended.returncode == 0, ended.stderr[-3000:]
    assert "rows 3" in ended.stdout.splitlines()

"""Runs the TensorFlow server of one worker or parameter server task: `python -m het_tf.server`.

TF_CONFIG names the task (see `het_tf.distribute.cluster.tf_config`). The program loads the het_tf
ops before it starts the server, so that the coordinator can place ops on this task. The process
serves until it is killed. On SIGTERM, a worker first pushes the pending updates of its caches and
replicas.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import os
import signal
import socket
import sys
import threading
from collections.abc import Sequence

import tensorflow as tf

from het_tf import ops
from het_tf.distribute.cluster.tf_config import (
    TaskConfig,
    read_tf_config,
    set_grpc_defaults,
    show_one,
)
from het_tf.distribute.shutdown_flush import send_all
from het_tf.runtime.threads import call_in_daemon

# Seconds. Job schedulers send SIGKILL some time after SIGTERM (Kubernetes: after 30 s).
LAST_FLUSH_TIMEOUT = 20.0

# Threads in addition to one per worker: two for calls of the training program, one for ops.
_SPARE_THREADS = 3


def start_server(task: TaskConfig) -> tf.distribute.Server:
    """Loads the ops and starts the server of a task. A worker's server sees one GPU of its host.

    Args:
      task: a "worker" or "ps" task.

    Returns:
      The running server, which listens on the port of `task.address`.

    Raises:
      ValueError: the task is neither a worker nor a ps.
    """
    if task.task_type not in ("worker", "ps"):
        raise ValueError(
            f'TF_CONFIG["task"]["type"] is "{task.task_type}", but only worker and ps tasks run a '
            "server. The chief runs the training program itself."
        )
    set_grpc_defaults()
    ops.load()
    config = tf.compat.v1.ConfigProto()
    cores = len(os.sched_getaffinity(0))
    # A call blocks a thread of the pool, and its ops need threads of the same pool. With one thread
    # per core, TensorFlow's default, a server with few cores would deadlock.
    config.inter_op_parallelism_threads = max(cores, len(task.cluster["worker"]) + _SPARE_THREADS)
    # The tasks of a host share its cores. Two workers on two cores took 27 to 31 ms of CPU per step
    # with two threads each, and 23 ms with one thread each.
    if not os.environ.get("TF_NUM_INTRAOP_THREADS"):
        config.intra_op_parallelism_threads = max(1, cores // task.num_tasks_on_host)
    if task.task_type == "ps":
        config.device_count["GPU"] = 0  # Tables are in host memory. Only workers use GPUs.
    elif gpu := show_one(task, config):
        print(f"het_tf.server: worker {task.task_index} uses {gpu}", flush=True)
    return tf.distribute.Server(
        tf.train.ClusterSpec(task.cluster),
        job_name=task.task_type,
        task_index=task.task_index,
        protocol="grpc",
        config=config,
    )


def _exit_when_stdin_closes() -> None:
    """Ends this process when the other end of its stdin is closed, as when its parent has died."""

    def watch() -> None:
        while sys.stdin.buffer.read(4096):
            pass
        os._exit(0)

    threading.Thread(target=watch, name="watch-stdin", daemon=True).start()


def _sigterm_socket() -> socket.socket:
    """Returns a socket that receives a byte on SIGTERM, whichever thread the signal interrupts."""
    reader, writer = socket.socketpair()
    writer.setblocking(False)
    signal.set_wakeup_fd(writer.detach())
    signal.signal(signal.SIGTERM, lambda *_: None)
    return reader


def main(argv: Sequence[str] | None = None) -> None:
    """Entry point of `python -m het_tf.server`."""
    parser = argparse.ArgumentParser(
        prog="python -m het_tf.server",
        description="Serve one worker or ps task. Which one is read from TF_CONFIG.",
    )
    parser.add_argument(
        "--exit_with_parent",
        action="store_true",
        help="exit when stdin is closed, as when its other end is a process that has ended",
    )
    args = parser.parse_args(argv)
    if args.exit_with_parent:
        _exit_when_stdin_closes()
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    terminated = _sigterm_socket()
    try:
        task = read_tf_config()
        server = start_server(task)
    except ValueError as error:
        sys.exit(f"het_tf.server: {error}")
    print(f"het_tf.server: {task.task_type} {task.task_index} serves {task.address}", flush=True)
    terminated.recv(1)
    if task.task_type == "worker":
        _flush(server, task)
    sys.stdout.flush()
    os._exit(0)  # The server's threads never end.


def _flush(server: tf.distribute.Server, task: TaskConfig) -> None:
    name = f"het_tf.server: {task.task_type} {task.task_index}"
    try:
        flush = call_in_daemon(send_all, server.target, task, LAST_FLUSH_TIMEOUT)
        reached, lost = flush.result(timeout=LAST_FLUSH_TIMEOUT)
        print(f"{name} ends; it has sent its last updates to {reached} shard(s), {lost} are down")
    except concurrent.futures.TimeoutError:
        print(f"{name} ends; it could not send its last updates in {LAST_FLUSH_TIMEOUT:g} s")
    except tf.errors.OpError as error:
        print(f"{name} ends; it could not send its last updates: {error.message}")


if __name__ == "__main__":
    main()

"""Reading and checking the TF_CONFIG environment variable.

TF_CONFIG is how every task of a TensorFlow cluster learns the addresses of the others::

    {"cluster": {"worker": ["a:2222", "b:2222"], "ps": ["c:2222"], "chief": ["d:2222"]},
     "task": {"type": "worker", "index": 1}}

A mistake in it usually shows up late and elsewhere (a server that hangs, a KeyError inside
TensorFlow), so it is checked here, once, with errors that name the offending part.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence

import tensorflow as tf

from het_tf.distribute.failures.probes import PROBE_TIMEOUT

# A host that vanished, or a process that hangs, answers no call and closes no connection. gRPC
# finds out by pings: one after so long without an answer to a running call, and the connection
# counts as lost when the ping stays unanswered. A gRPC server, TensorFlow's at least, closes a
# connection on which pings come more often than every 5 minutes while it has nothing to send, as
# while a closure or a step runs. So pings are the last resort: the probes of distribute/failures
# find out sooner. (A process that was killed on a live host is noticed at once: its kernel refuses
# the connection.)
_KEEPALIVE_TIME_MS = 310_000
_KEEPALIVE_TIMEOUT_MS = 20_000

# Time for one attempt to connect. The kernel accepts a connection for a process that hangs, so only
# this ends an attempt, and whatever waits for it; meanwhile TensorFlow may hold Python's lock. It
# is gRPC's name for it. As long as a probe may take, which is answered in the same way.
_CONNECT_TIMEOUT_MS = round(1000 * PROBE_TIMEOUT)

_SETTINGS = {
    # "Fail at once when the peer is down" is the caller's choice; TensorFlow's default is to wait
    # for the peer forever. https://www.tensorflow.org/tutorials/distribute/parameter_server_training
    "GRPC_FAIL_FAST": "use_caller",
    "TF_GRPC_DEFAULT_OPTIONS": (
        f"grpc.keepalive_time_ms={_KEEPALIVE_TIME_MS},"
        f"grpc.keepalive_timeout_ms={_KEEPALIVE_TIMEOUT_MS},"
        f"grpc.min_reconnect_backoff_ms={_CONNECT_TIMEOUT_MS}"
    ),
    # gRPC would ask the proxy of http_proxy or https_proxy for every task, for localhost too.
    "grpc_proxy": "",
}


def set_grpc_defaults() -> None:
    """Sets the gRPC variables that are not set yet in `os.environ`."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)


TASK_TYPES = ("chief", "worker", "ps", "evaluator")


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """The checked contents of TF_CONFIG.

    Attributes:
      cluster: task type -> addresses ("host:port"), in task order.
      task_type: type of this task, a key of `cluster` (or "chief").
      task_index: index of this task within its type.
    """

    cluster: dict[str, list[str]]
    task_type: str
    task_index: int

    @property
    def address(self) -> str:
        """The "host:port" of this task."""
        return self.cluster[self.task_type][self.task_index]

    @property
    def num_tasks_on_host(self) -> int:
        """How many tasks of this task's type have an address on its host, itself included."""
        return self._hosts.count(self._hosts[self.task_index])

    @property
    def rank_on_host(self) -> int:
        """How many of those come before it."""
        return self._hosts[: self.task_index].count(self._hosts[self.task_index])

    @property
    def _hosts(self) -> list[str]:
        return [address.rpartition(":")[0] for address in self.cluster[self.task_type]]


def read_tf_config(text: str | None = None) -> TaskConfig:
    """Parses and checks TF_CONFIG.

    Args:
      text: the JSON text; the environment variable TF_CONFIG when None.

    Returns:
      The checked configuration.

    Raises:
      ValueError: TF_CONFIG is missing, is not JSON, or a part of it is malformed. The message names
        TF_CONFIG and the part.
    """
    if text is None:
        text = os.environ.get("TF_CONFIG")
    if not text or not text.strip():
        raise ValueError(
            "TF_CONFIG is not set. It must hold JSON such as "
            '{"cluster": {"worker": ["host:port"], "ps": ["host:port"]}, '
            '"task": {"type": "ps", "index": 0}}.'
        )
    try:
        config = json.loads(text)
    except json.JSONDecodeError as error:
        raise ValueError(f"TF_CONFIG is not valid JSON ({error}): {text!r}") from error
    if not isinstance(config, dict):
        raise ValueError(f"TF_CONFIG must be a JSON object, got {text!r}.")

    cluster = check_cluster(config.get("cluster"), source='TF_CONFIG["cluster"]')
    task = config.get("task")
    if not isinstance(task, dict):
        raise ValueError(
            f'TF_CONFIG["task"] must be an object with "type" and "index", got {json.dumps(task)}.'
        )
    task_type, task_index = task.get("type"), task.get("index")
    if not isinstance(task_type, str) or (task_type not in cluster and task_type != "chief"):
        raise ValueError(
            f'TF_CONFIG["task"]["type"] is {json.dumps(task_type)}, which is not a task type of '
            f'TF_CONFIG["cluster"]: {sorted(cluster)}.'
        )
    if isinstance(task_index, str) and task_index.isdigit():  # TensorFlow accepts "0" as well.
        task_index = int(task_index)
    num_tasks = len(cluster.get(task_type, ("",)))
    if not _is_int(task_index) or not 0 <= task_index < num_tasks:
        raise ValueError(
            f'TF_CONFIG["task"]["index"] is {json.dumps(task_index)}, but '
            f'TF_CONFIG["cluster"]["{task_type}"] has {num_tasks} task(s): the index must be an '
            f"integer in [0, {num_tasks})."
        )
    return TaskConfig(cluster, task_type, task_index)


def check_cluster(cluster: object, source: str = "cluster spec") -> dict[str, list[str]]:
    """Checks that `cluster` is usable for parameter server training.

    Args:
      cluster: task type -> list of addresses (or task index -> address, for sparse specs).
      source: what to call it in an error message.

    Returns:
      The cluster as plain dict of lists.

    Raises:
      ValueError: a part is malformed, or there is no worker or no ps task.
    """
    if not isinstance(cluster, Mapping) or not cluster:
        raise ValueError(
            f"{source} must map task types to lists of addresses and name at least one worker and "
            f"one ps, got {_show(cluster)}."
        )
    checked: dict[str, list[str]] = {}
    for task_type, addresses in cluster.items():
        where = f'{source}["{task_type}"]'
        if task_type not in TASK_TYPES:
            raise ValueError(f"{where}: unknown task type, expected one of {list(TASK_TYPES)}.")
        if isinstance(addresses, Mapping):
            addresses = [addresses[i] for i in sorted(addresses, key=int)]
        if not isinstance(addresses, Sequence) or isinstance(addresses, str):
            raise ValueError(f"{where} must be a list of addresses, got {_show(addresses)}.")
        for i, address in enumerate(addresses):
            if not _is_address(address):
                raise ValueError(f'{where}[{i}] must be "host:port", got {_show(address)}.')
        checked[task_type] = list(addresses)
    for task_type in ("worker", "ps"):
        if not checked.get(task_type):
            raise ValueError(
                f"{source} has no {task_type} task: parameter server training needs at least one "
                f"worker and one ps, got {_show(checked)}."
            )
    if len(checked.get("chief", ())) > 1:
        raise ValueError(f'{source}["chief"] must name one task, got {_show(checked["chief"])}.')
    _check_all_differ(checked, source)
    return checked


def _check_all_differ(cluster: dict[str, list[str]], source: str) -> None:
    """Raises a ValueError if two tasks have one address."""
    seen: dict[str, str] = {}
    for task_type, addresses in cluster.items():
        for i, address in enumerate(addresses):
            where = f"{task_type}[{i}]"
            if address in seen:
                raise ValueError(
                    f"{source}: {seen[address]} and {where} have the same address {address!r}."
                )
            seen[address] = where


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _is_address(value: object) -> bool:
    if not isinstance(value, str):
        return False
    host, _, port = value.removeprefix("grpc://").rpartition(":")
    return bool(host) and port.isdigit() and 0 < int(port) < 65536


def _show(value: object) -> str:
    try:
        return json.dumps(value)
    except TypeError:
        return repr(value)


def gpu_of(task: TaskConfig, num_gpus: int) -> int | None:
    """Which GPU a worker task uses.

    The workers of a host take its GPUs in turn, in the order of the cluster's addresses.

    Args:
      task: a worker.
      num_gpus: how many its process sees: all of the host, or those of CUDA_VISIBLE_DEVICES.

    Returns:
      From 0 to num_gpus - 1; None where there is none.
    """
    return task.rank_on_host % num_gpus if num_gpus else None


def show_one(task: TaskConfig, config: tf.compat.v1.ConfigProto) -> str:
    """Has the server of a worker see the GPU of `gpu_of`, and no other.

    Args:
      task: the worker.
      config: of its server, which is changed.

    Returns:
      Which it is, for a message; empty where there is none.
    """
    num_gpus = len(tf.config.list_physical_devices("GPU"))
    gpu = gpu_of(task, num_gpus)
    if gpu is None:
        return ""
    config.gpu_options.visible_device_list = str(gpu)
    # Several workers may have one GPU, and a coordinator beside them.
    config.gpu_options.allow_growth = True
    unused = num_gpus - task.num_tasks_on_host
    rest = f"; no worker uses {unused} of them: list as many workers of this host"
    return f"GPU {gpu} of {num_gpus}{rest if unused > 0 else ''}"


def leave_memory_to_workers() -> None:
    """Has this process take memory of GPUs as it needs it: workers may share them."""
    # Where TensorFlow has begun to use them, or memory was set otherwise, that is left as it is.
    with contextlib.suppress(RuntimeError, ValueError):
        for gpu in tf.config.list_physical_devices("GPU"):
            tf.config.experimental.set_memory_growth(gpu, True)

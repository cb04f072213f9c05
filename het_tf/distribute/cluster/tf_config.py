"""Parser and checks of the TF_CONFIG environment variable, and settings of gRPC and GPUs.

TF_CONFIG tells every task of a TensorFlow cluster the addresses of all tasks::

    {"cluster": {"worker": ["a:2222", "b:2222"], "ps": ["c:2222"], "chief": ["d:2222"]},
     "task": {"type": "worker", "index": 1}}

Without these checks, a mistake in TF_CONFIG shows up late and elsewhere, such as in a server that
hangs or a KeyError inside TensorFlow. The errors here name the malformed part.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from collections.abc import Mapping, Sequence

import tensorflow as tf

from het_tf.distribute.failures.probes import PROBE_TIMEOUT

# Pings detect a host that vanished or a process that hangs, which neither answers nor closes a
# connection. gRPC sends a ping when a running call has had no answer for the keepalive time. If the
# ping stays unanswered, the connection is lost. TensorFlow's gRPC server closes a connection with
# more than one ping in 5 minutes during which the server sends nothing, as during a long step.
# Pings are therefore slow. The probes of distribute/failures detect failures sooner. (The kernel of
# a live host refuses connections to a killed process at once.)
_KEEPALIVE_TIME_MS = 310_000
_KEEPALIVE_TIMEOUT_MS = 20_000

# Time limit of one attempt to connect, which is the other meaning of gRPC's
# `min_reconnect_backoff_ms`. The kernel accepts a connection for a process that hangs, so only this
# limit ends the attempt and everything that waits for it. TensorFlow may hold Python's lock
# meanwhile. The limit is that of a probe, which needs the same answer.
_CONNECT_TIMEOUT_MS = round(1000 * PROBE_TIMEOUT)

_SETTINGS = {
    # The caller decides whether a call fails at once when the peer is down. TensorFlow's default is
    # to wait forever. https://www.tensorflow.org/tutorials/distribute/parameter_server_training
    "GRPC_FAIL_FAST": "use_caller",
    "TF_GRPC_DEFAULT_OPTIONS": (
        f"grpc.keepalive_time_ms={_KEEPALIVE_TIME_MS},"
        f"grpc.keepalive_timeout_ms={_KEEPALIVE_TIMEOUT_MS},"
        f"grpc.min_reconnect_backoff_ms={_CONNECT_TIMEOUT_MS}"
    ),
    # gRPC would use the proxy of http_proxy or https_proxy for every task, even on localhost.
    "grpc_proxy": "",
}


def set_grpc_defaults() -> None:
    """Sets the gRPC variables in `os.environ` that are not set yet."""
    for name, value in _SETTINGS.items():
        os.environ.setdefault(name, value)


TASK_TYPES = ("chief", "worker", "ps", "evaluator")


@dataclasses.dataclass(frozen=True)
class TaskConfig:
    """The checked contents of TF_CONFIG.

    Attributes:
      cluster: addresses ("host:port") by task type, in task order.
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
        """Number of tasks of this type on this task's host, including this task."""
        return self._hosts.count(self._hosts[self.task_index])

    @property
    def rank_on_host(self) -> int:
        """Number of tasks of this type on this task's host with a smaller index."""
        return self._hosts[: self.task_index].count(self._hosts[self.task_index])

    @property
    def _hosts(self) -> list[str]:
        return [address.rpartition(":")[0] for address in self.cluster[self.task_type]]


def read_tf_config(text: str | None = None) -> TaskConfig:
    """Parses and checks TF_CONFIG.

    Args:
      text: JSON text. None: the environment variable TF_CONFIG.

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


def read_chief_config() -> TaskConfig:
    """Parses and checks the TF_CONFIG of the training program, which is the chief.

    Raises:
      ValueError: TF_CONFIG is missing or malformed, or names another task.
    """
    task = read_tf_config()
    if task.task_type != "chief":
        raise ValueError(
            f'TF_CONFIG["task"]["type"] is "{task.task_type}", but the training program is the '
            "chief. Worker and ps tasks run `python -m het_tf.server`."
        )
    return task


def check_cluster(cluster: object, source: str = "cluster spec") -> dict[str, list[str]]:
    """Checks that `cluster` can be used for parameter server training.

    Args:
      cluster: list of addresses by task type. In sparse specs, address by task index.
      source: name of the spec in error messages.

    Returns:
      The cluster as a plain dict of lists.

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
    """Returns the index of the GPU that a worker task uses.

    The workers of a host use its GPUs in turn, in the order of the cluster's addresses.

    Args:
      task: a worker.
      num_gpus: number of GPUs that the worker's process sees: those of the host, or those of
        CUDA_VISIBLE_DEVICES.

    Returns:
      Index from 0 to num_gpus - 1, or None if there is no GPU.
    """
    return task.rank_on_host % num_gpus if num_gpus else None


def show_one(task: TaskConfig, config: tf.compat.v1.ConfigProto) -> str:
    """Limits the server of a worker to the GPU of `gpu_of`.

    Args:
      task: a worker.
      config: config of the worker's server. This function changes it.

    Returns:
      Description of the GPU for a message. Empty if there is none.
    """
    num_gpus = len(tf.config.list_physical_devices("GPU"))
    gpu = gpu_of(task, num_gpus)
    if gpu is None:
        return ""
    config.gpu_options.visible_device_list = str(gpu)
    # Several workers and a coordinator may share a GPU.
    config.gpu_options.allow_growth = True
    unused = num_gpus - task.num_tasks_on_host
    rest = f"; no worker uses {unused} of them: list as many workers of this host"
    return f"GPU {gpu} of {num_gpus}{rest if unused > 0 else ''}"


def leave_memory_to_workers() -> None:
    """Makes this process allocate GPU memory on demand, because workers may share the GPUs."""
    # TensorFlow raises an error if it already uses the GPUs, or if their memory is limited. The
    # setting then stays.
    with contextlib.suppress(RuntimeError, ValueError):
        for gpu in tf.config.list_physical_devices("GPU"):
            tf.config.experimental.set_memory_growth(gpu, True)

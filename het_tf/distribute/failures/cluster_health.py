"""Detection of tasks that are down, and errors that name them."""

from __future__ import annotations

import concurrent.futures
from collections.abc import Callable, Mapping
from typing import Any

import tensorflow as tf
from absl import logging

from het_tf.compat.errors import Cause, cause_of, names_job, node_named, tasks_named
from het_tf.distribute.failures import probes
from het_tf.distribute.failures.connection import lookup_table_error
from het_tf.runtime.broadcast import CHECK_INTERVAL
from het_tf.runtime.threads import call_apart

_POLL = 1.0  # seconds between health checks of the parameter servers


class ServerLostError(tf.errors.UnavailableError):
    """A parameter server is down, or was restarted and has lost its variables and tables.

    Attributes:
      what: description of the server and its failure.
      remedy: advice that follows `what` in the message.
      notice: text of the error that revealed the failure.
    """

    # TensorFlow calls savers through AutoGraph, which would replace this error by another one.
    ag_pass_through = True

    def __init__(self, what: str, remedy: str, notice: str = ""):
        """Creates the error. Its message consists of the three texts."""
        super().__init__(None, None, what + remedy + (f" ({notice})" if notice else ""))
        self.what, self.remedy, self.notice = what, remedy, notice


class ClusterHealth:
    """The health of a cluster's tasks, of which a strategy has one.

    Attributes:
      addresses: of the worker and ps tasks.
      monitor: probes all tasks between its `start` and `stop`.
      lost_after: seconds for which a task must leave every probe unanswered until it is lost.
      on_poll: called about once in a second while this process waits for closures.
    """

    def __init__(
        self,
        addresses: Mapping[probes.Task, str],
        describe_log: Callable[[str, int], str],
        lost_after: float,
        on_worker_lost: Callable[[int], None],
    ):
        """Knows the tasks; probes none yet.

        Args:
          addresses: of the worker and ps tasks.
          describe_log: says of a task where its log is, with its last lines; empty: unknown.
          lost_after: seconds, as of the strategy.
          on_worker_lost: called with the index of a worker that is lost.
        """
        self.addresses = addresses
        self.lost_after = lost_after
        self.on_poll: Callable[[], None] = lambda: None
        self._describe_log = describe_log
        self._on_worker_lost = on_worker_lost
        self.monitor = probes.HealthMonitor(addresses, self._task_down, lost_after)

    def is_down(self, device: str) -> bool:
        """Whether the task of a device does not answer now. False for this process."""
        spec = tf.DeviceSpec.from_string(device)
        task = (spec.job, spec.task)
        return task in self.addresses and self._probe(task) is not probes.TaskState.UP

    def call_watched(self, fn: Callable[[], Any]) -> Any:
        """Calls `fn` in a thread while it watches the parameter servers. Returns `fn`'s result.

        If a parameter server is lost, this function raises without waiting for `fn`, because `fn`
        may never end.

        Raises:
          tf.errors.UnavailableError: a parameter server is down or was lost during the call.
          Exception: the error of `fn`.
        """
        with self.monitor:
            waiting = call_apart(fn)
            while True:
                try:
                    return waiting.result(timeout=_POLL)
                except concurrent.futures.TimeoutError:
                    self.poll()
                except Exception as error:
                    raise self.explain(error) from error

    def poll(self) -> None:
        """Raises as `raise_if_ps_lost`, then calls `on_poll`. For loops that wait for closures."""
        self.raise_if_ps_lost()
        self.on_poll()

    def down_workers(self) -> set[int]:
        """Returns workers that refuse connections or are lost. Only while `monitor` is started.

        A silent worker may be busy until it counts as lost.
        """
        failing = self.monitor.failing()
        refused = {t for t, state in failing.items() if state is probes.TaskState.REFUSED}
        down = refused | set(self.monitor.lost("worker"))
        return {i for task_type, i in down if task_type == "worker"}

    def raise_if_ps_lost(self) -> None:
        """Raises an error if a parameter server is lost. Works only while `monitor` is started.

        Raises:
          tf.errors.UnavailableError: a parameter server has answered no probe for `lost_after`
            seconds. The message names it.
        """
        for task, state in self.monitor.lost("ps").items():
            raise ServerLostError(*self._ps_lost_message(task, state))

    def explain(self, error: BaseException) -> BaseException:
        """Returns an error that names the parameter server that is down, or `error` itself.

        Args:
          error: error of a closure, of `run_on_worker` or of the coordinator.

        Returns:
          A `tf.errors.UnavailableError` with the task and its address. If no parameter server is
          down, `error` itself.
        """
        # The coordinator wraps errors of creating the dataset of a closure.
        error = getattr(error, "original_exception", error)
        if not isinstance(error, tf.errors.OpError) or isinstance(error, ServerLostError):
            return error
        cause = cause_of(error)
        if cause is Cause.LOST_LOOKUP_TABLE:
            return lookup_table_error(f"The step ({node_named(error)})")
        # The server is alive, but it may fail a probe for lack of memory.
        if isinstance(error, tf.errors.ResourceExhaustedError):
            return error
        named = {task for task in tasks_named(error) & set(self.addresses) if task[0] == "ps"}
        is_transport = cause in (Cause.TRANSPORT, Cause.TRANSPORT_OF_OP)
        if not named and not is_transport:
            return error
        suspects = sorted(named) or [task for task in self.addresses if task[0] == "ps"]
        for task in suspects:
            state = self._probe(task)
            if state is not probes.TaskState.UP:
                return ServerLostError(*self._ps_lost_message(task, state), str(error))
        if named and (is_transport or cause is Cause.STALE_HANDLE):
            # The server answers, so it was restarted without its variables and tables.
            return ServerLostError(*self._ps_lost_message(sorted(named)[0], None), str(error))
        return error

    def _probe(self, task: probes.Task) -> probes.TaskState:
        """Probes a task. A task that answers within the time until it would be lost is up."""
        # A lost task has already had this time.
        lost = self.monitor.lost(task[0]).get(task)
        return lost or probes.probe(self.addresses[task], self.monitor.seconds_left(task))

    def _ps_lost_message(
        self, task: probes.Task, state: probes.TaskState | None
    ) -> tuple[str, str]:
        """Returns a description of the failure, and the remedy."""
        named = f"Parameter server /job:ps/task:{task[1]} at {self.addresses[task]}"
        what = "was restarted or unreachable" if state is None else state.value
        log = self._describe_log(*task)
        log = log and f" {log}"
        if state is probes.TaskState.SILENT:
            what += (
                f" (for {self.lost_after:g} s, the `lost_after` of the strategy). End it if it "
                "still runs"
            )
            return (
                f"{named} {what}",
                ", restart it and the training program, and resume from the last checkpoint, or"
                f" wait longer.{log}",
            )
        return (
            f"{named} {what}",
            ". The variables and tables it held are gone: restart it and the training program, and"
            f" resume from the last checkpoint.{log}",
        )

    def _task_down(self, task: probes.Task, state: probes.TaskState) -> None:
        logging.warning("%s %d at %s %s", *task, self.addresses[task], state.value)
        if task[0] == "worker" and state is probes.TaskState.REFUSED:
            self._on_worker_lost(task[1])

    def is_lost(self, device: str, error: tf.errors.OpError | None) -> bool | None:
        """Whether a flush skips `device`: the argument `is_lost` of `visit`."""
        if error is None:
            self.raise_if_ps_down()
        elif (explained := self.explain(error)) is not error:
            raise explained from error
        spec = tf.DeviceSpec.from_string(device)
        if spec.job != "worker":
            return False
        index = spec.task
        address = self.addresses["worker", index]
        state = self._probe(("worker", index))
        if state is probes.TaskState.UP:
            if error is None or not _is_stale_worker_error(error):
                return False
            # The end of one worker may fail a call on another worker.
            if runs_ops(device):
                return None
        what = "was restarted" if state is probes.TaskState.UP else state.value
        logging.warning("not flushed: worker %d at %s %s", index, address, what)
        self._on_worker_lost(index)
        return True

    def raise_if_ps_down(self) -> None:
        """Raises a `ServerLostError` if a parameter server does not answer a probe."""
        for task in self.addresses:
            if task[0] == "ps" and (state := self._probe(task)) is not probes.TaskState.UP:
                raise ServerLostError(*self._ps_lost_message(task, state))


def runs_ops(device: str, timeout: float = CHECK_INTERVAL) -> bool:
    """Whether a device runs ops: its task is still the process to which this one connected."""

    def run() -> None:
        with tf.device(device):
            tf.zeros([]).numpy()

    try:
        call_apart(run).result(timeout=timeout)
    except (tf.errors.OpError, concurrent.futures.TimeoutError):
        return False
    return True


def _is_stale_worker_error(error: tf.errors.OpError) -> bool:
    """Whether an error shows that a worker is a new process at its old address."""
    return isinstance(
        error,
        (
            tf.errors.UnavailableError,
            tf.errors.AbortedError,
            tf.errors.CancelledError,
            tf.errors.InvalidArgumentError,
            tf.errors.NotFoundError,
        ),
    ) and names_job(error, "worker")

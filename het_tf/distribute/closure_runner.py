"""Execution of closures on the workers, with a bounded number of closures in flight."""

from __future__ import annotations

import concurrent.futures
import contextlib
import gc
import queue
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import tensorflow as tf

from het_tf.compat.errors import Cause, cause_of, names_job
from het_tf.runtime.threads import call_in_daemon

if TYPE_CHECKING:
    from het_tf.distribute.strategy import HetParameterServerStrategy
import sys
from collections.abc import Iterable


class ClosureNumbers:
    """Source of numbers of closures. Thread-safe."""

    def __init__(self) -> None:
        """Starts with number 1."""
        self._lock = threading.Lock()
        self._last = 0
        self._open: set[int] = set()

    def take(self) -> tuple[int, int]:
        """Returns the number of a new closure, and the number up to which closures are finished."""
        with self._lock:
            self._last += 1
            self._open.add(self._last)
            return self._last, min(self._open) - 1

    def finish(self, numbers: Iterable[int]) -> None:
        """Marks closures as finished: their results have arrived, or are not needed any more."""
        with self._lock:
            self._open.difference_update(numbers)


class Coordinator(tf.distribute.coordinator.ClusterCoordinator):
    """TensorFlow's `ClusterCoordinator`, whose deletion does not wait for lost workers."""

    def __del__(self) -> None:
        """Ends the coordinator's threads in the background. A thread may wait for a lost worker."""
        # While the interpreter exits, the threads have ended, and no thread can be started.
        if not sys.is_finalizing():
            call_in_daemon(super().__del__)


_POLL = 1.0  # seconds between health checks of the parameter servers
_REFETCH_INTERVAL = 0.1  # seconds


class ClosureRunner:
    """Schedules closures and returns their results in the order in which they finish.

    `ClusterCoordinator` assigns every closure to the next free worker, and to another worker if
    this worker dies. It can wait for one closure or for all closures, but not for the first that
    finishes. Every closure in flight therefore has a thread that waits for it. A result is returned
    exactly once, even if the closure ran several times.

    Use a runner from one thread:

        with ClosureRunner(strategy) as runner:
            while ...:
                if runner.has_room: runner.schedule(fn, args, tag)
                else: tag, result = runner.wait()
    """

    def __init__(
        self,
        strategy: HetParameterServerStrategy,
        max_in_flight: int | None = None,
        numbered: bool = False,
    ):
        """Creates a runner.

        Args:
          strategy: strategy whose workers run the closures.
          max_in_flight: largest number of closures that are scheduled and not yet returned. None:
            twice the number of workers, so that every worker has its next closure ready.
          numbered: whether closures get the results of `ClosureNumbers.take` as two more arguments.
        """
        self._strategy = strategy
        self._max_in_flight = max_in_flight or 2 * strategy.num_workers
        self._in_flight = 0
        self._numbered = numbered
        self._numbers: dict[int, int] = {}  # Numbers of closures in flight, by `id(tag)`.
        self._scheduling: concurrent.futures.Future[None] | None = None  # The last `schedule`.
        self._finished: queue.SimpleQueue[tuple[Any, Any, Exception | None]] = queue.SimpleQueue()
        self._abandoned = threading.Event()

    def __enter__(self) -> ClosureRunner:
        self._strategy.health.monitor.start()
        return self

    def __exit__(self, exc_type: object, error: BaseException | None, traceback: object) -> None:
        """Waits for all closures on the coordinator and drops their results.

        An error in the `with` block propagates. A `tf.errors.CancelledError` is replaced by the
        error of a closure, because TensorFlow also cancels the ops of this thread when a closure
        fails.

        Raises:
          Exception: the error of a closure that other code scheduled, if the block had no error.
        """
        drained = self._abandoned.is_set()
        self._abandoned.set()
        try:
            first = None if drained else self._drain()
        finally:
            self._strategy.health.monitor.stop()
            self._strategy.closure_numbers.finish(self._numbers.values())
        if first is None:
            return
        if isinstance(error, tf.errors.CancelledError) or (error is None and not self._in_flight):
            raise first from error

    @property
    def in_flight(self) -> int:
        """Number of closures that are scheduled and not yet returned."""
        return self._in_flight

    @property
    def has_room(self) -> bool:
        """Whether another closure can be scheduled."""
        return self._in_flight < self._max_in_flight

    def schedule(self, fn: tf.types.experimental.PolymorphicFunction, args: Any, tag: Any) -> None:
        """Schedules `fn(*args)` on any worker. `wait` returns `tag` with the result.

        After this call, `HetParameterServerStrategy.join` waits for the closure.

        Raises:
          tf.errors.UnavailableError: a parameter server is down. The message names it.
        """
        self._in_flight += 1
        if self._numbered:
            number, done = self._strategy.closure_numbers.take()
            self._numbers[id(tag)] = number
            args = (*args, tf.constant(number, tf.int64), tf.constant(done, tf.int64))
        self._scheduling = concurrent.futures.Future()
        call_in_daemon(self._run, fn, args, tag, self._scheduling)
        self._wait_for(self._scheduling.result)

    def wait(self) -> tuple[Any, Any]:
        """Waits until a closure has finished.

        Returns:
          The closure's tag, and its result as NumPy arrays.

        Raises:
          tf.errors.UnavailableError: a parameter server is down. The message names it.
          Exception: the error of the closure. The remaining closures are then cancelled.
        """
        tag, result, error = self._wait_for(self._finished.get)
        self._in_flight -= 1
        if error is not None:
            self._raise(error)
        if self._numbered:
            self._strategy.closure_numbers.finish([self._numbers.pop(id(tag))])
        return tag, result

    def _wait_for(self, get: Callable[..., Any]) -> Any:
        """Waits for `get(timeout=seconds)` and returns its result. Raises if a server is lost."""
        while True:
            try:
                return get(timeout=_POLL)
            except (queue.Empty, concurrent.futures.TimeoutError):
                try:
                    self._strategy.health.poll()
                except tf.errors.UnavailableError:
                    self._abandoned.set()  # The closures in flight may never end.
                    raise

    def _raise(self, error: Exception) -> None:
        """Waits for the other closures and raises `error`, or a clearer error."""
        self._abandoned.set()
        explained = self._strategy.explain(error)
        first = self._drain()
        # The error of a cancelled closure may arrive before the error of the closure that failed.
        if first is not None and isinstance(error, tf.errors.CancelledError):
            explained = first
        if explained is error:
            raise error
        raise explained from error

    def _drain(self) -> BaseException | None:
        """Waits until no closure is in flight, or a parameter server is lost.

        After a failure, the coordinator cancels its other closures.

        Returns:
          The error of the closure that failed, or the error about the lost parameter server. None
          if all closures succeeded.
        """
        try:
            if self._scheduling is not None:  # An interrupt may have ended the wait in `schedule`.
                self._wait_for(self._scheduling.result)
            self._strategy.join()
        except Exception as error:
            return error
        # The coordinator raises an error only once. `schedule` may have raised it before `join`.
        while True:
            try:
                *_, failure = self._finished.get_nowait()
            except queue.Empty:
                return None
            if failure is not None and not isinstance(failure, tf.errors.CancelledError):
                return self._strategy.explain(failure)

    def _run(
        self, fn: Any, args: Any, tag: Any, scheduled: concurrent.futures.Future[None]
    ) -> None:
        # Runs in a thread. After a failure, scheduling waits for all closures in flight. This takes
        # minutes if they wait for a parameter server that hangs.
        try:
            remote = self._schedule(fn, args)
        except Exception as error:
            self._finished.put((tag, None, error))
            scheduled.set_result(None)
        else:
            scheduled.set_result(None)
            self._fetch(remote, tag)

    def _schedule(self, fn: Any, args: Any) -> tf.distribute.coordinator.RemoteValue:
        traces = _num_traces(fn)
        with _old_objects_passed_over() if traces == 0 else contextlib.nullcontext():
            remote = self._strategy.coordinator.schedule(fn, args=args)
            if _num_traces(fn) != traces:
                # Tracing leaves unused functions. When Python collects one, TensorFlow removes it
                # from all servers and holds the interpreter's lock meanwhile. If a server hangs
                # then, no thread of this process runs for a minute or more. The functions are
                # therefore collected now.
                gc.collect()
        return remote

    def _fetch(self, remote: tf.distribute.coordinator.RemoteValue, tag: Any) -> None:
        while True:
            try:
                result, error = remote.fetch(), None
            except Exception as raised:
                # The worker may die between the end of the closure and the copy of the result. The
                # coordinator then runs the closure again, under the same remote value.
                if _is_worker_lost(raised) and not self._abandoned.wait(_REFETCH_INTERVAL):
                    continue
                result, error = None, raised
            self._finished.put((tag, result, error))
            return


def _num_traces(fn: Any) -> int | None:
    """Returns the number of traces of a `tf.function`, or None for a Python function."""
    count = getattr(fn, "experimental_get_tracing_count", None)
    return count() if count else None


@contextlib.contextmanager
def _old_objects_passed_over() -> Iterator[None]:
    """Limits garbage collections in this context to objects that are created in it.

    A collection of all objects of TensorFlow and Keras takes half a second.
    """
    if gc.get_freeze_count():  # Other code has frozen objects, and `unfreeze` would undo it.
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _is_worker_lost(error: Exception) -> bool:
    # STALE_HANDLE: a new process at the worker's address does not have the result.
    is_lost = cause_of(error) in (Cause.TRANSPORT, Cause.STALE_HANDLE)
    return is_lost and names_job(error, "worker") and not names_job(error, "ps")

"""Running closures on the workers with a bounded number of them under way."""

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
    """Gives numbers to closures. Thread safe."""

    def __init__(self) -> None:
        """The first number is 1."""
        self._lock = threading.Lock()
        self._last = 0
        self._open: set[int] = set()

    def take(self) -> tuple[int, int]:
        """A number for a closure that is about to be scheduled, and what is done."""
        with self._lock:
            self._last += 1
            self._open.add(self._last)
            return self._last, min(self._open) - 1

    def finish(self, numbers: Iterable[int]) -> None:
        """Closures have ended, and their results are here; or nobody wants them."""
        with self._lock:
            self._open.difference_update(numbers)


class Coordinator(tf.distribute.coordinator.ClusterCoordinator):
    """TensorFlow's, but its end waits for no worker that is gone, nor does the program's."""

    def __del__(self) -> None:
        """Ends its threads; one of them may be waiting for such a worker."""
        if not sys.is_finalizing():  # Then they have ended, and no other can begin.
            call_in_daemon(super().__del__)


_POLL = 1.0  # seconds between looks at the health of the parameter servers
_REFETCH_INTERVAL = 0.1  # seconds


class ClosureRunner:
    """Schedules closures and hands back their results in the order in which they finish.

    `ClusterCoordinator` gives each closure to the next free worker, and again to another one if
    that worker dies. It can wait for one closure or for all of them, but not for whichever ends
    first, so every closure under way has a thread that waits for it. A result is handed back
    exactly once, however often the closure was run.

    Used from one thread:

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
          strategy: where to run.
          max_in_flight: closures scheduled but not handed back; twice the number of workers when
            None, so that a worker has its next closure ready when it ends one.
          numbered: closures get two more arguments, of `ClosureNumbers.take`.
        """
        self._strategy = strategy
        self._max_in_flight = max_in_flight or 2 * strategy.num_workers
        self._in_flight = 0
        self._numbered = numbered
        self._numbers: dict[int, int] = {}  # Of closures in flight, by id of their tag.
        self._scheduling: concurrent.futures.Future[None] | None = None  # The last one.
        self._finished: queue.SimpleQueue[tuple[Any, Any, Exception | None]] = queue.SimpleQueue()
        self._abandoned = threading.Event()

    def __enter__(self) -> ClosureRunner:
        self._strategy.health.start()
        return self

    def __exit__(self, exc_type: object, error: BaseException | None, traceback: object) -> None:
        """Schedules no more, and waits for every closure under way on the coordinator.

        Their results are dropped. An error in the `with` block is raised on, except that a
        `tf.errors.CancelledError` gives way to the error of a closure: when a closure fails,
        TensorFlow cancels what this thread is doing, too.

        Raises:
          Exception: what a closure raised that somebody else scheduled, if the block had no error.
        """
        drained = self._abandoned.is_set()
        self._abandoned.set()
        try:
            first = None if drained else self._drain()
        finally:
            self._strategy.health.stop()
            self._strategy.closure_numbers.finish(self._numbers.values())
        if first is None:
            return
        if isinstance(error, tf.errors.CancelledError) or (error is None and not self._in_flight):
            raise first from error

    @property
    def in_flight(self) -> int:
        """Closures scheduled and not handed back yet."""
        return self._in_flight

    @property
    def has_room(self) -> bool:
        """Whether another closure may be scheduled."""
        return self._in_flight < self._max_in_flight

    def schedule(self, fn: tf.types.experimental.PolymorphicFunction, args: Any, tag: Any) -> None:
        """Schedules `fn(*args)` on any worker; `wait` returns `tag` with its result.

        When this returns the coordinator has it, so that `HetParameterServerStrategy.join` waits
        for it.

        Raises:
          tf.errors.UnavailableError: a parameter server is down; the message names it.
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
        """Blocks until some closure has finished.

        Returns:
          Its tag, and its result as NumPy arrays.

        Raises:
          tf.errors.UnavailableError: a parameter server is down; the message names it.
          Exception: what the closure raised. The remaining closures are then cancelled.
        """
        tag, result, error = self._wait_for(self._finished.get)
        self._in_flight -= 1
        if error is not None:
            self._raise(error)
        if self._numbered:
            self._strategy.closure_numbers.finish([self._numbers.pop(id(tag))])
        return tag, result

    def _wait_for(self, get: Callable[..., Any]) -> Any:
        """What `get(timeout=seconds)` returns once it does, unless a parameter server is lost."""
        while True:
            try:
                return get(timeout=_POLL)
            except (queue.Empty, concurrent.futures.TimeoutError):
                try:
                    self._strategy.raise_if_ps_lost()
                except tf.errors.UnavailableError:
                    self._abandoned.set()  # The closures under way may never end.
                    raise

    def _raise(self, error: Exception) -> None:
        """Ends the other closures and raises what is to be said about `error`."""
        self._abandoned.set()
        explained = self._strategy.explain(error)
        first = self._drain()
        # A cancelled closure's result may be seen before that of the one which failed.
        if first is not None and isinstance(error, tf.errors.CancelledError):
            explained = first
        if explained is error:
            raise error
        raise explained from error

    def _drain(self) -> Exception | None:
        """Waits until no closure is under way, or a parameter server is lost.

        The coordinator cancels its other closures once one has failed.

        Returns:
          What that closure raised, or that a parameter server is lost.
        """
        try:
            if self._scheduling is not None:  # An interrupt may have ended the wait for it.
                self._wait_for(self._scheduling.result)
            self._strategy.join()
        except Exception as error:
            return error
        # The coordinator raises an error only once. `join` did not, so `schedule` may have.
        while True:
            try:
                *_, error = self._finished.get_nowait()
            except queue.Empty:
                return None
            if error is not None and not isinstance(error, tf.errors.CancelledError):
                return self._strategy.explain(error)

    def _run(
        self, fn: Any, args: Any, tag: Any, scheduled: concurrent.futures.Future[None]
    ) -> None:
        # In a thread since scheduling waits for all closures under way once one has failed, which
        # takes minutes where they wait for a parameter server that hangs.
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
                # Tracing leaves functions that nothing uses. TensorFlow removes one from all
                # servers when Python collects it, and holds the interpreter's lock meanwhile:
                # beside a server that hangs, nothing here would run for a minute or more. So they
                # go now.
                gc.collect()
        return remote

    def _fetch(self, remote: tf.distribute.coordinator.RemoteValue, tag: Any) -> None:
        while True:
            try:
                result, error = remote.fetch(), None
            except Exception as raised:
                # The worker may die after it ran the closure and before the result is copied here.
                # The coordinator then runs the closure again, under the same remote value.
                if _is_worker_lost(raised) and not self._abandoned.wait(_REFETCH_INTERVAL):
                    continue
                result, error = None, raised
            self._finished.put((tag, result, error))
            return


def _num_traces(fn: Any) -> int | None:
    """How often a `tf.function` was traced; None for a Python function."""
    count = getattr(fn, "experimental_get_tracing_count", None)
    return count() if count else None


@contextlib.contextmanager
def _old_objects_passed_over() -> Iterator[None]:
    """Within it, a garbage collection looks at objects made within it alone.

    Those that were there before are all of TensorFlow's and Keras's: half a second a collection.
    """
    if gc.get_freeze_count():  # somebody else's, who would miss it
        yield
        return
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def _is_worker_lost(error: Exception) -> bool:
    # A stale handle: a new process at the worker's address does not have the result.
    is_lost = cause_of(error) in (Cause.TRANSPORT, Cause.STALE_HANDLE)
    return is_lost and names_job(error, "worker") and not names_job(error, "ps")

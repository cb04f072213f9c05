"""Feeds: sources of the batches of closures.

The coordinator reads a `StreamFeed` and sends the batches with the closures. Every batch is used
once, even if a worker dies, and results can be put in order. A `WorkerFeed` has one dataset per
worker, which the worker reads: no batch passes through the coordinator.
"""

from __future__ import annotations

import abc
import dataclasses
import functools
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from het_tf import ops
from het_tf.compat.errors import Cause, cause_of, node_named
from het_tf.compat.tensorflow_internals import use_own_executor
from het_tf.distribute import HetParameterServerStrategy
from het_tf.distribute.closure_runner import ClosureRunner
from het_tf.distribute.dense.replicas import DenseReplicas
from het_tf.distribute.failures.connection import lookup_table_error
from het_tf.distribute.step_rounds import StepRounds
from het_tf.keras.data import datasets
from het_tf.keras.data.arguments import FitArguments
from het_tf.keras.data.batch_structure import components_of, spec_of
from het_tf.keras.data.datasets import worker_dataset_fn
from het_tf.runtime.planned_batch import batch_spec

_IDLE_WAIT = 0.005  # seconds between empty closures while other workers finish their shares


@dataclasses.dataclass(frozen=True)
class Work:
    """Arguments of one closure.

    Attributes:
      index: number of the closure within its pass, counted from 0.
      args: arguments of `on_batches` or `on_iterator`.
      steps: number of steps that the closure should run.
    """

    index: int
    args: tuple[Any, ...]
    steps: int


class Pass(abc.ABC):
    """One pass over a feed: an epoch, or an evaluation.

    Attributes:
      name: name of the sequence of batches. A pass that continues the sequence has the same name.
      goes_on: whether another pass may continue the sequence.
      has_begun: whether a step was made. The caller that runs the closures sets this attribute.
    """

    def __init__(self, name: str | None = None) -> None:
        self.name = name or uuid.uuid4().hex
        self.goes_on = name is not None
        self.has_begun = False

    @abc.abstractmethod
    def next_work(self, in_flight: int) -> Work | None:
        """Returns the next closure's work. None: no work, or none until other closures finish."""

    @abc.abstractmethod
    def next_round(self, members: int) -> list[Work]:
        """Returns the work of a round of synchronous steps, for at most so many members.

        Empty: the pass has ended. No closure is in flight.
        """

    @abc.abstractmethod
    def finished(self, work: Work, worker: int, steps: int) -> None:
        """Records the worker that ran the closure for `work`, and the number of its steps."""


class Feed(abc.ABC):
    """Batches for training or evaluation.

    Attributes:
      element_spec: spec of one batch.
      num_steps: batches per pass. None: not known yet.
      on_iterator: whether closures read the worker's iterator (`on_iterator`). Otherwise closures
        contain their batches (`on_batches`).
    """

    element_spec: Any
    num_steps: int | None
    on_iterator: bool

    @abc.abstractmethod
    def start(self, steps_per_closure: int, lookahead: int = 0) -> Pass:
        """Begins a pass.

        Args:
          steps_per_closure: largest number of steps of a closure.
          lookahead: number of batches that a closure may read for the next closure.
        """


class StreamFeed(Feed):
    """One dataset, which the coordinator reads."""

    on_iterator = False

    def __init__(self, dataset: tf.data.Dataset, steps: int | None = None, endless: bool = False):
        """Creates the feed.

        Args:
          dataset: batches.
          steps: batches per pass. None: all batches of the dataset.
          endless: whether a pass continues where the previous pass stopped, and the dataset
            repeats. Otherwise every pass reads the dataset from the start.

        Raises:
          ValueError: the dataset is infinite and `steps` is None.
        """
        cardinality = int(dataset.cardinality())
        if steps is None and cardinality == tf.data.INFINITE_CARDINALITY:
            raise ValueError(
                "The dataset is infinite: pass steps_per_epoch (fit), validation_steps "
                "(validation_data of fit) or steps (evaluate, predict)."
            )
        self.element_spec = spec_of(dataset)
        self.num_steps = steps if steps is not None else cardinality if cardinality >= 0 else None
        self._steps = steps
        self._dataset = dataset.prefetch(tf.data.AUTOTUNE)
        self._stream = _iterator(self._dataset.repeat()) if endless else None

    def start(self, steps_per_closure: int, lookahead: int = 0) -> Pass:
        """Begins a pass. This process reads its batches and sends them with the closures."""
        del lookahead  # A closure has no batches but those sent with it.
        use_own_executor()
        stream = self._stream if self._stream is not None else _iterator(self._dataset)
        return _StreamPass(stream, self._steps, steps_per_closure, self._set_length)

    def _set_length(self, length: int) -> None:
        if self.num_steps is None:
            self.num_steps = length


class _StreamPass(Pass):
    """Groups consecutive batches of equal shapes into closures."""

    def __init__(
        self,
        stream: Iterator[Any],
        steps: int | None,
        steps_per_closure: int,
        on_end: Callable[[int], None],
    ):
        super().__init__()
        self._stream = stream
        self._steps = steps
        self._steps_per_closure = steps_per_closure
        self._on_end = on_end
        self._taken = 0
        self._index = 0
        # A batch whose shape differs from the previous batch: the first of the next closure.
        self._held: list[tf.Tensor] | None = None
        self._held_step: list[list[tf.Tensor]] = []  # Batches of a step of the next round.

    def next_work(self, in_flight: int) -> Work | None:
        del in_flight
        group: list[list[tf.Tensor]] = []
        while len(group) < self._steps_per_closure:
            batch = self._next_batch()
            if batch is None:
                break
            if group and any(a.shape != b.shape for a, b in zip(group[0], batch, strict=True)):
                self._held = batch
                break
            group.append(batch)
        return self._work(group) if group else None

    def _work(self, group: list[list[tf.Tensor]]) -> Work:
        stacked = tuple(tf.stack(parts) for parts in zip(*group, strict=True))
        work = Work(self._index, stacked, len(group))
        self._index += 1
        return work

    def next_round(self, members: int) -> list[Work]:
        # All members make the same number of steps. The last batches may be for fewer members.
        steps: list[list[list[tf.Tensor]]] = []
        while len(steps) < self._steps_per_closure:
            step, self._held_step = self._held_step[:members], self._held_step[members:]
            while len(step) < members and (batch := self._next_batch()) is not None:
                step.append(batch)
            if not step:
                break
            fits = len(step) == members and all(
                a.shape == b.shape
                for before, batch in zip(steps[0] if steps else [], step, strict=False)
                for a, b in zip(before, batch, strict=True)
            )
            if steps and not fits:
                self._held_step = [*step, *self._held_step]
                break
            steps.append(step)
            if not fits:
                break
        return [self._work(list(group)) for group in zip(*steps, strict=True)]

    def finished(self, work: Work, worker: int, steps: int) -> None:
        del work, worker, steps  # A closure runs all batches sent with it.

    def _next_batch(self) -> list[tf.Tensor] | None:
        if self._held is not None:
            batch, self._held = self._held, None
            return batch
        if self._steps is not None and self._taken >= self._steps:
            return None
        try:
            batch = next(self._stream)
        except StopIteration:
            if self._steps is not None and self._taken < self._steps:
                logging.warning("the data ended after %d of %d steps", self._taken, self._steps)
                self._steps = self._taken
            else:
                self._on_end(self._taken)
            self._stream = iter(())
            return None
        except tf.errors.NotFoundError as error:
            if cause_of(error) is Cause.LOST_LOOKUP_TABLE:
                raise lookup_table_error(f"The data ({node_named(error)})") from error
            raise
        self._taken += 1
        return components_of(batch)


def release_without_wait(iterator: tf.data.Iterator) -> None:
    """Makes the release of an iterator return before the iterator is destroyed."""
    for resource in tf.nest.flatten(iterator, expand_composites=True):
        ops.destroy_later(resource)


def _iterator(dataset: tf.data.Dataset) -> tf.data.Iterator:
    iterator = iter(dataset)
    release_without_wait(iterator)
    return iterator


class WorkerFeed(Feed):
    """One dataset per worker. The worker builds and reads its dataset."""

    on_iterator = True

    def __init__(
        self,
        strategy: HetParameterServerStrategy,
        fn: Callable[..., tf.data.Dataset],
        steps: int | None = None,
        endless: bool = False,
    ):
        """Creates the datasets on the workers.

        Args:
          strategy: strategy of the workers.
          fn: makes a worker's dataset from a context. See `worker_dataset_fn`.
          steps: batches per pass, summed over the workers. The datasets repeat. None: a pass reads
            the dataset of every worker once, from start to end.
          endless: whether a pass continues where the previous pass stopped. Otherwise every pass
            reads from the start. Only with `steps`.
        """
        self._strategy = strategy
        self._steps = steps
        make = worker_dataset_fn(fn, strategy.num_workers, repeat=steps is not None)
        self._datasets = strategy.coordinator.create_per_worker_dataset(make)
        self.element_spec = batch_spec(spec_of(self._datasets))
        self.num_steps = steps
        self._iterator = iter(self._datasets) if endless else None
        self._name = uuid.uuid4().hex

    def start(self, steps_per_closure: int, lookahead: int = 0) -> Pass:
        """Begins a pass. The workers read its batches."""
        iterator = iter(self._datasets) if self._iterator is None else self._iterator
        # If passes continue, the next pass begins with the batches that a worker read ahead.
        name = None if self._iterator is None else self._name
        reading = _Reading(self._strategy, iterator, steps_per_closure, lookahead, name)
        if self._steps is None:
            return _SharesPass(reading, self._set_length)
        return _CountedPass(reading, self._steps)

    def _set_length(self, length: int) -> None:
        if self.num_steps is None:
            self.num_steps = length


@dataclasses.dataclass(frozen=True)
class _Reading:
    """Parameters of a pass over the datasets of the workers.

    Attributes:
      strategy: strategy of the workers.
      iterator: iterator over the datasets of the workers.
      per_closure: largest number of steps of a closure.
      lookahead: number of batches that a closure may read for the next closure.
      name: name of the batches, if the next pass continues with them, else None.
    """

    strategy: HetParameterServerStrategy
    iterator: Any
    per_closure: int
    lookahead: int
    name: str | None


class _WorkerPass(Pass):
    """Common part of the two passes over the datasets of the workers."""

    def __init__(self, reading: _Reading):
        super().__init__(reading.name)
        self._reading = reading
        self._index = 0
        self._ended: set[int] = set()  # Workers whose dataset has ended.

    def _work(self, steps: int) -> Work:
        lookahead = tf.constant(self._reading.lookahead)
        work = Work(self._index, (self._reading.iterator, tf.constant(steps), lookahead), steps)
        self._index += 1
        return work

    def _unfinished(self) -> set[int]:
        return set(range(self._reading.strategy.num_workers)) - self._ended


class _CountedPass(_WorkerPass):
    """A given number of steps. Any free worker runs the next closure."""

    def __init__(self, reading: _Reading, steps: int):
        super().__init__(reading)
        self._remaining = steps

    def next_work(self, in_flight: int) -> Work | None:
        del in_flight
        if self._remaining == 0:
            return None
        steps = min(self._reading.per_closure, self._remaining)
        self._remaining -= steps
        return self._work(steps)

    def next_round(self, members: int) -> list[Work]:
        members = min(members, self._remaining)
        if members == 0:
            return []
        each = min(self._reading.per_closure, self._remaining // members)
        self._remaining -= members * each
        return [self._work(each) for _ in range(members)]

    def finished(self, work: Work, worker: int, steps: int) -> None:
        self._remaining += work.steps - steps
        if steps < work.steps:  # A repeating dataset ends only if it is empty.
            self._ended.add(worker)
            if not self._unfinished() - self._reading.strategy.health.down_workers():
                raise ValueError("The datasets of all workers are empty.")
            time.sleep(_IDLE_WAIT)


class _SharesPass(_WorkerPass):
    """The datasets of all workers, each read to its end.

    The coordinator cannot choose the worker of a closure. Closures are therefore scheduled until
    every worker has reported the end of its dataset. On such a worker, a closure returns at once.
    """

    def __init__(self, reading: _Reading, on_end: Callable[[int], None]):
        super().__init__(reading)
        self._on_end = on_end
        self._steps = 0

    def next_work(self, in_flight: int) -> Work | None:
        unfinished = self._unfinished()
        if not unfinished:
            if in_flight == 0:
                self._on_end(self._steps)
            return None
        if self._ended:
            if unfinished <= self._reading.strategy.health.down_workers():
                logging.warning(
                    "worker(s) %s are down: the rest of their share of the data is not read",
                    sorted(unfinished),
                )
                self._ended |= unfinished
                return None
            if in_flight > len(unfinished):
                return None
        return self._work(self._reading.per_closure)

    def next_round(self, members: int) -> list[Work]:
        first = self.next_work(0)
        if first is None:
            return []
        return [first, *(self._work(self._reading.per_closure) for _ in range(1, members))]

    def finished(self, work: Work, worker: int, steps: int) -> None:
        self._steps += steps
        if steps < work.steps:
            self._ended.add(worker)
        if steps == 0:
            time.sleep(_IDLE_WAIT)


class Filler:
    """Schedules closures for the work of a pass while the runner has room."""

    def __init__(self, runner: ClosureRunner, data: Pass, fn: Any):
        """Stores the runner of the closures, the pass over the data, and the closures' function."""
        self._runner, self._data, self._fn = runner, data, fn

    def fill(self, stop: bool) -> None:
        """Schedules closures.

        With `stop`, schedules one closure at a time until a step was made, as Keras stops after a
        step.
        """
        runner, data = self._runner, self._data
        while runner.has_room and not (stop and (data.has_begun or runner.in_flight)):
            work = data.next_work(runner.in_flight)
            if work is None:
                return
            runner.schedule(self._fn, work.args, work)

    def finished(self, work: Work, worker: int, steps: int, refused: bool, plan_step: int) -> None:
        """Records that a closure has ended.

        Args:
          work: work of the closure.
          worker: worker that ran the closure.
          steps: number of its steps.
          refused: whether the worker may not make synchronous steps.
          plan_step: number of the next step of the worker's planned input. -1: there is no plan.
        """
        del refused, plan_step
        self._data.finished(work, worker, steps)


class SynchronousFiller(Filler):
    """Schedules the closures of rounds of synchronous steps, one round after the other."""

    def __init__(
        self,
        runner: ClosureRunner,
        data: Pass,
        fn: Any,
        rounds: StepRounds,
        replicas: DenseReplicas,
    ):
        """Stores the arguments. `replicas` count the steps that the workers make together."""
        super().__init__(runner, data, fn)
        self._rounds, self._replicas = rounds, replicas
        # Made by the closures of the round that have ended. -1: refused.
        self._steps: list[int] = []
        self._refused: list[Work] = []  # Of refused closures.
        self._plan_steps: dict[int, int] = {}  # The next one of each worker's plan.

    def fill(self, stop: bool) -> None:
        """Schedules the next round, if none runs. With `stop`, only if no step was made yet."""
        if self._runner.in_flight:
            return
        members = self._rounds.live_workers
        if self._steps:
            self._end_round(members)
        if stop and self._data.has_begun:
            return
        work, self._refused = self._refused[:members], self._refused[members:]
        if len(work) < members:
            work += self._data.next_round(members - len(work))
        if not work:
            return
        self._rounds.begin(len(work))
        turns = self._rounds.turns(self._replicas.steps_together, self._planned_step(members))
        try:
            for each, turn in zip(work, turns, strict=True):
                self._runner.schedule(self._fn, (*each.args, turn), each)
        except BaseException:
            self._rounds.abort()  # Those that were scheduled would wait for the others.
            raise

    def _planned_step(self, live_workers: int) -> int:
        """Step of the plan that all workers come to next. -1: there is none, or it differs."""
        steps = set(self._plan_steps.values())
        is_known = len(self._plan_steps) == live_workers
        return steps.pop() if is_known and len(steps) == 1 else -1

    def finished(self, work: Work, worker: int, steps: int, refused: bool, plan_step: int) -> None:
        """Records that a closure has ended."""
        self._plan_steps.pop(worker, None)
        if steps > 0:
            self._plan_steps[worker] = plan_step
        if refused:
            self._refused.append(work)
        else:
            self._data.finished(work, worker, steps)
        self._steps.append(-1 if refused else steps)

    def _end_round(self, live_workers: int) -> None:
        steps, self._steps = self._steps, []
        self._replicas.note_together(max(0, *steps))
        if min(steps) < max(steps) or len(steps) < live_workers:
            self._replicas.restart()  # Some workers lack steps, or have begun since.


def train_feed(
    strategy: HetParameterServerStrategy,
    x: Any,
    y: Any,
    sample_weight: Any,
    *,
    batch_size: int | None,
    shuffle: bool,
    steps: int | None,
    class_weight: Mapping[int, float] | None,
) -> Feed:
    """Returns the feed for `fit`. The arguments are those of `het_tf.keras.Model.fit`."""
    if class_weight is not None and sample_weight is not None:
        raise ValueError("class_weight and sample_weight cannot be given together.")

    def weighed(dataset: tf.data.Dataset) -> tf.data.Dataset:
        if class_weight is None:
            return dataset
        if batch_spec(dataset.element_spec) is not dataset.element_spec:
            raise ValueError(
                "class_weight cannot be given with hot_batches or location_aware(on_demand=True):"
                " give the dataset sample weights"
            )
        return datasets.weigh_classes(dataset, class_weight)

    if datasets.is_dataset_function(x):
        datasets.check_alone(y, sample_weight, batch_size, "a function")
        x = datasets.shares_or_dataset(x)
    if strategy.exactly_once and datasets.is_dataset_function(x):
        raise ValueError(
            "With exactly_once the batches of a closure must be the same whoever runs it, but a"
            " function of a tf.distribute.InputContext has every worker read its own: pass a"
            " dataset, or a function without arguments that returns one."
        )
    if datasets.is_dataset_function(x):
        return WorkerFeed(strategy, datasets.then(x, weighed), steps, endless=steps is not None)
    dataset = weighed(datasets.as_dataset(x, y, sample_weight, batch_size, shuffle, steps))
    if steps is None or not isinstance(x, tf.data.Dataset) or strategy.exactly_once:
        return StreamFeed(dataset, steps, endless=steps is not None)
    copy = datasets.as_copies(dataset)
    if copy is None:
        logging.info("the dataset needs this process, so its batches are sent from here")
        return StreamFeed(dataset, steps, endless=True)

    def share(context: tf.distribute.InputContext) -> tf.data.Dataset:
        return copy().repeat().shard(context.num_input_pipelines, context.input_pipeline_id)

    return WorkerFeed(strategy, share, steps, endless=True)


def eval_feed(
    strategy: HetParameterServerStrategy,
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    *,
    batch_size: int | None = None,
    steps: int | None = None,
) -> Feed:
    """Returns the feed for `evaluate`, with the arguments of `het_tf.keras.Model.evaluate`."""
    if datasets.is_dataset_function(x):
        datasets.check_alone(y, sample_weight, batch_size, "a function")
        x = datasets.shares_or_dataset(x)
    if datasets.is_dataset_function(x):
        return WorkerFeed(strategy, x, steps)
    return StreamFeed(datasets.as_dataset(x, y, sample_weight, batch_size, steps=steps), steps)


class Validation:
    """Validation data of `fit`, and the epochs after which `fit` validates.

    Attributes:
      had_batches: whether `fit` has validated. The trainer sets this attribute.
    """

    def __init__(self, strategy: HetParameterServerStrategy, given: FitArguments):
        """Stores arguments of `fit`. The first use of `feed` reads the data.

        Args:
          strategy: strategy of the workers.
          given: the arguments. `validation_data` is a function, a dataset, or arrays `(x, y)` or
            `(x, y, sample_weight)`. None: `fit` never validates.
        """
        self._strategy = strategy
        self._data = given.validation_data
        self._batch_size = given.validation_batch_size or given.batch_size
        self._steps = given.validation_steps
        self._freq = given.validation_freq
        self.had_batches = False

    @functools.cached_property
    def feed(self) -> Feed:
        """Feed of the validation data."""
        data = self._data
        if not isinstance(data, (tuple, list)):
            return eval_feed(self._strategy, data, steps=self._steps)
        x, y, sample_weight = keras.utils.unpack_x_y_sample_weight(tuple(data))
        return eval_feed(
            self._strategy, x, y, sample_weight, batch_size=self._batch_size, steps=self._steps
        )

    def is_due(self, epoch: int) -> bool:
        """Whether `fit` validates after this epoch, counted from 0."""
        if self._data is None:
            return False
        if isinstance(self._freq, int):
            return (epoch + 1) % self._freq == 0
        return epoch + 1 in self._freq


def predict_feed(x: Any, batch_size: int | None, steps: int | None) -> StreamFeed:
    """Returns the feed for `predict`. The arguments are those of `het_tf.keras.Model.predict`."""
    if datasets.is_dataset_function(x):
        datasets.check_alone(None, None, batch_size, "a function")
        return StreamFeed(datasets.call_once(x), steps)
    return StreamFeed(datasets.as_dataset(x, batch_size=batch_size, steps=steps), steps)

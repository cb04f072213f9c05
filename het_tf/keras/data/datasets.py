"""Conversion of a user's data into one dataset, or into one dataset per worker."""

from __future__ import annotations

import dataclasses
import functools
import inspect
import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from het_tf.keras.data.arguments import FitArguments
from het_tf.keras.data.batch_structure import (
    common_spec,
    components_of,
    spec_of,
    with_components,
)
from het_tf.layers.features import tuple_like
from het_tf.runtime.broadcast import TracedByDevice, cluster_devices
from het_tf.runtime.planned_batch import PlannedBatch, check_plain

_LOOKED_AT = 2  # batches whose shapes are compared, as in Keras


def is_python_source(x: Any) -> bool:
    """Whether `x` is a generator or a `keras.utils.PyDataset`."""
    return inspect.isgenerator(x) or isinstance(x, keras.utils.PyDataset)


def python_dataset(x: Any, shuffle: bool, as_arrays: Callable[[Any], Any]) -> tf.data.Dataset:
    """Returns a dataset that reads a generator or a `keras.utils.PyDataset` in this process.

    Args:
      x: source of batches `x`, `(x, y)` or `(x, y, sample_weight)`. A second iteration over the
        dataset continues a generator where the first iteration stopped.
      shuffle: whether every iteration over a finite `PyDataset` has a new order of batches.
      as_arrays: converts the parts of a batch to arrays.

    Raises:
      ValueError: there are no batches.
    """

    def arrays(batch: Any) -> Any:
        while isinstance(batch, tuple) and batch and batch[-1] is None:
            batch = batch[:-1]  # No labels, or no weights.
        return as_arrays(batch)

    if inspect.isgenerator(x):
        seen = list(itertools.islice(x, _LOOKED_AT))
        if not seen:
            raise ValueError("The generator has no batches.")
        batches = itertools.chain(seen, x)
        count = None
    else:
        count = x.num_batches
        if count == 0:
            raise ValueError(f"The PyDataset {type(x).__name__} has no batches.")
        seen = [x[i] for i in range(min(_LOOKED_AT, count or _LOOKED_AT))]

    def read() -> Iterator[Any]:
        found = batches if inspect.isgenerator(x) else _batches_of(x, count, shuffle)
        return map(arrays, found)

    dataset = tf.data.Dataset.from_generator(
        read, output_signature=tf.nest.map_structure(_spec, *map(arrays, seen))
    )
    return (
        dataset if count is None else dataset.apply(tf.data.experimental.assert_cardinality(count))
    )


def _batches_of(x: keras.utils.PyDataset, count: int | None, shuffle: bool) -> Iterator[Any]:
    x.on_epoch_begin()
    order: Iterable[int] = itertools.count() if count is None else range(count)
    if shuffle and count is not None:
        order = random.sample(range(count), count)  # As in Keras, whose set_random_seed seeds it.
    for i in order:
        yield x[i]
    x.on_epoch_end()


def _spec(array: np.ndarray, *others: np.ndarray) -> tf.TensorSpec:
    """Returns the spec of one part of several batches. Axes of different sizes become None."""
    if not array.ndim:
        raise TypeError(
            "Under HetParameterServerStrategy the data must be a function that returns a"
            " tf.data.Dataset, a tf.data.Dataset, arrays, or a generator or keras.utils.PyDataset"
            f" of batches; got one of {array.dtype} scalars."
        )
    sizes = zip(*(each.shape[1:] for each in (array, *others)), strict=True)
    shape = [of_axis[0] if len({*of_axis}) == 1 else None for of_axis in sizes]
    return tf.TensorSpec([None, *shape], array.dtype)


DatasetFunction = Callable[..., tf.data.Dataset]

_COMPOSITE = tf.RaggedTensor, tf.SparseTensor
_DEFAULT_BATCH_SIZE = 32


def is_dataset_function(x: Any) -> bool:
    """Whether `x` is a function that returns a dataset."""
    return callable(x) and not isinstance(x, (tf.data.Dataset, tf.Tensor, tf.Variable, np.ndarray))


def as_dataset(
    x: Any,
    y: Any = None,
    sample_weight: Any = None,
    batch_size: int | None = None,
    shuffle: bool | str = False,
    steps: int | None = None,
) -> tf.data.Dataset:
    """Returns a batched dataset of a `tf.data.Dataset`, a Python source of batches, or arrays.

    Args:
      x: a batched dataset, returned unchanged; a generator or `keras.utils.PyDataset`; or an array,
        or a list, tuple or dict of arrays whose first dimensions are equal.
      y: labels, in one of the forms of arrays `x`. Only with arrays, like the next two arguments.
      sample_weight: one weight per example.
      batch_size: examples per batch. None: `ceil(examples / steps)`, or 32 without `steps`.
      shuffle: whether every iteration shuffles the examples of arrays, or the batches of a
        `PyDataset`. "batch" does not shuffle arrays.
      steps: number of batches that the caller needs.

    Returns:
      A dataset of `x`, `(x, y)` or `(x, y, sample_weight)`.

    Raises:
      ValueError: `x` does not allow an argument, lengths differ, or a generator has no batches.
      TypeError: the type of `x` is not supported.
    """
    if isinstance(x, tf.data.Dataset):
        check_alone(y, sample_weight, batch_size, "a tf.data.Dataset")
        check_plain(x)
        return x
    if is_python_source(x):
        check_alone(y, sample_weight, batch_size, f"a {type(x).__name__}")
        return python_dataset(x, bool(shuffle), _as_arrays)
    if x is None:
        raise _no_data("None")
    parts = _given(x, y, sample_weight)
    arrays = _as_arrays(parts)
    flat = components_of(arrays)
    lengths = {len(array) for array in flat}
    if len(lengths) != 1:
        raise ValueError(
            "All arrays must have the same number of examples, got shapes "
            f"{[array.shape for array in flat]}."
        )
    tensors = [_as_tensor(array) for array in flat]
    length = lengths.pop()
    indices = tf.data.Dataset.range(length)
    if shuffle and shuffle != "batch":
        indices = indices.shuffle(max(1, length))
    if batch_size is None:
        batch_size = max(1, math.ceil(length / steps)) if steps else _DEFAULT_BATCH_SIZE
    batches = indices.batch(batch_size)
    return batches.map(
        lambda index: with_components(arrays, [tf.gather(each, index) for each in tensors])
    )


class OneBatches:
    """Datasets of one batch, for ragged or sparse tensors and for batches without examples.

    Batches of different shapes get a common spec, because every new spec retraces functions.
    """

    def __init__(self) -> None:
        """Starts without specs."""
        self._specs: dict[int, Any] = {}  # By number of parts: x, y, sample_weight.

    def dataset(self, x: Any, y: Any = None, sample_weight: Any = None) -> tf.data.Dataset | None:
        """Returns a dataset of the batch. None: the batch has only arrays, with examples.

        Raises:
          ValueError: `sample_weight` is given without `y`.
        """
        parts = _given(x, y, sample_weight)
        flat = [each for each in tf.nest.flatten(parts) if each is not None]
        if not any(isinstance(each, _COMPOSITE) for each in flat) and len(flat[0]):
            return None

        def as_tensor(value: Any) -> Any:
            return value if isinstance(value, _COMPOSITE) else _as_array(value)

        dataset = tf.data.Dataset.from_tensors(tf.nest.map_structure(as_tensor, parts))
        own = dataset.element_spec
        spec = common_spec([self._specs.get(len(parts), own), own]) or own
        self._specs[len(parts)] = spec
        return tf.data.experimental.from_variant(tf.data.experimental.to_variant(dataset), spec)


def num_examples(x: Any) -> int:
    """Returns the number of examples in arrays."""
    return len(components_of(_as_arrays(x))[0])


def _given(x: Any, y: Any, sample_weight: Any = None) -> tuple[Any, ...]:
    """Returns x, y and sample_weight without None. Lists of arrays become tuples."""
    if y is None and sample_weight is not None:
        raise ValueError("sample_weight needs y.")
    parts = (x,) if y is None else (x, y) if sample_weight is None else (x, y, sample_weight)
    return tuple(_lists_to_tuples(part) for part in parts)


def check_alone(y: Any, sample_weight: Any, batch_size: int | None, what: str) -> None:
    """Raises a ValueError if an argument is given that data of the kind `what` does not allow."""
    for name, value in (("y", y), ("sample_weight", sample_weight), ("batch_size", batch_size)):
        if value is not None:
            raise ValueError(f"`{name}` cannot be given when the data is {what}.")


def split_validation(given: FitArguments) -> FitArguments:
    """Moves the last examples, a fraction of `validation_split`, to the validation data.

    Raises:
      ValueError: the data is not arrays, or training or validation would have no examples.
    """
    x, fraction = given.x, given.validation_split
    if isinstance(x, tf.data.Dataset) or is_dataset_function(x) or is_python_source(x):
        raise ValueError("validation_split needs arrays; pass validation_data instead.")
    arrays = [_as_arrays(part) for part in (x, given.y, given.sample_weight)]
    length = len(components_of(arrays[0])[0])
    split = int(length * (1.0 - fraction))
    if not 0 < split < length:
        raise ValueError(
            f"validation_split={fraction} leaves no data on one side of {length} examples."
        )

    def cut(where: slice) -> list[Any]:
        return [with_components(part, [a[where] for a in components_of(part)]) for part in arrays]

    x, y, sample_weight = cut(slice(None, split))
    return dataclasses.replace(
        given, x=x, y=y, sample_weight=sample_weight, validation_data=cut(slice(split, None))
    )


def worker_dataset_fn(
    fn: DatasetFunction, num_workers: int, repeat: bool
) -> tf.types.experimental.ConcreteFunction:
    """Returns a function that makes the dataset of the worker that runs the function.

    Args:
      fn: takes a `tf.distribute.InputContext` and returns a batched `tf.data.Dataset`. In the
        context, `num_input_pipelines` is the number of workers and `input_pipeline_id` is the index
        of the worker. This process calls `fn` for every worker.
      num_workers: number of workers.
      repeat: whether the dataset of a worker repeats.

    Returns:
      A function without arguments.

    Raises:
      TypeError: `fn` does not return a dataset.
      ValueError: only this process can read a dataset or variable that `fn` uses, or the datasets
        of the workers differ in type.
    """

    def make(context: tf.distribute.InputContext) -> tf.data.Dataset:
        dataset = _call(fn, context)
        if repeat and isinstance(dataset.element_spec, PlannedBatch):
            raise ValueError(
                "steps_per_epoch cannot be given with location_aware(on_demand=True), which plans"
                " one pass over the data"
            )
        return dataset.repeat() if repeat else dataset

    contexts = [tf.distribute.InputContext(num_workers, i, 1) for i in range(num_workers)]
    made = [_traced(functools.partial(make, context)) for context in contexts]
    if any(captured.dtype == tf.variant for each in made for captured in each.inputs):
        # `fn` uses a dataset made outside `fn`. A worker cannot receive such a dataset as a tensor.
        copies = [as_copies(make(context)) for context in contexts]
        if None in copies:
            raise ValueError(
                "The function given as data uses a dataset made outside it that only this process "
                "can read, for instance because of a Python generator. Make it inside the "
                "function, or pass the dataset itself."
            )
        made = [_traced(copy) for copy in copies]
    seeds = [_seeds_of_draws(of_worker) for of_worker in made[:2]]
    if len(seeds) == 2 and seeds[0] and seeds[0] == seeds[1]:
        logging.warning(
            "the function given as data draws random numbers, and TensorFlow has a seed"
            " (keras.utils.set_random_seed or tf.random.set_seed): all workers draw the same"
            " numbers. docs/data.md shows what draws others."
        )
    variables = {id(each): each for of_worker in made for each in of_worker.variables}
    for variable in variables.values():
        _check_readable(variable)
    return made[0] if len(made) == 1 else _of_this_worker(made)


def _check_readable(variable: tf.Variable) -> None:
    """Checks that workers can read a variable.

    Raises:
      ValueError: they cannot. The process may have made the variable before it connected.
    """
    try:
        with tf.device(cluster_devices("worker")[0]):
            TracedByDevice(variable.read_value)()
    except tf.errors.OpError as error:
        raise ValueError(
            f"The function given as data uses the variable {variable.name!r}, which was made"
            " before the strategy, so that workers cannot read it: use its value,"
            " variable.numpy(), or make it, or the tf.random.Generator that it is of, after"
            " the strategy."
        ) from error


def _traced(maker: Callable[[], tf.data.Dataset]) -> tf.types.experimental.ConcreteFunction:
    return tf.function(maker).get_concrete_function()


def _seeds_of_draws(maker: tf.types.experimental.ConcreteFunction) -> list[tuple[int, int]]:
    """Seeds of the ops that draw random numbers in the functions of a dataset.

    Empty if TensorFlow has no seed. The seeds of dataset ops, such as those of `shuffle`, are
    inputs and no attributes.
    """
    if maker.graph.seed is None:
        return []
    functions = maker.graph.as_graph_def().library.function
    nodes = [node for function in functions for node in function.node_def if "seed2" in node.attr]
    return sorted((node.attr["seed"].i, node.attr["seed2"].i) for node in nodes)


def _of_this_worker(
    makers: list[tf.types.experimental.ConcreteFunction],
) -> tf.types.experimental.ConcreteFunction:
    """Returns a function that calls the maker at the index of the worker that runs the function.

    The makers are not branches of one function. In a branch, TensorFlow does not find a worker's
    copy of a lookup table that was made in the strategy's scope.
    """
    specs = [each.structured_outputs.element_spec for each in makers]
    spec = common_spec(specs)
    if spec is None:
        raise _unlike(specs)

    # Traced once: a tf.function would be traced for every worker's device, and TensorFlow warn.
    index_op = tf.function(
        tf.distribute.coordinator.experimental_get_current_worker_index
    ).get_concrete_function()

    def make() -> tf.Tensor:
        return tf.data.experimental.to_variant(makers[int(index_op())]())

    def of_this_worker() -> tf.data.Dataset:
        graph = tf.compat.v1.get_default_graph()
        # Evaluated for the worker at every call, like the index in `index_op`.
        made = graph.capture_call_time_value(make, tf.TensorSpec([], tf.variant))
        return tf.data.experimental.from_variant(made, spec)

    return _traced(of_this_worker)


def _unlike(specs: list[Any]) -> ValueError:
    kinds = " and ".join(sorted({str(spec) for spec in specs}))
    return ValueError(
        "The function given as data makes datasets of several types for different workers, which"
        f" must be one: {kinds}"
    )


def shares_or_dataset(fn: DatasetFunction) -> DatasetFunction | tf.data.Dataset:
    """Returns `fn` if `fn` takes a context and makes a worker's share, else the dataset of `fn`.

    If every worker read all of this dataset, every worker would train on every example. Shards of
    copies may miss or repeat examples, because every copy may shuffle in its own order.
    """
    return fn if takes_context(fn) else _call(fn)


def _call(fn: DatasetFunction, *arguments: Any) -> tf.data.Dataset:
    dataset = fn(*arguments)
    if not isinstance(dataset, tf.data.Dataset):
        raise TypeError(
            "The function given as data must return a tf.data.Dataset, got "
            f"{type(dataset).__name__}."
        )
    return dataset


def then(
    fn: DatasetFunction, change: Callable[[tf.data.Dataset], tf.data.Dataset]
) -> DatasetFunction:
    """Returns a dataset function that applies `change` to the dataset of `fn` for a context."""
    return lambda context: change(_call(fn, context))


def call_once(fn: DatasetFunction) -> tf.data.Dataset:
    """Returns the dataset of `fn` for a cluster of one worker."""
    return _call(fn, *([tf.distribute.InputContext(1, 0, 1)] if takes_context(fn) else []))


def takes_context(fn: DatasetFunction) -> bool:
    """Whether a dataset function takes a `tf.distribute.InputContext`.

    A first argument without a default, or with None, is a context. `lambda n=8: ...` takes none.
    """
    positional = (
        inspect.Parameter.POSITIONAL_ONLY,
        inspect.Parameter.POSITIONAL_OR_KEYWORD,
    )
    signature = inspect.signature(getattr(fn, "python_function", fn))
    for parameter in signature.parameters.values():
        if parameter.kind == inspect.Parameter.VAR_POSITIONAL:
            return True
        if parameter.kind in positional:
            return parameter.default is inspect.Parameter.empty or parameter.default is None
    return False


def as_copies(dataset: tf.data.Dataset) -> Callable[[], tf.data.Dataset] | None:
    """Returns a function that makes a copy of a dataset in any process.

    Returns:
      The function. None: the dataset depends on this process, for example on a Python function.
    """
    try:
        graph = tf.raw_ops.DatasetToGraphV2(
            input_dataset=tf.data.experimental.to_variant(dataset),
            external_state_policy=2,  # FAIL
            strip_device_assignment=True,
        )
    except tf.errors.OpError:
        return None
    spec = dataset.element_spec
    return lambda: tf.data.experimental.from_variant(
        tf.raw_ops.DatasetFromGraph(graph_def=graph), spec
    )


def weigh_classes(dataset: tf.data.Dataset, weights: Mapping[int, float]) -> tf.data.Dataset:
    """Adds sample weights: the weight of the class of every example, as by Keras's `class_weight`.

    Args:
      dataset: batches `(x, y)` or `(x, y, None)`. y is one tensor: class numbers of shape [batch]
        or [batch, 1], or one-hot of shape [batch, classes]. Float class numbers are rounded.
      weights: class number -> weight. Missing classes have weight 1.

    Raises:
      ValueError: the batches are not `(x, y)`, or already have sample weights.
    """
    spec = spec_of(dataset)
    is_pair = isinstance(spec, tuple) and spec[2:] in ((), (None,))
    if not (is_pair and isinstance(spec[1], tf.TensorSpec)):
        raise ValueError(
            "class_weight needs batches of (x, y) with a single label and no sample weights, got "
            f"{spec}."
        )
    first = min(weights, default=0)
    table = np.ones(max(weights, default=0) + 1 - first, np.float32)
    for label, weight in weights.items():
        table[label - first] = weight

    def weigh(x: Any, y: tf.Tensor, none: None = None) -> tuple[Any, tf.Tensor, tf.Tensor]:
        labels = y
        if y.shape.rank is not None and y.shape.rank > 1:
            labels = tf.argmax(y, -1) if y.shape[-1] != 1 else tf.squeeze(y, -1)
        if labels.dtype.is_floating:
            labels = tf.round(labels)
        labels = tf.cast(labels, tf.int64) - first
        known = (labels >= 0) & (labels < len(table))
        found = tf.gather(table, tf.where(known, labels, 0))
        return x, y, tf.where(known, found, 1.0)

    return dataset.map(weigh)


def _as_array(value: Any) -> np.ndarray | None:
    """Returns one input as an array. Floats become `floatx`, as in `keras.Model.fit`."""
    if value is None:
        return None
    if isinstance(value, _COMPOSITE):
        raise TypeError("Pass ragged and sparse tensors in a tf.data.Dataset.")
    array = value.numpy() if isinstance(value, tf.Tensor) else np.asarray(value)
    return array.astype(keras.config.floatx()) if array.dtype.kind == "f" else array


def _as_tensor(array: np.ndarray) -> tf.Tensor:
    try:
        return tf.convert_to_tensor(array)
    except ValueError as error:
        kinds = sorted({type(each).__name__ for each in array.flat})
        raise _no_data(f"objects of {', '.join(kinds)}") from error


def _no_data(what: str) -> TypeError:
    return TypeError(
        "Under HetParameterServerStrategy the data must be a function that returns a "
        "tf.data.Dataset, a tf.data.Dataset, a generator, a keras.utils.PyDataset or arrays of "
        f"numbers or strings; got {what}."
    )


def _as_arrays(parts: Any) -> Any:
    return tf.nest.map_structure(_as_array, _lists_to_tuples(parts))


def _lists_to_tuples(value: Any) -> Any:
    """Converts lists of arrays to tuples (several inputs), and lists of numbers to arrays."""
    if isinstance(value, dict):
        return {key: _lists_to_tuples(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        several = dict, list, tuple, *_COMPOSITE
        if not any(isinstance(item, several) or np.ndim(item) for item in value):
            return np.asarray(value)
        items = map(_lists_to_tuples, value)
        return tuple(items) if isinstance(value, list) else tuple_like(value, items)
    return value

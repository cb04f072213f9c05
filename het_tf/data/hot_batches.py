"""Batches whose rows are all cached (FAE: Adnan et al., PVLDB 15, 2021)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import tensorflow as tf

from het_tf.data.ids import batch_size_of, tables_of
from het_tf.runtime.current_strategy import is_synchronous
from het_tf.runtime.key_counts import FrequentKeys
from het_tf.runtime.planned_batch import PhasedBatch
from het_tf.runtime.validation import INT64_MAX, check_integer, check_number

_MOST_PHASE_BATCHES = 1 << 20


class HotRows(NamedTuple):
    """Rows that most examples need.

    Attributes:
      keys: ids of the rows, one int64 array for each table.
      accesses: share of the sample's ids that are among `keys`.
      examples: share of the sample's examples whose ids are all among `keys`.
    """

    keys: tuple[np.ndarray, ...]
    accesses: float
    examples: float


def hot_rows(
    dataset: tf.data.Dataset,
    ids: Callable[..., Any],
    budget: int,
    *,
    sample: float = 0.05,
) -> HotRows:
    """Finds the rows that occur most often in a sample of the dataset.

        hot = het_tf.data.hot_rows(dataset, lambda x, y: x["ids"], budget=100_000)

    Args:
      dataset: finite dataset of batches. It is read twice.
      ids: function of an element of the dataset, such as `lambda x, y: x["ids"]`. It returns
        integer ids [batch] or [batch, columns] of one layer, or a list of such tensors, one for
        each layer. Ids of one layer share rows.
      budget: number of rows, of all layers together. Every worker caches them.
      sample: share of the batches that are counted, evenly spread over the dataset.

    Raises:
      ValueError: an argument is out of range, or the dataset has no ids or is infinite.
    """
    budget = check_integer("budget", budget, 1, INT64_MAX)
    sample = check_number("sample", sample, 1e-6, 1)
    if dataset.cardinality() == tf.data.INFINITE_CARDINALITY:
        raise ValueError("hot_rows: the dataset is infinite; give it dataset.take(n)")
    sampled = dataset.shard(max(1, round(1 / sample)), 0)
    counts: list[FrequentKeys] = []
    for element in sampled:
        parts = [part.numpy().ravel() for part in tables_of(ids, element)]
        counts = counts or [FrequentKeys() for _ in parts]
        for count, part in zip(counts, parts, strict=True):
            count.add(*np.unique(part, return_counts=True))
    found = [count.top() for count in counts]
    if not any(len(keys) for keys, _ in found):
        raise ValueError("hot_rows: the dataset has no ids")
    times = np.concatenate([t for _, t in found])
    chosen = np.zeros(len(times), bool)
    chosen[np.argsort(-times, kind="stable")[:budget]] = True
    ends = np.cumsum([len(t) for _, t in found])[:-1]
    keys = tuple(np.sort(k[c]) for (k, _), c in zip(found, np.split(chosen, ends), strict=True))
    is_hot = np.concatenate([_is_hot(keys, ids, element).numpy() for element in sampled])
    return HotRows(keys, float(times[chosen].sum() / times.sum()), float(is_hot.mean()))


def hot_batches(
    dataset: tf.data.Dataset,
    ids: Callable[..., Any],
    hot: HotRows,
    *,
    batch_size: int | None = None,
    phase_batches: int = 32,
) -> tf.data.Dataset:
    """Splits a worker's examples into batches that need hot rows only, and other batches.

    Hot batches come in phases, and so do the others. In a hot phase, the worker trains its cached
    rows without any message for rows: it fetches the rows of the phase when the phase begins, and
    pushes their updates when it ends. Until then, other workers miss these updates. In the other
    batches, rows are as current as the layer's staleness says. Each example is in one batch.

    Use it in a function of a `tf.distribute.InputContext`:

        hot = het_tf.data.hot_rows(dataset, lambda x, y: x["ids"], budget=100_000)

        def share(context):
            mine = dataset.shard(context.num_input_pipelines, context.input_pipeline_id)
            return het_tf.data.hot_batches(mine, lambda x, y: x["ids"], hot, batch_size=128)

        model.fit(share, epochs=2)

    Args:
      dataset: batches of dense tensors. Dimensions after the first must be known.
      ids: as for `hot_rows`.
      hot: the hot rows. The capacity of the caches must be enough for them.
      batch_size: number of examples of a batch. None: the static batch dimension of the dataset.
        The last batch of each kind may have fewer.
      phase_batches: number of batches of a phase. The examples of three phases are in memory.

    Returns:
      Batches that only `het_tf.keras.Model.fit` can read.

    Raises:
      ValueError: `batch_size` is unknown, or an argument is out of range. The message names it.
    """
    if is_synchronous():
        raise ValueError(
            "hot_batches needs a strategy without synchronous=True: in a hot phase, a worker trains"
            " rows alone"
        )
    size = batch_size_of(dataset, batch_size, "hot_batches")
    phase_batches = check_integer("phase_batches", phase_batches, 1, _MOST_PHASE_BATCHES)
    if not isinstance(hot, HotRows):
        raise ValueError(f"hot must be a het_tf.data.HotRows, not {hot!r}")
    keys = tuple(np.unique(np.asarray(each, np.int64)) for each in hot.keys)
    for spec in tf.nest.flatten(dataset.element_spec):
        if not isinstance(spec, tf.TensorSpec) or not spec.shape[1:].is_fully_defined():
            raise ValueError(
                "hot_batches needs dense tensors whose dimensions after the first are known, but"
                f" the dataset has {spec}"
            )
    most = phase_batches * size
    nothing = tf.nest.map_structure(
        lambda spec: tf.zeros([0, *spec.shape[1:]], spec.dtype), dataset.element_spec
    )

    def split(left: tuple[Any, Any], chunk: tuple[Any, tf.Tensor]) -> tuple[Any, Any]:
        examples, is_last = chunk
        is_hot = _is_hot(keys, ids, examples)
        others = _concat(left[0], _select(examples, tf.logical_not(is_hot)))
        hots = _concat(left[1], _select(examples, is_hot))
        (others, more_others), (hots, more_hots) = (_cut(x, most, is_last) for x in (others, hots))
        return (more_others, more_hots), (others, hots)

    def batches(phase: Any, is_hot: bool) -> tf.data.Dataset:
        count = _length(phase)

        def batch(i: tf.Tensor) -> PhasedBatch:
            begins = tf.cast(tf.equal(i, 0), tf.int64)
            return PhasedBatch(
                tf.nest.map_structure(lambda x: x[i * size : (i + 1) * size], phase),
                tf.nest.map_structure(lambda x: x[: count * begins * int(is_hot)], phase),
                tf.constant(is_hot),
            )

        return tf.data.Dataset.range((count + size - 1) // size).map(batch)

    is_tuple = type(dataset.element_spec) is tuple  # tf.data passes a NamedTuple as one argument
    chunks = dataset.rebatch(most).map(
        lambda *element: (element if is_tuple else element[0], False)
    )
    chunks = chunks.concatenate(tf.data.Dataset.from_tensors((nothing, True)))
    phases = chunks.scan((nothing, nothing), split)
    return phases.flat_map(
        lambda others, hots: batches(others, False).concatenate(batches(hots, True))
    ).prefetch(phase_batches)


def _is_hot(keys: tuple[np.ndarray, ...], ids: Callable[..., Any], element: Any) -> tf.Tensor:
    """Returns whether all ids of an example are among the keys, bool [batch]."""
    parts = tables_of(ids, element)
    if len(parts) != len(keys):
        raise ValueError(f"hot has rows of {len(keys)} layers, but ids returns {len(parts)}")
    hot = tf.ones([tf.shape(parts[0])[0]], tf.bool)
    for known, part in zip(keys, parts, strict=True):
        if len(known) == 0:
            found = tf.zeros_like(part, tf.bool)
        else:
            table = tf.constant(known)
            at = tf.searchsorted(table, tf.reshape(part, [-1]))
            at = tf.minimum(at, len(known) - 1)
            found = tf.equal(tf.reshape(tf.gather(table, at), tf.shape(part)), part)
        hot = tf.logical_and(hot, tf.reduce_all(found, 1))
    return hot


def _length(examples: Any) -> tf.Tensor:
    return tf.shape(tf.nest.flatten(examples)[0], tf.int64)[0]


def _concat(first: Any, second: Any) -> Any:
    return tf.nest.map_structure(lambda a, b: tf.concat([a, b], 0), first, second)


def _select(examples: Any, mask: tf.Tensor) -> Any:
    at = tf.reshape(tf.where(mask), [-1])
    return tf.nest.map_structure(lambda x: tf.gather(x, at), examples)


def _cut(examples: Any, most: int, is_last: tf.Tensor) -> tuple[Any, Any]:
    """Returns the examples of a phase, if there are enough, and those that are left."""
    count = _length(examples)
    taken = tf.where(is_last, count, count // most * most)
    return (
        tf.nest.map_structure(lambda x: x[:taken], examples),
        tf.nest.map_structure(lambda x: x[taken:], examples),
    )

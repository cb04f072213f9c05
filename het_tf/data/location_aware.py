"""Which worker trains which example (Herald)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from het_tf import ops
from het_tf.data.ids import batch_size_of, tables_of
from het_tf.runtime.broadcast import cluster_devices, visit
from het_tf.runtime.current_strategy import is_synchronous
from het_tf.runtime.planned_batch import PlannedBatch

_MOST_WORKERS = 64
_ENOUGH = 0.95  # of the hits that all columns give


def location_aware(
    dataset: tf.data.Dataset,
    ids: Callable[..., Any],
    context: tf.distribute.InputContext,
    *,
    batch_size: int | None = None,
    capacity: int | None = None,
    fields: Sequence[int] | None = None,
    on_demand: bool = False,
) -> tf.data.Dataset:
    """Gives every example to the worker that caches most of its rows (Herald, NSDI 2024).

    All workers read the same examples and make the same plan, without a message. A step of all
    workers is `num_input_pipelines` batches. Every worker gets as many examples of a step, and each
    example is in the batch of one worker. The plan keeps a shadow of every worker's cache. If a
    shadow differs from the cache, the worker fetches a row that the plan took for cached. Under a
    strategy with `synchronous=True`, the shadow loses a row when another worker trains it.

    Use it in a function of a `tf.distribute.InputContext`:

        def share(context):
            dataset = tf.data.Dataset.from_tensor_slices(({"ids": ids}, labels)).batch(128)
            return het_tf.data.location_aware(
                dataset, lambda x, y: x["ids"], context, batch_size=128
            )

        model.fit(share, epochs=2)

    Args:
      dataset: batches. Every worker must read the same batches in the same order. Tensors must be
        dense or ragged.
      ids: function of an element of the dataset, such as `lambda x, y: x["ids"]`. It returns
        integer ids [batch] or [batch, columns] of one layer, or a list of such tensors, one for
        each layer. Ids of one layer share rows.
      context: context of the worker.
      batch_size: number of examples of a batch. None: the static batch dimension of the dataset.
      capacity: rows that a worker caches, of all layers together. None: all.
      fields: columns that decide, numbered over all tensors of `ids`. None: all columns.
      on_demand: whether workers push the updates of a row only when another worker needs the row,
        or when it leaves the cache. `ids` must then return exactly the ids that the model's layers
        look up; otherwise `fit` raises an error. Needs a strategy with `synchronous=True`.

    Returns:
      The worker's batches. With `on_demand`, batches that only `het_tf.keras.Model.fit` can read.

    Raises:
      ValueError: `batch_size` is unknown, or an argument is out of range. The message names it.
    """
    workers = context.num_input_pipelines
    synchronous = is_synchronous()
    if on_demand and not synchronous:
        raise ValueError("on_demand=True needs HetParameterServerStrategy(..., synchronous=True)")
    if workers > _MOST_WORKERS:
        raise ValueError(f"location_aware plans for at most {_MOST_WORKERS} workers, not {workers}")
    if capacity is not None and capacity < 1:
        raise ValueError(f"capacity must be at least 1, not {capacity!r}")
    size = batch_size_of(dataset, batch_size, "location_aware")
    if workers == 1:
        return dataset.rebatch(size)

    def plan(state: tuple[tf.Tensor, tf.Tensor], element: Any) -> tuple[Any, Any]:
        planner, step = state
        keys, tables = _keys_of(ids, element)
        planner, of_example, _, due, _ = ops.plan(
            planner,
            keys,
            num_workers=workers,
            worker=context.input_pipeline_id,
            capacity=capacity or 0,
            synchronous=synchronous,
            tables=tables,
            scored=_checked_fields(fields, len(tables)),
        )
        mine = tf.reshape(tf.where(of_example == context.input_pipeline_id), [-1])
        batch = tf.nest.map_structure(lambda x: tf.gather(x, mine), element)
        if on_demand:
            own_keys = tf.reshape(tf.gather(keys, mine), [-1])
            batch = PlannedBatch(batch, own_keys, due, step)
        return (planner, step + 1), (batch, tf.size(mine) > 0)

    first = tf.raw_ops.OptionalNone(), tf.constant(0, tf.int64)
    planned = dataset.rebatch(workers * size).scan(first, plan)
    # The last step may have fewer examples than there are workers.
    planned = planned.filter(lambda batch, has_examples: has_examples)
    return planned.map(lambda batch, has_examples: batch)


def telling_fields(
    dataset: tf.data.Dataset,
    ids: Callable[..., Any],
    *,
    workers: int = 8,
    batch_size: int | None = None,
    steps: int = 50,
) -> list[int]:
    """Finds the columns that decide which worker should train an example.

    Adds columns one by one, each time the column with which a plan has most hits, until the plan
    has 95 % of the hits of a plan with all columns. Planning with few columns takes less time.

    Args:
      dataset: batches, as for `location_aware`. The first `workers * steps` batches are read.
      ids: as for `location_aware`.
      workers: number of workers.
      batch_size: as for `location_aware`.
      steps: number of steps that are planned.

    Returns:
      Numbers of columns for `fields` of `location_aware`, the most telling one first.

    Raises:
      ValueError: the dataset has no batches, or `batch_size` is unknown.
    """
    size = batch_size_of(dataset, batch_size, "telling_fields")
    sample, tables = [], [0]
    for element in dataset.rebatch(workers * size).take(steps):
        keys, tables = _keys_of(ids, element)
        sample.append(keys)
    if not sample:
        raise ValueError("telling_fields: the dataset has no batches")

    def hits(scored: list[int]) -> int:
        planner, total = tf.raw_ops.OptionalNone(), 0
        for keys in sample:
            planner, *_, counts = ops.plan(
                planner,
                keys,
                num_workers=workers,
                worker=0,
                capacity=0,
                synchronous=is_synchronous(),
                tables=tables,
                scored=scored,
            )
            total += int(counts[1])
        return total

    columns = list(range(len(tables)))
    enough = _ENOUGH * hits(columns)
    fields: list[int] = []
    while len(fields) < len(columns):
        rest = [c for c in columns if c not in fields]
        found = [hits([*fields, c]) for c in rest]
        fields.append(rest[int(np.argmax(found))])
        if max(found) >= enough:
            break
    return fields


def plan_stats(strategy: Any) -> dict[str, int]:
    """Returns counters of the plans of `location_aware`.

    Args:
      strategy: the `HetParameterServerStrategy` whose workers plan.

    Returns:
      "ids": number of ids that were planned. "planned_hits": ids whose row the shadow of their
      worker had. `HetEmbedding.cache_stats` has the real hits. Every worker plans the examples of
      all workers, so the counters are those of the worker that planned most.
    """
    strategy.check_open()
    counts = visit(cluster_devices("worker"), ops.plan_counts, strategy.health.is_lost)
    ids, hits = max((tuple(c.tolist()) for c in counts.values()), default=(0, 0))
    return {"ids": ids, "planned_hits": hits}


def _keys_of(ids: Callable[..., Any], element: Any) -> tuple[tf.Tensor, list[int]]:
    """Returns ids of all tables, int64 [batch, columns], and the table of each column."""
    parts = tables_of(ids, element)
    tables = [table for table, part in enumerate(parts) for _ in range(part.shape[1])]
    return tf.concat(parts, 1), tables


def _checked_fields(fields: Sequence[int] | None, columns: int) -> list[int]:
    if fields is None:
        return list(range(columns))
    for field in fields:
        if not 0 <= field < columns:
            raise ValueError(f"fields holds {field!r}, but ids has {columns} columns")
    return list(fields)

"""Where the loops of a closure read their batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import tensorflow as tf

from het_tf.keras.data.batch_structure import Batch
from het_tf.runtime.planned_batch import PhasedBatch, PlannedBatch


@dataclasses.dataclass(frozen=True)
class Source:
    """Batches of a loop. The loop carries the source's state from step to step.

    Attributes:
      first: whether a first batch is wanted -> the first state.
      has: state -> whether there is a batch.
      get: index of the batch, state -> the batch.
      next: whether another batch is wanted, state -> the next state.
      planned: as `get`, with the plan of the batch. None: there is no plan.
      phased: as `get`, with the phase of the batch. None: there are no phases.
    """

    first: Callable[[tf.Tensor], tuple[Any, ...]]
    has: Callable[..., tf.Tensor]
    get: Callable[..., Batch]
    next: Callable[..., tuple[Any, ...]]
    planned: Callable[..., PlannedBatch] | None = None
    phased: Callable[..., PhasedBatch] | None = None

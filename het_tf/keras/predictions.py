"""Prediction on the workers, and its outputs in the order of the input."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from het_tf.distribute import HetParameterServerStrategy
from het_tf.distribute.closures import ClosureRunner
from het_tf.keras.feeds import StreamFeed, fill
from het_tf.keras.lookups import SharedLookups, shared
from het_tf.keras.metric_state import MetricScope
from het_tf.keras.one_replica import on_one_replica
from het_tf.keras.stacked import read_weights, stacked_signature, take_batch


class PredictClosure:
    """Runs `model.predict_step` over several batches on a worker.

    Attributes:
      strategy: the one that the model was made under.
    """

    def __init__(self, model: keras.Model, strategy: HetParameterServerStrategy, element_spec: Any):
        """Prepares the function; it is traced on first use. Arguments as for `StepClosure`."""
        self._model = model
        self.strategy = strategy
        self._element_spec = element_spec
        signature = stacked_signature(element_spec)
        self.on_batches = tf.function(self._on_batches, input_signature=signature, autograph=False)

    def _on_batches(self, *stacked: tf.Tensor) -> Any:
        """Outputs of the model, each stacked over the steps: [steps, batch, ...]."""
        weights = read_weights(self._model)
        variables = list(self._model.variables)

        @tf.function(input_signature=[tf.TensorSpec([], tf.int32)], autograph=False)
        def step(i: tf.Tensor) -> Any:
            batch = take_batch(self._element_spec, stacked, i)
            scope = MetricScope(weights, variables)
            sharing = shared(SharedLookups(self._model, scope, []))
            with scope, on_one_replica(self.strategy), sharing:
                return self._model.predict_step(batch)

        outputs = step.get_concrete_function().structured_outputs
        for output in tf.nest.flatten(outputs):
            if not isinstance(output, tf.Tensor):
                raise ValueError(
                    f"predict under HetParameterServerStrategy needs dense outputs, got {output}."
                )
        return tf.map_fn(
            step,
            tf.range(tf.shape(stacked[0])[0]),
            fn_output_signature=tf.nest.map_structure(tf.TensorSpec.from_tensor, outputs),
            parallel_iterations=1,
        )


def predict_in_order(
    closure: PredictClosure,
    feed: StreamFeed,
    steps_per_closure: int,
    callbacks: keras.callbacks.CallbackList,
    should_stop: Callable[[], bool],
) -> Any:
    """Runs a closure on all batches of a feed.

    Returns:
      What the model puts out, as arrays, all batches' one after the other.

    Raises:
      ValueError: there are no batches.
    """
    results: dict[int, Any] = {}
    handed_on = done = 0  # Closures, and steps, that the callbacks have seen.
    with ClosureRunner(closure.strategy) as runner:
        data = feed.start(steps_per_closure)
        while True:
            fill(runner, data, closure.on_batches, should_stop())
            if not runner.in_flight:
                break
            work, stacked = runner.wait()
            data.has_begun = True
            results[work.index] = stacked
            while handed_on in results:
                steps = tf.nest.flatten(results[handed_on])[0].shape[0]
                results[handed_on] = outputs = tf.nest.map_structure(
                    lambda a: a.reshape(-1, *a.shape[2:]) if a.ndim > 1 else a,
                    results[handed_on],
                )
                callbacks.on_predict_batch_begin(done)
                callbacks.on_predict_batch_end(done + steps - 1, {"outputs": outputs})
                handed_on, done = handed_on + 1, done + steps
    if not results:
        raise ValueError("The data has no batches.")
    in_order = [results[i] for i in range(handed_on)]
    return tf.nest.map_structure(lambda *parts: np.concatenate(parts), *in_order)

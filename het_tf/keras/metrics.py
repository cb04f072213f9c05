"""Metrics of click models. Their states are sums, so that workers can add them up."""

from __future__ import annotations

from typing import Any

import keras
from keras import ops


class _ClickSums(keras.metrics.Metric):
    """Weighted sums over examples with labels 0 and 1 and probabilities of label 1."""

    _SUMS: tuple[str, ...] = ()

    def __init__(self, name: str | None = None, dtype: Any = None):
        """Creates the sums. Arguments as of `keras.metrics.Metric`."""
        super().__init__(name=name, dtype=dtype)
        self._sums = {
            each: self.add_variable((), initializer="zeros", name=each)
            for each in ("weights", *self._SUMS)
        }

    def update_state(self, y_true: Any, y_pred: Any, sample_weight: Any = None) -> None:
        """Adds examples.

        Args:
          y_true: labels, 0 or 1, of any shape.
          y_pred: probabilities, with as many entries.
          sample_weight: weights of the labels, of the shape of `y_true` or its first dimensions, or
            one for all. None: all 1.
        """
        label = ops.reshape(ops.cast(y_true, self.dtype), (-1,))
        chance = ops.reshape(ops.cast(y_pred, self.dtype), (-1,))
        weight = ops.ones_like(label)
        if sample_weight is not None:
            weight = ops.cast(sample_weight, self.dtype)
            shape = ops.shape(y_true)
            while len(weight.shape) < len(shape):
                weight = ops.expand_dims(weight, -1)
            if len(weight.shape) == len(shape):
                weight = ops.broadcast_to(weight, shape)
            weight = ops.reshape(weight, (-1,))
        values = {"labels": label, "chances": chance}
        if "losses" in self._SUMS:
            values["losses"] = _log_loss(label, chance)
        self._sums["weights"].assign_add(ops.sum(weight))
        for name in self._SUMS:
            self._sums[name].assign_add(ops.sum(weight * values[name]))

    def reset_state(self) -> None:
        """Starts over."""
        for variable in self._sums.values():
            variable.assign(0.0)


@keras.saving.register_keras_serializable("het_tf")
class NormalizedEntropy(_ClickSums):
    """Log loss, divided by that of the mean label (He et al., ADKDD 2014). Smaller is better.

    1 is the loss of a model that knows only how many examples have label 1.

        metrics = [het_tf.keras.metrics.NormalizedEntropy()]
        model.compile("adagrad", "binary_crossentropy", metrics=metrics)
    """

    _SUMS = ("labels", "losses")

    def __init__(self, name: str = "normalized_entropy", dtype: Any = None):
        """Creates the metric. Arguments as of `keras.metrics.Metric`."""
        super().__init__(name, dtype)

    def result(self) -> Any:
        """Returns the value so far, a scalar. 0 before the first example."""
        mean = ops.divide_no_nan(self._sums["labels"], self._sums["weights"])
        least = self._sums["weights"] * _log_loss(mean, mean)
        return ops.divide_no_nan(self._sums["losses"], least)


@keras.saving.register_keras_serializable("het_tf")
class Calibration(_ClickSums):
    """Sum of the probabilities, divided by the sum of the labels.

    1 is best. A model with a larger value predicts too many clicks.

        metrics = [het_tf.keras.metrics.Calibration()]
        model.compile("adagrad", "binary_crossentropy", metrics=metrics)
    """

    _SUMS = ("labels", "chances")

    def __init__(self, name: str = "calibration", dtype: Any = None):
        """Creates the metric. Arguments as of `keras.metrics.Metric`."""
        super().__init__(name, dtype)

    def result(self) -> Any:
        """Returns the value so far, a scalar. 0 before the first example with label 1."""
        return ops.divide_no_nan(self._sums["chances"], self._sums["labels"])


def _log_loss(label: Any, chance: Any) -> Any:
    chance = ops.clip(chance, keras.config.epsilon(), 1 - keras.config.epsilon())
    return -(label * ops.log(chance) + (1 - label) * ops.log(1 - chance))

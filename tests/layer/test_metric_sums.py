"""The states of Keras's own metrics are sums over examples."""

from __future__ import annotations

import inspect

import keras
import numpy as np
import tensorflow as tf

from het_tf.keras.worker_step.metrics import MetricScope

ARGUMENTS = {
    "IoU": {"num_classes": 3, "target_class_ids": [0]},
    "MeanIoU": {"num_classes": 3},
    "MeanMetricWrapper": {"fn": keras.losses.mean_squared_error},
    "MeanRelativeError": {"normalizer": [1.0, 2.0, 3.0]},
    "OneHotIoU": {"num_classes": 3, "target_class_ids": [0]},
    "OneHotMeanIoU": {"num_classes": 3},
    "BinaryIoU": {"target_class_ids": [0]},
    "PrecisionAtRecall": {"recall": 0.5},
    "RecallAtPrecision": {"precision": 0.5},
    "SensitivityAtSpecificity": {"specificity": 0.5},
    "SpecificityAtSensitivity": {"sensitivity": 0.5},
}
# Those of one number, not of labels and predictions; and those of labels that are class numbers.
OF_VALUES = {"Mean", "Sum"}
SPARSE = {"SparseCategoricalAccuracy", "SparseCategoricalCrossentropy"}
SPARSE |= {"SparseTopKCategoricalAccuracy", "MeanIoU", "IoU"}


def all_of_keras():
    classes = vars(keras.metrics).values()
    found = [each for each in classes if inspect.isclass(each)]
    return sorted(
        {each.__name__ for each in found if issubclass(each, keras.metrics.Metric)} - {"Metric"}
    )


def test_metrics_of_keras_are_sums(subtests):
    for name in all_of_keras():
        with subtests.test(name):
            check_is_a_sum(name)


def check_is_a_sum(name):
    metric = getattr(keras.metrics, name)(**ARGUMENTS.get(name, {}))
    labels = tf.constant([[0.0, 1.0, 0.0], [1.0, 0.0, 1.0]])
    predictions = tf.constant([[0.2, 0.7, 0.6], [0.6, 0.1, 0.3]])
    if name in SPARSE:
        labels = tf.constant([1.0, 0.0])
    if name in ("MeanIoU", "IoU"):
        predictions = tf.constant([1.0, 2.0])
    given = (predictions,) if name in OF_VALUES else (labels, predictions)
    metric.update_state(*given)  # Some make their variables here.

    @tf.function(autograph=False)
    def steps(states, count):
        """So many steps, as in one closure."""
        for _ in range(count):
            with MetricScope(list(zip(metric.variables, states, strict=True))) as scope:
                metric.update_state(*given)
            states = [scope.get_current_value(variable) for variable in metric.variables]
        return states

    start = [tf.zeros(variable.shape, variable.dtype) for variable in metric.variables]
    of_one, of_two = steps(start, 1), steps(start, 2)
    assert any(state.numpy().any() for state in of_one)
    for one, two in zip(of_one, of_two, strict=True):
        np.testing.assert_allclose(two, 2 * one, rtol=1e-6)

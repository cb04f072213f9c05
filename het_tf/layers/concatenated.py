"""Outputs of several features in one tensor, each example's one after another."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from het_tf import pooling
from het_tf.layers.feature_configs import FeatureConfig
from het_tf.pooling import Bags


def interleave(features: Sequence[Bags], outputs: Sequence[tuple[int | None]]) -> bool:
    """Whether their bags can be looked up as those of one feature, in the order of the examples.

    Then its outputs are those of the features as they are to lie: nothing is copied.

    Args:
      features: of one width.
      outputs: their `shapes`.
    """
    # Where an axis but the first is unknown, as many bags need not be bags of the same shape.
    alike = {each.combiner for each in features if each.pools}
    return (
        len(alike) <= 1
        and None not in outputs[0][1:-1]
        and all(each.weights is None and each.splits.shape.rank == 0 for each in features)
    )


def interleaved(keys: tf.Tensor, features: Sequence[Bags]) -> Bags:
    """The bags of features as those of one.

    Args:
      keys: int64 [ids]: the first bag of each feature, then the second of each, and so on.
      features: those that `interleave`.
    """
    sizes = [each.size for each in features]
    pooled = next((each for each in features if each.pools), features[0])
    count, size = tf.size(keys, tf.int64), sizes[0]
    if len(set(sizes)) > 1:
        apart = sum(sizes)
        begins = np.cumsum([0, *sizes[:-1]], dtype=np.int64)
        bounds = tf.range(0, count, apart)[:, tf.newaxis] + begins
        count, size = tf.concat([tf.reshape(bounds, [-1]), [count]], 0), 1

    def restore(outputs: tf.Tensor) -> tf.Tensor:
        width = len(features) * outputs.shape[-1]
        return features[0].restore(tf.reshape(outputs, [-1, width]))

    return dataclasses.replace(pooled, ids=keys, splits=count, size=size, restore=restore)


def shapes(features: Sequence[FeatureConfig], inputs: Sequence[Any]) -> list[tuple[int | None]]:
    """Those of the outputs of features, with what others say of the axes that they share.

    Raises:
      ValueError: one is ragged, or of an unknown number of axes, or they differ in more than their
        last axes.
    """
    outer = tf.TensorShape(None)
    said_by = ""
    widths = []
    for feature, x in zip(features, inputs, strict=True):
        table = feature.table
        if isinstance(x.shape, tf.TensorShape) and x.shape.rank is None:
            raise ValueError(
                f"inputs of feature {feature.name} must have a known number of axes where"
                " concatenate=True"
            )
        *axes, width = pooling.output_shape(x.shape, table.combiner, table.embedding_dim)
        ragged = x.ragged if isinstance(x, keras.KerasTensor) else isinstance(x, tf.RaggedTensor)
        if ragged and len(axes) > 1:
            raise ValueError(
                f"concatenate=True takes dense outputs, but that of feature {feature.name} is"
                " ragged: let its table have a combiner, or leave concatenate out"
            )
        if not outer.is_compatible_with(axes):
            raise ValueError(
                "concatenate=True takes outputs that differ in their last axes alone, but that of"
                f" feature {feature.name} has shape {(*axes, width)}, and {said_by} have"
                f" {(*outer, None)}"
            )
        outer = outer.merge_with(axes)
        said_by = f"{said_by}, {feature.name}" if said_by else f"those of {feature.name}"
        widths.append(width)
    return [(*outer.as_list(), width) for width in widths]


def joined(outputs: Sequence[tuple[int | None]]) -> tuple[int | None]:
    """The shape of what `shapes` become."""
    return (*outputs[0][:-1], sum(shape[-1] for shape in outputs))

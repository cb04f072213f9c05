"""A network on embeddings, in numpy: rows of a table, then Dense 64, Dense 32 and a logit.

The rows of an example are laid side by side, but for those of one feature of many values: they are
added up. In between are rectifiers. numpy, since a function of TensorFlow takes three times as long
for a step of this size.
"""

from __future__ import annotations

import itertools

import numpy as np

_WIDTHS = (64, 32, 1)


class EmbeddingNetwork:
    """Its weights are one flat vector: kernel and bias of each layer, one layer after the other.

    Attributes:
      size: of the vector.
    """

    def __init__(self, fields: int, added: slice, dim: int):
        """Describes the network.

        Args:
          fields: of an example; each is a row, or missing.
          added: those whose rows are added up.
          dim: columns of a row.
        """
        self._added = added
        widths = ((fields - (added.stop - added.start) + 1) * dim, *_WIDTHS)
        self._shapes = list(itertools.pairwise(widths))
        self.size = sum((inputs + 1) * outputs for inputs, outputs in self._shapes)

    def initial_weights(self, seed: int) -> np.ndarray:
        """As Keras draws them: Glorot uniform, biases zero."""
        rng = np.random.default_rng(seed)
        weights = np.zeros(self.size, np.float32)
        for kernel, _ in self._layers(weights):
            limit = np.sqrt(6 / sum(kernel.shape))
            kernel[:] = rng.uniform(-limit, limit, kernel.shape)
        return weights

    def logits(self, rows: np.ndarray, weights: np.ndarray) -> np.ndarray:
        """Float32 [examples].

        Args:
          rows: float32 [examples, fields, dim], zeros where one is missing.
          weights: float32 [size].
        """
        return self._forward(rows, weights)[-1][:, 0]

    def gradients(
        self, rows: np.ndarray, labels: np.ndarray, weights: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Of the mean logistic loss, with respect to rows and weights.

        Args:
          rows: as of `logits`.
          labels: float32 [examples].
          weights: float32 [size].
        """
        *inputs, logits = self._forward(rows, weights)
        of_outputs = (1 / (1 + np.exp(-logits)) - labels[:, None]) / np.float32(len(labels))
        of_weights = np.empty_like(weights)
        layers = zip(inputs, self._layers(weights), self._layers(of_weights), strict=True)
        for layer_inputs, (kernel, _), (of_kernel, of_bias) in reversed(list(layers)):
            np.matmul(layer_inputs.T, of_outputs, out=of_kernel)
            of_outputs.sum(axis=0, out=of_bias)
            # A rectifier passes on what is above zero; rows are not behind one.
            of_outputs = of_outputs @ kernel.T
            if layer_inputs is not inputs[0]:
                of_outputs *= layer_inputs > 0
        first, last = self._added.start, self._added.stop
        of_features = of_outputs.reshape(len(rows), -1, rows.shape[2])
        of_rows = np.empty_like(rows)
        of_rows[:, :first] = of_features[:, :first]
        of_rows[:, first:last] = of_features[:, first : first + 1]
        of_rows[:, last:] = of_features[:, first + 1 :]
        return of_rows, of_weights

    def _forward(self, rows: np.ndarray, weights: np.ndarray) -> list[np.ndarray]:
        """The inputs of each layer, and the logits."""
        first, last = self._added.start, self._added.stop
        total = rows[:, first:last].sum(axis=1, keepdims=True)
        features = np.concatenate([rows[:, :first], total, rows[:, last:]], axis=1)
        values = [features.reshape(len(rows), -1)]
        for i, (kernel, bias) in enumerate(self._layers(weights)):
            outputs = values[-1] @ kernel + bias
            if i + 1 < len(self._shapes):
                np.maximum(outputs, 0, out=outputs)
            values.append(outputs)
        return values

    def _layers(self, weights: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
        """Views of the kernel and bias of each layer."""
        layers = []
        begin = 0
        for inputs, outputs in self._shapes:
            middle, end = begin + inputs * outputs, begin + (inputs + 1) * outputs
            layers.append((weights[begin:middle].reshape(inputs, outputs), weights[middle:end]))
            begin = end
        return layers

"""Learning rates of embeddings that follow what callbacks make of the compiled optimizer's."""

from __future__ import annotations

import keras

from het_tf.layers.embedding import embeddings_of


class RateFollower:
    """Moves the embeddings' rates on the servers, where no step may: steps of workers overlap."""

    def __init__(self, model: keras.Model):
        """Follows the rate of the optimizer that `model` is compiled with."""
        self._optimizer = model.optimizer
        self._layers = [x for x in embeddings_of(model) if x.rate_variable is not None]
        self._last: float | None = None
        if isinstance(self._optimizer, keras.optimizers.Optimizer):
            for layer in self._layers:
                layer.turn_to(self._optimizer)

    def follow(self) -> None:
        """To be called after callbacks; reads one variable where they left it as it was."""
        rate = getattr(self._optimizer, "learning_rate", None)
        if not self._layers or not isinstance(rate, keras.Variable):
            return
        now = float(rate.numpy())
        if now != self._last:
            for layer in self._layers:
                layer.follow_rate(now)
            self._last = now

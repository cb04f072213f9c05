"""Learning rates of embeddings that follow what callbacks make of the compiled optimizer's."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import keras

from het_tf import _keras
from het_tf.keras.step_count import innermost
from het_tf.layers.embedding import embeddings_of


class RateFollower:
    """Moves the embeddings' rates on the servers, where no step may: steps of workers overlap."""

    def __init__(self, model: keras.Model):
        """Follows the rate of the optimizer that `model` is compiled with."""
        self._optimizer = model.optimizer
        self._layers = [x for x in embeddings_of(model) if x.rate_variable is not None]
        self._last: float | None = None

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


@contextlib.contextmanager
def rate_is_loaded(optimizer: Any) -> Iterator[Callable[[], bool]]:
    """Around a loading of weights; what it gives then says whether the optimizer's rate was loaded.

    Args:
      optimizer: of the model; None: it has none.
    """
    rate = _keras.learning_rate_variable(innermost(optimizer))
    if rate is None:
        yield lambda: True
        return
    loaded: list[bool] = []
    assign = rate.assign

    def note(*args: Any, **kwargs: Any) -> Any:
        loaded.append(True)
        return assign(*args, **kwargs)

    # In the instance: the variable itself is read by steps that workers make meanwhile.
    rate.assign = note
    try:
        yield lambda: bool(loaded)
    finally:
        vars(rate).pop("assign", None)

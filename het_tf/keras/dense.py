"""Which of a Keras model's variables the workers have replicas of, and by what rule."""

from __future__ import annotations

import collections

import keras
import tensorflow as tf

from het_tf.distribute import HetParameterServerStrategy
from het_tf.distribute.replicas import DenseReplicas
from het_tf.keras.metric_state import metric_variables
from het_tf.layers.embedding import embeddings_of


class DenseVariables:
    """The variables of a model and its optimizer, sorted by what becomes of them (DESIGN 3.8).

    Attributes:
      replicas: of all variables that steps use, but for the settings.
      settings: variables that only callbacks change: learning rates. Each closure reads them once.
    """

    def __init__(self, model: keras.Model, strategy: HetParameterServerStrategy):
        """Sorts the variables of a compiled and built model.

        Raises:
          ValueError: there is no rule for a variable; the message names it.
        """
        optimizer = model.optimizer
        rates = [layer.rate_variable for layer in embeddings_of(model)]
        self.settings = [rate for rate in rates if rate is not None]
        trainable = list(model.trainable_variables)
        slots: list[keras.Variable] = []
        others: list[keras.Variable] = []
        if isinstance(optimizer, keras.optimizers.Optimizer):
            others.append(optimizer.iterations)
            rate = getattr(optimizer, "_learning_rate", None)  # No public way to the variable.
            if isinstance(rate, keras.Variable):
                self.settings.append(rate)
            known = {id(v) for v in [*others, *self.settings]}
            slots = [v for v in optimizer.variables if id(v) not in known]
        unread = [layer.compiled_rate for layer in embeddings_of(model)]
        kinds = [trainable, slots, others, self.settings, metric_variables(model), unread]
        known = {id(v) for kind in kinds for v in kind}
        rest = [v for v in model.variables if id(v) not in known]
        seeds = [v for v in rest if _is_seed(v)]
        others += [v for v in rest if not _is_seed(v)]
        self.replicas = DenseReplicas(
            strategy, *([v.value for v in kind] for kind in (trainable, slots, seeds, others))
        )

    def open_op(self) -> list[tuple[keras.Variable, tf.Tensor]]:
        """At the start of a function's graph: makes the replicas usable, reads the settings.

        Returns:
          The settings with their values.
        """
        self.replicas.open_op()
        # All that a server has comes in one tensor.
        by_device = collections.defaultdict(list)
        for setting in self.settings:
            by_device[setting.value.device].append(setting)
        values = []
        for device, settings in by_device.items():
            with tf.device(device):
                packed = tf.stack([tf.cast(s.value.read_value(), tf.float64) for s in settings])
            for i, setting in enumerate(settings):
                values.append((setting, tf.cast(packed[i], setting.dtype)))
        return values


def _is_seed(variable: keras.Variable) -> bool:
    """Whether it is the state of a `keras.random.SeedGenerator`."""
    return variable.path.endswith("seed_generator_state")

"""A layer with `optimizer="same"`: its rows have the optimizer that its model is compiled with."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import keras
import tensorflow as tf

from het_tf import _keras, optimizers
from het_tf.layers import callers, row_forms
from het_tf.layers.rate import LearningRate
from het_tf.table import EmbeddingTable


class SameOptimizer:
    """The part of `HetEmbedding` that takes that optimizer."""

    built: bool
    name: str
    trainable: bool
    anchor: keras.Variable
    optimizer: optimizers.Optimizer | None
    _takes_compiled: bool
    _compiled_optimizer: weakref.ref | None
    _rate: LearningRate
    _table: EmbeddingTable
    _is_traced: bool
    _make_table: Callable[..., None]
    _followed_here: Callable[[], keras.optimizers.Optimizer | None]
    flush: Callable[[], None]
    has_table: bool

    def _take(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Takes it for the steps that follow; a frozen layer that has rows makes none.

        Raises:
          ValueError: it has no row form, or is another than the one with which functions that were
            traced have trained the table.
        """
        is_new = self._followed() is not optimizer
        if self.optimizer is None or (self.trainable and (is_new or not self._is_for(optimizer))):
            self._take_optimizer(self._row_form(optimizer))
        self._compiled_optimizer = weakref.ref(optimizer)

    def _hear_of(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Takes it if nothing is lost by that: a model that never trains needs no other."""
        known = self.optimizer
        if known is not None and self.trainable and not self._is_for(optimizer):
            is_kind = type(self._row_form(optimizer)) is type(known)
            if not self._is_replaceable() or not (is_kind or self._is_untrained()):
                return
        self._take(optimizer)

    def _check_is_for(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Within a step, when it is too late to take another one."""
        if not self._is_for(optimizer):
            raise self._why_not_taken(self.optimizer, self._row_form(optimizer))
        self._compiled_optimizer = weakref.ref(optimizer)

    def _is_for(self, optimizer: keras.optimizers.Optimizer) -> bool:
        return self._row_form(optimizer).spec() == self.optimizer.spec()

    def _row_form(self, optimizer: keras.optimizers.Optimizer) -> optimizers.Optimizer:
        decays = not self._is_excluded_from_decay(optimizer)
        try:
            return row_forms.row_form(optimizer, of_compile=True, decays=decays)
        except ValueError as error:
            raise ValueError(
                f"layer {self.name} takes the optimizer that its model is compiled with: {error}."
                ' Give the layer one of its own, such as HetEmbedding(..., optimizer="adagrad")'
            ) from error

    def _is_excluded_from_decay(self, optimizer: keras.optimizers.Optimizer) -> bool:
        # Keras's layer has its matrix under this name.
        anchor = self.anchor if self.built else None
        return _keras.excludes_from_weight_decay(_inner(optimizer), "embeddings", anchor)

    def _take_optimizer(self, optimizer: optimizers.Optimizer) -> None:
        before, self.optimizer = self.optimizer, optimizer
        if not self.built:
            return
        try:
            if not self.has_table:
                self._make_table()
            elif before is None:
                self._put_another_table()
            elif optimizer.spec() != before.spec():
                self._replace_table(before)
        except BaseException:
            self.optimizer = before
            raise
        self._rate.take(optimizer)

    def _replace_table(self, before: optimizers.Optimizer) -> None:
        """Functions that were traced would go on with the table that is there."""
        if not self._is_replaceable():
            raise self._why_not_taken(before, self.optimizer)
        self._put_another_table()

    def _put_another_table(self) -> None:
        """Makes a table with the rows; slots of another kind are as before their first update."""
        replaced = self._table
        self._make_table(replaced)
        self._is_traced = False
        replaced.destroy()

    def _is_replaceable(self) -> bool:
        return not self.built or not self._is_traced or self._is_untrained()

    def _is_untrained(self) -> bool:
        if not self.built:
            return True
        self.flush()
        return not any(rows.clocks.any() for rows in self._table.export_parts())

    def _why_not_taken(self, is_for: optimizers.Optimizer, new: optimizers.Optimizer) -> ValueError:
        return ValueError(
            f'layer {self.name} has optimizer="same" and a table of {is_for}, which functions that'
            f" were traced use, so that it cannot take {new}: make the model once more, compile it"
            " with that, and give its layer the rows, with rows = old.table.export():"
            " new.table.assign(rows.keys, rows.values)"
        )

    def compiled_config(self) -> Any:
        """What "same" is, serialized, or None where nobody knows yet; for `take_compiled`."""
        optimizer = self.optimizer
        if optimizer is None:
            model = callers.compiled_model()
            optimizer = None if model is None else self._row_form(model.optimizer)
        return None if optimizer is None else keras.saving.serialize_keras_object(optimizer)

    def take_compiled(self, optimizer: Any) -> None:
        """What "same" was when the layer's config was made: serialized, or None where it is not."""
        if optimizer is not None:
            self.optimizer = row_forms.get(optimizer)

    def take_caller_s(self) -> None:
        """Takes that of the model that trains; where none is known yet, of the one that calls.

        A plain `keras.Model` tells nobody that it was compiled. To be called before anything is
        traced that looks up in the table.
        """
        if not self._takes_compiled or not self.built or not self._rate.is_there:
            return
        fitted = callers.fitted_model()
        is_new = self.optimizer is None or self._compiled_optimizer is None
        called = callers.compiled_model() if fitted is None and is_new else None
        with tf.init_scope():
            if fitted is not None:
                self._take(fitted.optimizer)
            elif called is not None:
                self._hear_of(called.optimizer)

    def _followed(self) -> keras.optimizers.Optimizer | None:
        return None if self._compiled_optimizer is None else self._compiled_optimizer()

    def steps_op(self) -> tf.Tensor | None:
        """How many steps the optimizer of "same" counts, int64 scalar, before it counts this one.

        None: the layer has an optimizer of its own, or follows none that is there.
        """
        followed = self._followed_here() or self._followed()
        if not self._takes_compiled or followed is None:
            return None
        # Read now: the optimizer may count before the rows are trained.
        return tf.convert_to_tensor(_keras.step_counter(_inner(followed)).value)

    @property
    def _same_rate(self) -> keras.Variable | None:
        """The variable of that optimizer's rate; None: it follows a schedule."""
        followed = self._followed()
        if followed is None:
            return self._rate.variable
        return _keras.learning_rate_variable(_inner(followed))

    def _same_rate_op(self, steps: tf.Tensor | None) -> tf.Tensor:
        """The rate of a step: that of the optimizer, or what was known of it if it is gone."""
        followed = self._followed()
        if followed is None or steps is None:
            return self._rate.step_op()
        rate = _keras.learning_rate_of(_inner(followed))
        now = rate.value if isinstance(rate, keras.Variable) else rate(steps)
        return tf.cast(now, tf.float32)


def _inner(optimizer: keras.optimizers.Optimizer) -> keras.optimizers.Optimizer:
    return getattr(optimizer, "inner_optimizer", optimizer)

"""Going on from a backup, again and again."""

from __future__ import annotations

import types

import keras
import pytest
import tensorflow as tf

import het_tf
from het_tf.keras.callbacks import BackupAndRestore
from het_tf.keras.callbacks.backup import Resuming


def test_training_ends_where_it_was_resumed_in_vain_three_times_in_a_row(tmp_path):
    inputs = keras.Input((1,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    model.compile("sgd", "mse")
    backup = BackupAndRestore(tmp_path)
    callbacks = keras.callbacks.CallbackList([backup], model=model)
    strategy = types.SimpleNamespace(manager=None, recover=lambda: True)  # of a cluster
    resuming = Resuming(model, strategy, callbacks)
    callbacks.on_train_begin()
    resuming.begin(0)
    error = tf.errors.UnavailableError(None, None, "Parameter server 0 is gone")
    for _ in range(5):
        resuming.note_steps()
        assert resuming.go_on(error, 0) == 0, "however often, as long as steps are made"
    for _ in range(2):
        assert resuming.go_on(error, 0) == 0
    with pytest.raises(tf.errors.UnavailableError, match="server 0 is gone"):
        resuming.go_on(error, 0)


@pytest.mark.parametrize(
    "kind", [het_tf.checkpoint.Manager, tf.train.CheckpointManager], ids=["ours", "theirs"]
)
def test_the_beginning_is_saved_with_the_manager_of_the_strategy_if_nothing_was(tmp_path, kind):
    inputs = keras.Input((1,))
    model = keras.Model(inputs, keras.layers.Dense(1)(inputs))
    manager = kind(tf.train.Checkpoint(model=model), tmp_path, max_to_keep=None)
    resuming = Resuming(
        model, types.SimpleNamespace(manager=manager), keras.callbacks.CallbackList(model=model)
    )
    for _ in range(2):
        resuming.begin(0)
        getattr(manager, "wait", lambda: None)()
        assert len(manager.checkpoints) == 1

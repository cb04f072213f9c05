"""Tables of layers that are in other layers, lists and dicts: checkpoints have them, too."""

from __future__ import annotations

import keras
import numpy as np
import pytest
import tensorflow as tf
from test_checkpoint import assert_same_rows, sorted_rows

import het_tf
from het_tf.layers import FeatureConfig, HetEmbedding, HetEmbeddingCollection, TableConfig

IDS = np.arange(48).reshape(16, 3)
ONES = np.ones(16)


def collection_model(model_class, optimizer="adam"):
    kinds = {"one": 4, "other": 2}
    features = {
        name: FeatureConfig(name, TableConfig(name, 50, dim, optimizer=optimizer))
        for name, dim in kinds.items()
    }
    inputs = {name: keras.Input((3,), dtype="int64", name=name) for name in kinds}
    rows = HetEmbeddingCollection(features, seed=1)(inputs)
    hidden = keras.layers.Concatenate()([keras.layers.Flatten()(rows[name]) for name in kinds])
    model = model_class(inputs, keras.layers.Dense(1)(hidden))
    model.compile(keras.optimizers.Adam(0.1), "mse")
    return model, dict.fromkeys(kinds, IDS)


class Lists(het_tf.keras.Model):
    """Has its layers in a list and a dict."""

    def __init__(self):
        super().__init__()
        self.embeddings = [HetEmbedding(2, seed=i) for i in range(2)]
        self.others = {"third": HetEmbedding(2, seed=3), "out": keras.layers.Dense(1)}
        self._private = [HetEmbedding(2, seed=4)]
        self.nested = {"a": [HetEmbedding(2, seed=5)]}
        self.of_lists = ([HetEmbedding(2, seed=6)], HetEmbedding(2, seed=7))

    def call(self, ids):
        layers = [*self.embeddings, self.others["third"], *self._private, *self.nested["a"]]
        layers += [*self.of_lists[0], self.of_lists[1]]
        return self.others["out"](
            keras.ops.concatenate([layer(ids[:, i % 3]) for i, layer in enumerate(layers)], -1)
        )


def list_model(_=None):
    model = Lists()
    model.compile(keras.optimizers.Adam(0.1), "mse")
    model(IDS)
    return model, IDS


def tables_of(model):
    return [
        layer.table for layer in het_tf.layers.embedding.embeddings_of(model) if layer.table.size()
    ]


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("make", "model_class", "kind"),
    [
        (collection_model, keras.Model, "checkpoint"),
        (list_model, het_tf.keras.Model, "manager"),
    ],
)
def test_tables_are_saved_and_restored(tmp_path, make, model_class, kind):
    model, x = make(model_class)
    model.fit(x, ONES, verbose=0)
    rows = [sorted_rows(table) for table in tables_of(model)]
    expected = model.predict(x, verbose=0)
    assert len(rows) == (7 if make is list_model else 2)
    checkpoint = tf.train.Checkpoint(model=model)
    if kind == "manager":
        manager = het_tf.checkpoint.Manager(checkpoint, tmp_path)
        path = manager.save()
        manager.wait()
    else:
        path = checkpoint.save(tmp_path / "checkpoint")
    model.fit(x, ONES, verbose=0)

    model, _ = make(model_class)
    model.optimizer.build(model.trainable_variables)
    tf.train.Checkpoint(model=model).restore(path).assert_existing_objects_matched()
    for table, of_table in zip(tables_of(model), rows, strict=True):
        assert_same_rows(sorted_rows(table), of_table)
    np.testing.assert_array_equal(model.predict(x, verbose=0), expected)


def test_fit_goes_on_from_a_backup_of_a_collection(tmp_path):
    losses = []

    def fit(model, x, last):
        def on_epoch_end(epoch, logs):
            losses.append(logs["loss"])
            if epoch == last:
                raise KeyboardInterrupt

        backup = het_tf.keras.callbacks.BackupAndRestore(tmp_path / "backup")
        noting = keras.callbacks.LambdaCallback(on_epoch_end=on_epoch_end)
        model.fit(x, ONES, epochs=4, verbose=0, shuffle=False, callbacks=[backup, noting])

    with pytest.raises(KeyboardInterrupt):
        fit(*collection_model(het_tf.keras.Model), last=2)
    fit(*collection_model(het_tf.keras.Model), last=9)
    assert losses == sorted(losses, reverse=True)
    assert len(set(losses)) == 4


def test_what_a_checkpoint_does_not_reach_is_named(tmp_path):
    class Around(keras.layers.Layer):
        def __init__(self):
            super().__init__()
            self.inner = [HetEmbedding(1, name="hidden")]

        def call(self, ids):
            return self.inner[0](ids)

    ids = keras.Input((), dtype="int64")
    model = het_tf.keras.Model(ids, Around()(ids))
    model(IDS[:, 0])
    manager = het_tf.checkpoint.Manager(tf.train.Checkpoint(model=model), tmp_path)
    with pytest.raises(ValueError, match="layer hidden is in a list or dict of a layer of"):
        manager.save()
    assert not manager.checkpoints


def test_containers_may_hold_themselves_and_keys_alike(tmp_path):
    model = het_tf.keras.Model(name="holder")
    layers = [HetEmbedding(1, seed=i, name=f"e{i}") for i in range(3)]
    for number, layer in enumerate(layers):
        layer.build()
        layer.table.assign([number], [[1.0]])
    model.some = {1: layers[0], "1": layers[1], "save_counter": layers[2]}
    model.some["me"] = model.some
    checkpoint = tf.train.Checkpoint(model=model)
    path = checkpoint.write(str(tmp_path / "all"))
    for layer in layers:
        layer.table.clear()
    checkpoint.read(path).assert_consumed()
    assert [layer.table.export().keys.tolist() for layer in layers] == [[0], [1], [2]]
    del model.some["1"]
    path = tf.train.Checkpoint(model=model).write(str(tmp_path / "less"))
    saved = [name for name, _ in tf.train.list_variables(path) if name.endswith("/keys")]
    assert len(saved) == 2


def test_a_restore_says_for_which_layers_there_are_no_rows(tmp_path, caplog):
    def make(*names):
        ids = keras.Input((), dtype="int64")
        model = het_tf.keras.Model(
            ids, [HetEmbedding(1, name=name, optimizer="sgd")(ids) for name in names]
        )
        return het_tf.checkpoint.Manager(tf.train.Checkpoint(model=model), tmp_path)

    manager = make("old")
    path = manager.save()
    manager.wait()
    assert make("old").restore_or_initialize() == path
    assert "has no rows" not in caplog.text
    assert make("old", "new").restore_or_initialize() == path
    assert f"{path} has no rows for layer new" in caplog.text
    assert "layer old" not in caplog.text


@pytest.mark.parametrize("compiled", [False, True])
def test_a_collection_that_has_the_compiled_optimizer_is_loaded(tmp_path, compiled):
    model, x = collection_model(het_tf.keras.Model, optimizer="same")
    model.fit(x, ONES, verbose=0)
    model.save(tmp_path / "model.keras")
    loaded = keras.models.load_model(tmp_path / "model.keras", compile=compiled)
    np.testing.assert_array_equal(loaded.predict(x, verbose=0), model.predict(x, verbose=0))

"""What is made outside of `strategy.scope()`, or of another kind, is named and not passed over."""

from __future__ import annotations

import re

import keras
import numpy as np
import pytest
import tensorflow as tf
from clicks import IDS, LABELS, make_model

import het_tf.keras


def test_forgotten_scope_warns_with_the_line_to_add(strategy):
    del strategy
    with pytest.warns(UserWarning, match=r"'user' is built outside .* `with strategy.scope\(\):`"):
        model = make_model()
    for run in (model.fit, model.evaluate):
        with pytest.warns(UserWarning, match=r"'clicks' was made outside .* `with strategy.scope"):
            run(IDS, LABELS, verbose=0)
    with pytest.warns(UserWarning, match="the cluster does nothing"):
        model.predict(IDS, verbose=0)


class Subclassed(het_tf.keras.Model):
    def __init__(self):
        super().__init__()
        self.embedding = het_tf.layers.HetEmbedding(2, name="user")
        self.out = keras.layers.Dense(1)

    def call(self, ids):
        return self.out(keras.ops.squeeze(self.embedding(ids), 1))


def test_made_inside_and_built_outside(strategy):
    with strategy.scope():
        model = Subclassed()
        model.compile("sgd", "mse")
    with pytest.warns(UserWarning, match="'user' is built outside of the strategy's scope"):
        model(IDS)
    with pytest.raises(ValueError, match=r"was not made under the strategy.*strategy.scope\(\)"):
        model.fit(IDS, LABELS, verbose=0)


@pytest.mark.parametrize("method", ["fit", "evaluate", "predict"])
def test_plain_keras_model_under_the_strategy(strategy, method):
    with strategy.scope():
        model = make_model(keras.Model)
    arguments = (IDS,) if method == "predict" else (IDS, LABELS)
    with pytest.raises(ValueError, match=r"make the model a het_tf\.keras\.Model"):
        getattr(model, method)(*arguments, verbose=0)


def test_dataset_of_a_loop_of_ones_own_is_read_by_workers(strategy):
    dataset = tf.data.Dataset.from_tensor_slices(IDS).batch(8)
    with strategy.scope():
        distributed = strategy.experimental_distribute_dataset(dataset)
    per_worker = strategy.coordinator.create_per_worker_dataset(distributed)
    read = strategy.coordinator.schedule(tf.function(lambda it: next(it)), args=(iter(per_worker),))
    np.testing.assert_array_equal(read.fetch(), IDS[:8])


@pytest.mark.parametrize("optimizer", [keras.optimizers.SGD, keras.optimizers.Adam])
def test_optimizer_made_outside_the_scope(strategy, optimizer):
    made_outside = optimizer()
    with strategy.scope():
        model = make_model(optimizer=made_outside)
    with pytest.raises(ValueError, match=r"optimizer inside `with strategy.scope\(\):`"):
        model.fit(IDS, LABELS, verbose=0)


@pytest.mark.parametrize("resolver", [3, None, "localhost:2222", het_tf.distribute.LocalCluster()])
def test_what_is_no_resolver(resolver):
    with pytest.raises(TypeError, match=rf"cluster_resolver must be .*{re.escape(repr(resolver))}"):
        het_tf.distribute.HetParameterServerStrategy(resolver)


def test_resolver_with_an_unknown_task_type():
    """At once: it would wait for these servers."""
    cluster = tf.train.ClusterSpec({"worker": ["localhost:1"], "ps": ["localhost:2"]})
    resolver = tf.distribute.cluster_resolver.SimpleClusterResolver(cluster, task_type="boss")
    with pytest.raises(ValueError, match="task_type is 'boss', not one of"):
        het_tf.distribute.HetParameterServerStrategy(resolver)


def test_resolver_of_a_cluster_that_is_not_running():
    with pytest.raises(RuntimeError, match="The LocalCluster is not running"):
        het_tf.distribute.HetParameterServerStrategy(het_tf.distribute.LocalCluster().resolver)

"""Outputs and gradients of pooled lookups against TensorFlow's, in float64."""

import dataclasses

import numpy as np
import pytest
import tensorflow as tf
from row_steps import train_rows

import het_tf
from het_tf import ops, optimizers
from het_tf.tables.pooling import bags_of
from het_tf.tables.worker_cache import WorkerCache

KEYS, DIM = 12, 5
PADDING = KEYS
COMBINERS = ["sum", "mean", "sqrtn", "max"]


@dataclasses.dataclass
class Batch:
    """Bags of ids in order, with weights, and a gradient for each output."""

    ids: np.ndarray
    splits: np.ndarray
    weights: np.ndarray
    gradient: np.ndarray

    @classmethod
    def random(cls, rng, kind):
        bags = int(rng.integers(1, 9))
        lengths = rng.integers(0, 5, bags) * (rng.random(bags) < 0.7)
        if kind == "no ids":
            lengths[:] = 0
        splits = np.concatenate([[0], np.cumsum(lengths)])
        ids = rng.integers(0, KEYS, splits[-1])
        if kind == "padding":  # of some bags all ids, of others some
            ids[rng.random(len(ids)) < np.repeat(rng.random(bags).round(1), lengths)] = PADDING
        if kind == "all padding":
            ids[:] = PADDING
        weights = rng.uniform(0.5, 2.0, splits[-1])
        if kind == "zero weights":
            weights *= rng.random(splits[-1]) < 0.5
            weights[: splits[len(splits) // 2]] = 0
        weights = weights.astype(np.float32)
        gradient = rng.normal(size=(bags, DIM)).astype(np.float32)
        return cls(ids, splits, weights, gradient)

    @property
    def bag_of(self):
        return np.repeat(np.arange(len(self.splits) - 1), np.diff(self.splits))

    def without(self, id_):
        """The batch as if an id was not there."""
        kept = self.ids != id_
        splits = np.concatenate([[0], np.cumsum(kept)])[self.splits]
        return Batch(self.ids[kept], splits, self.weights[kept], self.gradient)


def expected_of_padded(batch, rows, combiner, weighted):
    """As `expected`, of a batch with padding: TensorFlow is given the ids without it."""
    outputs, of_rows, kept = expected(batch.without(PADDING), rows, combiner, weighted)
    of_weights = np.zeros(len(batch.ids))
    of_weights[batch.ids != PADDING] = kept
    return outputs, of_rows, of_weights


def expected(batch, rows, combiner, weighted):
    """TensorFlow's outputs, and its gradients of rows and weights; all in float64."""
    bags = len(batch.splits) - 1
    rows = tf.constant(rows, tf.float64)
    weights = tf.constant(batch.weights if weighted else np.ones_like(batch.weights), tf.float64)
    with tf.GradientTape() as tape:
        tape.watch([rows, weights])
        if combiner == "max":
            values = tf.gather(rows, batch.ids) * weights[:, tf.newaxis]
            outputs = tf.math.unsorted_segment_max(values, batch.bag_of, bags)
            outputs = tf.where((np.diff(batch.splits) == 0)[:, np.newaxis], 0.0, outputs)
        elif len(batch.ids) == 0:
            outputs = tf.reduce_sum(rows) * 0 + tf.zeros([bags, DIM], tf.float64)
        else:
            columns = np.arange(len(batch.ids)) - batch.splits[batch.bag_of]
            places = np.stack([batch.bag_of, columns], 1)
            outputs = tf.nn.embedding_lookup_sparse(
                rows,
                tf.SparseTensor(places, batch.ids, [bags, 5]),
                tf.SparseTensor(places, weights, [bags, 5]),
                combiner=combiner,
            )
            # It leaves out the last bags that are empty.
            outputs = tf.pad(outputs, [[0, bags - tf.shape(outputs)[0]], [0, 0]])
        loss = tf.reduce_sum(outputs * batch.gradient.astype(np.float64))
    of_rows, of_weights = tape.gradient(loss, [rows, weights])
    of_rows = tf.zeros_like(rows) if of_rows is None else tf.convert_to_tensor(of_rows)
    of_weights = np.zeros(len(batch.ids)) if of_weights is None else of_weights.numpy()
    # Its sqrtn of zero weights has NaN as their gradient.
    return outputs.numpy(), of_rows.numpy(), np.nan_to_num(of_weights)


class Local:
    """The table in this process."""

    def __init__(self, table):
        self._table = table

    def pool(self, keys, splits, weights, **layout):
        outputs, self._found, self.pooling = self._table.pool_op(keys, splits, weights, **layout)
        return outputs

    def update(self, gradients):
        self._table.apply_pooled_op(self._found, self.pooling, gradients, 1.0, "error")

    def flush(self):
        pass


class Cached(Local):
    """A worker's cache before the table."""

    config = het_tf.CacheConfig(KEYS // 2, staleness=3)

    def __init__(self, table):
        self._cache = WorkerCache(table, self.config)

    def pool(self, keys, splits, weights, **layout):
        self._ticket = self._cache.installed_op(ops.unique_ids(keys))
        outputs, self.pooling = self._cache.pool_op(self._ticket, splits, weights, **layout)
        return outputs

    def update(self, gradients):
        self._cache.update_pooled_op(self._ticket, self.pooling, gradients, 1.0)

    def flush(self):
        self._cache.flush()


class Uncached(Cached):
    """A worker that fetches rows and sends gradients."""

    config = None


@pytest.mark.parametrize("rounds", [4, pytest.param(12, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("kind", [Local, Cached, Uncached])
def test_outputs_and_gradients_are_tensorflows(kind, rounds):
    for combiner in COMBINERS:
        check_rounds(kind, combiner, True, rounds)
        if combiner == "mean" or rounds > 4:
            check_rounds(kind, combiner, False, rounds)


def check_rounds(kind, combiner, weighted, rounds):
    rng = np.random.default_rng(COMBINERS.index(combiner) * 2 + weighted)
    table = het_tf.EmbeddingTable(DIM, optimizers.SGD(1.0), initializer="normal", seed=3)
    way = kind(table)
    for round_ in range(rounds):
        # Two features of one lookup, so that what one has does not leak into the other.
        names = ["mixed", "zero weights", "no ids", "padding", "all padding"]
        batches = [Batch.random(rng, names[(round_ + i) % 5]) for i in range(2)]
        rows = table.lookup(np.arange(KEYS))
        given = [tf.constant(b.weights) for b in batches]
        with tf.GradientTape(persistent=True) as tape:
            tape.watch(given)
            bags = [
                ragged_bags(b, weights if weighted else None, combiner)
                for b, weights in zip(batches, given, strict=True)
            ]
        keys = tf.concat([each.ids for each in bags], 0)
        splits = [each.splits for each in bags]
        weights = [each.weights if weighted else tf.zeros([0]) for each in bags]
        outputs = way.pool(keys, splits, weights, combiners=[combiner] * 2, bag_sizes=[1, 1])
        gradients = [tf.constant(b.gradient) for b in batches]
        of_weights = ops.pooling_gradient(way.pooling, gradients)
        way.update(gradients)
        way.flush()
        change = rows - table.lookup(np.arange(KEYS))
        wanted = [expected_of_padded(b, rows, combiner, weighted) for b in batches]
        for output, (wanted_output, _, _) in zip(outputs, wanted, strict=True):
            np.testing.assert_allclose(output, wanted_output, rtol=1e-5, atol=1e-6)
        np.testing.assert_allclose(
            change, sum(of_rows for _, of_rows, _ in wanted), rtol=1e-4, atol=1e-5
        )
        assert PADDING not in table.export().keys
        if not weighted:
            assert [len(x) for x in of_weights] == [0, 0]
            continue
        for i, (_, _, wanted_weight) in enumerate(wanted):
            of_weight = tape.gradient(weights[i], given[i], of_weights[i])
            np.testing.assert_allclose(of_weight, wanted_weight, rtol=1e-4, atol=1e-5)


def ragged_bags(batch, weights, combiner):
    ids, weights = (
        None if x is None else tf.RaggedTensor.from_row_splits(x, batch.splits)
        for x in (batch.ids, weights)
    )
    return bags_of(ids, weights, combiner, PADDING, "ids")


def new_layer(combiner, **arguments):
    return het_tf.layers.HetEmbedding(
        DIM,
        optimizer=optimizers.SGD(1.0),
        embeddings_initializer="normal",
        seed=2,
        combiner=combiner,
        **arguments,
    )


@pytest.mark.parametrize(
    ("combiner", "weighted"), [("sum", True), ("mean", False), ("sqrtn", True), ("max", True)]
)
def test_padding_of_a_matrix_is_as_if_it_was_not_there(combiner, weighted):
    rng = np.random.default_rng(COMBINERS.index(combiner) * 2 + weighted)
    layer = new_layer(combiner, padding_id=PADDING)
    layer.build()
    for padded in (0.0, 0.3, 0.7, 1.0):
        ids = rng.integers(0, KEYS, (6, 4))
        ids[rng.random((6, 4)) < padded] = PADDING
        ids[2:4] = PADDING
        batch = Batch(
            ids.ravel(),
            np.arange(0, 25, 4),
            rng.uniform(0.5, 2.0, 24).astype(np.float32),
            rng.normal(size=(6, DIM)).astype(np.float32),
        )
        rows = layer.table.lookup(np.arange(KEYS))
        weights = tf.constant(batch.weights.reshape(6, 4))
        with tf.GradientTape() as tape:
            tape.watch(weights)
            outputs = layer(ids, weights if weighted else None)
            loss = tf.reduce_sum(outputs * batch.gradient)
        *of_rows, of_weights = tape.gradient(loss, [*layer.trainable_variables, weights])
        layer.anchor.assign(*of_rows)
        wanted, of_rows, of_each = expected_of_padded(batch, rows, combiner, weighted)
        np.testing.assert_allclose(outputs, wanted, rtol=1e-5, atol=1e-6)
        change = rows - layer.table.lookup(np.arange(KEYS))
        np.testing.assert_allclose(change, of_rows, rtol=1e-4, atol=1e-5)
        if weighted:
            of_each = of_each.reshape(6, 4)
            np.testing.assert_allclose(of_weights, of_each, rtol=1e-4, atol=1e-5)
        else:
            assert of_weights is None


def test_a_maximum_that_ids_share_goes_to_each_as_in_tensorflow():
    layer = new_layer("max")
    ids = np.array([[3, 3, 4], [5, 3, 3]])
    before = layer(ids)
    rows = layer.table.lookup(np.arange(KEYS))
    batch = Batch(
        ids.ravel(), np.array([0, 3, 6]), np.ones(6, np.float32), np.ones((2, DIM), np.float32)
    )
    with tf.GradientTape() as tape:
        loss = tf.reduce_sum(layer(ids))
    train_rows(tape, loss, layer)
    outputs, of_rows, _ = expected(batch, rows, "max", False)
    np.testing.assert_allclose(before, outputs, rtol=1e-6)
    np.testing.assert_allclose(
        rows - layer.table.lookup(np.arange(KEYS)), of_rows, rtol=1e-5, atol=1e-6
    )

"""Which worker trains which example: het_tf.data."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

import het_tf

WORKERS, BATCH = 3, 4


def context(worker, workers=WORKERS):
    return tf.distribute.InputContext(workers, worker, workers)


def examples(count, users=40, seed=0):
    """Users, each with an own group of items, and a number for each example."""
    rng = np.random.default_rng(seed)
    user = rng.integers(0, users, count)
    item = 1000 * user[:, None] + rng.integers(0, 5, (count, 2))
    return {"user": user, "item": item}, np.arange(count)


def shares(data, workers=WORKERS, **arguments):
    """The examples' numbers, by worker and batch."""
    dataset = tf.data.Dataset.from_tensor_slices(data).batch(BATCH)
    return [
        [
            y.numpy().tolist()
            for _, y in het_tf.data.location_aware(
                dataset,
                lambda x, y: [x["user"], x["item"]],
                context(worker, workers),
                batch_size=BATCH,
                **arguments,
            )
        ]
        for worker in range(workers)
    ]


@pytest.mark.parametrize("count", [WORKERS * BATCH * 10, WORKERS * BATCH * 10 + 2])
def test_every_example_comes_to_one_worker_in_its_step(count):
    batches = shares(examples(count))
    for step in range(10):
        of_step = sorted(n for worker in batches for n in worker[step])
        assert of_step == list(range(step * WORKERS * BATCH, (step + 1) * WORKERS * BATCH))
        assert {len(worker[step]) for worker in batches} == {BATCH}
    rest = [n for worker in batches for batch in worker[10:] for n in batch]
    assert sorted(rest) == list(range(WORKERS * BATCH * 10, count))


def test_a_worker_gets_examples_whose_rows_it_has():
    (x, y) = examples(WORKERS * BATCH * 60)
    batches = shares((x, y))

    def users(of_worker):
        return {x["user"][n] for batch in of_worker[30:] for n in batch}

    in_turn = [{x["user"][n] for n in y[len(y) // 2 :][w::WORKERS]} for w in range(WORKERS)]
    assert sum(map(len, map(users, batches))) < 0.8 * sum(map(len, in_turn))


def test_plans_begin_anew_with_each_iterator_and_are_the_same():
    data = examples(WORKERS * BATCH * 5)
    assert shares(data) == shares(data)
    dataset = het_tf.data.location_aware(
        tf.data.Dataset.from_tensor_slices(data).batch(BATCH, drop_remainder=True),
        lambda x, y: x["user"],
        context(1),
    )
    first, second = ([y.numpy().tolist() for _, y in dataset] for _ in range(2))
    assert first == second


def test_ragged_tensors_and_single_components_follow_their_examples():
    ids = tf.range(WORKERS * BATCH * 2, dtype=tf.int64)
    bags = tf.RaggedTensor.from_row_lengths(tf.repeat(ids, ids % 3), ids % 3)
    dataset = tf.data.Dataset.from_tensor_slices({"id": ids, "bag": bags}).batch(BATCH)
    share = het_tf.data.location_aware(
        dataset, lambda x: x["id"], context(2), batch_size=BATCH, fields=[0], capacity=5
    )
    for batch in share:
        for number, bag in zip(batch["id"].numpy(), batch["bag"].to_list(), strict=True):
            assert bag == [number] * (number % 3)


def test_one_worker_trains_the_dataset_in_its_order():
    data = tf.data.Dataset.range(3 * BATCH).batch(2)
    share = het_tf.data.location_aware(data, lambda x: x, context(0, 1), batch_size=BATCH)
    assert [batch.numpy().tolist() for batch in share] == [
        list(range(i, i + BATCH)) for i in range(0, 3 * BATCH, BATCH)
    ]


def test_telling_fields_are_those_that_go_together():
    rng = np.random.default_rng(0)
    user = rng.integers(0, 30, 4000)
    x = np.stack([rng.integers(0, 3, 4000), user * 7 + 10**6, rng.integers(0, 10**5, 4000)], 1)
    dataset = tf.data.Dataset.from_tensor_slices(x).batch(10)
    fields = het_tf.data.telling_fields(dataset, lambda x: x, workers=4, batch_size=10, steps=60)
    assert fields[0] == 1
    assert 2 not in fields


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"capacity": 0}, "capacity must be at least 1, not 0"),
        ({"fields": [3]}, "fields holds 3, but ids has 3 columns"),
        ({"batch_size": None}, "batch dimension of the dataset is unknown"),
        ({"on_demand": True}, "on_demand=True needs HetParameterServerStrategy"),
    ],
)
def test_bad_arguments_are_named(arguments, said):
    dataset = tf.data.Dataset.from_tensor_slices(examples(20)).batch(BATCH)
    with pytest.raises(ValueError, match=said):
        het_tf.data.location_aware(
            dataset,
            lambda x, y: [x["user"], x["item"]],
            context(0),
            **{"batch_size": BATCH, **arguments},
        )
    with pytest.raises(ValueError, match="at most 64 workers, not 65"):
        het_tf.data.location_aware(dataset, lambda x, y: x["user"], context(0, 65))

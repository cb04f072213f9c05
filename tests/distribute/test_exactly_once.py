"""Updates of rows count once, whichever workers die."""

from __future__ import annotations

import program_runner
import pytest
import small_models as sm

import het_tf


@pytest.mark.parametrize(
    ("kills", "workers"), [(3, 2), pytest.param(30, 3, marks=pytest.mark.exhaustive)]
)
def test_every_example_counts_once_though_workers_are_killed(kills, workers):
    seen = program_runner.result_of(
        "exactly_once_program.py", f"--kills={kills}", f"--workers={workers}"
    )
    assert len(seen["killed"]) == kills
    assert seen["epochs"] > 0
    assert seen["wrong"] == []


def test_batches_have_to_be_the_same_for_every_run(strategy):
    strategy.exactly_once = True
    try:
        with strategy.scope():
            model = sm.make_id_counter(het_tf.keras.Model, 10)
        with pytest.raises(ValueError, match="the batches of a closure must be the same"):
            model.fit(lambda context: sm.id_dataset(range(10), 5), verbose=0)
    finally:
        strategy.exactly_once = False

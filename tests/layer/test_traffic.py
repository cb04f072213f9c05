"""What `fit` advises when its workers wait."""

from __future__ import annotations

from het_tf.keras.callbacks.traffic import advice
from het_tf.runtime.counters import with_ratios


def caches(**counters):
    names = ("ids", "keys", "hits", "hit_ids", "stale_hits", "rows_unasked", "evictions")
    return with_ratios(dict.fromkeys(names, 0) | counters)


def test_the_one_thing_to_change():
    good = {"ids": 1000, "keys": 1000, "hits": 900, "hit_ids": 900}
    few = good | {"hits": 200, "hit_ids": 200}
    assert advice(0.29, {}) is None
    assert "no layer has a cache" in advice(0.31, {})
    assert "20% of the ids: raise the capacity" in advice(0.5, caches(**few, evictions=1))
    assert "capacity" not in advice(0.5, caches(**few)), "a cache that is not full"
    refreshed = caches(**good, stale_hits=200, rows_unasked=100)
    assert "30% of the rows are fetched again" in advice(0.5, refreshed)
    assert "bfloat16" in advice(0.5, caches(**good))
    assert "bfloat16" in advice(0.5, caches()), "nothing was looked up"

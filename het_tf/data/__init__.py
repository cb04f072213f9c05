"""Input that knows the caches: which worker trains which example, and when."""

from het_tf.data.hot_batches import HotRows, hot_batches, hot_rows
from het_tf.data.location_aware import location_aware, plan_stats, telling_fields

__all__ = [
    "HotRows",
    "hot_batches",
    "hot_rows",
    "location_aware",
    "plan_stats",
    "telling_fields",
]

"""Embedding tables larger than the memory of one machine, with a cache on every worker.

An implementation of HET (Miao et al., VLDB 2022, arXiv 2112.07221) for TensorFlow and Keras.
"""

from het_tf import (
    checkpoint,
    data,
    distribute,
    initializers,
    interop,
    keras,
    layers,
    ops,
    optimizers,
    planner,
    serving,
)
from het_tf.cache_config import CacheConfig
from het_tf.compat import gpu_probe
from het_tf.export import export_saved_model
from het_tf.lifetimes import Admission, Expiry, KeyRange
from het_tf.row_storage import Storage
from het_tf.tables.table import EmbeddingTable, TableExport

__all__ = [
    "Admission",
    "CacheConfig",
    "EmbeddingTable",
    "Expiry",
    "KeyRange",
    "Storage",
    "TableExport",
    "checkpoint",
    "data",
    "distribute",
    "export_saved_model",
    "initializers",
    "interop",
    "keras",
    "layers",
    "ops",
    "optimizers",
    "planner",
    "serving",
]
__version__ = "0.1.0"

gpu_probe.look_for_devices()

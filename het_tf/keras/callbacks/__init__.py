"""Callbacks for models that train on parameter servers."""

from het_tf.keras.callbacks.backup import BackupAndRestore
from het_tf.keras.callbacks.cache_metrics import CacheMetrics

__all__ = ["BackupAndRestore", "CacheMetrics"]

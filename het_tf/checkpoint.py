"""Checkpoints of tables, and folders for the rows of Keras files."""

from het_tf.storage.checkpoints.keras_files import rows_in
from het_tf.storage.checkpoints.manager import Manager
from het_tf.storage.checkpoints.table_state import TableState

__all__ = ["Manager", "TableState", "rows_in"]

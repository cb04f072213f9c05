"""Tables that are larger than memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras

from het_tf.runtime.quantities import to_bytes

LEAST_MEMORY = 256 << 10  # bytes; FileArena::kLeastPages of ops/core/memory/file_arena.h


@keras.saving.register_keras_serializable("het_tf")
@dataclasses.dataclass(frozen=True)
class Storage:
    """Place of a table's rows on every parameter server: a file, with a part of it in memory.

    The rows are in pages of 4096 bytes of a file that has no name and is gone with the server. The
    pages in use are in memory. A server reads all rows of a request at once, so that the disk works
    on many pages at the same time. When more than `memory` is used, pages that no step has used
    since the last look are written and leave memory (second chance). The index stays in memory: 16
    to 28 bytes for each row.

    All guarantees hold as for rows in memory. A full disk is an error of the step, which changes
    nothing. Rows that are created one after the other share pages, so pages of frequent ids are
    frequent themselves, if ids get their rows in the order of training.

    Attributes:
      memory: memory for rows of the table on every server, in bytes or as a text such as "8GB". At
        least 256 KiB. None: what the strategy's plan has for the table (`het_tf.planner`), and
        without a plan, for each such table, a quarter of the memory that is free on the server.
      path: folder on a disk of every server, such as "/nvme/rows".

    Raises:
      ValueError: an attribute is invalid. The message names the attribute and its value.
    """

    memory: Any = None  # an integer or None after __post_init__
    path: str = ""

    def __post_init__(self) -> None:
        if self.memory is not None:
            object.__setattr__(self, "memory", to_bytes("memory", self.memory))
        if not isinstance(self.path, str) or not self.path.startswith("/") or "\n" in self.path:
            raise ValueError(f"path must be an absolute path of a folder, not {self.path!r}")

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, for Keras serialization."""
        return dataclasses.asdict(self)

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> Storage:
        """Creates a storage from the result of `get_config`."""
        return cls(**config)


def check(storage: Any) -> None:
    """Raises a ValueError if `storage` is neither a `Storage` nor None."""
    if storage is not None and not isinstance(storage, Storage):
        raise ValueError(f"storage must be a het_tf.Storage or None, not {storage!r}")


def spec(storage: Storage | None, planned_memory: int | None = None) -> str:
    """Returns the text form of a storage for the ops. Empty: rows are in memory.

    Args:
      storage: the storage of a layer.
      planned_memory: memory that a plan has for the rows, for a storage without `memory`.
    """
    if storage is None:
        return ""
    memory = planned_memory if storage.memory is None else storage.memory
    return f"memory={memory or 'auto'} path={storage.path}"

"""Tables that are larger than memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import keras

from het_tf.runtime.quantities import to_bytes


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
        least 256 KiB.
      path: folder on a disk of every server, such as "/nvme/rows".

    Raises:
      ValueError: an attribute is invalid. The message names the attribute and its value.
    """

    memory: Any  # an integer after __post_init__
    path: str

    def __post_init__(self) -> None:
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


def spec(storage: Storage | None) -> str:
    """Returns the text form of a storage for the ops. Empty: rows are in memory.

    Raises:
      ValueError: `storage` is neither a `Storage` nor None.
    """
    if storage is None:
        return ""
    if not isinstance(storage, Storage):
        raise ValueError(f"storage must be a het_tf.Storage or None, not {storage!r}")
    return f"memory={storage.memory} path={storage.path}"

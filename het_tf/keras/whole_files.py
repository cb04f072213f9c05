"""Files that are there whole, or as they were before."""

from __future__ import annotations

import contextlib
import os
import uuid
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def whole_file(
    filepath: Any, arguments: dict[str, Any], endings: tuple[str, ...] = (".keras", ".h5")
) -> Iterator[Any]:
    """Where to write a file that then takes the place of `filepath`, unless there was an error.

    Args:
      filepath: what Keras is to write. Where that is no local file, but a folder or an URL, or
        where Keras has questions to ask (`overwrite=False`), it is written as it is.
      arguments: Keras's other ones.
      endings: of the names that Keras takes; others it refuses, by their names.
    """
    path = os.fspath(filepath)
    is_file = path.endswith(endings) and "://" not in path and not os.path.isdir(path)
    if not is_file or arguments.get("max_shard_size") or not arguments.get("overwrite", True):
        yield filepath
        return
    folder, name = os.path.split(path)
    # Keras tells formats by the ending.
    temporary = os.path.join(folder, f".{uuid.uuid4().hex}.{name}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)

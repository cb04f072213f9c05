"""Files that are there whole, or as they were before."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
import uuid
from collections.abc import Iterator
from typing import Any

from het_tf.saving.files import replacing


@contextlib.contextmanager
def whole_file(
    filepath: Any, arguments: dict[str, Any], endings: tuple[str, ...] = (".keras", ".h5")
) -> Iterator[Any]:
    """Where to write a file that then takes the place of `filepath`, unless there was an error.

    Args:
      filepath: what Keras is to write. Where that is no file, but a folder, or where Keras has
        questions to ask (`overwrite=False`), it is written as it is.
      arguments: Keras's other ones.
      endings: of the names that Keras takes; others it refuses, by their names.
    """
    path = os.fspath(filepath)
    is_file = path.endswith(endings) and not os.path.isdir(path)
    asks = os.path.exists(path) and not arguments.get("overwrite", True)
    if not is_file or arguments.get("max_shard_size") or asks:
        yield filepath
        return
    folder, name = os.path.split(path)
    if "://" in path:
        with tempfile.TemporaryDirectory() as folder:
            temporary = os.path.join(folder, name)
            yield temporary
            with open(temporary, "rb") as file, replacing(path) as (target,):
                shutil.copyfileobj(file, target)
        return
    # Keras tells formats by the ending.
    temporary = os.path.join(folder, f".{uuid.uuid4().hex}.{name}")
    try:
        yield temporary
        os.replace(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.remove(temporary)

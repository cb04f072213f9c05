"""Serving with the het_tf ops: rows are mapped from files and follow the training.

The serving program must first load the op library, with `import het_tf` or with
`tf.load_op_library` of `het_tf.ops.LIBRARY`. `het_tf.export_saved_model` writes SavedModels without
the ops.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from absl import logging

from het_tf import ops
from het_tf.export import (
    flush_model,
    give_endpoint,
    layers_with_rows,
    save_endpoints,
    servable_of,
    signature_of,
)
from het_tf.runtime.current_strategy import servers_named
from het_tf.runtime.validation import INT32_MAX, check_integer, check_number
from het_tf.storage.checkpoints import snapshots
from het_tf.storage.checkpoints.snapshots import Background
from het_tf.storage.files import VERSIONS, saving_model
from het_tf.storage.served import graph_fingerprint
from het_tf.storage.served.row_selection import RowSelection
from het_tf.storage.served.versions import SupersededError, Versions, verify_versions
from het_tf.tables.pooling import Bags, pool_with_stock_ops
from het_tf.tables.table import EmbeddingTable

# Asset of the SavedModel. Its path shows the folder from which the model was loaded.
_ASSET = "het_tf.json"


class _Served(tf.saved_model.experimental.TrackableResource):
    """Resource of a loaded model that opens the model's versions."""

    def __init__(self, asset: tf.saved_model.Asset, attributes: dict[str, Any]):
        super().__init__()
        self._asset = asset
        self._attributes = attributes
        # Creates the handle now. A handle that is first used in a graph would belong to that graph.
        assert self.resource_handle is not None

    def _create_resource(self) -> tf.Tensor:
        return ops.served_handle(**self._attributes)

    def _initialize(self) -> tf.Operation:
        return ops.served_open(self.resource_handle, self._asset.asset_path)


class _MappedTable:
    """A table of one version."""

    def __init__(self, view: tf.Tensor, table: int, dim: int):
        self._view, self._table, self._dim = view, table, dim

    def pool(self, keys: tf.Tensor, features: Sequence[Bags]) -> list[tf.Tensor]:
        """Reads rows and pools them. Accepts the arguments of `HetEmbedding.outputs_of`.

        Returns:
          float32 [bags, dim], one per feature.
        """
        rows = ops.served_lookup(self._view, keys, table=self._table, dim=self._dim)
        if len(features) == 1 and not features[0].pools:
            return [rows]
        of_features = tf.split(rows, [tf.size(bags.ids) for bags in features])
        return [
            pool_with_stock_ops(of_feature, tf.range(tf.size(bags.ids, tf.int64)), bags)
            for of_feature, bags in zip(of_features, features, strict=True)
        ]


def save_mapped(
    model: keras.Model,
    path: str | os.PathLike[str],
    input_signature: Any,
    selection: RowSelection,
    poll_seconds: float,
    full_every: int = 1,
) -> Versions:
    """Writes a SavedModel with a first version of its rows and variables.

    If the folder has a SavedModel of the same model, this function only adds a version. After an
    error, the folder has its earlier versions only.

    Args:
      model: a built model.
      path: folder of the SavedModel.
      input_signature: as in `het_tf.export_saved_model`.
      selection: rows to serve, and their stored dtype.
      poll_seconds: interval in seconds at which a serving program looks for newer versions. 0:
        never.
      full_every: one of `full_every` later versions has all rows.

    Returns:
      The writer of later versions.

    Raises:
      ValueError: an error of `het_tf.export_saved_model`, `path` is a URL, or the folder has
        another model. The message names the difference.
      RuntimeError: another publisher began to write into the folder at the same time.
      tf.errors.OpError: a file cannot be written, or a parameter server is down.
    """
    path = os.fspath(path)
    if "://" in path:
        raise ValueError(
            f"rows are mapped from files of the operating system: {path!r} must be a folder of it"
        )
    specs = signature_of(model, input_signature)
    layers = layers_with_rows(model)
    for layer in layers:
        selection.check_table(layer.table)
    tables = [layer.table for layer in layers]
    attributes = {
        "dims": [table.dim for table in tables],
        "initializers": [table.row_attributes["initializer"] for table in tables],
        "seeds": [table.row_attributes["seed"] for table in tables],
        "poll_seconds": poll_seconds,
    }

    def values() -> list[np.ndarray]:
        return [v.value.numpy() for v in model.variables]

    def first_version(folder: str) -> Versions:
        versions = Versions(f"{folder}/{VERSIONS}", tables, values, selection, full_every)
        try:
            flush_model(model)
            versions.begin()()
        except BaseException:
            versions.close()
            raise
        return versions

    with tempfile.TemporaryDirectory() as directory:
        asset = f"{directory}/{_ASSET}"
        with tf.device("/device:CPU:0"):
            servable = _servable_without_rows(model, tables, specs, attributes, asset)
            description = attributes | _description(model, servable)
        if tf.io.gfile.exists(f"{path}/saved_model.pb"):
            _check_description(path, description, [layer.name for layer in layers])
            return first_version(path)
        with open(asset, "w") as file:
            json.dump(description, file)
        with saving_model(path) as folder:
            with tf.device("/device:CPU:0"):
                save_endpoints(servable, folder, {"freshness": servable.freshness})
            versions = first_version(folder)
            if tf.io.gfile.exists(f"{path}/saved_model.pb"):
                versions.close()
                message = f"{path}: another publisher wrote a SavedModel there meanwhile"
                raise SupersededError(message)
    versions.folder = f"{path}/{VERSIONS}"
    return versions


def _servable_without_rows(
    model: keras.Model,
    tables: Sequence[EmbeddingTable],
    specs: list[Any],
    attributes: dict[str, Any],
    asset: str,
) -> tf.Module:
    dtypes = [tf.as_dtype(v.dtype) for v in model.variables]
    shapes = [tuple(v.shape) for v in model.variables]
    servable = servable_of(model)
    servable.asset = tf.saved_model.Asset(asset)
    servable.served = _Served(servable.asset, attributes)

    def read() -> tuple[list[_MappedTable], list[tf.Tensor]]:
        view, _ = ops.served_pin(servable.served.resource_handle)
        values = ops.served_variables(view, dtypes=dtypes, shapes=shapes) if dtypes else []
        return [_MappedTable(view, i, t.dim) for i, t in enumerate(tables)], values

    @tf.function(input_signature=[], autograph=False)
    def freshness() -> dict[str, tf.Tensor]:
        return ops.served_status(servable.served.resource_handle)._asdict()

    servable.freshness = freshness
    give_endpoint(servable, model, specs, read)
    return servable


def _description(model: keras.Model, servable: tf.Module) -> dict[str, Any]:
    """Returns a description that identifies a model, besides the attributes of its tables."""
    serve = servable.serve.get_concrete_function()
    lookups = [x for x in servable.resources if hasattr(x, "export")]
    return {
        "variables": [[tf.as_dtype(v.dtype).name, list(v.shape)] for v in model.variables],
        "lookup tables": [graph_fingerprint.lookup_table_checksum(table) for table in lookups],
        "constants": graph_fingerprint.constants_of(serve),
        "graph": [list(pair) for pair in graph_fingerprint.checksums(serve)],
    }


def _check_description(path: str, own: dict[str, Any], layers: Sequence[str]) -> None:
    """Raises a ValueError with the first difference if a folder has another model."""
    asset = f"{path}/assets/{_ASSET}"
    known = json.loads(tf.io.gfile.GFile(asset).read()) if tf.io.gfile.exists(asset) else {}
    differs = next((name for name in own if known.get(name) != own[name]), None)
    if differs == "graph" and "graph" in known:
        saved = {checksum for _, checksum in known["graph"]}
        new = [scope for scope, checksum in own["graph"] if checksum not in saved]
        if not new and len(known["graph"]) == len(own["graph"]):
            return  # Only the order of operations differs.
        differs = f"what it computes, in {new[0]}" if new else "it computes more"
    elif differs in known and differs not in ("lookup tables", "constants"):
        named = layers if differs in ("dims", "initializers", "seeds") else ()
        differs = _first_difference(differs, known[differs], own[differs], named)
    elif differs is not None:
        differs = f"its {differs}" if known else "not one of het_tf.serving"
    if differs is not None:
        raise ValueError(f"{path} holds another model: {differs}")


def _first_difference(name: str, known: Any, own: Any, layers: Sequence[str]) -> str:
    if not isinstance(own, list):
        return f"{name} = {known} there, {own} here"
    if len(known) != len(own):
        return f"{len(known)} {name} there, {len(own)} here"
    at = next(i for i, (one, other) in enumerate(zip(known, own, strict=True)) if one != other)
    which = f" of layer {layers[at]}" if layers else f"[{at}]"
    hint = "; give the layer a seed, or load the model that was saved" if name == "seeds" else ""
    return f"{name}{which} = {known[at]} there, {own[at]} here{hint}"


__all__ = ["Publisher", "export_mapped", "publish", "verify"]

# Interval at which a serving program looks for a newer version.
_POLL_SECONDS = 0.5
# Interval at which a publisher checks whether another snapshot was written.
_LOOK_SECONDS = 0.05

_EVERY = re.compile(r"(\d+(?:\.\d*)?)\s*(ms|s|m|min|h)")
_UNITS = {"ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0}


@servers_named()
def export_mapped(
    model: keras.Model,
    path: str | os.PathLike[str],
    input_signature: Any = None,
    *,
    rows: str = "float32",
    min_updates: int = 0,
    min_norm: float = 0.0,
    max_age: int | None = None,
) -> None:
    """Writes a SavedModel that maps its rows from files. Loading it takes no time at any size.

    Every shard writes a snapshot of its rows and continues to answer requests. All processes of a
    machine that load the model share the memory of the rows. Do not change the files in place. The
    file system must be mounted: URLs do not work.

    The endpoints are those of `het_tf.export_saved_model`, and `freshness` (see `publish`).

    Args:
      model: a built model, under a strategy or not.
      path: folder of the SavedModel. Parameter servers must reach it under the same path.
      input_signature: as in `het_tf.export_saved_model`.
      rows: as in `het_tf.export_saved_model`.
      min_updates: as in `het_tf.export_saved_model`.
      min_norm: as in `het_tf.export_saved_model`.
      max_age: as in `het_tf.export_saved_model`.

    Raises:
      ValueError: an error of `het_tf.export_saved_model`, `path` is a URL, or the folder has a
        SavedModel.
      tf.errors.OpError: a file cannot be written, a value is beyond the range of float16, or a
        parameter server is down. No file of the model is left.
    """
    if tf.io.gfile.exists(f"{os.fspath(path)}/saved_model.pb"):
        raise ValueError(f"path = {os.fspath(path)} holds a SavedModel already")
    selection = RowSelection(rows, min_updates, min_norm, max_age)
    save_mapped(model, path, input_signature, selection, poll_seconds=0).close()


@servers_named()
def publish(
    model: keras.Model,
    folder: str | os.PathLike[str],
    every: float | str = "60s",
    input_signature: Any = None,
    *,
    rows: str = "float32",
    min_updates: int = 0,
    max_age: int | None = None,
    full_every: int = 1000,
) -> Publisher:
    """Writes a SavedModel as `export_mapped` does, and then new versions while the model trains.

    A thread of this program publishes the versions. For every version, the servers write the rows
    that changed, and the thread writes the variables. Training continues meanwhile. A program that
    has loaded the model opens every new version without loading the model again. Every request
    reads from one version only. The publisher writes a whole version and removes old files when the
    changes have half as many rows as the last whole version, or after `full_every` versions. If
    several publishers use a folder, only the newest continues. The others raise an error.

    The endpoint `freshness` returns "version", "written" (time in seconds since 1970),
    "age_seconds", "changed_rows" (number of changed rows in memory), and "trouble" (the error of
    opening the next version, or "").

    A version has the rows of the parameter servers and the values of Keras's variables. Pending
    updates of workers (`staleness`, `dense_staleness`) are in a later version. If the publisher is
    a callback of `fit`, `fit` flushes the workers first, and rows and variables belong to the same
    moment between two steps. `fit` waits for the snapshot and continues while the version is
    written.

    Args:
      model: a built model, under a strategy or not.
      folder: folder of the SavedModel. Parameter servers and serving programs must reach it. If an
        earlier program has published this model there, its versions are continued.
      every: interval in seconds, or text such as "30s", "5m", "1h".
      input_signature: as in `het_tf.export_saved_model`.
      rows: as in `het_tf.export_saved_model`.
      min_updates: as in `het_tf.export_saved_model`.
      max_age: as in `het_tf.export_saved_model`, for whole versions. Other versions have all
        changed rows of any age, which are served until the next whole version.
      full_every: one of `full_every` versions has all rows, even if few rows change. A program that
        loads the model opens all versions since the last whole one, and the folder keeps their
        files. A thousand versions take 0.2 to 0.5 s (100 rows of 16 columns each).

    Returns:
      The publisher, after the first version was written.

    Raises:
      ValueError: an error of `het_tf.export_saved_model`, `folder` is a URL or has another model,
        or `every` or `full_every` is out of range.
      RuntimeError: another publisher began to write into the folder at the same time.
      tf.errors.OpError: an error of `export_mapped`.
    """
    selection = RowSelection(rows, min_updates, max_age=max_age)
    full_every = check_integer("full_every", full_every, 1, INT32_MAX)
    return Publisher(model, folder, _seconds(every), input_signature, selection, full_every)


class Publisher(keras.callbacks.Callback):
    """Publisher of a model, until `close`. See `publish`."""

    def __init__(
        self,
        model: keras.Model,
        folder: str | os.PathLike[str],
        every: float,
        input_signature: Any,
        selection: RowSelection,
        full_every: int,
    ):
        """Publishes the first version. Accepts the arguments of `publish`, `every` in seconds."""
        super().__init__()
        self._published_model = model
        self._every = every
        self._next = time.monotonic() + every
        self._versions = save_mapped(
            model, folder, input_signature, selection, _POLL_SECONDS, full_every
        )
        self._version = self._versions.next - 1
        # Held while a thread begins a version, and while it waits for this version.
        self._lock = threading.Lock()
        self._writing = Background(os.fspath(folder))
        # Whether the last version was not written, or not even begun.
        self._failed = False
        # Whether `fit` makes steps, as far as its callbacks show.
        self._fits = False
        # Held while the publisher's thread takes a snapshot. `on_epoch_begin` waits for it, so that
        # steps start after the snapshot.
        self._moment = threading.Lock()
        self._closed = threading.Event()
        self._heard = threading.Event()
        self._thread = threading.Thread(target=self._run, name="het-publisher", daemon=True)
        self._thread.start()

    @property
    def version(self) -> int:
        """Number of the newest written version."""
        return self._version

    @servers_named()
    def publish(self, *, flush: bool = True) -> int:
        """Writes a version now. Waits for a version that is being written.

        Args:
          flush: whether to flush the workers first. Allowed only if no other thread trains.

        Returns:
          Number of the version.

        Raises:
          RuntimeError: the publisher was closed, or another publisher writes into the folder. This
            publisher then writes no more versions.
          tf.errors.OpError: a file cannot be written, or a parameter server is down. The next
            version also has the changes of this version.
        """
        with self._lock:
            self._wait()
            self._begin(flush)
            self._writing.wait()
            return self._version

    def close(self) -> None:
        """Publishes the changes since the last version, and stops.

        Raises: the errors of `publish`. The publisher stops in any case.
        """
        if self._closed.is_set():
            return
        try:
            self.publish()
        finally:
            with self._lock:
                self._wait()
                self._closed.set()
            self._heard.set()
            self._thread.join()

    def __enter__(self) -> Publisher:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    # Callbacks of Keras.

    def on_epoch_begin(self, epoch: int, logs: Any = None) -> None:
        """Passes the publishing from the thread to `on_train_batch_end`."""
        with self._moment:
            self._hear(fits=True)

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        """Begins a version if the interval is over and no write would delay it."""
        self._fits = True
        if time.monotonic() < self._next or self._writing.busy or snapshots.would_wait():
            return
        if self._ended or not self._lock.acquire(blocking=False):
            return
        try:
            self._wait()
            self._try_to_begin(flush=True)
        finally:
            self._lock.release()

    def on_test_begin(self, logs: Any = None) -> None:
        """Passes the publishing to the thread until the next step."""
        self._hear(fits=False)

    def on_train_end(self, logs: Any = None) -> None:
        """Waits for the version that is being written. Passes the publishing to the thread.

        Publishes again if the last version failed. If a newer publisher uses the folder, this
        function raises no error. `publish` and `close` do.

        Raises:
          tf.errors.OpError: the last version was not written, and cannot be written now.
        """
        with self._lock:
            self._wait()
        if self._failed and not self._ended:
            self.publish()
        self._hear(fits=False)

    @property
    def _ended(self) -> bool:
        return self._closed.is_set() or self._versions.superseded

    def _begin(self, flush: bool) -> None:
        """Begins a version. REQUIRES: `_lock` is held, and no version is being written."""
        if self._closed.is_set():
            raise RuntimeError("the publisher is closed")
        self._next, self._failed = time.monotonic() + self._every, True
        if flush:
            flush_model(self._published_model)
        self._writing.start(self._write, self._versions.begin())

    def _write(self, write: Callable[[], int]) -> None:
        try:
            self._version = write()
            self._failed = False
        except Exception as error:
            self._log(error)
            raise

    def _wait(self) -> None:
        """Waits until no version is being written. A failed version's changes are in the next."""
        with contextlib.suppress(Exception):  # `_write` has logged it.
            self._writing.wait()

    def _hear(self, fits: bool) -> None:
        self._fits = fits
        self._heard.set()

    def _run(self) -> None:
        while not self._ended:
            if (left := self._seconds_left()) > 0:
                self._heard.wait(left)
                self._heard.clear()
                continue
            with self._lock:
                self._wait()
                with self._moment:
                    if self._seconds_left() <= 0 and not self._ended:
                        self._fits = False
                        self._try_to_begin(flush=False)
                self._wait()
        with self._lock:
            self._wait()
            self._versions.close()

    def _seconds_left(self) -> float:
        """Returns the seconds until the thread publishes. It does not while another snapshot waits.

        Otherwise `fit` could wait for the thread, which would wait for the other snapshot.
        """
        # While `fit` makes steps, the thread gives it another interval, because `fit` flushes the
        # workers first. After this time without a step, `fit` may have ended with an exception,
        # which callbacks do not see.
        due = self._next + (self._every if self._fits else 0.0)
        return max(due - time.monotonic(), _LOOK_SECONDS if snapshots.would_wait() else 0.0)

    def _try_to_begin(self, flush: bool) -> None:
        try:
            self._begin(flush)
        except Exception as error:
            self._log(error)

    def _log(self, error: Exception) -> None:
        if isinstance(error, SupersededError):
            logging.error("publishing has ended: %s", error)
            return
        logging.warning("a version was not published, the next one has its rows: %s", error)


def _seconds(every: float | str) -> float:
    match = _EVERY.fullmatch(every.strip()) if isinstance(every, str) else None
    seconds = float(match[1]) * _UNITS[match[2]] if match else every
    if isinstance(seconds, str):
        raise ValueError(f'every must be a number of seconds or like "60s" or "5m", not {every!r}')
    return check_number("every", seconds, 1e-3, 1e9)


def verify(path: str | os.PathLike[str]) -> int:
    """Reads a whole SavedModel of `export_mapped` or `publish` and verifies its checksums.

    Loading a model verifies the checksums of changes, but not those of the rows in a whole version,
    which are read on demand. Versions may be published at the same time.

    Args:
      path: folder of the SavedModel.

    Returns:
      Number of row files.

    Raises:
      ValueError: there is no such model, or a file is missing or damaged. The message names the
        file.
    """
    path = os.fspath(path)
    if not tf.io.gfile.exists(f"{path}/saved_model.pb"):
        raise ValueError(f"path = {path} holds no SavedModel")
    return verify_versions(f"{path}/{VERSIONS}")

"""Manager of successive checkpoints, whose rows are written while training continues."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import time
import uuid
from collections.abc import Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf
from absl import logging

from het_tf.compat import keras_internals
from het_tf.runtime.validation import INT32_MAX, check_integer
from het_tf.storage.checkpoints import shard_parts
from het_tf.storage.checkpoints.increments import Chain, base_of
from het_tf.storage.checkpoints.snapshots import Background, wait_for_writes


def layers_in_containers(model: keras.Model) -> dict[str, Any]:
    """Returns trackable objects for a model's attributes that are lists or dicts of layers.

    TensorFlow's checkpoints do not see layers in lists and dicts.
    """
    # An attribute keeps its trackable object as long as it has the same layers. `vars` is needed,
    # because Keras would track an assigned attribute.
    containers = vars(model).setdefault("_het_containers", {})
    trackables = {}
    for name, value in [*vars(model).items()]:
        layers: dict[str, Any] = {}
        is_own = name == "_het_containers" or name in _names_of_keras()
        for path, layer in [] if is_own else _layers_within(value):
            while path in layers:  # A dict may have the keys 1 and "1".
                path += "'"
            layers[path] = layer
        if not layers:
            continue
        old_layers, trackable = containers.get(name, ({}, None))
        if list(old_layers) != list(layers) or any(
            old_layers[path] is not layers[path] for path in old_layers
        ):
            trackable = tf.train.Checkpoint()
            for path, layer in layers.items():
                setattr(trackable, f".{path}", layer)
            containers[name] = layers, trackable
        # For a tuple, TensorFlow already uses the attribute's name.
        trackables[f"{name}.lists" if isinstance(value, tuple) else name] = trackable
    return trackables


def _layers_within(
    value: Any, path: str = "", seen: bool = True, around: tuple[int, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """Yields the layers in containers that TensorFlow does not see, as (path, layer).

    Args:
      value: value of an attribute, or an item inside.
      path: keys and indices that lead to `value`, separated by dots.
      seen: whether TensorFlow sees `value`. It sees the items of tuples.
      around: ids of the containers around `value`.
    """
    if isinstance(value, keras.layers.Layer):
        if not seen:
            yield path, value
        return
    if not isinstance(value, (list, tuple, dict)) or id(value) in around:
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(item, (keras.layers.Layer, list, tuple, dict)):
            inner = f"{path}.{key}" if path else str(key)
            is_seen = seen and isinstance(value, tuple)
            yield from _layers_within(item, inner, is_seen, (*around, id(value)))


@functools.cache
def _names_of_keras() -> frozenset[str]:
    """Returns the attributes that Keras adds to models. Some of them contain the layers, too."""
    ids = keras.Input((1,), name="ids")
    models = [keras.Model(name="m"), keras.Sequential(name="s"), keras.Model(ids, ids, name="f")]
    return frozenset(name for model in models for name in vars(model))


def warn_of_missing(checkpoint: tf.train.Checkpoint, path: str) -> None:
    """Logs the layers for which a checkpoint had no rows. Called after its restore."""
    for layer in tf.train.TrackableView(checkpoint).descendants():
        state = getattr(layer, "_table_state", None)
        if state is not None and state.shape.path != path:
            logging.warning(
                "%s has no rows for layer %s, which are as they were: that layer may be new, or"
                " layers have another order or nesting than when it was saved",
                path,
                layer.name,
            )


def warn_of_unbuilt(checkpoint: tf.train.Checkpoint) -> None:
    """Logs the optimizers that are not built before a restore. Their slots are not restored."""
    for trackable in tf.train.TrackableView(checkpoint).descendants():
        if isinstance(trackable, keras.optimizers.Optimizer) and not trackable.built:
            logging.warning(
                "optimizer %s is not built, so that not all of its slots are restored: call its"
                " build(model.trainable_variables) before",
                trackable.name,
            )


def check_reached(checkpoint: tf.train.Checkpoint) -> None:
    """Checks that a checkpoint contains the tables of all of its models.

    Raises:
      ValueError: a table is missing. The message names its layer.
    """
    reached = tf.train.TrackableView(checkpoint).descendants()
    numbers = {id(trackable) for trackable in reached}
    for model in reached:
        if not isinstance(model, keras.layers.Layer):
            continue
        for layer in keras_internals.nested_layers(model):
            if hasattr(layer, "_table_state") and id(layer) not in numbers:
                raise ValueError(
                    f"layer {layer.name} is in a list or dict of a layer of {model.name}, into"
                    " which TensorFlow's checkpoints do not see: have it in an attribute of its"
                    " own, or in a tuple"
                )


class Manager:
    """Saves checkpoints of a `tf.train.Checkpoint` into a folder and keeps the newest ones.

    It works as `tf.train.CheckpointManager`, except for `save`. `save` writes the variables and
    takes a snapshot of the rows, then returns. The servers write the rows while training continues.
    A checkpoint exists when all of it is written. Until then the previous one is the latest.

    `save`, `wait`, `restore_or_initialize` and the end of the program wait for the save in
    progress. Its error is logged at once, and the next `save` or `wait` raises it.

    Attributes:
      checkpoint: object that is saved.
      directory: folder of the checkpoints.
    """

    def __init__(
        self,
        checkpoint: tf.train.Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None = 2,
        checkpoint_name: str = "ckpt",
        full_every: int = 1,
    ):
        """Continues with the checkpoints in the folder. No other manager may use the folder then.

        Waits for a checkpoint that another manager of this process is writing into the folder.

        Args:
          checkpoint: object to save, such as `tf.train.Checkpoint(model=model)`.
          directory: folder of the checkpoints. Parameter servers must reach it under the same path.
            It is created if it does not exist.
          max_to_keep: number of checkpoints to keep, at least 1. None: all.
          checkpoint_name: prefix of the names of checkpoints.
          full_every: one of `full_every` checkpoints has all rows of the tables. The others are
            incremental: they have all variables, and the rows that changed since the previous
            checkpoint. A restore of an incremental checkpoint also reads its bases. Bases are kept
            as long as a checkpoint needs them, beyond `max_to_keep`. A checkpoint has all rows in
            any case if it is the manager's first, if rows were replaced, or if the incremental
            checkpoints since the last full one have half of its rows.

        Raises:
          TypeError: `checkpoint` is no `tf.train.Checkpoint`.
          ValueError: `max_to_keep` or `full_every` is less than 1, or `checkpoint_name` is no file
            name.
        """
        if not isinstance(checkpoint, tf.train.Checkpoint):
            raise TypeError(f"checkpoint must be a tf.train.Checkpoint, not {checkpoint!r}")
        if not isinstance(checkpoint_name, str) or not re.fullmatch("[^/]+", checkpoint_name):
            raise ValueError(f"checkpoint_name must be the name of a file, not {checkpoint_name!r}")
        self.checkpoint = checkpoint
        self.directory = os.fspath(directory) or "."
        if max_to_keep is not None:
            max_to_keep = check_integer("max_to_keep", max_to_keep, 1, INT32_MAX, " or None")
        self._max_to_keep = max_to_keep
        full_every = check_integer("full_every", full_every, 1, INT32_MAX)
        self._chain = None if full_every == 1 else Chain(full_every)
        self._name = checkpoint_name
        # Base of every checkpoint, by path. None: a full checkpoint.
        self._bases: dict[str, str | None] = {}
        self._saving = Background(self.directory)
        # A manager that is no longer used may still write. It is the manager of an interrupted
        # `fit` when the next `fit` begins.
        wait_for_writes(self.directory)
        self._paths = _find_checkpoints(self.directory, checkpoint_name)

    @property
    def checkpoints(self) -> list[str]:
        """Paths of the existing checkpoints, the latest last.

        With `full_every`, they include all bases of incremental checkpoints.
        """
        return list(self._paths)

    @property
    def latest_checkpoint(self) -> str | None:
        """Path of the latest checkpoint. None: there is none."""
        return self._paths[-1] if self._paths else None

    def save(self) -> str:
        """Starts a checkpoint of the current state.

        Returns:
          Path of the checkpoint. It exists after `wait`.

        Raises:
          ValueError: the checkpoint lacks the table of a layer, because the layer is in a list or
            dict of another layer.
          tf.errors.OpError: the variables cannot be written, or a parameter server is down.
          Exception: the error of the previous save.
        """
        check_reached(self.checkpoint)
        self.wait()
        path = self._next_path()
        folder = f"{path}_temp"
        try:
            with shard_parts.rows_later(self._chain) as of_tables:
                variables = self.checkpoint.write(f"{folder}/variables")
        except BaseException:
            shard_parts.remove([folder])
            raise
        self._saving.start(self._write, path, variables, of_tables)
        return path

    def wait(self) -> None:
        """Waits for the save in progress.

        Raises:
          Exception: the error of the last save. It is raised once.
        """
        self._saving.wait()

    def restore_or_initialize(self) -> str | None:
        """Restores the latest checkpoint, if there is one.

        Waits for the save in progress. If this save fails, its error is logged, and the previous
        checkpoint is the latest.

        Returns:
          Path of the restored checkpoint. None: there is none.

        Raises:
          ValueError: an error of `tf.train.Checkpoint.restore`.
          tf.errors.OpError: the checkpoint is damaged, or a parameter server is down.
        """
        with contextlib.suppress(Exception):
            self.wait()
        if self.latest_checkpoint is not None:
            warn_of_unbuilt(self.checkpoint)
            self.checkpoint.restore(self.latest_checkpoint)
            warn_of_missing(self.checkpoint, self.latest_checkpoint)
        return self.latest_checkpoint

    def _next_path(self) -> str:
        """Returns a path with an unused number, also after a restore of an older checkpoint."""
        numbers = [int(self.checkpoint.save_counter)]
        numbers += [int(path.rpartition("-")[2]) for path in self._paths]
        self.checkpoint.save_counter.assign(max(numbers) + 1)
        return f"{self.directory}/{self._name}-{max(numbers) + 1}"

    # The following methods run in the background thread.

    def _write(self, path: str, variables: str, of_tables: Sequence[shard_parts.Parts]) -> None:
        try:
            _remove_checkpoint(path)  # A killed process may have left some of its files.
            bundles = [variables]
            for parts in of_tables:
                bundles += parts.write(path)
            with tf.device("/device:CPU:0"):
                tf.raw_ops.MergeV2Checkpoints(
                    checkpoint_prefixes=bundles, destination_prefix=path, delete_old_dirs=True
                )
            bases = {parts.cut.base for parts in of_tables}
            self._take(path, next(iter(bases), None))
            if self._chain is not None:
                for cut in [parts.cut for parts in of_tables]:
                    self._chain.take(os.path.basename(path), cut.numbers, cut.rows, cut.whole)
        except BaseException as error:
            logging.error("the checkpoint %s was not written: %s", path, error)
            shard_parts.remove([f"{path}_temp"])
            _remove_checkpoint(path)
            raise

    def _take(self, path: str, base: str | None) -> None:
        """Adds a complete checkpoint to the list and removes the checkpoints beyond `max_to_keep`.

        Args:
          path: path of the new checkpoint.
          base: name of its base. None: it has all rows.
        """
        paths = [*self._paths, path]
        self._bases[path] = None if base is None else f"{path.rpartition('/')[0]}/{base}"
        needed = set(paths if self._max_to_keep is None else paths[-self._max_to_keep :])
        for saved in reversed(paths):
            if saved not in needed:
                continue
            if saved not in self._bases:
                try:
                    self._bases[saved] = base_of(saved)
                except Exception as error:  # The reader's errors have no common class.
                    logging.warning("all checkpoints stay, as %s cannot be read: %s", saved, error)
                    needed.update(paths)
                    continue
            base = self._bases[saved]
            if base is not None:
                needed.add(base)
        keep = [saved for saved in paths if saved in needed]
        self._note(keep)
        self._paths = keep
        self._bases = {saved: self._bases[saved] for saved in keep if saved in self._bases}
        for saved in paths:
            if saved not in needed:
                _remove_checkpoint(saved)

    def _note(self, paths: Sequence[str]) -> None:
        """Writes the file `checkpoint` with the names of checkpoints, as TensorFlow's manager."""
        names = [json.dumps(os.path.basename(path)) for path in paths]
        lines = [f"model_checkpoint_path: {names[-1]}"]
        lines += [f"all_model_checkpoint_paths: {name}" for name in names]
        lines += [f"all_model_checkpoint_timestamps: {time.time()!r}" for _ in names]
        temporary = f"{self.directory}/checkpoint.{uuid.uuid4().hex}"
        with tf.io.gfile.GFile(temporary, "w") as file:
            file.write("\n".join(lines) + "\n")
        tf.io.gfile.rename(temporary, f"{self.directory}/checkpoint", overwrite=True)


def _find_checkpoints(directory: str, name: str) -> list[str]:
    """Returns the paths of the complete checkpoints in a folder, in order.

    If the file `checkpoint` names none, this function searches the folder. Without the search, a
    program could treat a folder with checkpoints as empty.
    """
    try:
        state = tf.train.get_checkpoint_state(directory)
    except ValueError:  # The file is empty.
        state = None
    number = re.compile(rf"{re.escape(name)}-(\d+)")
    paths = [] if state is None else state.all_model_checkpoint_paths
    noted = [path for path in paths if number.fullmatch(os.path.basename(path))]
    if noted:
        there = {path for path in noted if tf.io.gfile.exists(f"{path}.index")}
        for path in noted:
            if path not in there:
                logging.warning("%s.index is missing: that checkpoint cannot be restored", path)
        return [path for path in noted if path in there]
    try:
        files = tf.io.gfile.listdir(directory)
    except tf.errors.NotFoundError:
        return []
    found = {
        int(match[1]): f"{directory}/{match[0]}"
        for file in files
        if file.endswith(".index") and (match := number.fullmatch(file.removesuffix(".index")))
    }
    paths = [path for _, path in sorted(found.items())]
    if paths:
        logging.warning(
            "%s/checkpoint is missing or damaged, or names no %s-*: those that were found are %s",
            directory,
            name,
            paths,
        )
    return paths


def _remove_checkpoint(path: str) -> None:
    """Removes the files of a checkpoint, the index first."""
    folder, name = os.path.split(path)
    try:
        files = [file for file in tf.io.gfile.listdir(folder) if file.startswith(f"{name}.")]
        for file in sorted(files, key=lambda file: not file.endswith(".index")):
            tf.io.gfile.remove(f"{folder}/{file}")
    except tf.errors.OpError as error:
        logging.warning("could not remove %s: %s", path, error)

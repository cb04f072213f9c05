"""Checkpoints, one after the other, whose rows are written while training goes on."""

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
    """A model's attributes that are lists or dicts of layers, as checkpoints can see them."""
    # The same each time, as long as they hold the same. Straight from the instance, as Keras would
    # track an attribute.
    before = vars(model).setdefault("_het_containers", {})
    found = {}
    for name, value in [*vars(model).items()]:
        layers: dict[str, Any] = {}
        is_own = name == "_het_containers" or name in _names_of_keras()
        for path, layer in [] if is_own else _layers_within(value):
            while path in layers:  # a dict may have 1 and "1"
                path += "'"
            layers[path] = layer
        if not layers:
            continue
        held, known = before.get(name, ({}, None))
        if list(held) != list(layers) or any(held[path] is not layers[path] for path in held):
            known = tf.train.Checkpoint()
            for path, layer in layers.items():
                setattr(known, f".{path}", layer)
            before[name] = layers, known
        # TensorFlow has what it sees of a tuple under its name.
        found[f"{name}.lists" if isinstance(value, tuple) else name] = known
    return found


def _layers_within(
    value: Any, path: str = "", seen: bool = True, around: tuple[int, ...] = ()
) -> Iterator[tuple[str, Any]]:
    """The layers that containers hide, by keys and places.

    Args:
      value: of an attribute, or a part of one.
      path: to it.
      seen: whether TensorFlow sees it: it sees what is in tuples.
      around: the containers that it is in.
    """
    if isinstance(value, keras.layers.Layer):
        if not seen:
            yield path, value
        return
    if not isinstance(value, (list, tuple, dict)) or id(value) in around:
        return
    for key, each in value.items() if isinstance(value, dict) else enumerate(value):
        if isinstance(each, (keras.layers.Layer, list, tuple, dict)):
            inner = f"{path}.{key}" if path else str(key)
            within = seen and isinstance(value, tuple)
            yield from _layers_within(each, inner, within, (*around, id(value)))


@functools.cache
def _names_of_keras() -> frozenset[str]:
    """Attributes that Keras gives models, in some of which it notes their layers, too."""
    ids = keras.Input((1,), name="ids")
    models = [keras.Model(name="m"), keras.Sequential(name="s"), keras.Model(ids, ids, name="f")]
    return frozenset(name for model in models for name in vars(model))


def warn_of_missing(checkpoint: tf.train.Checkpoint, path: str) -> None:
    """Logs which layers a checkpoint, which was just restored, had no rows for."""
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
    """Logs which optimizers, of a checkpoint that is to be restored, have no slots to restore."""
    for each in tf.train.TrackableView(checkpoint).descendants():
        if isinstance(each, keras.optimizers.Optimizer) and not each.built:
            logging.warning(
                "optimizer %s is not built, so that not all of its slots are restored: call its"
                " build(model.trainable_variables) before",
                each.name,
            )


def check_reached(checkpoint: tf.train.Checkpoint) -> None:
    """Checks that the tables of all models of a checkpoint are in it.

    Raises:
      ValueError: one is not; names its layer.
    """
    reached = tf.train.TrackableView(checkpoint).descendants()
    numbers = {id(each) for each in reached}
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
    """Saves checkpoints of a `tf.train.Checkpoint` into a folder, and keeps the last ones.

    As `tf.train.CheckpointManager`, but that `save` returns when the rows are cut and the variables
    are written: the servers write the rows while training goes on. A checkpoint is there when all
    of it is; until then the one before is the latest.

    `save`, `wait`, `restore_or_initialize` and the end of the program wait for the save that is
    under way. Its error is logged at once, and raised by the next `save` or `wait`.

    Attributes:
      checkpoint: what is saved.
      directory: where.
    """

    def __init__(
        self,
        checkpoint: tf.train.Checkpoint,
        directory: str | os.PathLike[str],
        max_to_keep: int | None = 2,
        checkpoint_name: str = "ckpt",
        full_every: int = 1,
    ):
        """Goes on with the checkpoints in the folder, which no other manager may use any longer.

        A checkpoint that a manager of this process is still writing there is waited for.

        Args:
          checkpoint: such as `tf.train.Checkpoint(model=model)`.
          directory: folder. Parameter servers must reach it under the same path. It is made if it
            is not there.
          max_to_keep: how many checkpoints stay, at least 1; None: all.
          checkpoint_name: what their names begin with.
          full_every: one in so many checkpoints has all rows of the tables. The others have those
            that changed since the one before, and all variables; they are restored together with
            those that they build on, which stay as long, beyond max_to_keep. The first of a
            manager, and one before which rows were replaced, or half of the rows changed since the
            last such one, has all rows in any case.

        Raises:
          TypeError: checkpoint is something else.
          ValueError: max_to_keep or full_every is less than 1, or checkpoint_name is no name of a
            file.
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
        # Of checkpoints, what they build on.
        self._bases: dict[str, str | None] = {}
        self._saving = Background(self.directory)
        # Of a manager that is no longer used: a `fit` was interrupted, and the next one begins.
        wait_for_writes(self.directory)
        self._paths = _find_checkpoints(self.directory, checkpoint_name)

    @property
    def checkpoints(self) -> list[str]:
        """Paths of the checkpoints that are there, the latest last.

        With `full_every`, those on which others build are among them, however many stay.
        """
        return list(self._paths)

    @property
    def latest_checkpoint(self) -> str | None:
        """Path of the last checkpoint that is there; None: there is none."""
        return self._paths[-1] if self._paths else None

    def save(self) -> str:
        """Begins a checkpoint of what there is now.

        Returns:
          Its path, where it is after `wait`.

        Raises:
          ValueError: a layer's table is not in it, since the layer is in a list or dict of another.
          tf.errors.OpError: the variables cannot be written, or a parameter server is down.
          Exception: what kept the checkpoint before from being written.
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
        """Returns when nothing is being written.

        Raises:
          Exception: what kept the last checkpoint from being written. It is raised once.
        """
        self._saving.wait()

    def restore_or_initialize(self) -> str | None:
        """Restores the latest checkpoint, if there is one.

        A save under way is waited for. If it fails, which is logged, the latest is the one before.

        Returns:
          The path of what was restored. None: there is none.

        Raises:
          ValueError: as `tf.train.Checkpoint.restore`.
          tf.errors.OpError: the checkpoint is damaged, or a parameter server is down.
        """
        with contextlib.suppress(Exception):
            self.wait()
        if self.latest_checkpoint is not None:
            warn_of_unbuilt(self.checkpoint)
            self.checkpoint.restore(self.latest_checkpoint)
            warn_of_missing(self.checkpoint, self.latest_checkpoint)
        return self.latest_checkpoint

    # Inside.

    def _next_path(self) -> str:
        """A number of its own also after an older checkpoint was restored."""
        numbers = [int(self.checkpoint.save_counter)]
        numbers += [int(path.rpartition("-")[2]) for path in self._paths]
        self.checkpoint.save_counter.assign(max(numbers) + 1)
        return f"{self.directory}/{self._name}-{max(numbers) + 1}"

    # In a thread of its own:

    def _write(self, path: str, variables: str, of_tables: Sequence[shard_parts.Parts]) -> None:
        try:
            _remove_checkpoint(path)  # what a process that was killed has left of it
            bundles = [variables]
            for each in of_tables:
                bundles += each.write(path)
            with tf.device("/device:CPU:0"):
                tf.raw_ops.MergeV2Checkpoints(
                    checkpoint_prefixes=bundles, destination_prefix=path, delete_old_dirs=True
                )
            bases = {each.cut.base for each in of_tables}
            self._take(path, next(iter(bases), None))
            if self._chain is not None:
                for cut in [each.cut for each in of_tables]:
                    self._chain.take(os.path.basename(path), cut.numbers, cut.rows, cut.whole)
        except BaseException as error:
            logging.error("the checkpoint %s was not written: %s", path, error)
            shard_parts.remove([f"{path}_temp"])
            _remove_checkpoint(path)
            raise

    def _take(self, path: str, base: str | None) -> None:
        """Notes a checkpoint that is complete, and removes those that are too many.

        Args:
          path: of it.
          base: name of the one that it builds on; None: it has all rows.
        """
        paths = [*self._paths, path]
        self._bases[path] = None if base is None else f"{path.rpartition('/')[0]}/{base}"
        needed = set(paths if self._max_to_keep is None else paths[-self._max_to_keep :])
        for each in reversed(paths):
            if each not in needed:
                continue
            if each not in self._bases:
                try:
                    self._bases[each] = base_of(each)
                except Exception as error:  # the reader's have no common class
                    logging.warning("all checkpoints stay, as %s cannot be read: %s", each, error)
                    needed.update(paths)
                    continue
            base = self._bases[each]
            if base is not None:
                needed.add(base)
        keep = [each for each in paths if each in needed]
        self._note(keep)
        self._paths = keep
        self._bases = {each: self._bases[each] for each in keep if each in self._bases}
        for each in paths:
            if each not in needed:
                _remove_checkpoint(each)

    def _note(self, paths: Sequence[str]) -> None:
        """Writes which checkpoints there are, as TensorFlow's own manager does."""
        names = [json.dumps(os.path.basename(path)) for path in paths]
        lines = [f"model_checkpoint_path: {names[-1]}"]
        lines += [f"all_model_checkpoint_paths: {name}" for name in names]
        lines += [f"all_model_checkpoint_timestamps: {time.time()!r}" for _ in names]
        temporary = f"{self.directory}/checkpoint.{uuid.uuid4().hex}"
        with tf.io.gfile.GFile(temporary, "w") as file:
            file.write("\n".join(lines) + "\n")
        tf.io.gfile.rename(temporary, f"{self.directory}/checkpoint", overwrite=True)


def _find_checkpoints(directory: str, name: str) -> list[str]:
    """Paths of the checkpoints in a folder that are complete, in their order.

    Where the file `checkpoint` does not say which there are, they are looked for, lest a program
    takes a folder for empty in which a training is.
    """
    try:
        state = tf.train.get_checkpoint_state(directory)
    except ValueError:  # an empty file
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
    """Removes the files of a checkpoint, the one first by which others are found."""
    folder, name = os.path.split(path)
    try:
        files = [file for file in tf.io.gfile.listdir(folder) if file.startswith(f"{name}.")]
        for file in sorted(files, key=lambda file: not file.endswith(".index")):
            tf.io.gfile.remove(f"{folder}/{file}")
    except tf.errors.OpError as error:
        logging.warning("could not remove %s: %s", path, error)

"""Saving, loading and export of a model, after a flush of the weights on the workers."""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import keras
import tensorflow as tf

from het_tf.compat import keras_internals
from het_tf.compat.tensorflow_internals import CheckpointHooks
from het_tf.export import export_saved_model
from het_tf.keras.trainer import ParameterServerTrainer
from het_tf.layers.embedding import embeddings_of
from het_tf.layers.exporting import check_format
from het_tf.runtime.current_strategy import servers_named
from het_tf.storage.checkpoints.keras_files import check_checksums, only_checked, with_checksums
from het_tf.storage.checkpoints.manager import layers_in_containers
from het_tf.storage.files import whole_file

_IN_ARCHIVE = "model.weights.h5"  # Weights file in a .keras archive.


def check_weights(
    model: keras.Model, filepath: Any, skipped: Sequence[Any] | None, load: Callable[..., None]
) -> None:
    """Verifies the checksums of a weights file and the rows in the file, without loading them.

    Keras traverses the file as if it loaded the weights, but skips all layers without a table.

    Args:
      model: model that will load the file.
      filepath: path that Keras loads weights from.
      skipped: layers that Keras will skip. None: layers that do not fit. Rows are not verified.
      load: Keras's `load_weights` of the model.

    Raises:
      ValueError: see `check_checksums` and `load_rows`.
      tf.errors.OpError: see `load_rows`.
    """
    path = os.fspath(filepath)
    has_checksums = path.endswith(".weights.h5") and check_checksums(path)
    if skipped is None or not model.built or not embeddings_of(model):
        return
    if not path.endswith((".keras", ".weights.h5", ".weights.json")):
        return  # Other files contain no rows.
    layers = keras_internals.nested_layers(model, include_self=False)
    others = [layer for layer in layers if not embeddings_of(layer)]
    others += [getattr(model, "optimizer", None), *skipped]
    with contextlib.ExitStack() as stack:
        # The scope collects the weights of layers that contain tables, and drops them.
        stack.enter_context(keras.StatelessScope())
        wrong = stack.enter_context(only_checked(has_checksums))
        # For other faults, Keras warns or raises when it loads the file.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        with contextlib.suppress(ValueError):
            load(stack.enter_context(_weights_of(path)), objects_to_skip=others)
    if wrong:
        raise wrong[0]


@contextlib.contextmanager
def _weights_of(path: str) -> Iterator[str]:
    """Yields the path of a weights file. Keras cannot skip layers of a `.keras` archive."""
    if not path.endswith(".keras"):
        yield path
        return
    with (
        tempfile.TemporaryDirectory() as folder,
        tf.io.gfile.GFile(path, "rb") if "://" in path else open(path, "rb") as file,
        zipfile.ZipFile(file) as archive,
    ):
        yield archive.extract(_IN_ARCHIVE, folder)


if TYPE_CHECKING:
    from keras import Model as _KerasModel  # Base class for type checks only.
else:
    _KerasModel = object


class Saving(CheckpointHooks, _KerasModel):
    """Mix-in that flushes weights, slots and tables before they are read, saved or set.

    Part of `het_tf.keras.Model`. List the mix-in before the Keras model class.
    """

    _parameter_server_trainer: ParameterServerTrainer | None

    def checkpoint_children(self, save_type: str) -> dict[str, Any]:
        """Adds the layers in lists and dicts to the parts of TensorFlow's checkpoints."""
        self._check_open()  # TensorFlow aborts the process for variables of a closed cluster.
        return layers_in_containers(self) if save_type == "checkpoint" else {}

    def before_checkpoint_restore(self, path: str) -> None:
        """Flushes the workers."""
        del path
        self._sync(slots=True)

    def get_weights(self) -> list[Any]:
        """Returns the weights as `keras.Model.get_weights`, with the updates of all workers.

        Raises:
          ValueError: the model has a `HetEmbedding`. A table is not a Keras weight.
        """
        self._check_has_no_table()
        self._sync(slots=False)
        return super().get_weights()

    def set_weights(self, weights: list[Any]) -> None:
        """Sets the weights as `keras.Model.set_weights`.

        Raises:
          ValueError: the model has a `HetEmbedding`. A table is not a Keras weight.
        """
        self._check_has_no_table()
        self._sync(slots=False)
        super().set_weights(weights)

    def _check_has_no_table(self) -> None:
        for layer in embeddings_of(self):
            if layer.built:
                layer.anchor.numpy()  # Raises the ValueError.

    @servers_named()
    def save(
        self,
        filepath: str | os.PathLike[str],
        overwrite: bool = True,
        zipped: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """Saves the model as `keras.Model.save`, with the updates of all workers.

        After an error, for example if the disk is full, the old file is unchanged.

        Raises:
          ValueError: the model has a `HetEmbedding`, and the file has the legacy format `.h5`. This
            format cannot hold tables.
        """
        if os.fspath(filepath).endswith((".h5", ".hdf5")):
            self._check_has_no_table()
        self._sync(slots=True)
        kwargs |= {"overwrite": overwrite, "zipped": zipped}
        with whole_file(filepath, kwargs) as file:
            super().save(file, **kwargs)

    @servers_named()
    def save_weights(
        self, filepath: str | os.PathLike[str], overwrite: bool = True, **kwargs: Any
    ) -> None:
        """Saves weights and slots as `keras.Model.save_weights`, with the updates of all workers.

        The file has checksums. After an error, for example a full disk, the old file is unchanged.
        """
        self._sync(slots=True)
        kwargs["overwrite"] = overwrite
        with (
            whole_file(filepath, kwargs, (".weights.h5",)) as file,
            contextlib.nullcontext() if file is filepath else with_checksums(file),
        ):
            super().save_weights(file, **kwargs)

    @servers_named()
    def load_weights(
        self, filepath: str | os.PathLike[str], skip_mismatch: bool = False, **kwargs: Any
    ) -> None:
        """Loads weights as `keras.Model.load_weights`, after a check of checksums and rows.

        If the check fails, the model is unchanged.

        Raises:
          ValueError: a part of the file does not match its checksum. The message names the part.
            Or rows of a table are missing, damaged or of another width. The message names the
            layer. Or other weights do not fit. In this case Keras has loaded the weights that fit.
          tf.errors.OpError: rows in files beside the weights file are missing or damaged.
        """
        self._sync(slots=True)
        load = super().load_weights
        skipped = kwargs.get("objects_to_skip") or ()
        check_weights(self, filepath, None if skip_mismatch else skipped, load)
        load(filepath, skip_mismatch=skip_mismatch, **kwargs)

    def _check_open(self) -> None:
        getattr(self.distribute_strategy, "check_open", lambda: None)()

    def _sync(self, slots: bool) -> None:
        """Flushes the workers' replicas before variables are read or set, as in callbacks of `fit`.

        Replicas notice an assignment only if the value on the server changes. Without a flush, the
        server may still hold an old value, and assigning this value would have no effect.
        """
        self._check_open()
        trainer = self._parameter_server_trainer
        if trainer is not None and trainer.has_replicas:
            self.distribute_strategy.flush(slots=slots)

    @servers_named()
    def export(
        self,
        filepath: str | os.PathLike[str],
        format: str = "tf_saved_model",
        verbose: bool | None = None,
        input_signature: Any = None,
        **kwargs: Any,
    ) -> None:
        """Exports the model as `keras.Model.export`. Serving a SavedModel needs no het_tf ops.

        For a SavedModel, other arguments are `rows`, `min_updates`, `min_norm` and `max_age`, see
        `het_tf.export_saved_model`. `verbose` applies to the other formats only.

        Raises:
          ValueError: the model has a `HetEmbedding`, and the format cannot hold its table.
        """
        if format != "tf_saved_model":
            for layer in embeddings_of(self):
                check_format(layer, format)
            self._sync(slots=False)
            super().export(
                filepath, format, verbose=verbose, input_signature=input_signature, **kwargs
            )
            return
        export_saved_model(self, filepath, input_signature, **kwargs)

"""Weights and files of a model: workers bring it up to date before it is read, saved or loaded."""

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
from het_tf.export import export_saved_model
from het_tf.keras.trainer import ParameterServerTrainer
from het_tf.layers.embedding import embeddings_of
from het_tf.layers.exporting import check_format
from het_tf.runtime.current_strategy import servers_named
from het_tf.storage.checkpoints.keras_files import check_checksums, only_checked, with_checksums
from het_tf.storage.checkpoints.manager import layers_in_containers
from het_tf.storage.files import whole_file

_IN_ARCHIVE = "model.weights.h5"  # of a .keras file


def check_weights(
    model: keras.Model, filepath: Any, skipped: Sequence[Any] | None, load: Callable[..., None]
) -> None:
    """Raises what is wrong with the checksums of a file, or what loading it would raise of rows.

    Keras is made to go through the file as if it loaded it, past all layers without a table.

    Args:
      model: into which it is to be loaded.
      filepath: what Keras loads weights from.
      skipped: layers of the model that are to be left as they are; None: those which do not fit.
      load: Keras's `load_weights` of the model.

    Raises:
      ValueError: as by `check_checksums` and `load_rows`.
      tf.errors.OpError: as by `load_rows`.
    """
    path = os.fspath(filepath)
    has_checksums = path.endswith(".weights.h5") and check_checksums(path)
    if skipped is None or not model.built or not embeddings_of(model):
        return
    if not path.endswith((".keras", ".weights.h5", ".weights.json")):
        return  # it has no rows
    layers = keras_internals.nested_layers(model, include_self=False)
    others = [layer for layer in layers if not embeddings_of(layer)]
    others += [getattr(model, "optimizer", None), *skipped]
    with contextlib.ExitStack() as stack:
        # Weights of layers that contain tables wait in the scope, and end with it.
        stack.enter_context(keras.StatelessScope())
        wrong = stack.enter_context(only_checked(has_checksums))
        # What else is wrong Keras says when it loads the file.
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")
        with contextlib.suppress(ValueError):
            load(stack.enter_context(_weights_of(path)), objects_to_skip=others)
    if wrong:
        raise wrong[0]


@contextlib.contextmanager
def _weights_of(path: str) -> Iterator[str]:
    """A file of weights alone: of other ones Keras loads all layers."""
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
    from keras import Model as _KerasModel  # It is mixed into classes of Keras.
else:
    _KerasModel = object


class Saving(_KerasModel):
    """The part of a model that has weights, slots and tables current before they are looked at.

    To be put before a Keras model class, as part of `het_tf.keras.Model`.
    """

    _parameter_server_trainer: ParameterServerTrainer | None

    def _trackable_children(self, save_type: str = "checkpoint", **kwargs: Any) -> dict[str, Any]:
        """For TensorFlow's checkpoints: those of Keras, and the layers in lists and dicts."""
        self._check_open()  # TensorFlow ends the process over variables that went with a cluster.
        # There is no public way for an object to say what else is part of it.
        children = super()._trackable_children(save_type, **kwargs)
        return {**layers_in_containers(self), **children} if save_type == "checkpoint" else children

    def _checkpoint_adapter(self, path: str) -> Any:
        """What TensorFlow calls of all that it is to restore, before it restores any of it."""
        self._sync(slots=True)
        return super()._checkpoint_adapter(path)

    def get_weights(self) -> list[Any]:
        """As `keras.Model.get_weights`, with what all workers made of the weights until now.

        Raises:
          ValueError: the model has a `HetEmbedding`, whose table is no weight.
        """
        self._check_has_no_table()
        self._sync(slots=False)
        return super().get_weights()

    def set_weights(self, weights: list[Any]) -> None:
        """As `keras.Model.set_weights`.

        Raises:
          ValueError: the model has a `HetEmbedding`, whose table is no weight.
        """
        self._check_has_no_table()
        self._sync(slots=False)
        super().set_weights(weights)

    def _check_has_no_table(self) -> None:
        for layer in embeddings_of(self):
            if layer.built:
                layer.anchor.numpy()

    @servers_named()
    def save(
        self,
        filepath: str | os.PathLike[str],
        overwrite: bool = True,
        zipped: bool | None = None,
        **kwargs: Any,
    ) -> None:
        """As `keras.Model.save`, with what all workers made of weights and slots until now.

        After an error, such as of a full disk, the file is as it was before.

        Raises:
          ValueError: the model has a `HetEmbedding`, and the file is of the old format `.h5`, which
            has no place for its table.
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
        """As `keras.Model.save_weights`, with what all workers made of weights and slots until now.

        The file has checksums. After an error, such as of a full disk, it is as it was before.
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
        """As `keras.Model.load_weights`, but that checksums and rows of all tables come first.

        If something is damaged, or rows are missing or of another width, nothing has changed.

        Raises:
          ValueError: a part of the file does not agree with its checksum, which the message names;
            or the file lacks the rows of a table, or has damaged ones, or some of another width;
            the message names the layer. Or something else does not fit the model: then what does
            fit was loaded, as Keras has it.
          tf.errors.OpError: rows beside the file are missing or damaged.
        """
        self._sync(slots=True)
        load = super().load_weights
        skipped = kwargs.get("objects_to_skip") or ()
        check_weights(self, filepath, None if skip_mismatch else skipped, load)
        load(filepath, skip_mismatch=skip_mismatch, **kwargs)

    def _check_open(self) -> None:
        getattr(self.distribute_strategy, "check_open", lambda: None)()

    def _sync(self, slots: bool) -> None:
        """Has variables current in callbacks of `fit`, before they are read or set.

        Also before they are set: a value that a variable has is no change, and what is on the
        servers, behind the steps, may be just what was read to be set later.
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
        """As `keras.Model.export`; a SavedModel needs no het_tf ops to be served.

        See `het_tf.export_saved_model`, whose `rows`, `min_updates`, `min_norm` and `max_age` it
        takes, too; `verbose` is of other formats.

        Raises:
          ValueError: the model has a `HetEmbedding`, and the format has no place for its table.
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

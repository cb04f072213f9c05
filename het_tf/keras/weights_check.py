"""Looking at a weights file before any weight of a model changes."""

from __future__ import annotations

import contextlib
import os
import tempfile
import warnings
import zipfile
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import keras
import tensorflow as tf

from het_tf import _keras
from het_tf.layers.embedding import embeddings_of
from het_tf.saving.checksums import check_checksums
from het_tf.saving.weights_files import only_checked

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
    layers = _keras.nested_layers(model, include_self=False)
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

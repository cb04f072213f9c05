"""Tensors in tensor bundles, the format of TensorFlow's checkpoints, that no memory has to hold."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np
import tensorflow as tf

# Of a slice that is read and written at once.
_SLICE_BYTES = 64 << 20


def check_tensors(prefix: str, ours: Callable[[str], bool]) -> None:
    """Reads tensors of a bundle, one after the other, with their checksums.

    Args:
      prefix: of the bundle.
      ours: which, by name.

    Raises:
      tf.errors.OpError: one cannot be read, which the message names.
    """
    reader = tf.compat.v1.train.NewCheckpointReader(prefix)
    for name, dtype in sorted(reader.get_variable_to_dtype_map().items()):
        if ours(name):
            try:
                with tf.device("/device:CPU:0"):
                    tf.raw_ops.RestoreV2(
                        prefix=prefix, tensor_names=[name], shape_and_slices=[""], dtypes=[dtype]
                    )
            except tf.errors.OpError as error:
                raise type(error)(
                    None, None, f"checkpoint {prefix}, {name}: {error.message}"
                ) from error


def replace_tensors(prefix: str, arrays: Mapping[str, np.ndarray]) -> None:
    """Puts arrays, slice by slice, in the place of tensors of a bundle.

    Args:
      prefix: of the bundle. After an error it may be incomplete.
      arrays: by the name of the tensor; any shape. They may be mapped from files.

    Raises:
      KeyError: the bundle has no such tensor.
      tf.errors.OpError: a file cannot be read or written.
    """
    # `tf.train.load_checkpoint` would take the prefix for a folder where it looks like one.
    reader = tf.compat.v1.train.NewCheckpointReader(prefix)
    names = list(reader.get_variable_to_shape_map())
    for name in arrays.keys() - set(names):
        raise KeyError(f"{prefix} has no tensor {name}")
    if not arrays:
        return
    folder = f"{prefix}_temp"
    others = [name for name in names if name not in arrays]
    prefixes = [f"{folder}/others"]
    with tf.device("/device:CPU:0"):
        tf.io.gfile.makedirs(folder)
        tensors = [reader.get_tensor(name) for name in others]
        _save(prefixes[0], others, [""] * len(others), tensors)
        for i, (name, array) in enumerate(arrays.items()):
            rows = max(1, _SLICE_BYTES // max(1, array[:1].nbytes))
            for first in range(0, len(array), rows):
                part = np.asarray(array[first : first + rows])
                shape = " ".join(map(str, array.shape))
                rest = ":-" * (array.ndim - 1)
                prefixes.append(f"{folder}/{i}_{first}")
                _save(prefixes[-1], [name], [f"{shape} {first},{len(part)}{rest}"], [part])
        for file in tf.io.gfile.glob(f"{prefix}.*"):
            tf.io.gfile.remove(file)
        tf.raw_ops.MergeV2Checkpoints(
            checkpoint_prefixes=prefixes, destination_prefix=prefix, delete_old_dirs=True
        )


def _save(prefix: str, names: list[str], slices: list[str], tensors: list[np.ndarray]) -> None:
    tf.raw_ops.SaveV2(prefix=prefix, tensor_names=names, shape_and_slices=slices, tensors=tensors)

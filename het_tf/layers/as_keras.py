"""What programs do with `keras.layers.Embedding` beside calling it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NoReturn

import numpy as np

from het_tf import pooling
from het_tf.layers import arguments
from het_tf.table import EmbeddingTable


class AsKeras:
    """The part of `HetEmbedding` that does it, or says what to do instead."""

    name: str
    input_dim: int | None
    output_dim: int
    combiner: str | None
    table: EmbeddingTable
    flush: Callable[[], None]

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets rows as Keras's layer does; the caches start empty.

        Args:
          weights: `[matrix]`, the values of the ids 0 .. n - 1, [n, output_dim]; n is input_dim,
            where the layer has one.

        Raises:
          ValueError: it is something else, or the layer is not built yet.
        """
        if not isinstance(weights, (list, tuple)) or len(weights) != 1:
            count = f", not {len(weights)} of them" if isinstance(weights, (list, tuple)) else ""
            raise ValueError(
                f"set_weights of layer {self.name} takes [matrix], the values of the ids from 0"
                f" on{count}; table.import_(rows) takes what table.export() gives"
            )
        values = arguments.first_values(weights, self.input_dim, self.output_dim)
        table = self.table
        self.flush()
        table.assign(np.arange(len(values)), values)

    @property
    def embeddings(self) -> NoReturn:
        """There is no matrix.

        Raises:
          AttributeError: says so.
        """
        raise AttributeError(
            f"layer {self.name} has no matrix of embeddings, its table grows: table.lookup(ids)"
            " reads rows, table.export() all that were updated, and set_weights([matrix]) sets"
            " them. To score against all items, as a retrieval layer does with a matrix, call the"
            " layer on their ids: scores = query @ tf.transpose(layer(tf.range(items)))"
        )

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        """The shape of what `call` returns, of ids of this one."""
        return pooling.output_shape(input_shape, self.combiner, self.output_dim)

    def enable_lora(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused.

        Raises:
          NotImplementedError: says why.
        """
        raise NotImplementedError(f"layer {self.name}: {arguments.WHY_NOT['lora_rank']}")

    def quantize(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused; `keras.Model.quantize` passes over the layer with a warning.

        Raises:
          NotImplementedError: says why.
        """
        raise NotImplementedError(f"layer {self.name}: {arguments.WHY_NOT['quantization_config']}")

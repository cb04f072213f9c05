"""The embedding layer."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from het_tf import initializers, lifetimes, optimizers
from het_tf.cache_config import CacheConfig
from het_tf.compat import keras_internals
from het_tf.layers import lookahead
from het_tf.layers.exporting import served_table
from het_tf.layers.ids import keys_of, keys_of_stock_ops, map_values
from het_tf.layers.keras_parity import (
    WHY_NOT,
    check_dtype,
    dimensions,
    first_values,
    matrix_of,
    refuse_what_only_keras_does,
    regularizer,
)
from het_tf.layers.layer_table import LayerTable
from het_tf.layers.optimizer_binding import OptimizerBinding
from het_tf.layers.trainable_lookup import lookup
from het_tf.lifetimes import Admission, Expiry, KeyRange
from het_tf.optimizers.joint_optimizer import Anchor, compiled_optimizer
from het_tf.optimizers.rows import constrained
from het_tf.runtime.validation import INT64_MAX, check_float_dtype, check_integer
from het_tf.storage.checkpoints.table_state import TableState
from het_tf.tables import pooling
from het_tf.tables.table import EmbeddingTable
from het_tf.tables.worker_cache import WorkerCache


@keras.saving.register_keras_serializable("het_tf")
class HetEmbedding(keras.layers.Layer):
    """Turns integer ids into trained vectors, like `keras.layers.Embedding`, in a table that grows.

    It is called as that layer is, `HetEmbedding(input_dim, output_dim, ...)`, and then ids have to
    be in [0, input_dim); or without a bound, `HetEmbedding(output_dim)`, for any int64. Under a
    `tf.distribute.ParameterServerStrategy` the table lives on the parameter servers, and every
    worker trains through a cache that bounds how stale a row may be (HET, VLDB 2022). Without a
    strategy the table lives in this process.

    An optimizer that applies the gradients of a step trains the rows: the one that the model is
    compiled with (`optimizer="same"`), or one of the layer's own. Occurrences of an id in a batch
    are summed to one update. The table is no Keras weight. The layer's trainable weight is a scalar
    whose gradient stands for the gradients of the rows, and a gradient that no optimizer applies
    trains nothing. `het_tf.keras.Model.compile` makes its optimizer a
    `het_tf.optimizers.JointOptimizer`, which steps dense variables and rows together. A loop of
    your own does the same:

        optimizer = het_tf.optimizers.JointOptimizer(keras.optimizers.Adam())
        optimizer.build(model.trainable_variables)
        with tf.GradientTape() as tape:
            loss = loss_of(model(x), y)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    In a `tf.function` the tape, the call, `gradient()` and the optimizer must be in the same one.

    Input: integers of any integer dtype, below `2**63`: dense of any shape, ragged or sparse; or
    floats, as Keras makes of integers where a model has no `keras.Input(..., dtype="int64")`: these
    must be whole numbers below what their type counts without gaps (float32: `2**24`).
    Output: [*input.shape, output_dim], in the layer's compute dtype; with a combiner
    [*input.shape[:-1], output_dim], which is computed without a tensor of all ids' rows.
    """

    def __init__(
        self,
        first: int | None = None,
        second: int | None = None,
        /,
        embeddings_initializer: str | keras.initializers.Initializer = "uniform",
        embeddings_regularizer: str | keras.regularizers.Regularizer | None = None,
        embeddings_constraint: str | keras.constraints.Constraint | None = None,
        mask_zero: bool = False,
        weights: Any = None,
        *,
        input_dim: int | None = None,
        output_dim: int | None = None,
        optimizer: optimizers.Optimizer | keras.optimizers.Optimizer | str | None = "same",
        seed: int | None = None,
        cache: CacheConfig | None = None,
        nonfinite: str = "error",
        row_dtype: str = "float32",
        wire_dtype: str = "float32",
        combiner: str | None = None,
        padding_id: int | None = None,
        admission: Admission | None = None,
        expiry: Expiry | Sequence[Expiry] | None = None,
        key_ranges: Sequence[KeyRange] = (),
        **kwargs: Any,
    ):
        """Describes the layer; the table is made when it is built.

        Args:
          first: `input_dim`, where two dimensions are given, else `output_dim`.
          second: `output_dim`.
          embeddings_initializer: a Keras initializer or its name (`het_tf.initializers.spec`).
            `Constant(matrix)` is as `weights=matrix`, with zeros for ids beyond it. As Keras's it
            is in the layer's config, however large: copies of the layer begin with it.
          embeddings_regularizer: a Keras regularizer or its name. What it makes of the rows that a
            call looks up, each once, is added to the loss, if the layer is trainable; Keras's layer
            adds all rows, once however often it is called.
          embeddings_constraint: a Keras constraint of single rows, or its name: `NonNeg()`, or
            `MaxNorm`, `MinMaxNorm` and `UnitNorm` with axis=1. It holds for rows that were updated;
            with row_dtype="bfloat16" before they are rounded.
          mask_zero: whether id 0 is padding that later layers mask out.
          weights: array [n, output_dim], or a list of it: the first values of the ids 0 .. n - 1; n
            is input_dim, where that is given. Copies of a layer that is not built have them, too;
            clones of one that is begin with embeddings_initializer, as Keras's do.
          input_dim: ids must be in [0, input_dim); None: any int64.
          output_dim: columns of the embedding, at least 1.
          optimizer: what trains the rows. "same", or None: the row form of what the
            `JointOptimizer` wraps that trains the model, its learning rate included; without one
            the first training step is an error. Or one of `het_tf.optimizers`; or one of
            `keras.optimizers`, or the name of one, that has a row form.
          seed: of the initial values, int64; None: drawn now.
          cache: how workers cache rows under a parameter server strategy; None: they do not, they
            fetch rows and send gradients every step. Without a strategy it has no use but for
            `device_capacity`: the table's rows are then on this process's GPU as long as they are
            in use, and updates reach the table when they leave, or with `flush`.
          nonfinite: what NaN or infinity in a gradient or its squares does: "error" fails the step
            and changes nothing, "skip" leaves the ids concerned out and counts them.
          row_dtype: what the table keeps values as. "bfloat16" takes half of their memory: updates
            are made in float32, and their results rounded up or down at random, so that small ones
            count on average (Gupta et al., ICML 2015). A row that a worker sent then comes back.
          wire_dtype: of values and gradients in messages. "bfloat16" takes half of their bytes:
            rounded at random on the way up, to the nearest on the way down.
          combiner: what brings the rows along the last axis of the inputs to one, times weights:
            "sum"; "mean", divided by the sum of the weights; "sqrtn", by the root of the sum of
            their squares; "max", the largest by column (ids that share it share its gradient). A
            bag without ids is zeros, and so is a mean or sqrtn of weights that come to zero. None:
            every id has its row.
          padding_id: an id that is as if it were not there: not looked up, not counted.
          admission: which ids get a row; None: all that are updated.
          expiry: when rows go; None: they stay. Of several, each is reason enough.
          key_ranges: ids for which other rules hold, or which have another initializer.
          **kwargs: of `keras.layers.Layer`. What else `keras.layers.Embedding` takes may be None.

        Raises:
          ValueError: an argument is out of its range; the message names it.
        """
        refuse_what_only_keras_does(kwargs)
        super().__init__(**kwargs)
        check_dtype(self.dtype_policy)
        if seed is None:
            seed = random.getrandbits(62)
        if nonfinite not in ("error", "skip"):
            raise ValueError(f'nonfinite must be "error" or "skip", not {nonfinite!r}')
        if cache is not None and not isinstance(cache, CacheConfig):
            raise ValueError(f"cache must be a het_tf.CacheConfig or None, not {cache!r}")
        pooling.check_combiner(combiner)
        if padding_id is not None:
            padding_id = check_integer("padding_id", padding_id, -INT64_MAX - 1, INT64_MAX)
            if mask_zero and padding_id != 0:
                raise ValueError(f"mask_zero makes id 0 padding, padding_id = {padding_id} another")
        input_dim, output_dim = dimensions(first, second, input_dim, output_dim)
        self.input_dim, self.output_dim = input_dim, output_dim
        self.embeddings_regularizer = regularizer(embeddings_regularizer)
        self.embeddings_constraint = keras.constraints.get(embeddings_constraint)
        initializer = keras.initializers.get(embeddings_initializer)
        matrix = matrix_of(initializer)
        if matrix is not None and weights is not None:
            raise ValueError("weights are given twice, as embeddings_initializer, too")
        given = weights if matrix is None else matrix
        self._stored = LayerTable(self, first_values(given, input_dim, output_dim))
        self.embeddings_initializer = initializer
        self.row_initializer = keras.initializers.Zeros() if matrix is not None else initializer
        self.seed = check_integer("seed", seed, -INT64_MAX - 1, INT64_MAX)
        self._binding = OptimizerBinding(self, optimizer)
        constrained(self.optimizer or optimizers.SGD(), self.embeddings_constraint)
        if self.optimizer and self.optimizer.cowclip and self.embeddings_regularizer:
            raise ValueError(
                f"cowclip={self.optimizer.cowclip!r} counts how often an id comes, and an"
                " embeddings_regularizer has each come once more: use l2 of the optimizer instead"
            )
        self.cache = cache
        self.nonfinite = nonfinite
        self.row_dtype = check_float_dtype("row_dtype", row_dtype)
        self.wire_dtype = check_float_dtype("wire_dtype", wire_dtype)
        self.admission, self.expiry = admission, lifetimes.checked(admission, expiry)
        lifetimes.spec(admission, expiry, key_ranges)
        self.key_ranges = tuple(key_ranges)
        ranges = self.key_initializers()
        initializers.spec(self.row_initializer, input_dim, output_dim, ranges)
        self.mask_zero = mask_zero
        self.combiner = combiner
        self.padding_id = padding_id
        # Of a collection's layers: see `EmbeddingTable`.
        self.layout: tuple[tuple[str, int, int], ...] = ()
        self.supports_masking = mask_zero
        self.supports_jit = False
        self.autocast = False

    def build(self, input_shape: Any = None) -> None:
        """Makes the table, on the parameter servers of the strategy in scope or in this process.

        Raises:
          ValueError: the strategy in scope is neither a ParameterServerStrategy nor of one replica;
            or there is no GPU for `device_capacity`.
          tf.errors.NotFoundError: a parameter server has not loaded the ops.
        """
        strategy = tf.distribute.get_strategy()
        # A sequential model without an Input builds its layers within a step.
        with tf.init_scope():
            self._build(strategy)
        self.built = True

    def _build(self, strategy: tf.distribute.Strategy) -> None:
        self._stored.place(strategy)
        self._anchor = Anchor(self._binding)
        self._anchor.trainable = self.trainable  # as Keras has it of weights that layers add
        self._rate = self._binding.make_rate()
        if self.optimizer is not None:
            self.make_table()

    def key_initializers(self) -> list[tuple[int, int, keras.initializers.Initializer]]:
        """Initializers of ranges of keys: first and last key, initializer."""
        ranges = self.key_ranges
        return [(r.first, r.last, r.initializer) for r in ranges if r.initializer is not None]

    def make_table(self, replaced: EmbeddingTable | None = None) -> None:
        """Makes the table, as `LayerTable.make`."""
        table = self._stored.make(replaced)
        # Restores the rows, if a checkpoint was restored before there was a table.
        self._table_state = TableState(table, self.flush)

    def call(self, inputs: Any, weights: Any = None, training: bool | None = None) -> Any:
        """Looks ids up; under a gradient tape, the backward pass updates their rows.

        With `training=False`, as Keras has it in `evaluate` and `predict`, a cached row that missed
        any update merged into its table is fetched again, whatever the staleness.

        Args:
          inputs: integers: a dense tensor of any rank, a RaggedTensor or a SparseTensor.
          weights: what rows are multiplied with, one for each id: as inputs, or dense with fewer
            axes. They get a gradient. None: ones.
          training: as of Keras.

        Returns:
          Without a combiner [*inputs.shape, output_dim], ragged where inputs are; zeros where an id
          is padding or a sparse input has none. With a combiner the last axis of inputs is gone, if
          there is more than one.

        Raises:
          ValueError: inputs are no numbers, or weights do not fit them.
          tf.errors.InvalidArgumentError: as by `keys_of`.
        """
        exact = map_values(inputs, lambda ids: self._keys_of(ids, bound=False))
        bags = pooling.bags_of(exact, weights, self.combiner, self._padding, f"layer {self.name}")
        keys = self.keys_of(bags.ids)
        if not self._regularizes or served_table(self) is not None:
            (outputs,) = self.outputs_of(keys, [bags], training)
            return bags.restore(outputs)
        looked_up = self.lookup_keys(keys)
        count = tf.size(looked_up, tf.int64) - tf.size(keys, tf.int64)
        each = pooling.Bags(looked_up[-count:], count, None, "sum", lambda rows: rows)
        outputs, rows = self._pooled(looked_up, [bags, each], training)
        self.add_loss(self.embeddings_regularizer(rows))
        return bags.restore(tf.cast(outputs, self.compute_dtype))

    @property
    def _regularizes(self) -> bool:
        # As of Keras, that of a frozen weight does not count.
        return self.embeddings_regularizer is not None and self.trainable

    def lookup_keys(self, keys: tf.Tensor) -> tf.Tensor:
        """What a call looks up: the keys of its ids, and for a regularizer each once more."""
        if not self._regularizes:
            return keys
        keys = tf.reshape(keys, [-1])
        return tf.concat([keys, tf.unique(keys).y], 0)

    def outputs_of(
        self, keys: tf.Tensor, features: Sequence[pooling.Bags], training: bool | None = None
    ) -> list[tf.Tensor]:
        """The lookup of a call: of one feature or more, whose ids follow one another.

        Args:
          keys: int64 [ids], those of the features one after the other.
          features: how they are pooled.
          training: as for `call`.

        Returns:
          Of each feature [bags, output_dim], in the layer's compute dtype.
        """
        outputs = self._pooled(keys, features, training)
        return [tf.cast(output, self.compute_dtype) for output in outputs]

    def _pooled(
        self, keys: tf.Tensor, features: Sequence[pooling.Bags], training: bool | None
    ) -> list[tf.Tensor]:
        """`outputs_of` before they are cast: float32."""
        served = served_table(self)
        if served is not None:
            outputs = served.pool(keys, features)
        else:
            optimizer = compiled_optimizer()
            if optimizer is not None and self.built and self.optimizer is None:
                with tf.init_scope():
                    self._binding.offer(optimizer)
            if not self._stored.exists and keras_internals.asks_for_shapes():
                outputs = [tf.zeros([bags.count, self.output_dim]) for bags in features]
            else:
                self._stored.ensure()
                if not tf.executing_eagerly() and not keras_internals.asks_for_shapes():
                    self._binding.is_traced = True
                if lookahead.record(self, keys, fresh=training is False):
                    zeros = [tf.zeros([bags.count, self.output_dim]) for bags in features]
                    outputs = list(map(lookahead.unknown, zeros))
                else:
                    outputs = lookup(self, keys, features, training)
        for output in outputs:
            output.set_shape([None, self.output_dim])
        return outputs

    def compute_output_spec(
        self, inputs: Any, weights: Any = None, training: bool | None = None
    ) -> keras.KerasTensor:
        """The shape of what `call` returns."""
        return pooling.output_spec(inputs, self.combiner, self.output_dim, self.compute_dtype)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Which ids are not padding, if `mask_zero` and they are dense and not pooled."""
        if not self.mask_zero or self.combiner is not None:
            return None
        if isinstance(inputs, (tf.RaggedTensor, tf.SparseTensor)):
            return None
        return keras.ops.not_equal(inputs, 0)

    def get_config(self) -> dict[str, Any]:
        """The arguments, for Keras serialization."""
        serialize = keras.saving.serialize_keras_object
        optimizer = {"optimizer": None if self.optimizer is None else serialize(self.optimizer)}
        if self._binding.takes_compiled:
            optimizer = {"optimizer": "same", "compiled_optimizer": optimizer["optimizer"]}
        # A table that is there has its rows saved, and no config has those of `weights` again.
        is_constant = self.row_initializer is not self.embeddings_initializer
        weights = None if is_constant else self._stored.first_values
        return super().get_config() | {
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            **optimizer,
            "embeddings_initializer": serialize(self.embeddings_initializer),
            "embeddings_regularizer": serialize(self.embeddings_regularizer),
            "embeddings_constraint": serialize(self.embeddings_constraint),
            "weights": serialize(weights),
            "seed": self.seed,
            "cache": None if self.cache is None else serialize(self.cache),
            "nonfinite": self.nonfinite,
            "row_dtype": self.row_dtype,
            "wire_dtype": self.wire_dtype,
            "mask_zero": self.mask_zero,
            "combiner": self.combiner,
            "padding_id": self.padding_id,
            **lifetimes.serialized(self.admission, self.expiry),
            "key_ranges": [serialize(each) for each in self.key_ranges],
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> HetEmbedding:
        """The inverse of `get_config`; also of that of a `keras.layers.Embedding`.

        Raises:
          TypeError: an argument is wrong; as of Keras's layers.
        """
        config = dict(config)
        for name in ("optimizer", "cache", "weights"):
            if isinstance(config.get(name), dict):
                config[name] = keras.saving.deserialize_keras_object(config[name])
        config["key_ranges"] = [
            keras.saving.deserialize_keras_object(each) if isinstance(each, dict) else each
            for each in config.get("key_ranges", ())
        ]
        taken = config.pop("compiled_optimizer", None)
        layer = super().from_config(lifetimes.deserialized(config))
        layer.binding.take_config(taken)
        return layer

    # The rows.

    @property
    def stored(self) -> LayerTable:
        """Where the rows are."""
        return self._stored

    @property
    def table(self) -> EmbeddingTable:
        """The table. Updates that caches have not sent are not in it: `flush`.

        Raises:
          ValueError: the layer is not built yet.
        """
        return self._stored.table

    @property
    def worker_cache(self) -> WorkerCache:
        """The cache that every worker keeps of the table.

        Raises:
          ValueError: as for `table`.
        """
        return self._stored.worker_cache

    def flush(self) -> None:
        """Sends what the caches hold back. `fit`, `evaluate` and saving do so anyway.

        Under a strategy those are the workers' and, for steps outside of `coordinator.schedule`,
        the coordinator's.

        Raises:
          tf.errors.UnavailableError: a parameter server is down.
        """
        self._stored.flush()

    def cache_stats(self) -> dict[str, int | float]:
        """Counters of the caches of all workers and of the coordinator, summed, and their ratios.

        Without those of workers that are down. Without a strategy there is a cache only where the
        table's rows are on a GPU, else this is empty.

        Returns:
          A key is an id of which a lookup takes one, however often it occurs. Since the caches were
          made:

          - "lookups"; "ids", occurrences and all; "keys".
          - "hit_ids", "hits": ids and keys whose row was in the cache; "hit_rate": hit_ids / ids;
            "key_hit_rate": hits / keys.
          - "stale_hits": hits whose row was fetched again, since it had passed the read bound;
            "checks_spared": hits that no server was asked about, since it sends the row by itself
            once it has passed the bound; "rows_unasked": rows that came that way; "refreshes":
            stale_hits + rows_unasked.
          - "misses": keys whose row was not there; "initialized": those of them that nobody had
            updated, and that were computed here; "visitors": those whose value came without
            optimizer slots, since they are not worth a line.
          - "updates": one a key and step; "nonfinite_skipped": those left out for NaN or infinity.
          - "rows_pushed": rows sent; "updates_pushed": the updates that they carried;
            "updates_lost": updates whose shard was cleared or restored before it had them.
            "updates_undone": with `exactly_once`, of closures that failed and were run again.
          - "evictions": rows that left a full cache; "dirty_evictions": with updates not yet sent.
            Where rows are on a GPU: "rows_to_host" of them that the host keeps; "rows_from_host":
            misses whose row it had kept, and no server sent.
          - "messages": requests; "bytes_up", "bytes_down": of requests and of replies;
            "bytes_up_push": the part of bytes_up that pushes take.
          - "bytes_to_device", "bytes_from_device": where rows are on a GPU, what the cache copies
            there and back: ids, rows that came; keys that messages name, rows that are pushed.

          Now: "rows" in the caches, "pending" updates that no shard is known to have, and
          "memory_bytes" of rows, unsent updates and index.

        Raises:
          ValueError: as for `table`.
          RuntimeError: the cluster was closed.
        """
        return self._stored.stats()

    def save_own_variables(self, store: Any) -> None:
        """Puts the weights and all rows of the table into a Keras weights file.

        In `het_tf.checkpoint.rows_in(folder)` a pointer takes the place of the rows. A layer
        that is not built puts nothing there, as Keras's do.
        """
        if not self.built:
            return
        for i, variable in enumerate(self._trainable_variables + self._non_trainable_variables):
            store[str(i)] = 0.0 if variable is self._anchor else variable
        self._stored.save(store)

    def load_own_variables(self, store: Any) -> None:
        """Replaces the weights and all rows of the table; the caches start empty."""
        if not self.built and not store.keys():
            return
        self._stored.load(store)
        for i, variable in enumerate(self._trainable_variables + self._non_trainable_variables):
            if variable is not self._anchor:
                variable.assign(store[str(i)])
        moved_with = str(i + 1)
        if self._binding.rate_variable is not None and moved_with in set(store.keys()):
            self._binding.load_rate(float(np.asarray(store[moved_with])))

    # What programs do with `keras.layers.Embedding` beside calling it.

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
        values = first_values(weights, self.input_dim, self.output_dim)
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
        raise NotImplementedError(f"layer {self.name}: {WHY_NOT['lora_rank']}")

    def quantize(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refused; `keras.Model.quantize` passes over the layer with a warning.

        Raises:
          NotImplementedError: says why.
        """
        raise NotImplementedError(f"layer {self.name}: {WHY_NOT['quantization_config']}")

    def keys_of(self, ids: Any) -> tf.Tensor:
        """Ids as the keys of the table, int64 of the same shape.

        Raises:
          ValueError: ids are no numbers.
          tf.errors.InvalidArgumentError: one is no whole number, is a float that its type may have
            rounded, is no int64, was cast to an integer type that does not hold it, or is not in
            [0, input_dim). The message has its value.
        """
        return self._keys_of(tf.convert_to_tensor(ids), bound=True)

    def _keys_of(self, ids: tf.Tensor, bound: bool) -> tf.Tensor:
        convert = keys_of if served_table(self) is None else keys_of_stock_ops
        name = f"inputs of layer {self.name}"
        return convert(ids, name, self.input_dim if bound else None)

    @property
    def _padding(self) -> int | None:
        return 0 if self.mask_zero else self.padding_id

    @property
    def anchor(self) -> Anchor:
        """The weight whose gradient stands for the gradients of the rows."""
        return self._anchor

    @property
    def binding(self) -> OptimizerBinding:
        """What trains the rows."""
        return self._binding

    @property
    def optimizer(self) -> optimizers.Optimizer | None:
        """The optimizer of the rows; None: that of a compiled model, which is not known yet."""
        return self._binding.optimizer

    @property
    def learning_rate(self) -> keras.Variable:
        """The learning rate of the layer's own optimizer, or with "same" of the compiled one.

        Assign to it, and the next step uses it. A `JointOptimizer` multiplies a rate of the layer's
        own by the factor by which the rate of its inner optimizer has moved.

        Raises:
          ValueError: the layer is not built yet, or its learning rate follows a schedule.
        """
        return self._binding.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.learning_rate.assign(value)


@keras.saving.register_keras_serializable("het_tf")
class EmbedReduce(HetEmbedding):
    """`HetEmbedding` that pools by default, as `keras_rs.layers.EmbedReduce` does."""

    def __init__(self, *args: Any, combiner: str = "mean", **kwargs: Any):
        """As of `HetEmbedding`."""
        super().__init__(*args, combiner=combiner, **kwargs)


def embeddings_of(model: keras.Model) -> list[HetEmbedding]:
    """The `HetEmbedding` layers of a model, those of its layers' layers included."""
    return [
        layer for layer in keras_internals.nested_layers(model) if isinstance(layer, HetEmbedding)
    ]


def named_embeddings(model: keras.Model) -> dict[str, HetEmbedding]:
    """The built layers of `embeddings_of`, by their paths.

    A path may occur twice, as where one function made each of two towers. The second layer is then
    called path_2.
    """
    named: dict[str, HetEmbedding] = {}
    for layer in embeddings_of(model):
        if layer.built:
            numbered = (f"{layer.path}_{i}" for i in itertools.count(2))
            name = next(x for x in itertools.chain([layer.path], numbered) if x not in named)
            named[name] = layer
    return named

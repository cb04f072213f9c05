"""The embedding layer."""

from __future__ import annotations

import itertools
import random
from collections.abc import Sequence
from typing import Any, NoReturn

import keras
import numpy as np
import tensorflow as tf

from het_tf import initializers, lifetimes, optimizers, row_storage
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
    """Embedding layer like `keras.layers.Embedding`, with a table that grows.

    `HetEmbedding(input_dim, output_dim, ...)` is called like Keras's layer and accepts ids in [0,
    input_dim). `HetEmbedding(output_dim)` accepts any int64 id. Under a
    `tf.distribute.ParameterServerStrategy`, the parameter servers store the table. With `cache`,
    workers train through caches with bounded staleness (HET, VLDB 2022). Without a strategy, this
    process stores the table.

    An optimizer that applies the gradients of a step trains the rows: the optimizer that the model
    is compiled with (`optimizer="same"`), or the layer's own. The gradients of all occurrences of
    an id in a batch are summed into one update. The table is not a Keras weight. The layer's
    trainable weight is a scalar whose gradient represents the gradients of the rows. A gradient
    that no optimizer applies trains nothing. `het_tf.keras.Model.compile` wraps its optimizer in a
    `het_tf.optimizers.JointOptimizer`, which updates dense variables and rows in one step. A custom
    training loop does the same:

        optimizer = het_tf.optimizers.JointOptimizer(keras.optimizers.Adam())
        optimizer.build(model.trainable_variables)
        with tf.GradientTape() as tape:
            loss = loss_of(model(x), y)
        gradients = tape.gradient(loss, model.trainable_variables)
        optimizer.apply_gradients(zip(gradients, model.trainable_variables))

    In a `tf.function`, the tape, the call, `gradient()` and the optimizer must be in the same one.

    Input: integers of any integer dtype, below `2**63`: dense of any shape, ragged or sparse.
    Without a `keras.Input(..., dtype="int64")`, Keras casts integers to floats. Floats must be
    whole numbers, in the range where their dtype has every integer (float32: below `2**24`).
    Output: [*input.shape, output_dim], in the layer's compute dtype. With a combiner:
    [*input.shape[:-1], output_dim], computed without a tensor of the rows of all ids.
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
        cache: CacheConfig | str | None = "auto",
        nonfinite: str = "error",
        row_dtype: str = "float32",
        wire_dtype: str = "float32",
        combiner: str | None = None,
        padding_id: int | None = None,
        admission: Admission | None = None,
        expiry: Expiry | Sequence[Expiry] | None = None,
        key_ranges: Sequence[KeyRange] = (),
        storage: row_storage.Storage | None = None,
        **kwargs: Any,
    ):
        """Configures the layer. The table is created once the layer is built and has an optimizer.

        Args:
          first: `input_dim` if two dimensions are given, otherwise `output_dim`.
          second: `output_dim`.
          embeddings_initializer: a Keras initializer or its name (see `het_tf.initializers.spec`).
            `Constant(matrix)` is equivalent to `weights=matrix`, with zeros for ids beyond the
            matrix. As in Keras, the matrix is part of the layer's config, whatever its size. Copies
            of the layer start with the matrix.
          embeddings_regularizer: a Keras regularizer or its name. If the layer is trainable, every
            call adds the penalty of its rows to the loss. Each row of a call counts once. Keras's
            layer adds the penalty of all rows, once for any number of calls.
          embeddings_constraint: a Keras constraint on single rows, or its name: `NonNeg()`, or
            `MaxNorm`, `MinMaxNorm` and `UnitNorm` with axis=1. The constraint holds for updated
            rows, with row_dtype="bfloat16" before rounding.
          mask_zero: whether id 0 is padding that later layers mask out.
          weights: array [n, output_dim], or a list of one array: the first values of the ids from 0
            to n - 1. n is input_dim, if given. Copies of an unbuilt layer also have these values.
            Clones of a built layer start with embeddings_initializer, as in Keras.
          input_dim: upper bound of the ids, which must be in [0, input_dim). None: any int64.
          output_dim: number of columns of the embedding, at least 1.
          optimizer: optimizer of the rows. "same" or None: the row form of the optimizer inside the
            model's `JointOptimizer`, with its learning rate. Without a `JointOptimizer`, the first
            training step raises an error. Other values: an optimizer of `het_tf.optimizers`, or an
            optimizer of `keras.optimizers` that has a row form, or the name of one.
          seed: int64 seed of the initial values. None: a random seed.
          cache: the cache of every worker under a parameter server strategy. None: workers fetch
            rows and send gradients in every step. "auto": `CacheConfig()` under a
            `HetParameterServerStrategy`, and None otherwise, since TensorFlow's own strategy does
            not `flush`. Without a strategy, only `device_capacity` has an effect: rows in use are
            on this process's GPU. Updates reach the table on eviction or `flush`.
          nonfinite: reaction to NaN or infinity in a gradient or its squares. "error": the step
            fails and changes nothing. "skip": the ids concerned are not updated and are counted.
          row_dtype: dtype of the values in the table. "bfloat16" halves their memory. Updates are
            computed in float32 and rounded stochastically, so that small updates count on average
            (Gupta et al., ICML 2015). Servers return each pushed row.
          wire_dtype: dtype of values and gradients in messages. "bfloat16" halves their bytes.
            Requests are rounded stochastically, replies to the nearest value.
          combiner: reduction of the weighted rows along the last axis of the inputs: "sum"; "mean",
            divided by the sum of the weights; "sqrtn", divided by the root of the sum of the
            squared weights; "max", the largest value per column (ids with this value share its
            gradient). A bag without ids yields zeros. A divisor of zero also yields zeros. None:
            one output per id.
          padding_id: id that is ignored: it is neither looked up nor counted.
          admission: rule that selects the ids that get a row. None: all updated ids.
          expiry: rule that removes rows. None: rows stay. Of several rules, one suffices.
          key_ranges: ranges of ids with different rules or a different initializer.
          storage: a `het_tf.Storage` for a table that is larger than the servers' memory. None: all
            rows are in memory.
          **kwargs: arguments of `keras.layers.Layer`. Others of `keras.layers.Embedding` may be
            None.

        Raises:
          ValueError: an argument is invalid; the message names it.
        """
        refuse_what_only_keras_does(kwargs)
        super().__init__(**kwargs)
        check_dtype(self.dtype_policy)
        if seed is None:
            seed = random.getrandbits(62)
        if nonfinite not in ("error", "skip"):
            raise ValueError(f'nonfinite must be "error" or "skip", not {nonfinite!r}')
        if cache is not None and cache != "auto" and not isinstance(cache, CacheConfig):
            raise ValueError(f'cache must be a het_tf.CacheConfig, "auto" or None, not {cache!r}')
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
        row_storage.check(storage)
        self.storage = storage
        ranges = self.key_initializers()
        initializers.spec(self.row_initializer, input_dim, output_dim, ranges)
        self.mask_zero = mask_zero
        self.combiner = combiner
        self.padding_id = padding_id
        # Set for layers of a collection: see `EmbeddingTable`.
        self.layout: tuple[tuple[str, int, int], ...] = ()
        self.supports_masking = mask_zero
        self.supports_jit = False
        self.autocast = False

    def build(self, input_shape: Any = None) -> None:
        """Places the table on the parameter servers of the current strategy, or in this process.

        Raises:
          ValueError: the current strategy is not a ParameterServerStrategy and has several
            replicas; or `device_capacity` has no GPU.
          tf.errors.NotFoundError: a parameter server has not loaded the ops.
        """
        strategy = tf.distribute.get_strategy()
        # A Sequential model without an Input builds its layers during a step.
        with tf.init_scope():
            self._build(strategy)
        self.built = True

    def _build(self, strategy: tf.distribute.Strategy) -> None:
        self._stored.place(strategy)
        self._anchor = Anchor(self._binding)
        self._anchor.trainable = self.trainable  # As `add_weight` does.
        self._rate = self._binding.make_rate()
        if self.optimizer is not None:
            self.make_table()

    def key_initializers(self) -> list[tuple[int, int, keras.initializers.Initializer]]:
        """Returns first key, last key and initializer of each key range with an initializer."""
        ranges = self.key_ranges
        return [(r.first, r.last, r.initializer) for r in ranges if r.initializer is not None]

    def make_table(self, replaced: EmbeddingTable | None = None) -> None:
        """Creates the table, as `LayerTable.make`."""
        table = self._stored.make(replaced)
        # Restores the rows if a checkpoint was restored before the table existed.
        self._table_state = TableState(table, self.flush)

    def call(self, inputs: Any, weights: Any = None, training: bool | None = None) -> Any:
        """Looks up ids. An optimizer that applies the gradients of the call trains the rows.

        Keras passes `training=False` in `evaluate` and `predict`. Then a cached row that misses any
        merged update is fetched again, whatever the staleness bounds.

        Args:
          inputs: integers: a dense tensor of any rank, a RaggedTensor or a SparseTensor.
          weights: factors of the rows, one per id: like `inputs`, or dense with fewer axes. Weights
            get a gradient. None: all weights are 1.
          training: as in Keras.

        Returns:
          Without a combiner: [*inputs.shape, output_dim], ragged if the inputs are. Padding ids and
          missing ids of a sparse input yield zeros. With a combiner: without the last axis of the
          inputs, if there is more than one axis.

        Raises:
          ValueError: inputs are not numbers, or weights do not fit them.
          tf.errors.InvalidArgumentError: see `keys_of`.
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
        # Keras ignores the regularizer of a frozen weight.
        return self.embeddings_regularizer is not None and self.trainable

    def lookup_keys(self, keys: tf.Tensor) -> tf.Tensor:
        """Returns the keys that a call looks up. A regularizer appends each unique key once."""
        if not self._regularizes:
            return keys
        keys = tf.reshape(keys, [-1])
        return tf.concat([keys, tf.unique(keys).y], 0)

    def outputs_of(
        self, keys: tf.Tensor, features: Sequence[pooling.Bags], training: bool | None = None
    ) -> list[tf.Tensor]:
        """Looks up and pools the ids of one or more features.

        Args:
          keys: int64 [ids], the keys of all features, concatenated.
          features: the bags of each feature.
          training: as for `call`.

        Returns:
          [bags, output_dim] per feature, in the layer's compute dtype.
        """
        outputs = self._pooled(keys, features, training)
        return [tf.cast(output, self.compute_dtype) for output in outputs]

    def _pooled(
        self, keys: tf.Tensor, features: Sequence[pooling.Bags], training: bool | None
    ) -> list[tf.Tensor]:
        """Returns the result of `outputs_of` before the cast, in float32."""
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
        """Returns the shape and dtype of the result of `call`."""
        return pooling.output_spec(inputs, self.combiner, self.output_dim, self.compute_dtype)

    def compute_mask(self, inputs: Any, mask: Any = None) -> Any:
        """Returns the mask of non-padding ids, if `mask_zero` and ids are dense and not pooled."""
        if not self.mask_zero or self.combiner is not None:
            return None
        if isinstance(inputs, (tf.RaggedTensor, tf.SparseTensor)):
            return None
        return keras.ops.not_equal(inputs, 0)

    def get_config(self) -> dict[str, Any]:
        """Returns the arguments, for Keras serialization."""
        serialize = keras.saving.serialize_keras_object
        optimizer = {"optimizer": None if self.optimizer is None else serialize(self.optimizer)}
        if self._binding.takes_compiled:
            optimizer = {"optimizer": "same", "compiled_optimizer": optimizer["optimizer"]}
        # An existing table saves its rows. `first_values` is then None, and the config omits them.
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
            "cache": serialize(self.cache),
            "nonfinite": self.nonfinite,
            "row_dtype": self.row_dtype,
            "wire_dtype": self.wire_dtype,
            "mask_zero": self.mask_zero,
            "combiner": self.combiner,
            "padding_id": self.padding_id,
            **lifetimes.serialized(self.admission, self.expiry),
            "key_ranges": [serialize(each) for each in self.key_ranges],
            "storage": serialize(self.storage),
        }

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> HetEmbedding:
        """Creates a layer from a config of `get_config` or of a `keras.layers.Embedding`.

        Raises:
          TypeError: an argument is wrong, as in Keras's layers.
        """
        config = dict(config)
        for name in ("optimizer", "cache", "weights", "storage"):
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
        """The storage of the rows."""
        return self._stored

    @property
    def table(self) -> EmbeddingTable:
        """The table. Updates that caches have not sent are missing: see `flush`.

        Raises:
          ValueError: the layer is not built yet.
        """
        return self._stored.table

    @property
    def worker_cache(self) -> WorkerCache:
        """The cache of the table that every worker keeps.

        Raises:
          ValueError: the layer is not built yet.
        """
        return self._stored.worker_cache

    def flush(self) -> None:
        """Sends the updates that the caches hold back. `fit`, `evaluate` and saving do the same.

        Under a strategy, these are the caches of the workers. The coordinator's cache is included,
        which serves steps outside of `coordinator.schedule`.

        Raises:
          tf.errors.UnavailableError: a parameter server is down.
        """
        self._stored.flush()

    def cache_stats(self) -> dict[str, int | float]:
        """Returns counters, summed over the caches of all workers and the coordinator, and ratios.

        Workers that are down are not included. Without a strategy, the result is empty unless the
        table's rows are on a GPU.

        Returns:
          A lookup counts repeated ids as one key. Counters since the creation of the caches:

          - "lookups"; "ids", with repetitions; "keys".
          - "hit_ids", "hits": ids and keys whose row was in the cache; "hit_rate": hit_ids / ids;
            "key_hit_rate": hits / keys.
          - "stale_hits": hits whose row exceeded the read bound and was fetched again;
            "checks_spared": hits without a request, because the server sends the row once it
            exceeds the bound; "rows_unasked": rows that the server sent for this reason;
            "refreshes": stale_hits + rows_unasked.
          - "misses": keys whose row was not in the cache; "initialized": misses that nobody had
            updated and that were computed locally; "visitors": misses whose value was fetched
            without optimizer slots, because the cache did not admit the row.
          - "updates": one per key and step; "nonfinite_skipped": skipped for NaN or infinity.
          - "rows_pushed": rows sent; "updates_pushed": updates in these rows; "updates_lost":
            updates that were not merged when their shard was cleared or restored; "updates_undone":
            with `exactly_once`, updates of failed closures that were run again.
          - "evictions": rows evicted from a full cache; "dirty_evictions": evictions with unsent
            updates. With rows on a GPU: "rows_to_host": evicted rows that the host keeps;
            "rows_from_host": misses whose row the host had kept, so that no server sent it.
          - "messages": requests; "bytes_up", "bytes_down": bytes of requests and of replies;
            "bytes_up_push": the part of bytes_up that pushes need.
          - "bytes_to_device", "bytes_from_device": with rows on a GPU, bytes that the cache copies
            to the GPU (ids, received rows) and back (keys in messages, pushed rows).

          Current values: "rows" in the caches, "pending" updates that no shard has acknowledged,
          and "memory_bytes" of rows, unsent updates and index.

        Raises:
          ValueError: the layer is not built yet.
          RuntimeError: the cluster was closed.
        """
        return self._stored.stats()

    def save_own_variables(self, store: Any) -> None:
        """Writes the weights and all rows of the table to a Keras weights file.

        In `het_tf.checkpoint.rows_in(folder)`, a pointer replaces the rows. A layer that is not
        built writes nothing, as in Keras.
        """
        if not self.built:
            return
        for i, variable in enumerate(self._trainable_variables + self._non_trainable_variables):
            store[str(i)] = 0.0 if variable is self._anchor else variable
        self._stored.save(store)

    def load_own_variables(self, store: Any) -> None:
        """Replaces the weights and all rows of the table, and empties the caches."""
        if not self.built and not store.keys():
            return
        self._stored.load(store)
        for i, variable in enumerate(self._trainable_variables + self._non_trainable_variables):
            if variable is not self._anchor:
                variable.assign(store[str(i)])
        moved_with = str(i + 1)
        if self._binding.rate_variable is not None and moved_with in set(store.keys()):
            self._binding.load_rate(float(np.asarray(store[moved_with])))

    # Other members of `keras.layers.Embedding`.

    def set_weights(self, weights: Sequence[Any]) -> None:
        """Sets rows as Keras's layer does, and empties the caches.

        Args:
          weights: `[matrix]`, the values of the ids 0 .. n - 1, [n, output_dim]. If the layer has
            an input_dim, n is input_dim.

        Raises:
          ValueError: `weights` has another form, or the layer is not built yet.
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
        """Not supported: the layer has no matrix.

        Raises:
          AttributeError: always. The message names alternatives.
        """
        raise AttributeError(
            f"layer {self.name} has no matrix of embeddings, its table grows: table.lookup(ids)"
            " reads rows, table.export() all that were updated, and set_weights([matrix]) sets"
            " them. To score against all items, as a retrieval layer does with a matrix, call the"
            " layer on their ids: scores = query @ tf.transpose(layer(tf.range(items)))"
        )

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        """Returns the shape of the result of `call` for ids of shape `input_shape`."""
        return pooling.output_shape(input_shape, self.combiner, self.output_dim)

    def enable_lora(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported.

        Raises:
          NotImplementedError: always. The message gives the reason.
        """
        raise NotImplementedError(f"layer {self.name}: {WHY_NOT['lora_rank']}")

    def quantize(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Not supported. `keras.Model.quantize` skips the layer with a warning.

        Raises:
          NotImplementedError: always. The message gives the reason.
        """
        raise NotImplementedError(f"layer {self.name}: {WHY_NOT['quantization_config']}")

    def keys_of(self, ids: Any) -> tf.Tensor:
        """Returns ids as keys of the table, int64 of the same shape.

        Raises:
          ValueError: ids are not numbers.
          tf.errors.InvalidArgumentError: an id is not a whole number, is a float that may have been
            rounded, does not fit int64, was cast to an integer dtype that is too small, or is not
            in [0, input_dim). The message contains the id.
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
        """The weight whose gradient represents the gradients of the rows."""
        return self._anchor

    @property
    def binding(self) -> OptimizerBinding:
        """The binding of the rows to their optimizer."""
        return self._binding

    @property
    def optimizer(self) -> optimizers.Optimizer | None:
        """The optimizer of the rows. None: that of a compiled model, which is not known yet."""
        return self._binding.optimizer

    @property
    def learning_rate(self) -> keras.Variable:
        """The learning rate of the layer's own optimizer, or with "same" of the compiled optimizer.

        The next step uses an assigned value. A `JointOptimizer` multiplies the rate of a layer's
        own optimizer by the factor by which the rate of its inner optimizer has changed.

        Raises:
          ValueError: the layer is not built yet, or its learning rate follows a schedule.
        """
        return self._binding.learning_rate

    @learning_rate.setter
    def learning_rate(self, value: float) -> None:
        self.learning_rate.assign(value)


@keras.saving.register_keras_serializable("het_tf")
class EmbedReduce(HetEmbedding):
    """`HetEmbedding` that pools by default, like `keras_rs.layers.EmbedReduce`."""

    def __init__(self, *args: Any, combiner: str = "mean", **kwargs: Any):
        """Accepts the arguments of `HetEmbedding`."""
        super().__init__(*args, combiner=combiner, **kwargs)


def embeddings_of(model: keras.Model) -> list[HetEmbedding]:
    """Returns the `HetEmbedding` layers of a model, including those in nested layers."""
    return [
        layer for layer in keras_internals.nested_layers(model) if isinstance(layer, HetEmbedding)
    ]


def named_embeddings(model: keras.Model) -> dict[str, HetEmbedding]:
    """Returns the built layers of `embeddings_of`, by path.

    Two layers may share a path, as two towers of one function do. The second is named path_2.
    """
    named: dict[str, HetEmbedding] = {}
    for layer in embeddings_of(model):
        if layer.built:
            numbered = (f"{layer.path}_{i}" for i in itertools.count(2))
            name = next(x for x in itertools.chain([layer.path], numbered) if x not in named)
            named[name] = layer
    return named

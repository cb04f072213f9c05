"""Keras models that also train under `HetParameterServerStrategy`."""

from __future__ import annotations

import contextlib
import functools
import warnings
from typing import Any

import keras
import tensorflow as tf

from het_tf.compat import keras_internals
from het_tf.distribute import HetParameterServerStrategy
from het_tf.keras.data import datasets
from het_tf.keras.data.arguments import EvaluateArguments, FitArguments, PredictArguments
from het_tf.keras.data.model_inputs import by_key, checked_inputs
from het_tf.keras.model_files import Saving
from het_tf.keras.trainer import ParameterServerTrainer
from het_tf.keras.worker_step.batched_lookups import lookups_of_call
from het_tf.layers.embedding import embeddings_of
from het_tf.optimizers.joint_optimizer import JointOptimizer, compiled_with
from het_tf.runtime.current_strategy import servers_named, warn_of_idle_cluster
from het_tf.runtime.planned_batch import check_plain
from het_tf.storage.checkpoints.table_state import FlushedFirst


class _ParameterServerFit(Saving):
    """Mix-in that replaces `compile`, `fit`, `evaluate` and `predict` of a Keras model class.

    List the mix-in before the Keras class. If the model was not made under a
    `HetParameterServerStrategy`, the Keras class trains, evaluates and predicts.
    """

    @property
    def _parameter_server_trainer(self) -> ParameterServerTrainer | None:  # type: ignore[override]
        strategy = self.distribute_strategy
        if not isinstance(strategy, HetParameterServerStrategy):
            return None
        # Keras would track an assigned attribute as a part of the model.
        trainer = self.__dict__.get("_het_trainer")
        if trainer is None:
            trainer = self.__dict__["_het_trainer"] = ParameterServerTrainer(self, strategy)
            # TensorFlow's checkpoints find this attribute, and flush before they write.
            self._het_flushed_first = FlushedFirst(functools.partial(self._sync, slots=True))
        return trainer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Calls the model as `keras.Model` does. Rejects ids that do not fit their Input."""
        self._check_open()
        if args:
            args = (checked_inputs(self, by_key(self, args[0])), *args[1:])
        elif "inputs" in kwargs:
            kwargs["inputs"] = checked_inputs(self, by_key(self, kwargs["inputs"]))
        optimizer = getattr(self, "optimizer", None)  # None before `compile`.
        is_joint = isinstance(optimizer, JointOptimizer)
        called = compiled_with(optimizer) if is_joint else contextlib.nullcontext()
        with servers_named(), called, lookups_of_call(self, args, kwargs):
            return super().__call__(*args, **kwargs)

    def _trainer_to_run(self) -> ParameterServerTrainer | None:
        trainer = self._parameter_server_trainer
        if trainer is None:
            strategy = self.distribute_strategy
            if isinstance(strategy, tf.distribute.ParameterServerStrategy):
                raise ValueError(
                    f"Model {self.name!r} was made under tf.distribute.{type(strategy).__name__},"
                    " under which it does not train, evaluate or predict: make the strategy a"
                    " het_tf.distribute.HetParameterServerStrategy(cluster_resolver)."
                )
            warn_of_idle_cluster(f"Model {self.name!r} was made")
        return trainer

    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        loss_weights: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = None,
        run_eagerly: bool = False,
        steps_per_execution: int | str = "auto",
        jit_compile: bool | str = "auto",
        auto_scale_loss: bool = True,
    ) -> None:
        """Configures the model for training, as `keras.Model.compile` does.

        Args:
          steps_per_execution: number of steps that a worker runs per message from the coordinator.
            "auto" is 16 under `HetParameterServerStrategy`, or fewer for short epochs. Otherwise 1.
          **others: see `keras.Model.compile`. The model's `optimizer` is a
            `het_tf.optimizers.JointOptimizer` that wraps the given optimizer as its
            `inner_optimizer`. `HetParameterServerStrategy` does not use XLA.

        Raises:
          ValueError: `steps_per_execution` is neither a positive integer nor "auto", or
            `run_eagerly` is set under `HetParameterServerStrategy`.
        """
        if steps_per_execution != "auto" and (
            not isinstance(steps_per_execution, int) or steps_per_execution < 1
        ):
            raise ValueError(
                'steps_per_execution must be a positive integer or "auto", got '
                f"{steps_per_execution!r}."
            )
        trainer = self._parameter_server_trainer
        arguments = dict(
            optimizer=None,
            loss=loss,
            loss_weights=loss_weights,
            metrics=metrics,
            weighted_metrics=weighted_metrics,
            run_eagerly=run_eagerly,
            auto_scale_loss=False,  # `_joint` adds the scaling.
        )
        if trainer is None:
            arguments["optimizer"] = self._joint(optimizer, auto_scale_loss)
            steps = 1 if steps_per_execution == "auto" else steps_per_execution
            super().compile(**arguments, steps_per_execution=steps, jit_compile=jit_compile)
            self._tell_embeddings()
            return
        if run_eagerly:
            raise ValueError("run_eagerly does not work under HetParameterServerStrategy.")
        if jit_compile is True:
            warnings.warn("jit_compile is ignored under HetParameterServerStrategy.", stacklevel=2)
        with self.distribute_strategy.scope():
            arguments["optimizer"] = self._joint(optimizer, auto_scale_loss)
            super().compile(**arguments, steps_per_execution=steps_per_execution, jit_compile=False)
            self._tell_embeddings()
        trainer.forget_compiled()

    def _joint(self, optimizer: Any, auto_scale_loss: bool) -> Any:
        """Returns the `JointOptimizer` for the optimizer that `compile` was given."""
        optimizer = keras.optimizers.get(optimizer)
        is_known = isinstance(optimizer, keras.optimizers.Optimizer)
        if not is_known or isinstance(optimizer, JointOptimizer):
            return optimizer
        scales = isinstance(optimizer, keras.optimizers.LossScaleOptimizer)
        if auto_scale_loss and self.dtype_policy.name == "mixed_float16" and not scales:
            optimizer = keras.optimizers.LossScaleOptimizer(optimizer, name="loss_scale_optimizer")
        return JointOptimizer(optimizer)

    def _tell_embeddings(self) -> None:
        if isinstance(self.optimizer, JointOptimizer):
            for layer in embeddings_of(self):
                layer.binding.offer(self.optimizer)

    def _prepare_rows(self) -> None:
        """Prepares the rows for steps of the optimizer that the model is compiled with."""
        self._check_open()  # Its error is clearer than the one of reading the optimizer.
        optimizer = getattr(self, "optimizer", None)  # None before `compile`.
        if isinstance(optimizer, JointOptimizer):
            with servers_named():
                for layer in embeddings_of(self):
                    layer.binding.take(optimizer)

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles a loaded model like the saved model. Keras calls this method."""
        self.compile(**keras.saving.deserialize_keras_object(config))
        if self.optimizer is not None and self.built:
            self.optimizer.build(self.trainable_variables)

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        epochs: int = 1,
        verbose: str | int = "auto",
        callbacks: Any = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        class_weight: dict[int, float] | None = None,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        steps_per_epoch: int | None = None,
        validation_steps: int | None = None,
        validation_batch_size: int | None = None,
        validation_freq: int | list[int] = 1,
    ) -> keras.callbacks.History:
        """Trains the model, as `keras.Model.fit` does.

        Under `HetParameterServerStrategy` the workers run the steps asynchronously. Batch callbacks
        are called after the steps have finished. Metrics count every finished step once.

        Args:
          x: under `HetParameterServerStrategy` one of:
            - a batched `tf.data.Dataset` of `x`, `(x, y)` or `(x, y, sample_weight)`. Without
              `steps_per_epoch`, this process reads the dataset, and an epoch trains every batch
              once. With `steps_per_epoch`, every worker reads a repeated copy of the dataset and
              trains every `num_workers`-th batch.
            - a function without arguments that returns such a dataset. Same as the dataset.
            - a function that takes a `tf.distribute.InputContext` and returns one worker's share of
              the data as such a dataset. `input_pipeline_id` and `num_input_pipelines` identify the
              share, for example to select files. Without `steps_per_epoch`, an epoch reads every
              share once. Otherwise a share that ends starts over. Prefer this in large clusters.
            - arrays, or lists, tuples or dicts of arrays, with `y`, `batch_size` and so on.
          steps_per_epoch: number of steps of all workers together. Data that ends starts over.
          validation_data: arrays `(x, y)` or `(x, y, sample_weight)`, a dataset, or a function.
          **others: see `keras.Model.fit`.

        Returns:
          The `History`. Under `HetParameterServerStrategy`, the logs of an epoch also have
          "examples_per_s", "hit_rate" (share of ids whose row was in a cache), "MB_up_per_s",
          "MB_down_per_s" and "waiting" (share of the time that the workers waited for rows), if
          they are known.

        Raises:
          ValueError: the data does not fit the model, or a part of the model cannot be trained
            asynchronously. The message names the part.
          tf.errors.UnavailableError: a parameter server died. The message names it.
          tf.errors.ResourceExhaustedError: a parameter server has no memory for more rows. The
            server keeps its rows and still serves reads.
        """
        arguments = FitArguments.of(locals())
        trainer = self._trainer_to_run()
        self._prepare_rows()
        if trainer is None:
            check_plain(x)
            return super().fit(**vars(arguments))
        return trainer.fit(arguments)

    def lookahead_stats(self) -> dict[str, float]:
        """Returns counters of the last `fit` that show how long steps waited for rows.

        Returns:
          "steps": number of steps of all workers. "ahead_steps": steps whose rows were requested
          ahead (`CacheConfig.lookahead`), not when a layer was called. "waited_steps": number of
          "ahead_steps" that had to wait for their rows. "waited_seconds": total time of these
          waits. "lookahead": the largest number of steps by which a worker's lookups ran ahead.
          Empty without `HetParameterServerStrategy`.
        """
        trainer = self._parameter_server_trainer
        return {} if trainer is None else trainer.lookahead_stats()

    @servers_named()
    def evaluate(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        sample_weight: Any = None,
        steps: int | None = None,
        callbacks: Any = None,
        return_dict: bool = False,
        **kwargs: Any,
    ) -> Any:
        """Evaluates as `keras.Model.evaluate`, on the workers under `HetParameterServerStrategy`.

        Args:
          x: data in a form that `fit` accepts. This process reads every batch once. For a function
            of a `tf.distribute.InputContext`, every worker reads its share.
          **others: see `keras.Model.evaluate`.

        Returns:
          The loss and the metrics, as a list, a scalar or a dict, as in Keras.
        """
        arguments = EvaluateArguments.of(locals())
        trainer = self._trainer_to_run()
        if trainer is None:
            check_plain(x)
            return super().evaluate(**vars(arguments), **kwargs)
        if kwargs:
            raise TypeError(f"evaluate has no arguments {sorted(kwargs)}")
        return trainer.evaluate(arguments)

    def predict(
        self,
        x: Any,
        batch_size: int | None = None,
        verbose: str | int = "auto",
        steps: int | None = None,
        callbacks: Any = None,
    ) -> Any:
        """Predicts as `keras.Model.predict`, on the workers under `HetParameterServerStrategy`.

        Args:
          x: a dataset, arrays, or a function. A function is called once, as for a single worker.
          **others: see `keras.Model.predict`.

        Returns:
          NumPy arrays in the order of the input.
        """
        arguments = PredictArguments.of(locals())
        trainer = self._trainer_to_run()
        if trainer is None:
            check_plain(x)
            return super().predict(**vars(arguments))
        return trainer.predict(arguments)

    def train_on_batch(
        self,
        x: Any,
        y: Any = None,
        sample_weight: Any = None,
        class_weight: dict[int, float] | None = None,
        return_dict: bool = False,
    ) -> Any:
        """Trains one batch, as `keras.Model.train_on_batch` does.

        Under `HetParameterServerStrategy` one worker runs the step. The call returns when the
        tables and variables contain the update. For fast training use `fit`, with all workers.
        """
        trainer = self._trainer_to_run()
        self._prepare_rows()
        if trainer is None:
            return super().train_on_batch(x, y, sample_weight, class_weight, return_dict)
        return trainer.run_on_batch(
            x, y, sample_weight, class_weight, training=True, return_dict=return_dict
        )

    def test_on_batch(
        self, x: Any, y: Any = None, sample_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """Evaluates a batch as `keras.Model.test_on_batch`, on one worker under the strategy."""
        trainer = self._trainer_to_run()
        if trainer is None:
            return super().test_on_batch(x, y, sample_weight, return_dict)
        return trainer.run_on_batch(x, y, sample_weight, training=False, return_dict=return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """Predicts a batch as `keras.Model.predict_on_batch`, on one worker under the strategy."""
        trainer = self._trainer_to_run()
        if trainer is None:
            return super().predict_on_batch(x)
        batch = trainer.one_batches.dataset(x)
        if batch is not None:
            return self.predict(batch, verbose=0)
        return self.predict(x, batch_size=datasets.num_examples(x), verbose=0)


@keras.saving.register_keras_serializable(package="het_tf")
class Model(_ParameterServerFit, keras.Model):
    """`keras.Model` whose `fit`, `evaluate` and `predict` work under `HetParameterServerStrategy`.

    Create a model from inputs and outputs, or by subclassing. Create and compile the model, its
    layers and its optimizer inside `with strategy.scope():`. Without the strategy the model behaves
    like a `keras.Model`.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Model:
        """Returns a functional model if the arguments are inputs and outputs, as in Keras."""
        if cls is Model and _is_functional(args, kwargs):
            return super().__new__(Functional)
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any):
        """Creates a model, with the arguments of `keras.Model`."""
        if _is_functional(args, kwargs) and not isinstance(self, _KerasFunctional):
            keras_internals.make_functional(type(self), Model, Functional)
        super().__init__(*args, **kwargs)


_KerasFunctional: Any = keras_internals.functional_class()


@keras.saving.register_keras_serializable(package="het_tf")
class Functional(Model, _KerasFunctional):
    """Class of the models that `Model(inputs, outputs)` returns."""


@keras.saving.register_keras_serializable(package="het_tf")
class Sequential(_ParameterServerFit, keras.Sequential):
    """`keras.Sequential` that also trains under `HetParameterServerStrategy`. See `Model`."""


def _is_functional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the arguments of a model's constructor are inputs and outputs."""
    return (
        len(args) == 2
        or (len(args) == 1 and "outputs" in kwargs)
        or ("inputs" in kwargs and "outputs" in kwargs)
    )

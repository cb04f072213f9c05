"""`keras.Model` that also trains on parameter servers."""

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
from het_tf.storage.checkpoints.table_state import FlushedFirst


class _ParameterServerFit(Saving):
    """Replaces `fit`, `evaluate`, `predict` and `compile` where the model's strategy is ours.

    To be put before a Keras model class. Everything else, and everything under any other strategy
    or none, is left to that class.
    """

    @property
    def _parameter_server_trainer(self) -> ParameterServerTrainer | None:  # type: ignore[override]
        strategy = self.distribute_strategy
        if not isinstance(strategy, HetParameterServerStrategy):
            return None
        # Straight into the instance: Keras would track the attribute as part of the model.
        trainer = self.__dict__.get("_het_trainer")
        if trainer is None:
            trainer = self.__dict__["_het_trainer"] = ParameterServerTrainer(self, strategy)
            # For TensorFlow's checkpoints, which find it here.
            self._het_flushed_first = FlushedFirst(functools.partial(self._sync, slots=True))
        return trainer

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As `keras.Model.__call__`; ids that do not fit their Input are refused."""
        self._check_open()
        if args:
            args = (checked_inputs(self, by_key(self, args[0])), *args[1:])
        elif "inputs" in kwargs:
            kwargs["inputs"] = checked_inputs(self, by_key(self, kwargs["inputs"]))
        optimizer = getattr(self, "optimizer", None)  # None before `compile`
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
        """As `keras.Model.compile`, with a default for `steps_per_execution`.

        Args:
          steps_per_execution: steps that a worker does without talking to the coordinator, or
            "auto": under `HetParameterServerStrategy` 16, or fewer for short epochs; otherwise 1.
          **others: see `keras.Model.compile`. Under `HetParameterServerStrategy` XLA is not used.
            The optimizer is wrapped in a `het_tf.optimizers.JointOptimizer`, which is then the
            model's `optimizer`; the one that was given is its `inner_optimizer`.

        Raises:
          ValueError: `steps_per_execution` is not a positive integer or "auto", or `run_eagerly`
            is set under `HetParameterServerStrategy`.
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
            auto_scale_loss=False,  # `_joint` does it
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
        """What `compile` is given, as an optimizer that trains rows, too."""
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
        """Has the optimizer that the model is compiled with train the rows from now on."""
        self._check_open()  # Where the optimizer is looked at, TensorFlow's error says less.
        optimizer = getattr(self, "optimizer", None)  # None before `compile`
        if isinstance(optimizer, JointOptimizer):
            with servers_named():
                for layer in embeddings_of(self):
                    layer.binding.take(optimizer)

    def compile_from_config(self, config: dict[str, Any]) -> None:
        """Compiles a loaded model as the saved one was; called by Keras."""
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
        """As `keras.Model.fit`; under `HetParameterServerStrategy` the workers do the steps.

        Steps then run asynchronously, several workers at a time, and callbacks for batches are
        called when steps have finished. Metrics count every finished step once.

        Args:
          x: under `HetParameterServerStrategy` one of:
            - a `tf.data.Dataset`, batched, of `x`, `(x, y)` or `(x, y, sample_weight)`. Without
              `steps_per_epoch` it is read by this process and every batch is trained once per
              epoch. With `steps_per_epoch` every worker reads a copy that repeats, of which it
              takes every `num_workers`-th batch.
            - a function without arguments that returns such a dataset: the same as that dataset.
            - a function that takes a `tf.distribute.InputContext` and returns such a dataset,
              which is one worker's share: every worker reads its own, from the files for instance
              that its `num_input_pipelines` and `input_pipeline_id` choose. Without
              `steps_per_epoch` an epoch is the shares of all workers, each to its end; with it a
              share that ends starts over. This is the way to feed a large cluster.
            - arrays, or lists, tuples or dicts of arrays, with `y`, `batch_size` and so on.
          steps_per_epoch: steps of all workers together; the data starts over when it ends.
          validation_data: arrays `(x, y)` or `(x, y, sample_weight)`, a dataset, or a function.
          **others: see `keras.Model.fit`.

        Returns:
          The `History`.

        Raises:
          ValueError: the data does not fit, or a part of the model cannot be trained
            asynchronously; the message says which.
          tf.errors.UnavailableError: a parameter server died; the message names it.
          tf.errors.ResourceExhaustedError: a parameter server has not the memory for the table. It
            keeps its rows, and goes on serving reads.
        """
        arguments = FitArguments.of(locals())
        trainer = self._trainer_to_run()
        self._prepare_rows()
        if trainer is None:
            return super().fit(**vars(arguments))
        return trainer.fit(arguments)

    def lookahead_stats(self) -> dict[str, float]:
        """How many steps of the last `fit` waited for their rows.

        Returns:
          "steps": steps done by all workers; "ahead_steps": those whose rows were looked up ahead
          (`CacheConfig.lookahead`), and not when their layers were called; "waited_steps": those of
          these that were to begin before their rows were there; "waited_seconds": for how long,
          together. Empty without `HetParameterServerStrategy`.
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
        """As `keras.Model.evaluate`; under `HetParameterServerStrategy` on the workers.

        Args:
          x: as for `fit`: every batch once, read by this process, or the share of every worker
            from a function that takes a `tf.distribute.InputContext`.
          **others: see `keras.Model.evaluate`.

        Returns:
          The loss and metrics, as a list, a scalar or a dict, as in Keras.
        """
        arguments = EvaluateArguments.of(locals())
        trainer = self._trainer_to_run()
        if trainer is None:
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
        """As `keras.Model.predict`; under `HetParameterServerStrategy` on the workers.

        Args:
          x: a dataset, arrays, or a function, which is then called once, as for one worker.
          **others: see `keras.Model.predict`.

        Returns:
          NumPy arrays in the order of the input.
        """
        arguments = PredictArguments.of(locals())
        trainer = self._trainer_to_run()
        if trainer is None:
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
        """As `keras.Model.train_on_batch`; under `HetParameterServerStrategy` on some worker.

        Every call waits for its step, which then is in the tables and variables: for a test or a
        look at one batch. `fit` has all workers step at once.
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
        """As `keras.Model.test_on_batch`; under `HetParameterServerStrategy` on some worker."""
        trainer = self._trainer_to_run()
        if trainer is None:
            return super().test_on_batch(x, y, sample_weight, return_dict)
        return trainer.run_on_batch(x, y, sample_weight, training=False, return_dict=return_dict)

    def predict_on_batch(self, x: Any) -> Any:
        """As `keras.Model.predict_on_batch`; under `HetParameterServerStrategy` on some worker."""
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

    Made from inputs and outputs or by subclassing, like `keras.Model`, and the same as it where
    there is no such strategy. Make the model, its layers and its optimizer, and compile it, inside
    `with strategy.scope():`.
    """

    def __new__(cls, *args: Any, **kwargs: Any) -> Model:
        """A functional model if given inputs and outputs, as in Keras."""
        if cls is Model and _is_functional(args, kwargs):
            return super().__new__(Functional)
        return super().__new__(cls)

    def __init__(self, *args: Any, **kwargs: Any):
        """As `keras.Model(inputs, outputs, ...)`, or `super().__init__(...)` in a subclass."""
        if _is_functional(args, kwargs) and not isinstance(self, _KerasFunctional):
            keras_internals.make_functional(type(self), Model, Functional)
        super().__init__(*args, **kwargs)


_KerasFunctional: Any = keras_internals.functional_class()


@keras.saving.register_keras_serializable(package="het_tf")
class Functional(Model, _KerasFunctional):
    """What `Model(inputs, outputs)` makes."""


@keras.saving.register_keras_serializable(package="het_tf")
class Sequential(_ParameterServerFit, keras.Sequential):
    """`keras.Sequential` that also trains under `HetParameterServerStrategy`, see `Model`."""


def _is_functional(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether a model's arguments are inputs and outputs."""
    return (
        len(args) == 2
        or (len(args) == 1 and "outputs" in kwargs)
        or ("inputs" in kwargs and "outputs" in kwargs)
    )

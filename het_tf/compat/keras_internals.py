"""Uses of Keras 3 symbols that are not public and have no public substitute.

No other module of het_tf uses such symbols. Checked with Keras 3.15.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.backend.common.symbolic_scope import in_symbolic_scope


def build_from_spec(model: keras.Model, batch_spec: Any) -> None:
    """Builds the model, its compiled metrics and losses, and the optimizer (`_symbolic_build`).

    Keras does the same at the start of `fit` under a strategy. No public call builds compiled
    metrics before the first batch. A closure cannot create variables.

    Args:
      model: model, compiled or not. The caller must be inside the scope of its strategy.
      batch_spec: an element of the dataset, with a `tf.TensorSpec` for each tensor.
    """
    model._symbolic_build(data_batch=batch_spec)


def set_initial_epoch(model: keras.Model, epoch: int) -> None:
    """Sets the first epoch of the running `fit` (`_initial_epoch`). Call it in `on_train_begin`.

    Keras's `BackupAndRestore` sets the same attribute. Without it, a training that continues from a
    checkpoint would begin with epoch 0.
    """
    model._initial_epoch = epoch


def take_initial_epoch(model: keras.Model) -> int:
    """Returns and clears the epoch that `BackupAndRestore` set, or 0. The next `fit` ignores it.

    See `set_initial_epoch`.
    """
    epoch = getattr(model, "_initial_epoch", None) or 0
    model._initial_epoch = None
    return epoch


@functools.cache
def functional_class() -> type[keras.Model]:
    """Returns the class of `keras.Model(inputs, outputs)`, which Keras does not export.

    Without it, `het_tf.keras.Model(inputs, outputs)` could not be a functional model.
    """
    # Default names would increase the numbers in the names of the user's models and inputs.
    inputs = keras.Input((), name="het_tf_input")
    return type(keras.Model(inputs, inputs, name="het_tf_model"))


def make_functional(
    cls: type[keras.Model], base: type[keras.Model], functional: type[keras.Model]
) -> None:
    """Replaces `base` by `functional` among the base classes of a subclass.

    Keras (`inject_functional_model_class`) does the same for subclasses of `keras.Model` that are
    constructed from inputs and outputs. Keras would make `base` itself functional. Subclasses with
    their own `call` could then no longer be created.
    """
    cls.__bases__ = tuple(functional if each is base else each for each in cls.__bases__)
    for each in cls.__bases__:
        if issubclass(each, base) and not issubclass(each, functional):
            make_functional(each, base, functional)


def calls_as_keras_does(model: keras.Model) -> bool:
    """Whether a model is functional or sequential and does not override `call`."""
    is_known = isinstance(model, (functional_class(), keras.Sequential))
    base = keras.Sequential if isinstance(model, keras.Sequential) else functional_class()
    return is_known and type(model).call is base.call


def trains_as_keras_does(model: keras.Model) -> bool:
    """Whether `calls_as_keras_does`, and the model does not override `train_step`."""
    return calls_as_keras_does(model) and type(model).train_step is keras.Model.train_step


def nested_layers(model: keras.layers.Layer, include_self: bool = True) -> list[keras.layers.Layer]:
    """Returns the layers of a model, with layers inside of layers (`_flatten_layers`).

    `keras.Model.layers` has only the layers of the model itself. Without this function, tables in
    nested layers would not be found, flushed and saved.
    """
    return list(model._flatten_layers(include_self=include_self))


def step_counter(optimizer: keras.optimizers.Optimizer) -> keras.Variable | None:
    """Returns the variable that counts steps (`_iterations`).

    `iterations` is a tensor under accumulation, which steps of several workers could not count in.
    """
    return getattr(optimizer, "_iterations", None)


def asks_for_shapes() -> bool:
    """Whether Keras calls layers only to infer output shapes, in a graph that never runs.

    Without `in_symbolic_scope`, a layer would look up rows of placeholders in such a graph.
    """
    return in_symbolic_scope()


@contextlib.contextmanager
def stepping_within(
    optimizer: keras.optimizers.Optimizer,
    context: Callable[[], contextlib.AbstractContextManager[Any]],
    update_step: Callable[..., None] | None,
) -> Iterator[None]:
    """Runs an optimizer's steps on variables and slots (`_backend_update_step`) in a context.

    The optimizer reads its learning rate before it enters the context.

    Args:
      optimizer: a Keras optimizer.
      context: creates the context of a step.
      update_step: replacement for the optimizer's `update_step`. None keeps the method.
    """
    step = optimizer._backend_update_step

    def step_within(*args: Any) -> Any:
        with context():
            return step(*args)

    # Keras would track assigned attributes.
    replaced: dict[str, Any] = {"_backend_update_step": step_within}
    if update_step is not None:
        replaced["update_step"] = update_step
    optimizer.__dict__.update(replaced)
    try:
        yield
    finally:
        for name in replaced:
            del optimizer.__dict__[name]


def learning_rate_of(optimizer: keras.optimizers.Optimizer) -> Any:
    """Returns the variable or schedule of the rate (`_learning_rate`).

    `learning_rate` gives a schedule's value. A layer that trains its rows at the rate of the
    compiled optimizer needs the schedule.
    """
    return getattr(optimizer, "_learning_rate", None)


def learning_rate_variable(optimizer: keras.optimizers.Optimizer) -> keras.Variable | None:
    """Returns the learning rate variable, or None if the optimizer uses a schedule."""
    rate = learning_rate_of(optimizer)
    return rate if isinstance(rate, keras.Variable) else None


def excludes_from_weight_decay(
    optimizer: keras.optimizers.Optimizer, name: str, variable: keras.Variable | None
) -> bool:
    """Whether `exclude_from_weight_decay` was called for `variable` or a match of `name`.

    Keras has no public way to ask. Without this function, excluded rows would decay.
    """
    pattern = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    if pattern is not None and pattern.search(name):
        return True
    excluded = getattr(optimizer, "_exclude_from_weight_decay", ())
    return bool(excluded) and variable is not None and optimizer._var_key(variable) in excluded


def accumulated_gradients(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """Returns the sums of gradients of an optimizer with `gradient_accumulation_steps`.

    `optimizer.variables` has them among other slots. Without this function, workers would add
    their gradients to the same sums.
    """
    return list(optimizer._accumulated_gradients)


def slot_of(optimizer: keras.optimizers.Optimizer, name: str, variable: Any) -> keras.Variable:
    """Returns a variable's slot, such as "momentums".

    Some optimizers keep slots private, and `_get_variable_index` is the only way from a variable to
    its slot. Without this function, steps of replicas would be Keras's chains of ops, which take
    1.8 ms for a wide & deep model.
    """
    slots = getattr(optimizer, name, None) or getattr(optimizer, f"_{name}")
    return slots[optimizer._get_variable_index(variable)]

"""The non-public parts of Keras 3 that there is no public way around.

Nothing else in het_tf reaches into Keras. Checked with Keras 3.15.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import keras
from keras.src.backend.common.symbolic_scope import in_symbolic_scope


def build_from_spec(model: keras.Model, batch_spec: Any) -> None:
    """Builds the model, its compiled metrics and losses, and the optimizer.

    Keras does the same at the start of `fit` under a strategy. There is no public call that builds
    compiled metrics before the first batch, and no variable can be made inside a closure.

    Args:
      model: a compiled or not compiled model, inside its strategy's scope.
      batch_spec: an element of the dataset with `tf.TensorSpec`s for tensors.
    """
    model._symbolic_build(data_batch=batch_spec)


def set_initial_epoch(model: keras.Model, epoch: int) -> None:
    """Has the `fit` whose `on_train_begin` this is begin with that epoch."""
    model._initial_epoch = epoch


def take_initial_epoch(model: keras.Model) -> int:
    """The epoch from which a `BackupAndRestore` wants to resume, or 0; not the next `fit`, too."""
    epoch = getattr(model, "_initial_epoch", None) or 0
    model._initial_epoch = None
    return epoch


@functools.cache
def functional_class() -> type[keras.Model]:
    """The class of `keras.Model(inputs, outputs)`, which Keras does not export."""
    # With names of their own: the ones that Keras counts are the user's.
    inputs = keras.Input((), name="het_tf_input")
    return type(keras.Model(inputs, inputs, name="het_tf_model"))


def make_functional(
    cls: type[keras.Model], base: type[keras.Model], functional: type[keras.Model]
) -> None:
    """Puts a functional model in the place of `base` among the bases of a subclass.

    Keras does so with subclasses of `keras.Model` whose constructor is called with inputs and
    outputs. Were it left to Keras, `base` itself would become functional, and subclasses with a
    `call` of their own could not be made any more.
    """
    cls.__bases__ = tuple(functional if each is base else each for each in cls.__bases__)
    for each in cls.__bases__:
        if issubclass(each, base) and not issubclass(each, functional):
            make_functional(each, base, functional)


def calls_as_keras_does(model: keras.Model) -> bool:
    """Whether it is functional or sequential, with the call of Keras."""
    is_known = isinstance(model, (functional_class(), keras.Sequential))
    base = keras.Sequential if isinstance(model, keras.Sequential) else functional_class()
    return is_known and type(model).call is base.call


def trains_as_keras_does(model: keras.Model) -> bool:
    """Whether `calls_as_keras_does`, with the train_step of Keras."""
    return calls_as_keras_does(model) and type(model).train_step is keras.Model.train_step


def nested_layers(model: keras.layers.Layer, include_self: bool = True) -> list[keras.layers.Layer]:
    """The layers of a model, those of its layers' layers included."""
    return list(model._flatten_layers(include_self=include_self))


def step_counter(optimizer: keras.optimizers.Optimizer) -> keras.Variable | None:
    """The variable in which it counts its steps; `iterations` is none where it accumulates."""
    return getattr(optimizer, "_iterations", None)


def asks_for_shapes() -> bool:
    """Whether layers are called for the shapes of their outputs, in a graph that nothing runs."""
    return in_symbolic_scope()


@contextlib.contextmanager
def stepping_within(
    optimizer: keras.optimizers.Optimizer,
    context: Callable[[], contextlib.AbstractContextManager[Any]],
    update_step: Callable[..., None] | None,
) -> Iterator[None]:
    """Has an optimizer step on variables and slots within a context.

    The optimizer has asked for its rate before.

    Args:
      optimizer: of Keras.
      context: makes the context of each step.
      update_step: takes the place of the optimizer's method; None: the method stays.
    """
    step = optimizer._backend_update_step

    def step_within(*args: Any) -> Any:
        with context():
            return step(*args)

    # Straight into the instance: Keras would track them.
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
    """The variable of its learning rate, or its schedule; `learning_rate` is that one's value."""
    return getattr(optimizer, "_learning_rate", None)


def learning_rate_variable(optimizer: keras.optimizers.Optimizer) -> keras.Variable | None:
    """The variable of its learning rate; None: it follows a schedule."""
    rate = learning_rate_of(optimizer)
    return rate if isinstance(rate, keras.Variable) else None


def excludes_from_weight_decay(
    optimizer: keras.optimizers.Optimizer, name: str, variable: keras.Variable | None
) -> bool:
    """Whether `exclude_from_weight_decay` was told of a variable, or of one of that name."""
    pattern = getattr(optimizer, "_exclude_from_weight_decay_pattern", None)
    if pattern is not None and pattern.search(name):
        return True
    excluded = getattr(optimizer, "_exclude_from_weight_decay", ())
    return bool(excluded) and variable is not None and optimizer._var_key(variable) in excluded


def accumulated_gradients(optimizer: keras.optimizers.Optimizer) -> list[keras.Variable]:
    """What an optimizer with `gradient_accumulation_steps` has added up."""
    return list(optimizer._accumulated_gradients)


def slot_of(optimizer: keras.optimizers.Optimizer, name: str, variable: Any) -> keras.Variable:
    """A variable's slot of this name, such as "momentums", which is public in some optimizers."""
    slots = getattr(optimizer, name, None) or getattr(optimizer, f"_{name}")
    return slots[optimizer._get_variable_index(variable)]

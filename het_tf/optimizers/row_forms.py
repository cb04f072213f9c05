"""Conversion of Keras's optimizers to optimizers of rows."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from het_tf.compat import keras_internals
from het_tf.optimizers import rows as optimizers

Config = dict[str, Any]

# Arguments of Keras's optimizers that act on whole variables, several variables or several steps.
# `JointOptimizer` applies those in `_OF_STEPS` to the step of a compiled model.
_OF_STEPS = ("global_clipnorm", "gradient_accumulation_steps", "loss_scale_factor")
_WITHOUT_ROW_FORM = ("clipnorm", "clipvalue", "use_ema")


def _sgd(config: Config) -> optimizers.Optimizer:
    if not config["momentum"]:
        return optimizers.SGD(**_common(config))
    return optimizers.Momentum(**_common(config, "momentum", "nesterov"))


def _adagrad(config: Config) -> optimizers.Optimizer:
    return optimizers.Adagrad(**_common(config, "initial_accumulator_value", "epsilon"))


def _adam(config: Config) -> optimizers.Optimizer:
    _check_unset("Adam", config, "amsgrad")
    return optimizers.Adam(**_common(config, "beta_1", "beta_2", "epsilon"))


def _adamw(config: Config) -> optimizers.Optimizer:
    _check_unset("AdamW", config, "amsgrad")
    return optimizers.AdamW(**_common(config, "beta_1", "beta_2", "epsilon"))


def _rmsprop(config: Config) -> optimizers.Optimizer:
    return optimizers.RMSprop(**_common(config, "rho", "momentum", "epsilon", "centered"))


def _lion(config: Config) -> optimizers.Optimizer:
    return optimizers.Lion(**_common(config, "beta_1", "beta_2"))


def _lamb(config: Config) -> optimizers.Optimizer:
    return optimizers.LAMB(**_common(config, "beta_1", "beta_2", "epsilon"))


def _ftrl(config: Config) -> optimizers.Optimizer:
    if config["learning_rate_power"] != -0.5:
        raise ValueError(
            "optimizer Ftrl has no row form with"
            f" learning_rate_power={config['learning_rate_power']!r}, only with -0.5"
        )
    strengths = {
        name: config[f"{name}_regularization_strength"] for name in ("l1", "l2", "l2_shrinkage")
    }
    return optimizers.Ftrl(**_common(config, "initial_accumulator_value", "beta"), **strengths)


# Conversion of a config to the row form, by exact class: subclasses have no row form.
ROW_FORMS: dict[type[keras.optimizers.Optimizer], Callable[[Config], optimizers.Optimizer]] = {
    keras.optimizers.SGD: _sgd,
    keras.optimizers.Adagrad: _adagrad,
    keras.optimizers.Adam: _adam,
    keras.optimizers.AdamW: _adamw,
    keras.optimizers.Ftrl: _ftrl,
    keras.optimizers.Lamb: _lamb,
    keras.optimizers.Lion: _lion,
    keras.optimizers.RMSprop: _rmsprop,
}


def row_form(
    optimizer: keras.optimizers.Optimizer,
    of_compile: bool = False,
    decays: bool = True,
    rate: float | None = None,
) -> optimizers.Optimizer:
    """Returns the optimizer that updates a row as a Keras optimizer updates a variable.

    Args:
      optimizer: a Keras optimizer.
      of_compile: whether a model is compiled with the optimizer. If so, the `JointOptimizer`
        processes the gradients of a whole step, and the row form omits these options.
      decays: whether `weight_decay` applies to rows.
      rate: learning rate of the row form. None: the current rate of the optimizer.

    Raises:
      ValueError: the optimizer has no row form; the message names the missing feature.
    """
    if of_compile and isinstance(optimizer, keras.optimizers.LossScaleOptimizer):
        optimizer = optimizer.inner_optimizer
    name = type(optimizer).__name__
    convert = ROW_FORMS.get(type(optimizer))
    if convert is None:
        known = ", ".join(sorted(kind.__name__ for kind in ROW_FORMS))
        raise ValueError(f"optimizer {name} has no row form; of Keras's optimizers have: {known}")
    config = _arguments_of(optimizer, rate)
    _check_unset(name, config, *_WITHOUT_ROW_FORM, *(() if of_compile else _OF_STEPS))
    return convert(config if decays else config | {"weight_decay": None})


def _arguments_of(optimizer: keras.optimizers.Optimizer, rate: Any) -> Config:
    """Returns the optimizer's arguments. `get_config` would need a serializable schedule."""
    names = set(inspect.signature(type(optimizer)).parameters) - {"learning_rate", "kwargs"}
    if rate is None:
        rate = keras_internals.learning_rate_of(optimizer)
    if isinstance(rate, keras.Variable):  # float32 as 0.001, not 0.0010000000474974513
        rate = float(str(np.float32(rate.numpy())))
    return {name: getattr(optimizer, name) for name in names} | {"learning_rate": rate}


def get(identifier: Any) -> optimizers.Optimizer:
    """Returns a row optimizer, given one, a Keras optimizer, a name or a serialized form.

    Raises:
      ValueError: `identifier` is none of these, or has no row form.
    """
    if isinstance(identifier, dict):
        whole = "module" in identifier  # Keras object; else as in `keras.optimizers.get`
        identifier = (
            keras.saving.deserialize_keras_object if whole else keras.optimizers.deserialize
        )(identifier)
    if isinstance(identifier, keras.optimizers.Optimizer):
        return row_form(identifier)
    return _named(identifier) if isinstance(identifier, str) else optimizers.get(identifier)


def _named(name: str) -> optimizers.Optimizer:
    """Returns Keras's optimizer of a name, with Keras's defaults, or one that only rows have.

    Raises:
      ValueError: no optimizer has the name.
    """
    try:
        optimizer = keras.optimizers.get(name)
    except ValueError:
        pass
    else:
        return row_form(optimizer)
    own: dict[str, type[optimizers.Optimizer]] = {}
    for kind in optimizers.Optimizer.__subclasses__():
        own |= {kind.name: kind, kind.__name__.lower(): kind}
    if name.lower() not in own:
        known = {kind.__name__.lower() for kind in ROW_FORMS}
        known |= {kind.name for kind in optimizers.Optimizer.__subclasses__()}
        raise ValueError(
            "optimizer must be one of het_tf.optimizers or of keras.optimizers, or the name of one:"
            f" {', '.join(sorted(known))}; not {name!r}"
        )
    return own[name.lower()]()


def _common(config: Config, *names: str) -> Config:
    """Returns the named arguments, and those that all optimizers of rows have."""
    decay = config.get("weight_decay") or 0.0
    common = {"learning_rate": config["learning_rate"], "weight_decay": decay}
    return common | {name: config[name] for name in names}


def _check_unset(optimizer: str, config: Config, *names: str) -> None:
    for name in names:
        if config.get(name):
            remedy = "; the optimizers in het_tf.optimizers have a clipnorm for each row"
            raise ValueError(
                f"optimizer {optimizer} has no row form with {name}={config[name]!r}"
                + (remedy if "clip" in name else "")
            )

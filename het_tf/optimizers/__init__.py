"""Optimizers of embedding rows, and `JointOptimizer` for rows and dense variables together."""

from het_tf.optimizers.joint_optimizer import JointOptimizer
from het_tf.optimizers.rows import (
    LAMB,
    SGD,
    Adagrad,
    Adam,
    AdamW,
    Ftrl,
    Lion,
    Momentum,
    Optimizer,
    RMSprop,
    RowWiseAdagrad,
    RowWiseAdam,
    get,
)

__all__ = [
    "LAMB",
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Ftrl",
    "JointOptimizer",
    "Lion",
    "Momentum",
    "Optimizer",
    "RMSprop",
    "RowWiseAdagrad",
    "RowWiseAdam",
    "get",
]

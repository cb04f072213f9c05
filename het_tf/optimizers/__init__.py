"""Optimizers of embedding rows, and the one that trains rows and dense variables in one step."""

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

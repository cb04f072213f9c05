"""Which cluster a model needs, and what it will cost (`het_tf.planner.plan`)."""

from het_tf.planner.calibration import calibrate, step_seconds
from het_tf.planner.cost import Calibration
from het_tf.planner.plan import DoesNotFitError, Plan, Planner, TablePlan, plan
from het_tf.planner.replay import Traffic
from het_tf.planner.statistics import Statistics, TableStatistics, statistics
from het_tf.planner.tables import EmbeddingConfig
from het_tf.planner.topology import Constraints, Topology

__all__ = [
    "Calibration",
    "Constraints",
    "DoesNotFitError",
    "EmbeddingConfig",
    "Plan",
    "Planner",
    "Statistics",
    "TablePlan",
    "TableStatistics",
    "Topology",
    "Traffic",
    "calibrate",
    "plan",
    "statistics",
    "step_seconds",
]

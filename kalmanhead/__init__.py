"""Learns neural networks from streams, with the last layer kept as a Kalman filter."""

from importlib import import_module
from typing import Any

# Imported when first used: the command line's help must not wait for torch.
_HOMES = {
    "KalmanHead": "kalmanhead.head",
    "KalmanHeadRegressor": "kalmanhead.estimators",
    "KalmanHeadMultiTargetRegressor": "kalmanhead.estimators",
    "KalmanHeadClassifier": "kalmanhead.estimators",
    "SoftmaxHead": "kalmanhead.softmax",
    "TrainedHead": "kalmanhead.trained_head",
    "OnlineLearner": "kalmanhead.learner",
    "adam": "kalmanhead.optimizers",
    "sgd": "kalmanhead.optimizers",
    "Metrics": "kalmanhead.metrics",
    "ModelConfig": "kalmanhead.config",
    "build_learner": "kalmanhead.config",
    "Progress": "kalmanhead.engine",
    "learn_stream": "kalmanhead.engine",
    "rollout": "kalmanhead.engine",
    "rollout_errors": "kalmanhead.fields",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    """Import a public name from its module."""
    if name not in _HOMES:
        raise AttributeError(f"module 'kalmanhead' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)

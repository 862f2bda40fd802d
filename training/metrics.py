"""Metrics of predictions on labelled rows; NaN as soon as a prediction is not finite."""

from __future__ import annotations

import math

import numpy as np
from scipy.stats import rankdata

BINARY = ("log_loss", "auc", "brier", "accuracy")
REGRESSION = ("mae", "rmse")
HIGHER_IS_BETTER = frozenset({"auc", "accuracy"})
# As float32 probabilities are clipped in training.
EPSILON = 1e-7


def metrics_of(kind: str, labels: np.ndarray, predicted: np.ndarray) -> dict[str, float]:
    """All metrics of a label kind (`binary` or `regression`); labels and predicted [row]."""
    names = BINARY if kind == "binary" else REGRESSION
    return {name: metric(name, labels, predicted) for name in names}


def metric(name: str, labels: np.ndarray, predicted: np.ndarray) -> float:
    """One metric; labels 0/1 or values [row], predicted probabilities or values [row]."""
    labels, predicted = labels.astype(np.float64), predicted.astype(np.float64)
    if not len(labels) or not np.isfinite(predicted).all():
        return math.nan
    if name == "log_loss":
        p = np.clip(predicted, EPSILON, 1 - EPSILON)
        return float(-np.mean(labels * np.log(p) + (1 - labels) * np.log1p(-p)))
    if name == "auc":
        return _auc(labels, predicted)
    if name == "accuracy":
        return float(np.mean((predicted >= 0.5) == (labels >= 0.5)))
    error = predicted - labels
    if name == "mae":
        return float(np.mean(np.abs(error)))
    squared = float(np.mean(error**2))
    return squared if name == "brier" else math.sqrt(squared)


def regression_of(name: str, candidate: float, champion: float) -> float:
    """By how much the candidate is worse, in the metric's unit; negative when it is better."""
    return champion - candidate if name in HIGHER_IS_BETTER else candidate - champion


def _auc(labels: np.ndarray, predicted: np.ndarray) -> float:
    """Area under the ROC curve by the rank sum, ties shared; NaN with one class only."""
    positive = labels >= 0.5
    ones, zeros = int(positive.sum()), int((~positive).sum())
    if not ones or not zeros:
        return math.nan
    ranks = rankdata(predicted)
    return float((ranks[positive].sum() - ones * (ones + 1) / 2) / (ones * zeros))

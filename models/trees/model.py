"""A tree model as its file describes it: the trees, where their sum starts, and what the sum stands for."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from models.trees.flat import FlatTrees
from models.trees.nodes import ReadTrees


class Output(StrEnum):
    """What the sum of a model's trees stands for."""

    LIGHTGBM_MARGIN = "LightGBM margin"
    """A raw score, float64; its file names no objective that turns it into a probability."""

    LIGHTGBM_SIGMOID = "LightGBM log-odds"
    """Log-odds over the sigmoid's slope, float64."""

    XGBOOST_MARGIN = "XGBoost margin"
    """A raw score, float32."""

    XGBOOST_SIGMOID = "XGBoost log-odds"
    """Log-odds, float32."""

    FOREST_SUM = "sum of shares"
    """The number of trees times the probability, float64."""


@dataclass(frozen=True, slots=True)
class TreeModel:
    """What a reader gives.

    ``trees``: the trees; their values' type is the one sums are taken in.
    ``output``: what a sum stands for.
    ``start``: what a sum starts with.
    ``slope``: slope of LightGBM's sigmoid; 1 elsewhere.
    ``wrapped``: whether the file is of one of our own objectives (:mod:`models.objectives`), whose probabilities need
    the facts it keeps beside the trees: the sums are good, a probability made of them alone would not be.
    ``nodes``: the nodes that ``trees`` were laid out of, and checked with them: to take sums apart.
    """

    trees: FlatTrees
    output: Output
    start: float = 0.0
    slope: float = 1.0
    wrapped: bool = False
    nodes: ReadTrees | None = None

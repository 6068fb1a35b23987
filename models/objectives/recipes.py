"""How the learners of this package are made from settings."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from features.errors import InputError
from models.learners import default_settings
from models.objectives.boosted import BoostedObjective, Library
from models.objectives.focal import FocalClassifier
from models.objectives.hazard import EDGES_HOURS, HazardClassifier
from models.objectives.ranker import RankClassifier
from models.recipe import Recipe

KINDS: Mapping[str, tuple[type[BoostedObjective], Library]] = {
    "lightgbm_focal": (FocalClassifier, "lightgbm"),
    "lightgbm_rank": (RankClassifier, "lightgbm"),
    "xgboost_rank": (RankClassifier, "xgboost"),
    "lightgbm_hazard": (HazardClassifier, "lightgbm"),
    "xgboost_hazard": (HazardClassifier, "xgboost"),
}
"""Class and library of each learner, which its file is read by."""

_LIGHTGBM_MORE = ("reg_alpha", "max_depth", "min_split_gain", "max_delta_step", "path_smooth", "extra_trees")
_XGBOOST_MORE = ("reg_alpha", "gamma", "colsample_bylevel", "colsample_bynode", "grow_policy", "max_leaves")


def _focal(seed: int, settings: dict[str, Any]) -> FocalClassifier:
    gamma = _at_least("lightgbm_focal", "focal_gamma", settings.pop("focal_gamma"), 0)
    class_weight = settings.pop("class_weight", None)
    return FocalClassifier(gamma=gamma, class_weight=class_weight, settings=settings, random_state=seed)


def _ranker(name: str, library: Library) -> Any:
    choices = {"lightgbm": ("lambdarank", "rank_xendcg"), "xgboost": ("rank:ndcg", "rank:pairwise", "rank:map")}

    def build(seed: int, settings: dict[str, Any]) -> RankClassifier:
        objective = settings.pop("objective")
        if objective not in choices[library]:
            raise InputError(
                f"unknown objective {objective!r}",
                f"parameter models.settings.{name}.objective",
                f"Choose one of {', '.join(choices[library])}.",
            )
        hours = _at_least(name, "group_hours", settings.pop("group_hours"), 0)
        return RankClassifier(library, objective, hours, settings, seed)

    return build


def _hazard(name: str, library: Library) -> Any:
    def build(seed: int, settings: dict[str, Any]) -> HazardClassifier:
        edges = settings.pop("edges_hours")
        if not isinstance(edges, list | tuple) or not all(_positive(each) for each in edges):
            raise InputError(
                f"{edges!r} is no list of hours",
                f"parameter models.settings.{name}.edges_hours",
                f"Give positive numbers, such as {list(EDGES_HOURS)}, or an empty list for one interval.",
            )
        return HazardClassifier(library, tuple(edges), settings, seed)

    return build


def _positive(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and value > 0


def _at_least(learner: str, setting: str, value: Any, lowest: float) -> float:
    if not value >= lowest:
        raise InputError(
            f"{setting} is {value}", f"parameter models.settings.{learner}.{setting}", f"Give {lowest} or more."
        )
    return float(value)


def _recipes() -> dict[str, Recipe]:
    trees = default_settings("lightgbm")
    # The hessian of a ranking pair is of another size than p(1 - p) a row: its floor is the library's own.
    forest = {name: value for name, value in default_settings("xgboost").items() if name != "min_child_weight"}
    return {
        "lightgbm_focal": Recipe({**trees, "focal_gamma": 1.0}, _focal, (*_LIGHTGBM_MORE, "class_weight")),
        "lightgbm_rank": Recipe(
            {**trees, "objective": "lambdarank", "group_hours": 0},
            _ranker("lightgbm_rank", "lightgbm"),
            (*_LIGHTGBM_MORE, "lambdarank_truncation_level", "lambdarank_norm"),
        ),
        "xgboost_rank": Recipe(
            {**forest, "min_child_weight": 0.02, "objective": "rank:ndcg", "group_hours": 0},
            _ranker("xgboost_rank", "xgboost"),
            (*_XGBOOST_MORE, "lambdarank_pair_method", "lambdarank_num_pair_per_sample"),
        ),
        "lightgbm_hazard": Recipe(
            {**trees, "edges_hours": EDGES_HOURS},
            _hazard("lightgbm_hazard", "lightgbm"),
            (*_LIGHTGBM_MORE, "scale_pos_weight", "class_weight"),
        ),
        "xgboost_hazard": Recipe(
            {**default_settings("xgboost"), "edges_hours": EDGES_HOURS},
            _hazard("xgboost_hazard", "xgboost"),
            (*_XGBOOST_MORE, "scale_pos_weight"),
        ),
    }


RECIPES: Mapping[str, Recipe] = _recipes()
"""The recipes, by name of the learner."""

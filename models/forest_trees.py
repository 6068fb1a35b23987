"""A random forest as boosted trees that say the same, so that its scores can be taken apart exactly.

scikit-learn has no TreeSHAP. A forest's probability is the mean of its trees' leaf shares: the sum of trees whose
leaves hold those shares over the number of trees. Written in LightGBM's text format, with scikit-learn's weighted row
counts as cover, LightGBM computes their exact path-dependent contributions (Lundberg et al., 2020).
"""

from __future__ import annotations

from typing import Any, Final

import lightgbm
import numpy as np
from sklearn.ensemble import RandomForestClassifier

_ROOT_COUNT: Final = 2**30
"""Cover of a root: LightGBM keeps counts as whole numbers of 32 bits, scikit-learn has weights."""

_MISSING_NAN: Final = 8
_DEFAULT_LEFT: Final = 2


def forest_as_booster(forest: RandomForestClassifier) -> lightgbm.Booster:
    """Write a fitted forest of two classes as a booster whose raw score is the forest's probability of class 1.

    ``forest``: fitted on classes 0 and 1; features may be NaN.
    Returns: ``predict(X, pred_contrib=True)`` gives contributions to the probability, and their base as last column.
    """
    trees = [_tree(number, each.tree_, len(forest.estimators_)) for number, each in enumerate(forest.estimators_)]
    features = forest.n_features_in_
    head = [
        "tree",
        "version=v4",
        "num_class=1",
        "num_tree_per_iteration=1",
        "label_index=0",
        f"max_feature_idx={features - 1}",
        "objective=regression",
        "feature_names=" + " ".join(f"f{at}" for at in range(features)),
        "feature_infos=" + " ".join("[-1e308:1e308]" for _ in range(features)),
        "tree_sizes=" + " ".join(str(len(text)) for text in trees),
        "",
        "",
    ]
    return lightgbm.Booster(
        model_str="\n".join(head) + "".join(trees) + "end of trees\n\nparameters:\nend of parameters\n"
    )


def _tree(number: int, tree: Any, trees: int) -> str:
    share = tree.value[:, 0, 1] / tree.value[:, 0, :].sum(axis=1) / trees
    cover = tree.weighted_n_node_samples
    count = np.maximum(np.rint(cover / cover[0] * _ROOT_COUNT), 1).astype(np.int64)
    inner = np.flatnonzero(tree.children_left >= 0)
    leaves = np.flatnonzero(tree.children_left < 0)
    name = np.empty(tree.node_count, np.int64)
    name[inner] = np.arange(len(inner))
    name[leaves] = ~np.arange(len(leaves))
    fields: dict[str, Any] = {"num_leaves": [len(leaves)], "num_cat": [0]}
    if len(inner):
        left = np.asarray(tree.missing_go_to_left, dtype=bool)[inner]
        fields |= {
            "split_feature": tree.feature[inner],
            "split_gain": np.zeros(len(inner), np.int64),
            # both libraries go left where the value is at most the threshold
            "threshold": [repr(float(each)) for each in tree.threshold[inner]],
            "decision_type": np.where(left, _MISSING_NAN | _DEFAULT_LEFT, _MISSING_NAN),
            "left_child": name[tree.children_left[inner]],
            "right_child": name[tree.children_right[inner]],
        }
    fields["leaf_value"] = [repr(float(each)) for each in share[leaves]]
    if len(inner):
        fields |= {
            "leaf_weight": count[leaves],
            "leaf_count": count[leaves],
            "internal_value": [repr(float(each)) for each in share[inner]],
            "internal_weight": count[inner],
            "internal_count": count[inner],
        }
    fields |= {"is_linear": [0], "shrinkage": [1]}
    lines = [f"Tree={number}", *(f"{key}={' '.join(map(str, values))}" for key, values in fields.items())]
    return "\n".join(lines) + "\n\n\n"

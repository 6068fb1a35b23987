"""scikit-learn's random forest of two classes, from its skops archive or from the object.

Only the arrays of the trees are taken from the archive (:mod:`models.skops_archive`).

Left where the value, as float32, is at most the threshold, a float64; NaN goes where the node says. A tree's leaf gives
the weighted share of positives, and the forest their mean, added in the order of the trees.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np

from features.errors import InputError
from models.skops_archive import SkopsArchive, fields_of, kind_of, plain_of
from models.trees.errors import UnsupportedModelError, damaged
from models.trees.flat import flatten
from models.trees.keys import limits_at_most
from models.trees.model import Output, TreeModel
from models.trees.nodes import ReadTrees, begins, end_to_end, known_cover

_KIND: Final = ("RandomForestClassifier", "sklearn.ensemble._forest")
_NODE_FIELDS: Final = {
    "left_child": "i",
    "right_child": "i",
    "feature": "i",
    "threshold": "f",
    "missing_go_to_left": "u",
    "weighted_n_node_samples": "f",
}


@dataclass(frozen=True, slots=True)
class _Tree:
    left: np.ndarray
    right: np.ndarray
    feature: np.ndarray
    threshold: np.ndarray
    missing_left: np.ndarray
    value: np.ndarray
    cover: np.ndarray


def read_forest(content: bytes, where: str) -> TreeModel:
    """Read a forest from its skops archive.

    Returns: sums in float64, in the library's order.
    Raises ``UnsupportedModelError`` if it holds something else than a random forest of the classes 0 and 1.
    Raises ``InputError`` if it is damaged.
    """
    try:
        archive = SkopsArchive(content)
        kind = kind_of(archive.root)
        if kind != _KIND:
            raise UnsupportedModelError(f"it holds a {str(kind[0])[:60]}", where)
        fields = fields_of(archive.root)
        classes = archive.array(fields["classes_"])
        trees = [_tree(archive, each) for each in fields["estimators_"]["content"]]
        return _model(trees, classes, int(plain_of(fields["n_features_in_"])), where)
    except KeyError as error:
        raise damaged(f"{error} is missing", where) from None
    except InputError:
        raise
    except Exception as error:  # a damaged zip or array header raises whatever its readers meet: there is no list of it
        raise damaged(error, where) from None


def from_forest(forest: Any, where: str = "the forest") -> TreeModel:
    """Take a fitted forest's trees.

    Returns: as :func:`read_forest` gives it.
    Raises ``UnsupportedModelError, InputError`` as :func:`read_forest` does.
    """
    trees = [
        _Tree(
            each.tree_.children_left,
            each.tree_.children_right,
            each.tree_.feature,
            each.tree_.threshold,
            each.tree_.missing_go_to_left,
            each.tree_.value,
            each.tree_.weighted_n_node_samples,
        )
        for each in forest.estimators_
    ]
    return _model(trees, np.asarray(forest.classes_), int(forest.n_features_in_), where)


def _model(trees: Sequence[_Tree], classes: np.ndarray, features: int, where: str) -> TreeModel:
    if classes.tolist() != [0, 1]:
        raise UnsupportedModelError(f"its classes are {str(classes.tolist())[:40]}", where)
    if not trees or features < 1:
        raise damaged("it has no trees or no features", where)
    for tree in trees:
        if tree.value.shape != (len(tree.left), 1, 2):
            raise damaged("a tree's values are misstated", where)
    threshold = end_to_end([each.threshold for each in trees], np.float64)
    left = end_to_end([each.left for each in trees], np.int64)
    if np.isnan(threshold[left >= 0]).any():  # infinite where a node parts NaN from all else
        raise damaged("a tree's threshold is not a number", where)
    read = ReadTrees(
        first=begins([len(each.left) for each in trees]),
        left=left,
        right=end_to_end([each.right for each in trees], np.int64),
        feature=end_to_end([each.feature for each in trees], np.int64),
        limit=limits_at_most(np.where(left >= 0, threshold, 0.0)),
        missing_left=end_to_end([each.missing_left for each in trees], np.bool_),
        zero_missing=np.zeros(len(left), np.bool_),
        value=end_to_end([each.value[:, 0, 1] for each in trees], np.float64),
        cover=known_cover(end_to_end([each.cover for each in trees], np.float64)),
    )
    return TreeModel(flatten(read, features, where), Output.FOREST_SUM, nodes=read)


def _tree(archive: SkopsArchive, node: Any) -> _Tree:
    state = fields_of(fields_of(node)["tree_"])
    nodes, values = archive.array(state["nodes"]), archive.array(state["values"])
    kinds = {name: nodes.dtype[name].kind for name in _NODE_FIELDS if name in (nodes.dtype.names or ())}
    if kinds != _NODE_FIELDS or nodes.ndim != 1 or values.dtype.kind != "f":
        raise ValueError("a tree's nodes are not as scikit-learn writes them")
    return _Tree(
        nodes["left_child"],
        nodes["right_child"],
        nodes["feature"],
        nodes["threshold"],
        nodes["missing_go_to_left"],
        values,
        nodes["weighted_n_node_samples"],
    )

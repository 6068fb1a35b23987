"""Prior: a LightGBM model of many other fleets, whose log-odds are pooled with those of a fleet's own learners.

Columns are matched by name. Splits on columns that a matrix lacks are removed from their trees: rows follow the branch
of missing values. The result is an ordinary LightGBM model of that matrix.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any, Final, Literal

import lightgbm
import numpy as np
from pydantic import BaseModel, ConfigDict, ValidationError
from scipy.special import expit

from features.vocabulary import FeatureColumn
from foundation.errors import InputError
from models.learners.factory import LoadedLightGBM, make_learner
from models.rows.ranking import Bools, Floats

SHIPPED: Final = "shipped"
"""Value of ``training.prior`` for the prior included in predrain."""

CARD: Final = "card.json"
MODEL: Final = "model.txt"

_SETTINGS: Final[dict[str, Any]] = {
    "n_estimators": 200,
    "num_leaves": 8,
    "min_child_samples": 100,
    "subsample": 0.5,
    "learning_rate": 0.05,
    "colsample_bytree": 0.2,
}


class PriorCard(BaseModel):
    """Description of a prior.

    ``columns``: feature names of ``model.txt``, in order.
    ``made_of``: the source fleets as JSON: number, seed, sizes, ranges, incidents and rows.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True)

    format: Literal[1] = 1
    columns: tuple[str, ...]
    sha256: str
    made_of: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Prior:
    """A loaded or fitted prior; ``model`` is LightGBM's text format."""

    card: PriorCard
    model: str

    def coverage(self, columns: Sequence[FeatureColumn]) -> float:
        """Return the share of the prior's split gain on the given columns, from 0 to 1."""
        names = {column.name for column in columns}
        known = [name in names for name in self.card.columns]
        features = re.findall(r"^split_feature=(.*)$", self.model, re.MULTILINE)
        gains = re.findall(r"^split_gain=(.*)$", self.model, re.MULTILINE)
        gain = np.array(" ".join(gains).split(), dtype=np.float64)
        is_known = np.array([known[int(number)] for number in " ".join(features).split()], dtype=bool)
        return float(gain[is_known].sum() / gain.sum()) if gain.any() else 0.0

    def model_for(self, columns: Sequence[FeatureColumn]) -> LoadedLightGBM:
        """Return the prior as a model of the given columns."""
        index_of = {column.name: i for i, column in enumerate(columns)}
        position = {i: index_of[name] for i, name in enumerate(self.card.columns) if name in index_of}
        head, *trees = self.model.split("\nTree=")
        trees[-1] = trees[-1].split("\nend of trees")[0]
        replaced = {
            "max_feature_idx": str(len(columns) - 1),
            "feature_names": " ".join(f"Column_{i}" for i in range(len(columns))),
            "feature_infos": " ".join(["none"] * len(columns)),
        }
        lines = [line for line in head.splitlines() if not line.startswith("tree_sizes=")]
        lines = [f"{key}={replaced[key]}" if (key := line.split("=")[0]) in replaced else line for line in lines]
        for number, tree in enumerate(trees):
            lines += ["", f"Tree={number}", *_rewrite_tree(tree, position)]
        return LoadedLightGBM(lightgbm.Booster(model_str="\n".join([*lines, "", "end of trees", ""])))


def fit_prior(
    X: np.ndarray, y: np.ndarray, weight: np.ndarray, columns: Sequence[str], *, seed: int, made_of: Mapping[str, Any]
) -> Prior:
    """Fit a prior on rows of other fleets, of both classes; the same rows and seed give the same text."""
    learner = make_learner("lightgbm", seed=seed, settings=_SETTINGS).fit(X, y, sample_weight=weight)
    # the parameters at the end are not part of the model
    model = learner.booster_.model_to_string(num_iteration=-1).split("\nfeature_importances:")[0]
    digest = hashlib.sha256(model.encode()).hexdigest()
    return Prior(PriorCard(columns=tuple(columns), sha256=digest, made_of=dict(made_of)), model)


def write_prior(prior: Prior, folder: Path) -> None:
    """Write a prior's files into an existing folder."""
    card = json.dumps(prior.card.model_dump(mode="json"), indent=1, sort_keys=True)
    (folder / MODEL).write_text(prior.model, encoding="utf-8", newline="\n")
    (folder / CARD).write_text(card + "\n", encoding="utf-8", newline="\n")


def load_prior(place: str) -> Prior:
    """Load a prior: :data:`SHIPPED`, or a folder written by ``predrain prior build``.

    Raises ``InputError`` if there is none, or its model does not match its card.
    """
    folder = resources.files("models.learners") / "prior_data" if place == SHIPPED else Path(place)
    location, hint = "parameter training.prior", "Build it again with `predrain prior build`."
    try:
        card = PriorCard.model_validate_json((folder / CARD).read_text(encoding="utf-8"))
        model = (folder / MODEL).read_text(encoding="utf-8")
    except OSError:
        raise InputError(
            f"no prior in {place}", location, f"Write {SHIPPED}, or the folder that `predrain prior build` wrote."
        ) from None
    except (ValidationError, UnicodeDecodeError) as error:
        raise InputError(
            f"the prior in {place} is not readable: {str(error).splitlines()[0]}", location, hint
        ) from None
    if hashlib.sha256(model.encode()).hexdigest() != card.sha256:
        raise InputError(f"the model of the prior in {place} does not match its card", location, hint)
    return Prior(card, model)


def _rewrite_tree(text: str, position: Mapping[int, int]) -> list[str]:
    """Rewrite one tree of LightGBM's text format: renumber features, remove those without a position."""
    fields = dict(line.split("=", 1) for line in text.splitlines() if "=" in line)
    parts = {key: value.split() for key, value in fields.items()}
    nodes: list[int] = []
    leaves: list[int] = []
    children: dict[int, tuple[int, int]] = {}

    def walk(node: int) -> int:
        if node < 0:
            leaves.append(-node - 1)
            return -len(leaves)
        left, right = int(parts["left_child"][node]), int(parts["right_child"][node])
        if int(parts["split_feature"][node]) not in position:
            kind = int(parts["decision_type"][node])
            # missing values take the default branch, or count as 0 if the training data had none
            to_left = kind & 2 if kind >> 2 & 3 == 2 else float(parts["threshold"][node]) >= 0
            return walk(left if to_left else right)
        new_node = len(nodes)
        nodes.append(node)
        children[new_node] = walk(left), walk(right)
        return new_node

    walk(0 if int(fields["num_leaves"]) > 1 else -1)
    values = [parts["leaf_value"][leaf] for leaf in leaves]
    lines = [f"num_leaves={len(leaves)}", "num_cat=0"]
    if not nodes:
        return [*lines, f"leaf_value={values[0]}", "shrinkage=1", ""]
    lines += [
        "split_feature=" + " ".join(str(position[int(parts["split_feature"][node])]) for node in nodes),
        "left_child=" + " ".join(str(children[i][0]) for i in range(len(nodes))),
        "right_child=" + " ".join(str(children[i][1]) for i in range(len(nodes))),
        "leaf_value=" + " ".join(values),
    ]
    for key in ("split_gain", "threshold", "decision_type", "internal_value", "internal_weight", "internal_count"):
        lines.append(f"{key}=" + " ".join(parts[key][node] for node in nodes))
    for key in ("leaf_weight", "leaf_count"):
        lines.append(f"{key}=" + " ".join(parts[key][leaf] for leaf in leaves))
    return [*lines, "is_linear=0", "shrinkage=1", ""]


INCIDENTS_AT_HALF_SHARE: Final = 100.0
"""Own incidents at which the prior has a share of one half; tuned on simulated fleets, see
docs/decisions/0029-priors.md."""

SHARE_DEVIATION: Final = 0.2
"""Standard deviation of the normal prior on the share."""


def default_share(n_incidents: int, coverage: float) -> float:
    """Return the default share of a prior, given the number of own incidents.

    ``coverage``: see :meth:`Prior.coverage`; a prior counts only as far as its columns exist here.
    """
    return coverage * INCIDENTS_AT_HALF_SHARE / (INCIDENTS_AT_HALF_SHARE + n_incidents)


def fit_share(fitted: Floats, prior: Floats, positive: Bools, *, n_incidents: int, believed: float) -> float:
    """Fit the share of a prior by penalized likelihood on rows that neither model was fitted on.

    Share, slope and level are fitted jointly, so that only discrimination between rows counts. Rows of one incident
    count as one; the share has a normal prior around ``believed``, the log slope one around 0 (0.5).

    Returns: from 0 to 1; 0 if the likelihood does not exceed that of the own log-odds alone: a prior must not harm.
    """
    from scipy.optimize import minimize  # scoring needs no optimizer

    y = positive.astype(np.float64)
    rows_per_incident = max(y.sum() / max(n_incidents, 1), 1.0)
    fitted, difference = fitted - fitted.mean(), prior - prior.mean() - (fitted - fitted.mean())
    level = np.log(max(y.mean(), 1e-9))

    def belief(share: float) -> float:
        return 0.5 * ((share - believed) / SHARE_DEVIATION) ** 2

    def loss(point: Floats) -> tuple[float, Floats]:
        share, log_slope, shift = point
        slope, pooled_log_odds = np.exp(log_slope), fitted + share * difference
        z = level + shift + slope * pooled_log_odds
        residual = expit(z) - y
        value = np.sum(np.logaddexp(0, z) - y * z) / rows_per_incident
        gradient = np.array([slope * (residual @ difference), slope * (residual @ pooled_log_odds), residual.sum()])
        gradient /= rows_per_incident
        gradient[:2] += (share - believed) / SHARE_DEVIATION**2, log_slope / 0.25
        return float(value + belief(share) + 0.5 * (log_slope / 0.5) ** 2), gradient

    def fit(start: float, least: float, most: float) -> tuple[float, float]:
        bounds = [(least, most), (-3.0, 3.0), (-20.0, 20.0)]
        optimum = minimize(loss, [start, 0.0, 0.0], jac=True, method="L-BFGS-B", bounds=bounds)
        return float(optimum.x[0]), float(optimum.fun) - belief(float(optimum.x[0]))

    share, pooled = fit(believed, 0.0, 1.0)
    return share if pooled < fit(0.0, 0.0, 0.0)[1] else 0.0

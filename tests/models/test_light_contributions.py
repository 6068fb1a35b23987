"""The light scorer takes scores apart as the libraries do, without importing them."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from models.bundle import load_bundle, save_bundle
from models.explanation import attribute_score, members_of, weights_in
from models.light.bundle import load_light
from models.trees.contributions import tree_contributions
from models.trees.flat import flatten
from models.trees.keys import limits_at_most
from models.trees.model import Output, TreeModel
from models.trees.nodes import ReadTrees, begins
from tests.models.small_models import fitted_models, rows

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_bundle(tmp_path_factory.mktemp("light") / "bundle", fitted_models(), {"profile": "lightgbm"}).path


@pytest.mark.parametrize("profile", fitted_models().models)
def test_contributions_are_the_libraries_own(bundle: Path, profile: str) -> None:
    X, _ = rows(60, seed=9)
    full, light = load_bundle(bundle), load_light(bundle)
    manifest = {**light.manifest, "profile": profile}
    save = save_bundle(bundle.with_name(profile), full.fitted, {"profile": profile})
    light = load_light(save.path)
    assert light.manifest["profile"] == manifest["profile"]
    found, method = light.contributions(X)
    expected, told = attribute_score(members_of(full.fitted, profile), X, weights_in(full.fitted, profile))
    assert method == told
    # XGBoost adds its own up in float32.
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=2e-5)


def test_a_profile_whose_baseline_stands_in_is_told_by_its_points(tmp_path: Path) -> None:
    fitted = replace(fitted_models(), stand_in="history_count")
    path = save_bundle(tmp_path / "bundle", fitted, {"profile": "stacked"}).path
    X, _ = rows(20, seed=3)
    found, method = load_light(path).contributions(X)
    expected, told = attribute_score(members_of(fitted, "stacked"), X)
    assert method == told
    np.testing.assert_allclose(found, expected)


@given(st.integers(0, 2**32 - 1), st.integers(1, 5))
def test_contributions_are_shapley_values_of_what_the_trees_expect(seed: int, depth: int) -> None:
    """The plain definition: over all orders in which features become known, what each one changes."""
    rng = np.random.default_rng(seed)
    model = random_trees(rng, depth)
    X = rng.normal(0, 1, (3, 4)).astype(np.float32)
    X[rng.random(X.shape) < 0.2] = np.nan
    found, base = tree_contributions(model, X)
    for row in range(len(X)):
        expected = by_definition(model, X[row])
        np.testing.assert_allclose(found[row], expected, atol=1e-9)
        assert base == pytest.approx(value_of(model, X[row], frozenset()))
        assert base + found[row].sum() == pytest.approx(value_of(model, X[row], frozenset(range(4))))


def test_a_file_that_does_not_say_how_many_rows_went_where_is_left_to_its_library() -> None:
    model = random_trees(np.random.default_rng(1), 2)
    assert model.nodes is not None
    with pytest.raises(ValueError, match="does not say how many rows went each way"):
        tree_contributions(replace(model, nodes=replace(model.nodes, cover=np.empty(0))), np.zeros((1, 4), np.float32))


def random_trees(rng: np.random.Generator, depth: int) -> TreeModel:
    """Two trees over four features, with covers that add up."""
    parts = [_tree(rng, depth) for _ in range(2)]
    joined = [np.concatenate([part[at] for part in parts]) for at in range(7)]
    left, right, feature, threshold, missing, value, cover = joined
    read = ReadTrees(
        begins([len(part[0]) for part in parts]),
        left.astype(np.int64),
        right.astype(np.int64),
        feature.astype(np.int64),
        limits_at_most(threshold),
        missing.astype(np.bool_),
        np.zeros(len(left), np.bool_),
        value,
        cover=cover,
    )
    return TreeModel(flatten(read, 4, "m"), Output.LIGHTGBM_MARGIN, nodes=read)


def _tree(rng: np.random.Generator, depth: int) -> list[np.ndarray]:
    nodes: list[list[float]] = []

    def grow(level: int, cover: int) -> int:
        at = len(nodes)
        leaf = level == 0 or cover < 2 or rng.random() < 0.2
        nodes.append([-1, -1, 0, 0.0, 0, rng.normal() if leaf else 0.0, cover])
        if not leaf:
            share = int(rng.integers(1, cover))
            nodes[at][2:5] = [float(rng.integers(0, 4)), float(rng.normal()), float(rng.random() < 0.5)]
            nodes[at][0] = grow(level - 1, share)
            nodes[at][1] = grow(level - 1, cover - share)
        return at

    grow(depth, 50)
    return [np.array(column) for column in zip(*nodes, strict=True)]


def value_of(model: TreeModel, row: np.ndarray, known: frozenset[int]) -> float:
    """What the trees expect of a row of which only some features are known."""
    nodes = model.nodes
    assert nodes is not None
    limits = nodes.limit

    def at(node: int, begin: int) -> float:
        if nodes.left[node] < 0:
            return float(nodes.value[node])
        left, right = int(begin + nodes.left[node]), int(begin + nodes.right[node])
        feature = int(nodes.feature[node])
        if feature in known:
            x = row[feature]
            goes_left = (
                bool(nodes.missing_left[node])
                if np.isnan(x)
                else limits_at_most(np.array([float(x)]))[0] <= limits[node]
            )
            return at(left if goes_left else right, begin)
        whole = nodes.cover[node]
        return float((nodes.cover[left] * at(left, begin) + nodes.cover[right] * at(right, begin)) / whole)

    return sum(at(int(begin), int(begin)) for begin in nodes.first[:-1])


def by_definition(model: TreeModel, row: np.ndarray) -> np.ndarray:
    from itertools import permutations

    found, orders = np.zeros(4), list(permutations(range(4)))
    for order in orders:
        known: frozenset[int] = frozenset()
        before = value_of(model, row, known)
        for feature in order:
            known |= {feature}
            after = value_of(model, row, known)
            found[feature] += (after - before) / len(orders)
            before = after
    return found


EXPLAINS = """
import json, sys
from pathlib import Path
import numpy as np
from models.light.bundle import load_light
from serving.light_scorer import LightScorer

light = load_light(Path(sys.argv[1]))
values = np.random.default_rng(1).normal(0, 30, (50, len(light.columns))).astype(np.float32)
reasons = LightScorer(light).reasons(values, np.arange(50), top=3, noun="GPUs")
heavy = ("pandas", "sklearn", "lightgbm", "xgboost", "mlflow", "torch", "skops", "pyarrow")
print(json.dumps([sum(map(len, reasons)) > 0, [name for name in heavy if name in sys.modules]]))
"""


def test_explaining_imports_neither_pandas_nor_a_library_that_trains(tmp_path: Path) -> None:
    path = save_bundle(tmp_path / "bundle", fitted_models(), {"profile": "stacked"}).path
    done = subprocess.run(
        [sys.executable, "-c", EXPLAINS, str(path)], capture_output=True, text=True, cwd=ROOT, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout) == [True, []]

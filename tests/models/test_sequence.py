"""Networks on raw windows: the contract, what they learn, what they must not see, and their files."""

import json
import sys

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from foundation.errors import InputError
from models.bundle.serialization import read_learner, write_learner
from models.explanation.contributions import contributions
from models.learners.factory import FitRows, fit_learners, make_learner
from models.sequence.classifier import SequenceClassifier
from models.sequence.layout import SequenceLayout, SequenceScaler
from tests.processes import printed_by

torch = pytest.importorskip("torch")

LAYOUT = SequenceLayout(begin=3, steps=12, channels=2, statics=(1, 2), categories=(3, 0))
QUICK = {"epochs": 6, "batch_size": 64, "hidden": 8}


def shapes(n=600, seed=0, noise=0.5):
    """Rows whose class is the sign of the slope of the first channel late in the window, whatever the level."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 2, n)
    window = rng.normal(0, noise, (n, 12, 2)) + rng.normal(0, 3, (n, 1, 2))
    window[:, 6:, 0] += np.where(y == 1, 1, -1)[:, None] * np.linspace(0, 2, 6)
    X = np.concatenate([np.zeros((n, 1)), rng.integers(0, 3, (n, 1)), rng.normal(size=(n, 1))], axis=1)
    X = np.concatenate([X, window.reshape(n, -1)], axis=1).astype(np.float32)
    X[rng.random(X.shape) < 0.03] = np.nan
    return X, y


@pytest.mark.parametrize("name", ["lstm", "cnn1d"])
def test_a_network_learns_the_shape_of_a_window(name):
    X, y = shapes()
    learner = SequenceClassifier(name, LAYOUT, epochs=15, batch_size=32, learning_rate=5e-3, random_state=1).fit(X, y)
    fresh, truth = shapes(seed=1)
    assert roc_auc_score(truth, learner.predict_proba(fresh)[:, 1]) > 0.9
    added = learner.occluded(fresh[:50])
    assert np.abs(added).mean(axis=0).argmax() == 3 + 11 * 2  # the first channel, at its newest step
    assert not added[:, 0].any()
    np.testing.assert_array_equal(contributions(learner, fresh[:50])[0], added)


@pytest.mark.parametrize("name", ["lstm", "cnn1d"])
def test_a_fit_is_the_same_bit_for_bit_and_leaves_the_global_random_state_alone(name):
    X, y = shapes(200)
    state, threads = torch.get_rng_state().clone(), torch.get_num_threads()
    first = make_learner(name, seed=5, settings=QUICK).set_params(layout=LAYOUT).fit(X, y)
    torch.manual_seed(99)
    torch.rand(7)
    torch.set_rng_state(state)
    # Two at a time: they must not draw from one source.
    fits = {key: make_learner(key, seed=5, settings=QUICK).set_params(layout=LAYOUT) for key in ("lstm", "cnn1d")}
    again = fit_learners(fits, FitRows(X, y))[name]
    assert torch.equal(state, torch.get_rng_state())
    assert torch.get_num_threads() == threads
    np.testing.assert_array_equal(first.predict_proba(X), again.predict_proba(X))
    other_seed = make_learner(name, seed=6, settings=QUICK).set_params(layout=LAYOUT).fit(X, y)
    assert (first.predict_proba(X) != other_seed.predict_proba(X)).any()


@pytest.mark.parametrize(("purge_hours", "last"), [(0, 79), (1, 78), (8, 71)])
def test_the_tail_is_the_latest_rows_with_weight_after_a_gap(purge_hours, last):
    hours = np.arange(110).repeat(3)
    order = np.random.default_rng(0).permutation(len(hours))
    hours, weight = hours[order], np.where(hours < 100, 1.0, 0.0)[order]
    fit_on, tail = SequenceClassifier(tail_share=0.2)._split(hours % 2, weight, hours, purge_hours)
    assert sorted(set(hours[tail])) == [*range(80, 100)]
    assert sorted(set(hours[fit_on])) == [*range(last + 1)]
    assert (tail.sum(), fit_on.sum()) == (60, 3 * (last + 1))


def test_without_a_positive_in_the_tail_a_fixed_number_of_epochs_is_run_on_all_rows():
    X, y = shapes(100)
    y[70:] = 0
    learner = SequenceClassifier("cnn1d", LAYOUT, epochs=9, fixed_epochs=2, hidden=4)
    learner.fit(X, y)
    assert (learner.early_stopped_, learner.epochs_) == (False, 2)
    y[90:95] = 1
    learner.fit(X, y)
    assert learner.early_stopped_
    assert 1 <= learner.epochs_ <= 9


def test_unknown_values_and_unseen_categories_differ_from_known_ones():
    X, _ = shapes(50)
    scaler = SequenceScaler.fit(X, LAYOUT)
    row = X[:1].copy()
    row[0, 3:] = np.nan
    row[0, 1], row[0, 2] = 7, np.nan
    window, static = scaler.transform(row)
    assert not window.any()
    np.testing.assert_array_equal(static, np.zeros((1, 5)))
    row[0, 1] = 2
    np.testing.assert_array_equal(scaler.transform(row)[1], [[0, 0, 1, 0, 0]])
    row[0, 3] = 1e9
    assert scaler.transform(row)[0][0, 0].tolist() == [5.0, 0.0, 1.0, 0.0]


@pytest.mark.parametrize("name", ["lstm", "cnn1d"])
def test_a_file_gives_the_same_bits_and_the_same_file(name, tmp_path):
    X, y = shapes(200)
    learner = make_learner(name, seed=3, settings=QUICK).set_params(layout=LAYOUT).fit(X, y)
    write_learner(name, learner, tmp_path / "a")
    content = (tmp_path / "a").read_bytes()
    loaded = read_learner(name, content, "a", X.shape[1])
    np.testing.assert_array_equal(loaded.predict_proba(X), learner.predict_proba(X))
    np.testing.assert_array_equal(loaded.occluded(X[:3]), learner.occluded(X[:3]))
    write_learner(name, loaded, tmp_path / "b")
    assert (tmp_path / "b").read_bytes() == content
    other_name = {"lstm": "cnn1d", "cnn1d": "lstm"}[name]
    with pytest.raises(InputError, match=f"not a readable {other_name} model: it holds format 1 of {name}"):
        read_learner(other_name, content, "a", X.shape[1])
    with pytest.raises(InputError, match=f"not a readable {name} model"):
        read_learner(name, content[: len(content) // 2], "a", X.shape[1])
    length = int.from_bytes(content[:8], "little")
    header = json.loads(content[8 : 8 + length])
    assert set(header["__metadata__"]) == {"predrain"}
    changed = content[8 : 8 + length].replace(b'\\"hidden\\": 8', b'\\"hidden\\": 9')
    assert changed != content[8 : 8 + length]
    with pytest.raises(InputError, match="weights of shapes"):
        read_learner(name, content[:8] + changed + content[8 + length :], "a", X.shape[1])


def test_without_pytorch_everything_else_works_and_one_error_says_what_to_install():
    script = """
        import sys

        class Hidden:
            def find_spec(self, name, path=None, target=None):
                if name.split(".")[0] == "torch":
                    raise ModuleNotFoundError("No module named 'torch'", name="torch")
                return None

        sys.meta_path.insert(0, Hidden())
        import importlib.util
        real = importlib.util.find_spec
        importlib.util.find_spec = lambda name, package=None: None if name == "torch" else real(name, package)

        import pipeline.stages, models.bundle.store, models.sequence.layout
        from foundation.errors import InputError
        from models.learners.factory import make_learner

        assert make_learner("lightgbm", seed=1) is not None
        try:
            make_learner("lstm", seed=1)
        except InputError as error:
            print(error)
        assert "torch" not in sys.modules
    """
    printed = printed_by(script)
    assert "the learner lstm needs torch, which predrain does not install by default" in printed
    assert "pip install 'predrain[sequence]'" in printed
    assert "torch==2.13.0" in printed


def test_a_pytorch_that_cannot_be_loaded_is_one_clear_error(tmp_path, monkeypatch):
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text("raise ImportError('libtorch_cpu.so: cannot open it')")
    for name in [name for name in sys.modules if name.partition(".")[0] == "torch"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.delitem(sys.modules, "models.sequence.network", raising=False)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(
        InputError, match=r"lstm needs torch, which is installed but cannot be loaded: libtorch_cpu\.so"
    ):
        make_learner("lstm", seed=1)

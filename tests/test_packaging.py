"""Each role runs with its own extras alone: what another role needs is not imported."""

import importlib.metadata
import json
import re
import subprocess
import sys
import tomllib
from datetime import UTC, datetime
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from tests.house_size import ROOMS
from tests.serving.http.world import small_fleet
from tests.serving.score_folder import write_scores

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
LOCKS = {
    "requirements/run.lock": ("train", "serve", "act", "collect"),
    "requirements/serve.lock": ("serve", "registry", "collect", "act", "kubernetes", "nvml"),
    "requirements/act.lock": ("act", "kubernetes"),
}
HIDING = """
import importlib.metadata, json, sys
installed = set(json.loads(sys.argv[1]))
hidden = {
    name for name, owners in importlib.metadata.packages_distributions().items()
    if not installed & {owner.lower().replace("_", "-").replace(".", "-") for owner in owners} and name not in ROOMS
}
class Hider:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in hidden:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)
sys.meta_path.insert(0, Hider())
def run(*args):
    from predrain.command import app
    app(list(args), standalone_mode=False)
def import_all(*names):
    import importlib, pkgutil
    for name in names:
        room = importlib.import_module(name)
        for module in pkgutil.walk_packages(room.__path__, f"{name}."):
            importlib.import_module(module.name)
"""


def normalized(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def installed_by(*extras: str) -> set[str]:
    """Give the distributions that the project with some extras installs on this machine."""
    waiting = [*PROJECT["dependencies"], *(f"predrain[{extra}]" for extra in extras)]
    seen: set[str] = set()
    packages: set[str] = set()
    while waiting:
        text = waiting.pop()
        if text in seen:
            continue
        seen.add(text)
        need = Requirement(text)
        if normalized(need.name) == "predrain":
            waiting += [inner for extra in need.extras for inner in PROJECT["optional-dependencies"][extra]]
            continue
        packages.add(normalized(need.name))
        for line in importlib.metadata.distribution(need.name).requires or ():
            inner = Requirement(line)
            wanted = [{"extra": extra} for extra in need.extras or {""}]
            if inner.marker is None or any(inner.marker.evaluate(extra) for extra in wanted):
                waiting.append(f"{inner.name}[{','.join(sorted(inner.extras))}]" if inner.extras else inner.name)
    return packages


def with_only(extras: tuple[str, ...], code: str, folder: Path) -> subprocess.CompletedProcess[str]:
    source = f"ROOMS = {set(ROOMS)!r}\n{HIDING}\n{code}"
    return subprocess.run(
        [sys.executable, "-c", source, json.dumps(sorted(installed_by(*extras)))],
        cwd=folder, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip


ACT = """
run('act', '--cluster', 'cluster.json', '--scores', 'scores', '--settings', 'act.yaml')
import_all('policy', 'scheduler.controller', 'scheduler.ledger', 'predrain.act')
import_all('features.labels'); import serving.scores.alert_outcomes  # what became of its alerts
"""


@pytest.mark.parametrize(
    ("extras", "code"),
    [
        ((), "import_all('policy', 'telemetry.collect.slurm'); run('import', '--help')"),
        (("dask",), "import_all('features', 'simulator')"),
        (("act",), ACT),
        (("act", "kubernetes"), "import_all('scheduler', 'telemetry.collect.kubernetes')"),
        (("collect",), "import_all('telemetry.collect.remote_write'); run('collect', 'receive', '--help')"),
        (("serve",), "import_all('serving'); run('serve', '--help'); run('score', '--help')"),
    ],
)  # fmt: skip
def test_a_role_runs_without_the_packages_of_the_others(extras: tuple[str, ...], code: str, tmp_path: Path) -> None:
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    write_scores(tmp_path / "scores", small_fleet(now), now)
    nodes = [{"name": f"n{number}", "cluster": "c", "group": "g"} for number in range(1, 6)]
    (tmp_path / "cluster.json").write_text(json.dumps({"format": 1, "nodes": nodes}))
    (tmp_path / "act.yaml").write_text("policy: {thresholds: {watch: 0.1}}\n")
    done = with_only(extras, code, tmp_path)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("extra", "code"),
    [
        ("learners", "run('train', '--matrix', 'matrix', '--out', 'bundle')"),
        ("kubernetes", "run('collect', 'kubernetes', '--dataset', 'fleet', '--cluster', 'east')"),
    ],
)
def test_a_missing_package_is_named_with_the_extra_that_brings_it(extra: str, code: str, tmp_path: Path) -> None:
    done = with_only((), code, tmp_path)
    assert f"is not installed. Run: pip install 'predrain[{extra}]'." in done.stderr, done.stderr


def test_no_image_carries_what_only_training_needs() -> None:
    for lock, extras in LOCKS.items():
        lines = (ROOT / lock).read_text(encoding="utf-8").splitlines()
        locked = {normalized(line.partition("==")[0]) for line in lines if "==" in line}
        wanted = installed_by(*extras)
        assert wanted <= locked, f"{lock} lacks {wanted - locked}: make lock"
        assert lock == "requirements/run.lock" or not locked & {"dvc", "scmrepo", "celery", "pygit2"}
    controller = (ROOT / "requirements/act.lock").read_text(encoding="utf-8")
    assert not re.search(r"^(mlflow|lightgbm|scikit-learn|matplotlib|numba|llvmlite)==", controller, flags=re.MULTILINE)

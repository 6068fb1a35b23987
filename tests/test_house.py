"""The house itself: what is true of the checkout as a whole."""

import ast
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, get_args, get_type_hints

import pytest
import yaml
from pydantic import BaseModel

from pipeline.params import Params
from scheduler.controller.settings import ActSettings
from serving.http.limits import ServiceSettings
from tests.house_size import ROOMS, read_house
from tests.processes import printed_by

ROOT = Path(__file__).resolve().parents[1]
MAX_CYCLES = 0
MAX_FOLDER = 16
MAX_SMALL_SINGLE_IMPORTER = 11
"""Lower these as the tree shrinks; never raise them. `make size` prints where they stand."""

HEAVY = (
    "numpy",
    "pandas",
    "pyarrow",
    "sklearn",
    "lightgbm",
    "xgboost",
    "mlflow",
    "numba",
    "matplotlib",
    "scipy",
    "yaml",
)


def test_modules_import_in_no_more_circles_and_folders_and_fragments_do_not_grow() -> None:
    house = read_house()
    assert len(house.cycles) <= MAX_CYCLES, house.cycles
    (folder, modules), *_ = house.folders.most_common(1)
    assert modules <= MAX_FOLDER, f"{folder} has {modules} modules: give it sub-packages"
    small = house.small_single_importer
    assert len(small) <= MAX_SMALL_SINGLE_IMPORTER, f"merge these into their importers: {small}"


def python_files() -> list[Path]:
    return sorted(path for room in (*ROOMS, "tests", "benchmarks") for path in (ROOT / room).rglob("*.py"))


def test_no_test_module_imports_another() -> None:
    tests = [path for path in python_files() if path.is_relative_to(ROOT / "tests")]
    importing = re.compile(r"^ *(from|import) tests\.[\w.]*\btest_", re.MULTILINE)
    assert [str(path) for path in tests if importing.search(path.read_text())] == []
    assert importing.search("from tests.policy.test_budget import STORM")


def test_no_public_class_is_defined_twice() -> None:
    public = re.compile(r"^class ([A-Za-z]\w*)[(:\[]", re.MULTILINE)
    classes = Counter(name for path in read_house().files.values() for name in public.findall(path.read_text()))
    assert len(classes) > 500
    assert {name for name, count in classes.items() if count > 1} == set()


def test_no_file_is_over_500_lines() -> None:
    long = {
        str(path.relative_to(ROOT)): n for path in python_files() if (n := len(path.read_text().splitlines())) > 500
    }
    assert long == {}


def test_every_public_name_of_the_rooms_is_documented() -> None:
    missing = []
    for path in python_files():
        if path.is_relative_to(ROOT / "tests"):
            continue
        tree = ast.parse(path.read_text())
        if ast.get_docstring(tree) is None:
            missing.append(str(path.relative_to(ROOT)))
        for node in tree.body:
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and not node.name.startswith("_"):
                if ast.get_docstring(node) is None:
                    missing.append(f"{path.relative_to(ROOT)}:{node.name}")
                for inner in node.body if isinstance(node, ast.ClassDef) else []:
                    if (
                        isinstance(inner, ast.FunctionDef)
                        and not inner.name.startswith("_")
                        and ast.get_docstring(inner) is None
                    ):
                        missing.append(f"{path.relative_to(ROOT)}:{node.name}.{inner.name}")
    assert missing == []


def missing_names(path: Path, text: str) -> list[str]:
    """Give what docstrings refer to and does not exist: Sphinx roles, and the modules that a package lists."""
    missing = []
    for reference in re.findall(rf":\w+:`~?((?:{'|'.join(ROOMS)})\.[\w.]+)`", text):
        place, names = ROOT, reference.split(".")
        while names and (place / names[0]).is_dir():
            place /= names.pop(0)
        module = place / f"{names.pop(0)}.py" if names else place / "__init__.py"
        code = module.read_text() if module.is_file() else ""
        if not code or not all(
            re.search(rf"^ *(?:(?:async )?def |class )?{name}\b", code, re.MULTILINE) for name in names
        ):
            missing.append(reference)
    listed = re.findall(r"``([a-z_]+)/?``", text) if path.name == "__init__.py" else []
    around = {entry.stem for place in (ROOT, path.parent, path.parent.parent) for entry in place.iterdir()}
    return missing + [name for name in listed if name not in around]


def test_no_docstring_names_what_does_not_exist() -> None:
    paths = [path for path in python_files() if path.relative_to(ROOT).parts[0] in ROOMS]
    assert {path: missing for path in paths if (missing := missing_names(path, path.read_text()))} == {}
    stale = ":mod:`~policy.gone` :func:`policy.decide.nobody` :attr:`policy.fleet.NodeView.units` ``tiers`` ``nowhere``"
    assert missing_names(ROOT / "policy/__init__.py", stale) == ["policy.gone", "policy.decide.nobody", "nowhere"]


FOREIGN_KEYS = {
    *("MLFLOW_TRACKING_URI", "USER", "PATH_INFO", "ssl", "__loader__"),  # environment, WSGI, asyncio, numpy
    *("accept-encoding", "authorization", "content-type", "query_string", "nodenames"),  # HTTP, ASGI, kube-scheduler
    *("leaf_value", "left_child", "right_child", "split_feature", "__metadata__"),  # LightGBM, safetensors
    *("input", "row_max", "row_min"),  # pydantic, Polars
    *("decision_type", "ctx"),  # XGBoost, pydantic
    *("backtest.cooldown", "models.parallel.combiner", "label_other", "recall_high"),  # made by joining names
    *("power_w_min", "power_w_max", "episode_precision_low", "oracle_share_precision_at_k"),
    *("comparison", "schema.json"),  # columns by position, members of an archive
}
"""Keys that are read and that others write, or that are put together of several names."""

NOT_OURS = ("telemetry", "foundation", "scheduler/kubernetes", "scheduler/slurm")
"""Rooms that read documents of Kubernetes, Slurm and exporters."""


@dataclass
class Words:
    """Names and texts of the product's code.

    ``read``: keys that are read, with a place; ``written``: keys of mappings, names of fields, arguments; ``used``:
    every attribute or text that may read a setting.
    """

    read: dict[str, str] = field(default_factory=dict)
    written: set[str] = field(default_factory=set)
    used: set[str] = field(default_factory=set)

    def take(self, name: str, tree: ast.AST) -> None:
        for node in ast.walk(tree):
            reads: list[ast.AST | None] = []
            writes: list[ast.AST | None] = []
            if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") != "Literal":
                (reads if isinstance(node.ctx, ast.Load) else writes).append(node.slice)
            elif isinstance(node, ast.Dict):
                writes += node.keys
            elif isinstance(node, ast.Call) and node.args:
                method = getattr(node.func, "attr", "")
                reads += node.args[:1] if method in ("get", "pop") else []
                writes += node.args[:1] if method == "setdefault" else []
            elif isinstance(node, ast.keyword) and node.arg:
                self.written.add(node.arg)
            elif isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
                self.written.add(node.target.id)
                if node.target.id.isupper() and node.value is not None:  # a list of columns
                    writes += ast.walk(node.value)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                self.used.add(node.value)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load):
                self.used.add(node.attr)
            self.written |= {key.value for key in writes if isinstance(key, ast.Constant)}
            if not name.startswith(NOT_OURS):
                keys = [key for key in reads if isinstance(key, ast.Constant) and isinstance(key.value, str)]
                self.read |= {key.value: f"{name}:{key.lineno}" for key in keys}


@pytest.fixture(scope="module")
def words() -> Words:
    found = Words()
    for path in (path for room in ROOMS for path in (ROOT / room).rglob("*.py")):
        found.take(str(path.relative_to(ROOT)), ast.parse(path.read_text()))
    return found


def unwritten(words: Words) -> dict[str, str]:
    return {key: place for key, place in words.read.items() if key not in words.written | FOREIGN_KEYS}


def test_no_key_is_read_that_nobody_writes(words: Words) -> None:
    assert unwritten(words) == {}
    assert FOREIGN_KEYS - words.read.keys() == set(), "no longer read"
    words = replace(words, read=dict(words.read))
    words.take("policy/dead_wire.py", ast.parse("drift = summary['a key of nobody'] or summary.get('another')"))
    assert unwritten(words) == dict.fromkeys(("a key of nobody", "another"), "policy/dead_wire.py:1")


def settings_in(section: Any, known: set[Any]) -> Iterator[str]:
    """Give the names of all settings of a section and of those in it."""
    if section in known:
        return
    known.add(section)
    types = get_type_hints(section) if is_dataclass(section) else {}
    for name in [entry.name for entry in fields(section)] if is_dataclass(section) else section.model_fields:
        yield f"{section.__name__}.{name}"
        waiting = [types[name] if types else section.model_fields[name].annotation]
        while waiting:
            kind = waiting.pop()
            waiting += get_args(kind)
            if isinstance(kind, type) and (is_dataclass(kind) or issubclass(kind, BaseModel)):
                yield from settings_in(kind, known)


def test_no_setting_is_without_a_reader(words: Words) -> None:
    known: set[Any] = set()
    settings = [name for root in (Params, ActSettings, ServiceSettings) for name in settings_in(root, known)]
    assert len(settings) > 200
    assert [name for name in settings if name.partition(".")[2] not in words.used] == []


def test_no_lock_falls_back_to_a_file_that_a_killed_process_leaves_behind() -> None:
    calls = [
        (path, node)
        for path in python_files()
        if "FileLock(" in (text := path.read_text())
        for node in ast.walk(ast.parse(text))
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "FileLock"
    ]
    assert calls
    for path, call in calls:
        assert any(keyword.arg == "fallback_to_soft" for keyword in call.keywords), f"{path}:{call.lineno}"


def test_the_help_imports_no_heavy_library() -> None:
    code = (
        "import sys\nfrom predrain.command import app\ntry:\n    app(['--help'])\nexcept SystemExit:\n    pass\n"
        f"print('LOADED', [name for name in {HEAVY!r} if name in sys.modules])"
    )
    assert "LOADED []" in printed_by(code)


def test_making_features_loads_no_learner() -> None:
    code = (
        "import sys, pipeline.matrix_stage, pipeline.params\n"
        "learners = ('sklearn', 'lightgbm', 'xgboost', 'skops', 'torch', 'mlflow', 'matplotlib')\n"
        "print('LOADED', [name for name in learners if name in sys.modules])"
    )
    assert "LOADED []" in printed_by(code)


def test_no_pickle_in_the_rooms() -> None:
    importing = re.compile(r"^ *(from|import) (pickle|dill|cloudpickle)\b", re.MULTILINE)
    files = [path for room in ROOMS for path in (ROOT / room).rglob("*.py")]
    assert [str(path) for path in files if importing.search(path.read_text())] == []
    assert importing.search("    import pickle")


@pytest.mark.parametrize("path", sorted((ROOT / "requirements").glob("*.lock")), ids=lambda path: path.name)
def test_the_lock_pins_every_package_by_hash_and_names_no_index(path: Path) -> None:
    text = re.sub(r"^ *#.*\n", "", path.read_text(), flags=re.MULTILINE).replace("\\\n", "")
    assert text
    for requirement in text.splitlines():
        assert re.match(r"[a-z0-9.-]+==\S", requirement), requirement
        # The build of PyTorch depends on the platform and the index.
        assert ("--hash=sha256:" in requirement) == (path.name != "sequence.lock"), requirement
        assert "://" not in requirement


def test_every_stage_of_dvc_is_a_predrain_command_with_existing_code_as_dependency() -> None:
    stages = yaml.safe_load((ROOT / "dvc.yaml").read_text())["stages"]
    assert list(stages) == ["prepare", "features", "backtest", "train", "report"]
    for stage in stages.values():
        assert stage["cmd"].startswith("predrain ")
        for dep in stage["deps"]:
            assert dep.startswith("data/") or (ROOT / dep).exists(), dep


@pytest.mark.parametrize(
    ("page", "pattern", "folder"),
    [
        ("CONTRIBUTING.md", r"`((?:[a-z_.]+/)+[A-Za-z_.-]*)`", ROOT),
        ("tests/README.md", r"`([a-z_/]+/test_\w+\.py|test_\w+\.py)`", ROOT / "tests"),
    ],
)
def test_what_contributors_are_pointed_to_exists(page: str, pattern: str, folder: Path) -> None:
    named = re.findall(pattern, (ROOT / page).read_text(encoding="utf-8"))
    assert len(named) > 25
    assert [path for path in named if not (folder / path).exists()] == []

"""Where a result comes from."""

import shutil
import subprocess
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path

import pytest

import pipeline.tracking


def git(folder: Path, *arguments: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@b")
    result = subprocess.run(["git", "-C", str(folder), *who, *arguments], check=True, capture_output=True, text=True)
    return result.stdout.strip()


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository of somebody's own, with this package's file at the place that it has in a checkout."""
    (tmp_path / "pipeline").mkdir()
    shutil.copy(pipeline.tracking.__file__, tmp_path / "pipeline" / "provenance.py")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-qm", "one")
    return tmp_path


def revision_at(folder: Path) -> str:
    """What the module finds where it lies."""
    spec = spec_from_file_location("provenance", folder / "provenance.py")
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module.code_revision()


def test_a_checkout_gives_its_commit_and_says_where_files_differ_from_it(checkout):
    commit = git(checkout, "rev-parse", "HEAD")
    assert revision_at(checkout / "pipeline") == commit
    (checkout / "new").touch()
    assert revision_at(checkout / "pipeline") == commit
    with (checkout / "pipeline" / "provenance.py").open("a") as file:
        file.write("# more\n")
    assert revision_at(checkout / "pipeline") == f"{commit}-dirty"


def test_an_installation_inside_somebody_elses_repository_is_no_checkout(checkout):
    inside = checkout / ".venv" / "site-packages" / "pipeline"
    inside.mkdir(parents=True)
    shutil.copy(checkout / "pipeline" / "provenance.py", inside)
    assert revision_at(inside) == "unknown"

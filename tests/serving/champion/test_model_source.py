"""Which model scores: a folder's bundle or the registry's champion, and the last good one when that fails."""

import shutil
from pathlib import Path

import pytest

from foundation.errors import InputError
from models.bundle.store import save_bundle
from serving.champion.sources import ModelSource
from tests.models.small_models import fitted_models


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("bundles")
    return [save_bundle(folder / name, fitted_models(), {"profile": name}).path for name in ("stacked", "lightgbm")]


def test_a_bundle_that_anyone_may_write_scores_nothing(bundles: list[Path], tmp_path: Path) -> None:
    place = tmp_path / "bundle"
    shutil.copytree(bundles[0], place)
    (place / "manifest.json").chmod(0o646)
    with pytest.raises(InputError, match="other users can write it"):
        ModelSource(str(place), registry="sqlite:///none.db", name="predrain").current()


def test_a_folder_is_read_again_when_it_changes_and_the_old_model_kept_when_it_is_damaged(
    bundles: list[Path], tmp_path: Path
) -> None:
    place = tmp_path / "bundle"
    with pytest.raises(InputError, match="no bundle in"):
        ModelSource(str(place), registry="sqlite:///none.db", name="predrain").current()
    shutil.copytree(bundles[0], place)
    source = ModelSource(str(place), registry="sqlite:///none.db", name="predrain")
    first = source.current()
    assert source.current().bundle is first.bundle
    shutil.rmtree(place)
    shutil.copytree(bundles[1], place)
    second = source.current()
    assert (second.bundle.profile, second.version, second.note) == ("lightgbm", None, "")
    (place / "learners" / "lightgbm.txt").write_text("tree")
    (place / "manifest.json").write_text((place / "manifest.json").read_text().replace("lightgbm", "xgboost", 1))
    kept = source.current()
    assert kept.bundle is second.bundle
    assert kept.note.startswith("the model in use is kept: ")
    with pytest.raises(InputError):
        ModelSource(str(place), registry="sqlite:///none.db", name="predrain").current()

"""The model of a service: its bundle, where it comes from, swapped under load, refused and kept."""

import json
import shutil
import threading
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pytest

from foundation.errors import InputError
from foundation.files import previous_path
from models.bundle.store import Bundle, load_bundle, save_bundle
from models.ensembles import Stacker
from serving.champion import (
    ChampionBundle,
    FeatureRows,
    ModelHolder,
    ModelSource,
    load_model,
    locked_folder,
)
from serving.http.limits import ServiceSettings
from tests.models.small_models import fitted_models, rows
from tests.processes import printed_by
from tests.serving.http.world import running
from tests.waiting import wait

FACTS = {"params": {"labels": {"horizon": "24h"}}}


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> list[Bundle]:
    folder = tmp_path_factory.mktemp("bundles")
    return [
        save_bundle(folder / name, fitted_models(), {"profile": name, **FACTS})
        for name in ("lightgbm", "logistic", "stacked")
    ]


def put(bundle: Bundle, place: Path) -> None:
    """Replace a bundle's folder as `predrain train --out` does: by renaming."""
    building, old = place.with_name(".building"), place.with_name(".old")
    shutil.copytree(bundle.path, building)
    if place.exists():
        place.rename(old)
    building.rename(place)
    shutil.rmtree(old, ignore_errors=True)


def some_rows() -> list[dict[str, Any]]:
    X, _ = rows(3, seed=5)
    names = [column.name for column in fitted_models().columns]
    return [{name: float(value) for name, value in zip(names, row, strict=True) if np.isfinite(value)} for row in X]


def risks_of(bundle: Bundle) -> list[float]:
    """What the bundle says of the rows."""
    times = pd.Series(pd.DatetimeIndex([pd.Timestamp(0, tz="UTC")] * 3))
    scored = bundle.fitted.score(rows(3, seed=5)[0], times, np.array(["0", "1", "2"], dtype=object))
    return [float(risk) for risk in scored.loc[scored["model"] == bundle.profile, "risk"]]


def test_a_model_is_swapped_under_load_and_every_answer_is_of_one_model(tmp_path: Path, bundles: list[Bundle]) -> None:
    place = tmp_path / "bundle"
    put(bundles[0], place)
    body = {"rows": some_rows()}
    expected = {bundle.digest: risks_of(bundle) for bundle in bundles}
    failures: list[object] = []
    digests: set[str] = set()
    stop = threading.Event()

    def ask(client: Any) -> None:
        try:
            while not stop.is_set():
                status, content, _ = client.send("POST", "/v1/predict", body)
                digest = content.get("model", {}).get("digest")
                digests.add(str(digest))
                risks = [answer["risk"] for answer in content.get("predictions", [])]
                if status != 200 or risks != pytest.approx(expected.get(digest, []), rel=1e-6):
                    failures.append((status, content))
        except Exception as error:
            failures.append(error)

    settings = ServiceSettings(poll_s=0.01)
    with running(tmp_path / "no", model=place, settings=settings, wait_for_scores=False) as service:
        holder = service.service.holder
        wait(lambda: holder.model is not None)
        threads = [threading.Thread(target=ask, args=(service.client(),)) for _ in range(2)]
        for thread in threads:
            thread.start()
        for number in range(1, 7):
            put(bundles[number % 3], place)
            wait(lambda number=number: holder.model.bundle.digest == bundles[number % 3].digest)
            time.sleep(0.03)
        stop.set()
        for thread in threads:
            thread.join(20)
        assert failures == []
        assert len(digests) == 3
        assert holder.loads == 7


def test_a_bundle_that_cannot_be_served_is_refused_and_the_old_one_goes_on(tmp_path, bundles):
    place = tmp_path / "bundle"
    put(bundles[0], place)
    settings = ServiceSettings(poll_s=0.01)
    with running(tmp_path / "no", model=place, settings=settings, wait_for_scores=False) as service:
        holder, client = service.service.holder, service.client()
        wait(lambda: holder.model is not None)
        put(bundles[1], tmp_path / "other")
        (tmp_path / "other" / "learners" / "logistic.skops").write_bytes(b"junk")
        put(Bundle(tmp_path / "other", bundles[1].fitted, {}, ""), place)
        wait(lambda: holder.refused is not None)
        content = client.post("/v1/predict", {"rows": some_rows()})
        assert content["model"]["digest"] == bundles[0].digest
        warnings = client.send("GET", "/readyz")[1]["warnings"]
        (kept,) = (warning for warning in warnings if "stays in use" in warning)
        assert kept.startswith(f"model {bundles[0].digest[:12]}")
        assert "logistic.skops was changed" in kept
        page = client.get("/metrics").decode()
        assert "predrain_model_current 0.0" in page
        assert "predrain_model_loads_total 1.0" in page
        shutil.rmtree(place)
        wait(lambda: "no bundle" in str(holder.refused))
        put(bundles[1], place)
        wait(lambda: holder.model is not None and holder.model.bundle.digest == bundles[1].digest)
        assert holder.refused is None
        assert "predrain_model_current 1.0" in client.get("/metrics").decode()


def champion_of(folder: Path) -> ChampionBundle:
    return ChampionBundle(folder, f"sqlite:///{folder.parent / 'none.db'}", "predrain")


def test_a_copy_is_served_before_the_registry_responds_and_without_one_its_error_is_reported(tmp_path, bundles, caplog):
    holder = ModelHolder(champion_of(tmp_path / "none"))
    assert holder.refresh() is False
    assert "the model cannot be served: the MLflow store does not exist" in str(holder.why_not_loaded)
    assert [log.message for log in caplog.records] == [holder.why_not_loaded]
    champion_of(tmp_path / "copy").take(bundles[0].path, 3)
    holder = ModelHolder(champion_of(tmp_path / "copy"))
    assert holder.refresh() is True
    assert (holder.why_not_loaded, holder.refused, holder.model.version) == (None, None, "3")
    caplog.clear()
    for _ in range(3):
        holder.refresh()
        assert "cannot update the champion: the MLflow store" in str(holder.refused)
    assert [log.message for log in caplog.records] == [holder.refused]


def test_a_copy_is_whole_or_the_one_of_before_stays(tmp_path: Path, bundles: list[Bundle]) -> None:
    copy = champion_of(tmp_path / "copy")
    copy.take(bundles[0].path, 3)
    assert copy.resolve().version == 3
    for number, bundle in ((5, bundles[1]), (6, bundles[2])):
        copy.take(bundle.path, number)
    resolved = copy.resolve()
    assert resolved.version == 6
    assert (resolved.path / "manifest.json").read_bytes() == (bundles[2].path / "manifest.json").read_bytes()
    assert [path.name for path in (tmp_path / "copy").iterdir()] == ["bundle"]


def test_a_bundle_whose_replacement_was_killed_is_there_after_a_restart(tmp_path: Path, bundles: list[Bundle]) -> None:
    copy = champion_of(tmp_path / "state" / "champion")
    copy.take(bundles[0].path, 3)
    copy.bundle.rename(previous_path(copy.bundle))
    assert champion_of(locked_folder(tmp_path / "state")).resolve().version == 3


def test_a_state_folder_is_one_process_s(tmp_path: Path) -> None:
    assert locked_folder(tmp_path / "state") == tmp_path / "state" / "champion"
    with pytest.raises(InputError, match="another predrain serve uses this folder"):
        locked_folder(tmp_path / "state")
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="the path is a file"):
        locked_folder(tmp_path / "file")


def model_rows() -> FeatureRows:
    values, _ = rows(40, seed=6)
    return FeatureRows(values, [f"g{i % 20}" for i in range(40)], np.arange(40) // 20 * 3_600_000)


def test_a_bundle_is_loaded_and_scores_rows(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = save_bundle(tmp_path / "bundle", fitted_models(), {"profile": "logistic", **FACTS}).path
    model = load_model(path, version=7)
    assert model.about() == {"digest": load_bundle(path).digest, "profile": "logistic", "version": "7"}
    assert model.horizon_seconds == 86_400
    assert caplog.records == []
    answers = model.score(model_rows())
    assert [set(answer) for answer in answers] == [{"unit", "risk", "score", "rank", "alert"}] * 40
    assert [answer["unit"] for answer in answers] == model_rows().units
    assert sorted(answer["rank"] for answer in answers[:20]) == list(range(1, 21))


LOADS = """
import json, sys
from pathlib import Path
from serving.champion import load_model

load_model(Path(sys.argv[1]))
others = ("mlflow", "torch", "shap", "skops", "matplotlib", "numba")
print(json.dumps([name for name in others if name in sys.modules]))
"""


def test_a_server_that_scores_rows_imports_only_what_the_profile_needs(tmp_path: Path) -> None:
    models = fitted_models()
    alone = replace(
        models, models=("lightgbm",), learners={"lightgbm": models.learners["lightgbm"]}, members=(), cascade=None
    )
    alone = replace(alone, stacker=Stacker(()))
    path = save_bundle(tmp_path / "bundle", alone, {"profile": "lightgbm"}).path
    assert json.loads(printed_by(LOADS, path)) == []


def test_a_bundle_that_anyone_may_write_scores_nothing(bundles: list[Bundle], tmp_path: Path) -> None:
    place = tmp_path / "bundle"
    shutil.copytree(bundles[2].path, place)
    (place / "manifest.json").chmod(0o646)
    with pytest.raises(InputError, match="other users can write to this path"):
        ModelSource(str(place), registry="sqlite:///none.db", name="predrain").current()


def test_a_folder_is_read_again_when_it_changes_and_the_old_model_kept_when_it_is_damaged(bundles, tmp_path):
    place = tmp_path / "bundle"
    with pytest.raises(InputError, match="no bundle in"):
        ModelSource(str(place), registry="sqlite:///none.db", name="predrain").current()
    shutil.copytree(bundles[2].path, place)
    source = ModelSource(str(place), registry="sqlite:///none.db", name="predrain")
    first = source.current()
    assert source.current().bundle is first.bundle
    shutil.rmtree(place)
    shutil.copytree(bundles[0].path, place)
    second = source.current()
    assert (second.bundle.profile, second.version, second.note) == ("lightgbm", None, "")
    (place / "learners" / "lightgbm.txt").write_text("tree")
    (place / "manifest.json").write_text((place / "manifest.json").read_text().replace("lightgbm", "xgboost", 1))
    served = source.current()
    assert served.bundle is second.bundle
    assert served.note.startswith("the current model stays in use: ")
    with pytest.raises(InputError):
        ModelSource(str(place), registry="sqlite:///none.db", name="predrain").current()

"""An online state's life: another model, a dataset that grows, stored scores beside it, a disk that is full."""

import json
import shutil
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from features.config import FeatureSection
from models.bundle import save_bundle
from serving.batch import score_decision
from serving.http.online import NewestScores, OnlinePlace
from serving.writing import ScoresFolder
from telemetry.atomic import write_bytes
from tests.features.small_fleet import HOUR, SMALL, make_matrix
from tests.serving.batch_world import DECISION, LABELS, World, fitted_on, make_world, manifest
from tests.serving.http.test_telemetry_route import END, SCORING, Clock, cut, late_samples, rows_of, serving
from tests.serving.http.world import running, wait


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("life"))


def decision_of(service: Any) -> Any:
    return service.service.online.upkeep.served.decision


def test_another_model_is_decided_with_as_soon_as_it_is_loaded(tmp_path: Path, world: World) -> None:
    place = tmp_path / "bundle"
    shutil.copytree(world.bundle.path, place)
    here = World(world.dataset, world.matrix, type(world.bundle)(place, world.bundle.fitted, {}, ""))
    with serving(tmp_path, here, Clock(END)) as service:
        first = decision_of(service)
        state = service.service.online.upkeep.state  # type: ignore[union-attr]
        other = save_bundle(place, fitted_on(world.matrix), manifest(world.matrix) | {"profile": "lightgbm"})
        second = wait(lambda: (found := decision_of(service)) and found is not first and found)
        assert second.model.name.profile == "lightgbm"
        assert service.client().get("/v1/nodes")["model"]["digest"] == other.digest
        assert service.service.online.upkeep.state is state  # type: ignore[union-attr]
        # One whose features look back on other samples needs a state of its own, which begins from the dataset.
        features = SMALL.model_copy(update={"windows": (HOUR, 2 * HOUR)})
        matrix = make_matrix(world.dataset, tmp_path / "m", features=features, decision=DECISION, labels=LABELS)
        save_bundle(place, fitted_on(matrix), manifest(matrix, features=FeatureSection.model_validate(features)))
        third = wait(lambda: (found := decision_of(service)) and found is not second and found)
        assert third.config.features.windows == (HOUR, 2 * HOUR)
        assert third.known > 0


def test_a_dataset_that_grows_is_followed(tmp_path: Path, world: World) -> None:
    _, border = late_samples(world)
    data = cut(world, tmp_path / "cut", border)
    with serving(tmp_path, world, Clock(END), dataset=data) as service:
        before = decision_of(service)
        whole = cut(world, tmp_path / "whole", int(END.timestamp() * 1000))
        data.rename(tmp_path / "old")
        whole.rename(data)
        after = wait(lambda: (found := decision_of(service)) and found.known > before.known and found)
        stored = score_decision(
            world.dataset, world.model, ScoresFolder(tmp_path / "batch"), SCORING, clock=lambda: END, at=END
        )
        lines = (stored.folder / "risks.jsonl").read_text().splitlines()
        assert after.known == sum(json.loads(line)["status"] == "ok" for line in lines)


def test_stored_scores_are_answered_from_while_the_online_state_knows_less(tmp_path: Path, world: World) -> None:
    clock = Clock(END)
    scores = ScoresFolder(tmp_path / "scores")
    score_decision(world.dataset, world.model, scores, SCORING, clock=lambda: END, at=END - 3 * HOUR)
    samples, border = late_samples(world)
    with serving(tmp_path, world, clock, dataset=cut(world, tmp_path / "cut", border)) as service:
        client = service.client()
        wait(lambda: service.service.keeper.served.fleet is not None)
        assert decision_of(service).known == 0
        assert client.get("/v1/nodes")["decision"] == f"{END - 3 * HOUR:%Y%m%dT%H%M%SZ}"
        of = len(decision_of(service).scores.units)
        warning = f"the online state knows the risks of 0 of {of} units: until more telemetry comes, stored scores hold"
        assert client.get("/readyz")["warnings"] == [warning]
        client.post("/v1/telemetry", {"samples": rows_of(samples)})
        wait(lambda: decision_of(service).known > 0)
        assert client.get("/v1/nodes")["decision"] == f"{END:%Y%m%dT%H%M%SZ}"
        assert client.get("/readyz")["warnings"] == []
        assert isinstance(service.service.newest, NewestScores)


def test_scores_that_have_expired_are_said_to_be_while_no_telemetry_comes(tmp_path: Path, world: World) -> None:
    clock = Clock(END)
    scores = ScoresFolder(tmp_path / "scores")
    score_decision(world.dataset, world.model, scores, SCORING, clock=lambda: END, at=END - 3 * HOUR)
    _, border = late_samples(world)
    with serving(tmp_path, world, clock, dataset=cut(world, tmp_path / "cut", border)) as service:
        client = service.client()
        wait(lambda: service.service.keeper.served.fleet is not None)
        assert client.send("GET", "/readyz")[0] == 200
        clock.now = END + 48 * HOUR
        wait(lambda: decision_of(service).t > END and decision_of(service).known == 0)
        status, told, _ = client.send("GET", "/readyz")
        decision = f"{END - 3 * HOUR:%Y%m%dT%H%M%SZ}"
        assert (status, told["reasons"]) == (503, [f"the scores of {decision} have expired: score the fleet again"])
        assert any("until more telemetry comes, stored scores hold" in each for each in told["warnings"])
        page = client.get("/metrics").decode()
        assert "predrain_ready 0.0" in page
        assert "predrain_scores_expired 1.0" in page
        content = client.get("/v1/nodes")
        assert (content["decision"], content["expired"]) == (decision, True)
        unit = client.get("/v1/nodes/node0")["units"][0]
        assert (unit["status"], unit["tier"], unit["last_known"]["risk"] >= 0) == ("expired", "unknown", True)


def test_an_online_state_without_any_telemetry_is_not_ready(tmp_path: Path, world: World) -> None:
    with serving(tmp_path, world, Clock(END + 48 * HOUR)) as service:
        client = service.client()
        assert decision_of(service).known == 0
        status, told, _ = client.send("GET", "/readyz")
        assert (status, told["reasons"]) == (503, ["no unit's risk is known: look after the telemetry"])
        page = client.get("/metrics").decode()
        assert "predrain_ready 0.0" in page
        assert "predrain_scores_expired 1.0" in page


def test_an_older_online_decision_never_takes_the_place_of_newer_scores(tmp_path: Path, world: World) -> None:
    clock = Clock(END - timedelta(hours=3))
    with serving(tmp_path, world, clock) as service:
        decided = decision_of(service).t
        score_decision(
            world.dataset, world.model, ScoresFolder(tmp_path / "scores"), SCORING, clock=lambda: END, at=END
        )
        wait(lambda: service.service.keeper.served.fleet is not None)
        assert decided < END
        assert service.client().get("/v1/nodes")["decision"] == f"{END:%Y%m%dT%H%M%SZ}"


def test_a_snapshot_that_cannot_be_written_is_told_and_tried_again(tmp_path: Path, world: World) -> None:
    with serving(tmp_path, world, Clock(END)) as service:
        upkeep = service.service.online.upkeep
        assert upkeep is not None
        blocked = tmp_path / ".online.building"
        write_bytes(blocked, b"a file where the folder is built")
        assert upkeep.save() is False
        assert any("the online state cannot be written" in each for each in service.service._warnings())
        page = service.client().get("/metrics").decode()
        assert "predrain_online_snapshot_failures_total 1.0" in page
        blocked.unlink()
        assert upkeep.save() is True
        assert not any("cannot be written" in each for each in service.service._warnings())
        assert "predrain_online_snapshot_timestamp_seconds" in service.client().get("/metrics").decode()


def test_without_a_dataset_and_a_snapshot_it_says_what_is_missing(tmp_path: Path, world: World) -> None:
    place = OnlinePlace(tmp_path / "online", None, SCORING, poll_s=0.01)
    with running(tmp_path / "no", model=world.bundle.path, online=place, wait_for_scores=False) as service:
        wait(lambda: "nothing says which GPUs there are" in str(service.service.online.trouble))
        reasons = service.client().send("GET", "/readyz")[1]["reasons"]
        assert any("Give --dataset FOLDER" in reason for reason in reasons)


def test_no_state_is_begun_for_a_model_that_says_too_little(tmp_path: Path, world: World) -> None:
    bare = save_bundle(tmp_path / "bundle", fitted_on(world.matrix), {"profile": "lightgbm"})
    place = OnlinePlace(tmp_path / "online", world.dataset.path, SCORING, poll_s=0.01)
    with running(tmp_path / "no", model=bare.path, online=place, wait_for_scores=False) as service:
        wait(lambda: "does not say which parameters" in str(service.service.online.trouble))

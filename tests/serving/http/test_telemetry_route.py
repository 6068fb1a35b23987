"""Pushed telemetry: taken by a running service, decided from, kept over a restart; and samples only asked about."""

import gzip
import hashlib
import io
import json
import re
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from features.blocks import table_of
from serving.batch import score_decision
from serving.config import ScoringSettings
from serving.http.online import OnlinePlace
from serving.http.settings import ServiceSettings
from serving.writing import ScoresFolder
from tests.features.small_fleet import HOUR, T0, write_dataset
from tests.serving.batch_world import HOLLOW, HOURS, World, make_world, telemetry
from tests.serving.http.test_process import COMMAND, started
from tests.serving.http.world import Client, Running, running, wait

END = T0 + HOURS * HOUR
SCORING = ScoringSettings()
PAGE = Path(__file__).parents[3] / "docs" / "reference" / "http.md"
SCOPES = ("read", "write", "admin")
ARROW = "application/vnd.apache.arrow.stream"


class Clock:
    def __init__(self, now: datetime = END) -> None:
        self.now = now

    def __call__(self) -> datetime:
        return self.now


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return make_world(tmp_path_factory.mktemp("telemetry"))


@contextmanager
def serving(folder: Path, world: World, clock: Clock, **more: Any) -> Iterator[Running]:
    """A service with an online state, once it has decided for the first time."""
    dataset = more.pop("dataset", world.dataset.path)
    again_s = more.pop("again_s", 0.0)
    place = OnlinePlace(folder / "online", dataset, SCORING, poll_s=0.02, tidy_s=0.1, follow_s=0.05, again_s=again_s)
    with running(
        folder / "scores", model=world.bundle.path, clock=clock, online=place, wait_for_scores=False, **more
    ) as service:
        wait(lambda: service.service.online.fleet is not None)
        yield service


def batch(world: World, folder: Path, at: datetime, now: datetime) -> dict[str, Any]:
    """What `predrain score` says at a time."""
    scores = ScoresFolder(folder / "batch")
    result = score_decision(world.dataset, world.model, scores, SCORING, clock=lambda: now, at=at)
    lines = (result.folder / "risks.jsonl").read_text().splitlines()
    return {record["unit"]: record for record in map(json.loads, lines)}


def test_scores_from_pushed_samples_are_those_of_the_batch(tmp_path: Path, world: World) -> None:
    """The state begins from the dataset up to 20:00; the samples from then on are pushed, in three ways."""
    clock = Clock(END)
    samples, border = late_samples(world)
    with serving(tmp_path, world, clock, dataset=cut(world, tmp_path / "cut", border)) as service:
        client = service.client()
        before = service.service.online.upkeep.served.decision.scores.units  # type: ignore[union-attr]
        parts = np.array_split(np.random.default_rng(1).permutation(samples.num_rows), 3)
        answer = client.post("/v1/telemetry", {"samples": rows_of(samples.take(pa.array(parts[0])))})
        assert answer["samples"]["stored"] == len(parts[0])
        body = gzip.compress(json.dumps(rows_of(samples.take(pa.array(parts[1])))).encode())
        status, answer, _ = client.send("POST", "/v1/telemetry?kind=samples", body, Content_Encoding="gzip")
        assert (status, answer["samples"]["rows"]) == (200, len(parts[1]))
        arrow = stream_of(samples.take(pa.array(parts[2])))
        status, answer, _ = client.send("POST", "/v1/telemetry?kind=samples", arrow, ARROW)
        assert (status, answer["samples"]["unknown"]) == (200, 0)
        # What came late is decided about again, at the same decision time.
        expected = batch(world, tmp_path, END, END)
        known = sum(record["status"] == "ok" for record in expected.values())
        wait(lambda: service.service.online.upkeep.served.decision.known == known)  # type: ignore[union-attr]
        nodes = sorted({record["node"] for record in expected.values()})
        content = client.post("/v1/predict", {"nodes": nodes})
        assert (content["decision"], content["expired"]) == (f"{END:%Y%m%dT%H%M%SZ}", False)
        found = {unit["unit"]: unit for node in content["nodes"] for unit in node["units"]}
        assert before.keys() == found.keys() == expected.keys()
        for unit, record in expected.items():
            same(found[unit], record)
        assert any(before[unit].risk != expected[unit]["risk"] for unit in before)
        told = client.get("/readyz")["telemetry"]
        assert (told["units"], told["known"], told["decision_age_s"]) == (len(expected), known, 0)
        page = client.get("/metrics").decode()
        assert f"predrain_online_known_units {known}.0" in page
        documented = set(re.findall(r"`(predrain_\w+)`", PAGE.read_text()))
        assert set(re.findall(r"# TYPE (\w+)", page)) <= documented
        told = {name for name in documented if name.startswith(("predrain_model_", "predrain_online_"))}
        assert told - {"predrain_online_snapshot_timestamp_seconds"} <= set(re.findall(r"# TYPE (\w+)", page))


def test_samples_that_are_only_asked_about_say_what_pushing_them_would_and_are_not_held(
    tmp_path: Path, world: World
) -> None:
    clock = Clock(END)
    samples, border = late_samples(world)
    with serving(tmp_path, world, clock, dataset=cut(world, tmp_path / "cut", border)) as service:
        client = service.client()
        upkeep = service.service.online.upkeep
        assert upkeep is not None
        assert upkeep.state is not None
        held = upkeep.state.size
        frame = samples.to_pandas()
        mine = samples.filter(pa.array((frame["node"] == frame.loc[frame["gpu"] == HOLLOW, "node"].iloc[0]).to_numpy()))
        asked = client.post("/v1/predict", {"samples": rows_of(mine)})
        assert upkeep.state.size == held
        again = client.post("/v1/predict", {"samples": rows_of(mine)})
        assert [each["risk"] for each in again["gpus"]] == [each["risk"] for each in asked["gpus"]]
        assert asked["samples"]["stored"] == mine.num_rows
        # Pushed, they say the same, but for what compares with a fleet that now has them.
        client.post("/v1/telemetry", {"samples": rows_of(mine)})
        found = {each["unit"]: each for each in asked["gpus"]}
        known = {unit for unit, each in found.items() if each["status"] == "ok"}
        assert known

        def decided() -> bool:
            units = upkeep.served.decision.scores.units  # type: ignore[union-attr]
            return {unit for unit in found if units[unit].status == "ok"} == known

        wait(decided)
        units = upkeep.served.decision.scores.units  # type: ignore[union-attr]
        for unit in known:
            assert found[unit]["risk"] == pytest.approx(units[unit].risk, rel=0.2)
            assert found[unit]["reasons"]  # whoever asks about a GPU is told why, whatever its tier
        assert found[HOLLOW]["why_unknown"] is not None  # its rows hold no value: nothing is guessed


def test_a_restart_goes_on_where_the_service_was_stopped(tmp_path: Path, world: World) -> None:
    clock = Clock(END)
    samples, border = late_samples(world)
    with serving(tmp_path, world, clock, dataset=cut(world, tmp_path / "cut", border)) as service:
        service.client().post("/v1/telemetry", {"samples": rows_of(samples)})
        event = {"timestamp": END.isoformat(), "node": "node0", "gpu": "gpu01", "type": "xid", "code": "63"}
        event["source"] = "test"
        elsewhere = event | {"gpu": "gpu99"}
        told = service.client().post("/v1/telemetry", {"events": [event, event, elsewhere]})
        assert told["events"] == {"rows": 3, "added": 1, "unknown": 1}
        first = service.service.online.upkeep
        assert first is not None
        assert first.state is not None
    size, totals, events = first.state.size, first.state.totals, first.state.fleet[1]
    with serving(tmp_path, world, clock, dataset=None) as service:  # the snapshot knows the fleet
        again = service.service.online.upkeep
        assert again is not None
        assert again.state is not None
        assert (again.state.size.rows, again.state.totals) == (size.rows, totals)
        assert len(again.state.fleet[1]) == len(events)
        expected = batch(world, tmp_path, END, END)
        found = {unit: each.to_json() for unit, each in again.served.decision.scores.units.items()}  # type: ignore[union-attr]
        for unit, record in expected.items():
            same(found[unit], record)


def test_a_damaged_snapshot_is_set_aside_and_said(tmp_path: Path, world: World) -> None:
    clock = Clock(END)
    with serving(tmp_path, world, clock):
        pass
    (tmp_path / "online" / "state.json").write_bytes(b"junk")
    with serving(tmp_path, world, clock) as service:
        warnings = service.service._warnings()
        assert any("the snapshot was not used: it is damaged: state.json" in each for each in warnings)
        assert (tmp_path / "online.refused" / "state.json").read_bytes() == b"junk"
    (tmp_path / "online" / "state.json").write_bytes(b"junk")
    place = OnlinePlace(tmp_path / "online", None, SCORING, poll_s=0.02)
    with running(tmp_path / "no", model=world.bundle.path, clock=clock, online=place, wait_for_scores=False) as service:
        wait(lambda: "damaged" in str(service.service.online.trouble))
        status, problem, _ = service.client().send("GET", "/readyz")
        assert status == 503
        assert any("it is damaged" in reason for reason in problem["reasons"])
        assert service.client().send("POST", "/v1/telemetry", {"samples": []})[0] == 503


SAMPLE = {"timestamp": "2026-01-01T20:00:00Z", "node": "node0", "gpu": "gpu01", "gpu_temp_c": 60.0}
EVENT = {"timestamp": SAMPLE["timestamp"], "node": "node0", "type": "xid", "source": "test"}


def bad(**changes: Any) -> dict[str, Any]:
    return {"samples": [SAMPLE, SAMPLE | changes]}


@pytest.mark.parametrize(
    ("body", "status", "words"),
    [
        (b"{", 400, "not JSON"),
        (b'{"samples": [{"gpu_temp_c": NaN}]}', 400, "NaN"),
        (b"[" * 5000 + b"]" * 5000, 413, "arrays and objects"),
        (b"[" * 200_000, 413, "arrays and objects"),
        ([SAMPLE], 422, "?kind=samples"),
        ({}, 422, "neither samples nor events"),
        ({"sample": []}, 422, "did you mean 'samples'?"),
        ({"jobs": []}, 422, "jobs is read from the dataset"),
        ({"samples": {}}, 422, "neither samples nor events"),
        ({"samples": [1]}, 422, "samples row 0 is no object"),
        ({"samples": [SAMPLE] * 51}, 413, "send at most 50"),
        (bad(timestamp="2026-01-01T20:00:00"), 422, "samples row 1: timestamp"),
        (bad(timestamp=None), 422, "nulls in 'timestamp'"),
        (bad(timestamp="1999-01-01T00:00:00Z"), 422, "before 2000"),
        (bad(timestamp="2027-01-01T00:00:00Z"), 422, "more than a day from now"),
        (bad(gpu_temp_c="hot"), 422, "gpu_temp_c is 'hot', not a number"),
        (bad(gpu_tmp_c=60), 422, "unknown column 'gpu_tmp_c'"),
        (bad(gpu_temp_c=10**400), 422, "gpu_temp_c"),
        (bad(node="n" * 300), 422, "300 characters"),
        ({"events": [EVENT | {"type": "boom"}]}, 422, "boom"),
        ({"events": [EVENT]}, 422, "the code of an xid is null"),
    ],
)
def test_what_cannot_be_taken_is_refused_with_the_row_and_nothing_is_held(
    refusing: Running, body: Any, status: int, words: str
) -> None:
    upkeep = refusing.service.online.upkeep
    assert upkeep is not None
    assert upkeep.state is not None
    before = upkeep.state.totals
    found, problem, _ = refusing.client().send("POST", "/v1/telemetry", body)
    assert (found, words in problem["detail"]) == (status, True), problem
    assert upkeep.state.totals == before


def test_rows_that_cannot_be_used_are_counted_one_by_one(refusing: Running) -> None:
    answer = refusing.client().post(
        "/v1/telemetry",
        {
            "samples": [
                SAMPLE,
                SAMPLE | {"gpu": "gpu77"},
                SAMPLE | {"node": "elsewhere"},
                SAMPLE | {"timestamp": "2025-12-01T00:00:00Z"},
                SAMPLE | {"timestamp": "2026-01-02T03:00:00Z"},
                SAMPLE | {"timestamp": "2026-01-01T21:00:00Z", "gpu_temp_c": 900.0},
            ]
        },
    )["samples"]
    fates = {name: answer[name] for name in ("rows", "stored", "unknown", "too_old", "ahead", "values_nulled")}
    assert fates == {"rows": 6, "stored": 2, "unknown": 2, "too_old": 1, "ahead": 1, "values_nulled": 1}


@pytest.mark.parametrize(
    ("samples", "words"),
    [
        ([SAMPLE | {"gpu": "gpu77"}], "the inventory knows none of the 1 units named, such as gpu77 on node0"),
        ([SAMPLE | {"gpu": None}], "no row names a GPU"),
        ([{"timestamp": SAMPLE["timestamp"], "node": "node0"}], "no value of any channel"),
        ([], "samples is no list of rows"),
    ],
)
def test_samples_of_nobody_are_refused(refusing: Running, samples: Any, words: str) -> None:
    status, problem, _ = refusing.client().send("POST", "/v1/predict", {"samples": samples})
    assert (status, words in problem["detail"]) == (422, True), problem


def test_hostile_arrow_and_kinds_are_refused(refusing: Running) -> None:
    client = refusing.client()
    good = pa.table({"timestamp": pa.array([END], pa.timestamp("ms", "UTC")), "node": ["node0"], "gpu": ["gpu01"]})
    for path, body, status in (
        ("/v1/telemetry", stream_of(good), 422),
        ("/v1/telemetry?kind=jobs", stream_of(good), 422),
        ("/v1/telemetry?kind=samples", b"junk", 400),
        ("/v1/telemetry?kind=samples", stream_of(good), 422),
        ("/v1/telemetry?kind=samples", stream_of(pa.table({"gpu": [[1]]})), 400),
        ("/v1/telemetry?sort=up", stream_of(good), 400),
    ):
        found, problem, _ = client.send("POST", path, body, ARROW)
        assert found == status, (path, problem)
    assert client.send("POST", "/v1/telemetry", {"samples": [SAMPLE]}, "text/csv")[0] == 415


def test_telemetry_needs_a_state_and_the_scope_to_write(tmp_path: Path) -> None:
    tokens = tmp_path / "tokens"
    lines = [f"{scope} sha256:{hashlib.sha256(f'{scope}-token-0123456789'.encode()).hexdigest()}" for scope in SCOPES]
    tokens.write_text("\n".join(lines) + "\n")
    with running(tmp_path / "scores", tokens=tokens, wait_for_scores=False) as service:
        for scope, status in (("read", 403), ("write", 409), ("admin", 409)):
            client = service.client(f"{scope}-token-0123456789")
            assert client.send("POST", "/v1/telemetry", {"samples": [SAMPLE]})[0] == status
        assert service.client().send("POST", "/v1/telemetry", {"samples": [SAMPLE]})[0] == 401
        asked = service.client("read-token-0123456789").send("POST", "/v1/predict", {"samples": [SAMPLE]})
        assert asked[0] == 409


@pytest.fixture(scope="module")
def refusing(world: World, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("refusing")
    with serving(folder, world, Clock(END), settings=ServiceSettings(rows=50)) as service:
        yield service


@pytest.mark.system
def test_the_command_keeps_what_was_pushed_over_a_restart(tmp_path: Path, world: World) -> None:
    now = datetime.now(UTC)
    inventory = world.dataset.inventory()
    inventory["installed_at"] = inventory["installed_at"] - timedelta(days=3650)  # in service, whatever the clock says
    samples = telemetry(world.dataset.inventory())
    samples = samples[samples["timestamp"] > END - 4 * HOUR].reset_index(drop=True)
    dataset = write_dataset(tmp_path / "data", inventory, samples=samples, hours=HOURS)
    step = timedelta(minutes=10)
    samples["timestamp"] = samples["timestamp"] + (now - END) // step * step
    more = ("--model", str(world.bundle.path), "--state", str(tmp_path / "state"))
    with started(tmp_path, *more, "--dataset", str(dataset.path)) as (process, port, log):
        client = Client(port)
        wait(lambda: ready(client).get("telemetry"), 60)
        answer = client.post("/v1/telemetry", {"samples": rows_of(table_of(samples))})
        assert answer["samples"]["stored"] == len(samples)
        told = wait(lambda: (found := ready(client))["telemetry"]["known"] and found, 60)
        assert told["status"] == "ready"  # there are no stored scores, and none are needed
        known = told["telemetry"]["known"]
        second = subprocess.run(
            [*COMMAND, "--scores", str(tmp_path), "--port", "0", "--no-extender", *more],
            capture_output=True, text=True, timeout=60, check=False, cwd=PAGE.parents[2],
        )  # fmt: skip
        assert second.returncode == 1
        assert "another predrain serve keeps its state here" in second.stderr
        client.connection.close()
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 0, log.read_text()
    with started(tmp_path, *more) as (process, port, log):
        client = Client(port)
        assert wait(lambda: ready(client).get("telemetry"), 60)["known"] == known
        nodes = client.post("/v1/predict", {"nodes": ["node0"]})["nodes"]
        assert nodes[0]["risk"] is not None
        client.connection.close()
        messages = [json.loads(line).get("message", "") for line in log.read_text().splitlines()]
        assert any(each.startswith("the online state goes on with ") for each in messages)


def ready(client: Client) -> Any:
    return client.send("GET", "/readyz")[1]


def late_samples(world: World) -> tuple[pa.Table, int]:
    """The samples of the last four hours, and the time before them in milliseconds."""
    samples = table_of(telemetry(world.dataset.inventory()))
    border = int((END - 4 * HOUR).timestamp() * 1000)
    return samples.filter(pa.array(samples.column("timestamp").cast(pa.int64()).to_numpy() > border)), border


def cut(world: World, folder: Path, border_ms: int) -> Path:
    """The dataset without its last samples."""
    dataset = world.dataset
    samples = telemetry(dataset.inventory())
    samples = samples[samples["timestamp"].astype("int64") <= border_ms].reset_index(drop=True)
    return write_dataset(folder, dataset.inventory(), samples=samples, events=dataset.events(), hours=HOURS).path


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for key in ("status", "why_unknown", "tier", "rank", "alert", "node", "slot", "completeness"):
        assert found[key] == expected[key], key
    if expected["risk"] is not None:
        assert found["risk"] == pytest.approx(expected["risk"], rel=1e-6, abs=1e-9)
        assert found["risks"] == pytest.approx(expected["risks"], rel=1e-6, abs=1e-9)
    assert [each["text"] for each in found["reasons"]] == [each["text"] for each in expected["reasons"]]


def rows_of(table: pa.Table) -> list[dict[str, Any]]:
    rows = table.to_pylist()
    for row in rows:
        row["timestamp"] = row["timestamp"].isoformat()
    return [{key: value for key, value in row.items() if value is not None} for row in rows]


def stream_of(table: pa.Table) -> bytes:
    sink = io.BytesIO()
    with pa.ipc.new_stream(sink, table.schema) as stream:
        stream.write_table(table)
    return sink.getvalue()

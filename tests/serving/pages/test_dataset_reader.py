"""The processes that read a dataset for the pages: real ones, on a small simulated fleet."""

import subprocess
import sys
from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from features.errors import InputError
from predrain.page_reader import command, facts
from predrain.serve import page_reader
from scheduler.ledger.sqlite_ledger import SqliteLedger
from scheduler.ports.records import Finding
from serving.pages.dataset_reader import DatasetReader
from telemetry.dataset.store import Dataset
from telemetry.errors import InputError as DatasetError
from tests.serving.http.world import Running, record, running, wait
from tests.serving.pages.page_world import look, store


@pytest.fixture(scope="module")
def scores(small_fleet: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two decisions of the simulated fleet, a day before its end; every fourth GPU is raised."""
    folder = tmp_path_factory.mktemp("scores")
    found = Dataset.open(small_fleet)
    here = found.inventory()
    here = here[here["removed_at"].isna()].drop_duplicates("gpu")
    for back in (30, 24):
        decided = (found.meta.span[1] - timedelta(hours=back)).replace(minute=0, second=0, microsecond=0)
        records = [
            record(gpu, node, 0.2 if at % 4 == 0 else 0.01, "elevated" if at % 4 == 0 else "clear", decided=decided)
            for at, (gpu, node) in enumerate(zip(here["gpu"], here["node"], strict=True))
        ]
        store(folder, records, decided)
    return folder


@pytest.fixture(scope="module")
def service(scores: Path, small_fleet: Path) -> Iterator[Running]:
    now = Dataset.open(small_fleet).meta.span[1] - timedelta(hours=23)
    reader = page_reader(scores, small_fleet, None)
    with running(scores, clock=lambda: now, reader=reader) as started:
        wait(lambda: reader.facts.trouble is None, 60)
        yield started


def test_racks_groups_and_outcomes_come_to_the_page(service: Running, small_fleet: Path) -> None:
    page = look(service, "/")
    head = page.rows[0]
    assert "Rack" in head
    assert "Group" in head
    racks = set(Dataset.open(small_fleet).inventory()["rack"])
    assert set(page.column(head.index("Rack"))) <= racks
    rack = sorted(racks)[0]
    narrowed = look(service, f"/?rack={rack}")
    assert set(narrowed.column(head.index("Rack"))) == {rack}
    assert "judged alerts were right" in look(service, "/outcomes").text
    assert "alerts were right" in page.text


def test_a_gpu_shows_its_channels_as_plots(service: Running, small_fleet: Path, scores: Path) -> None:
    unit = look(service, "/?show=gpus").column(0)[0]
    page = look(service, f"/gpus/{unit}")
    plots = [found for tag, found in page.tags if tag == "svg" and found.get("class") == "small"]
    assert len(plots) >= 5
    labels = [str(found["aria-label"]) for found in plots]
    assert any(label.startswith("gpu_temp_c: ") for label in labels)
    found = Dataset.open(small_fleet)
    frame = found.read_bucket(found.bucket_of(page_node(page.links)), ["timestamp", "gpu", "gpu_temp_c"]).to_pandas()
    since = found.meta.span[1] - timedelta(days=5)
    mine = frame[(frame["gpu"] == unit) & (frame["timestamp"] > since)]["gpu_temp_c"].dropna()
    assert service.service is not None
    label = next(each for each in labels if each.startswith("gpu_temp_c: "))
    assert label == f"gpu_temp_c: {mine.min():.3g} to {mine.max():.3g} C, now {mine.iloc[-1]:.3g}"


def page_node(links: list[tuple[str, str]]) -> str:
    return next(words for href, words in links if href.startswith("/nodes/"))


def test_the_service_itself_never_loads_what_the_readers_need(scores: Path, small_fleet: Path) -> None:
    unit = next(iter(Dataset.open(small_fleet).inventory()["gpu"]))
    code = f"""
import sys
from pathlib import Path
from tests.serving.http.world import running, wait
from predrain.serve import page_reader
scores, dataset = Path({str(scores)!r}), Path({str(small_fleet)!r})
reader = page_reader(scores, dataset, None)
with running(scores, reader=reader) as service:
    wait(lambda: reader.facts.trouble is None, 60)
    client = service.client()
    print([client.send("GET", path)[0] for path in ("/", "/gpus/{unit}", "/outcomes", "/docs")])
    print(sorted({{"pandas", "mlflow", "lightgbm", "sklearn", "numba", "matplotlib"}} & sys.modules.keys()))
"""
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=100, check=False)
    assert run.stdout.splitlines()[-1] == "[]", run.stderr
    assert run.stdout.splitlines()[0].startswith("[200, ")


def test_facts_that_cannot_be_had_are_told_and_those_of_before_stay(tmp_path: Path, scores: Path) -> None:
    with pytest.raises(DatasetError, match="there is no dataset here"):
        page_reader(scores, tmp_path, None)
    reader = DatasetReader(command(scores, tmp_path, None), [])
    reader.start()
    wait(lambda: reader.facts.trouble != "the dataset is being read", 60)
    assert "it has no dataset.json" in str(reader.facts.trouble)
    assert reader.facts.outcomes is None
    with pytest.raises(InputError, match=r"the dataset's reader does not answer|it has no dataset\.json"):
        reader.channels("n", "g")
    reader.stop()
    with pytest.raises(InputError, match="the service is leaving"):
        reader.channels("n", "g")


@pytest.mark.parametrize(
    "script", ["exit 1", "read line; echo nonsense", "read line; echo '[1]'", "read line; printf x"]
)
def test_a_reader_that_fails_is_told_and_begun_again(script: str) -> None:
    reader = DatasetReader(["bash", "-c", script], [])
    for _ in range(2):
        with pytest.raises(InputError, match="the dataset's reader does not answer"):
            reader.channels("n", "g")
    reader.stop()


def test_the_facts_are_plain(scores: Path, small_fleet: Path) -> None:
    found = facts(scores, small_fleet, None)
    assert datetime.fromisoformat(found["data_end"]) == Dataset.open(small_fleet).meta.span[1]
    assert len(found["places"]) == Dataset.open(small_fleet).inventory()["gpu"].nunique()
    assert all(len(place) == 4 for place in found["places"].values())
    counted = found["outcomes"]["verdicts"]
    assert sum(counted.values()) == len(found["outcomes"]["alerts"]) > 0


def test_what_a_diagnostic_of_ours_found_tells_what_an_alert_came_to(
    tmp_path: Path, scores: Path, small_fleet: Path
) -> None:
    plain = facts(scores, small_fleet, None)["outcomes"]
    raised = next(each for each in plain["alerts"] if each["verdict"] == "wrong")
    at = datetime.fromisoformat(raised["at"]) + timedelta(hours=3)
    ledger = SqliteLedger(tmp_path / "ledger.db")
    content = {"key": "k", "at": at.isoformat(), "units": [raised["unit"]], "result": "failed", "failed_units": []}
    ledger.find(Finding(at, raised["node"], "verified", "failed: memory", content))
    ledger.close()
    found = facts(scores, small_fleet, tmp_path / "ledger.db")["outcomes"]
    verdicts = {each["unit"]: each["verdict"] for each in found["alerts"] if each["at"] == raised["at"]}
    assert verdicts[raised["unit"]] == "right"
    assert found["verdicts"]["right"] > plain["verdicts"]["right"]

"""A node's and a GPU's page, with racks and outcomes of alerts as `predrain score` writes them."""

from collections.abc import Iterator
from dataclasses import asdict
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from foundation.errors import InputError
from policy.fleet import JobView
from policy.ladder.cost_benefit import CostBenefitConfig, evaluate_drain
from scheduler.ledger.rungs import RungUse
from serving.pages.routes import drains_came_to
from serving.scores.alert_outcomes import _by_week, write_facts
from serving.scores.reading import FACTS, past_scores, read_facts
from serving.scores.writing import ScoresFolder
from telemetry.dataset.store import Dataset
from tests.serving.http.world import DECIDED, NOW, Running, record, running, small_fleet
from tests.serving.http.world import small_fleet as of_five_nodes
from tests.serving.pages.page_world import a_week, look
from tests.serving.score_folder import write_scores

RUNG = RungUse(
    "2026-01-01T06:39:00Z", "n1", "probe", None, "idle at a risk of 7.4 %", 0.98, 0.1, 0.1, "2.00 idle GPU-hours",
    "test passed",
)  # fmt: skip


class Ledger:
    """A ledger that knows one node."""

    def node(self, name: str) -> str:
        return name

    def why(self, node: str, most: int) -> list[dict[str, Any]]:
        assert most == 50
        if node != "n1":
            raise InputError(f"the ledger has no records of node {node!r}", "ledger.db", "Check the name.")
        call = {"at": "2026-01-01T06:12:00Z", "verb": "swap", "node": "n1", "answer": "done", "message": "",
                "wrote": [{"path": "/spec/taints", "before": None, "after": "predrain.io/at-risk"}]}  # fmt: skip
        skip = {"at": "2026-01-01T06:12:01Z", "verb": "drain", "node": "n1", "why": "the stage is soft"}
        entry = {"decision": 7, "at": "2026-01-01T06:12:00Z", "tier": "high", "risk": 0.9, "wanted": "drain",
                "target": "swap", "model": {"profile": "mean_log_odds", "digest": "ab" * 32},
                "scores_of": "2026-01-01T06:00:00Z", "reasons": ["ECC errors rose"], "over_budget": "rack r1 is full",
                "breaker": {"jump": "scores jumped"}, "calls": [call], "skipped": [skip]}  # fmt: skip
        entry["request"] = {"rung": "checkpoint", "saves": 3.25, "costs": 0.5, "reasons": ["much unsaved work"]}
        return [entry]

    def work(self, node: str, most: int) -> list[dict[str, Any]]:
        assert (node, most) == ("n1", 50)
        call = {
            "at": "2026-01-01T06:13:00Z",
            "kind": "checkpoint",
            "workload": "train-7",
            "answer": "done",
            "message": "",
        }
        work_of = {
            "at": "2026-01-01T06:18:00Z",
            "kind": "empty",
            "answer": None,
            "message": "no workloads left to evict",
        }
        probed = {"at": "2026-01-01T06:40:00Z", "kind": "probed", "answer": None, "message": "passed",
                  "idle_gpu_hours": 2.0, "expected": {"saves": 1.5}}  # fmt: skip
        return [call, work_of, probed]

    def rungs(self, node: str | None, now: datetime, most: int, alerts: Any) -> list[RungUse]:
        assert (node, now, most) in ((None, NOW, 50), ("n1", NOW, 50))
        return [RUNG]

    def last_actions(self) -> dict[str, tuple[str, str]]:
        return {"n1": ("swap", "2026-01-01T06:12:00Z")}

    def out_of_service(self) -> dict[str, dict[str, Any]]:
        entry = {"level": "drain", "since": "2026-01-01T06:12:00Z", "expires_at": None, "reasons": ["a test failed"]}
        return {"n1": entry}

    def actions(self, node: str, verb: str = "", since: str = "", until: str = "", **page: int) -> list[dict[str, Any]]:
        calls = [{**self.why("n1", 50)[0]["calls"][0], "call": 3, "decision": 7, "confirmed": True}]
        return calls if node in ("*", "n1", "n?") and verb in ("", "swap") and until != "2026-01-01" else []

    def drains(self, since: str) -> list[dict[str, Any]]:
        return []

    def close(self) -> None:
        pass

    def rounds(self, most: int) -> list[dict[str, Any]]:
        assert most == 50
        return [{"decision": 7, "at": "2026-01-01T06:12:00Z", "nodes": 5, "tiers": {"high": 1},
                 "calls": self.why("n1", 50)[0]["calls"], "skipped": []}]  # fmt: skip


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    folder = tmp_path_factory.mktemp("scores")
    a_week(folder)
    with running(folder, ledger=Ledger) as started:
        yield started


def test_a_node_shows_its_gpus_with_reasons_and_leads_to_them_and_to_the_ledger(service: Running) -> None:
    page = look(service, "/nodes/n1")
    assert page.column(0) == ["GPU-n1-0", "GPU-n1-1"]
    assert "correctable ECC errors rose by 17,700; fleet 99th percentile 0" in page.rows[1][-1]
    assert "60 % of the increase in the score; telemetry" in page.rows[1][-1]
    assert page.rows[2][-1] == "not elevated"
    assert ("/gpus/GPU-n1-0", "GPU-n1-0") in page.links
    assert ("/ledger?node=n1", "Ledger of n1") in page.links
    assert "trend over 4 decisions" in page.text
    assert sum(tag == "svg" and attributes.get("class") == "spark" for tag, attributes in page.tags) == 2


def test_a_gpu_of_which_nothing_is_known_says_why(service: Running) -> None:
    page = look(service, "/gpus/GPU-n5-0")
    assert "not known: its newest sample is 3 h old" in page.text
    assert [row[1] for row in page.rows if row and row[0].startswith("20")] == ["not known"] * 4


def test_what_is_not_there_is_a_page_with_404(service: Running) -> None:
    for path, text in (
        ("/nodes/x", "node &#39;x&#39;"),
        ("/gpus/x%3Cb", "GPU &#39;x&lt;b&#39;"),
        ("/nodes/n1?a=1", ""),
    ):
        status, body, _ = service.client().send("GET", path)
        assert status == (404 if text else 400)
        assert text in body.decode()


def test_an_expired_score_tells_only_what_it_was(tmp_path: Path) -> None:
    write_scores(tmp_path, small_fleet())
    with running(tmp_path, clock=lambda: NOW + timedelta(hours=30)) as late:
        page = look(late, "/gpus/GPU-n1-0")
        assert "Its last value was 90 %, high." in page.text
        assert "the score has expired" in look(late, "/nodes/n1").text


def test_the_ledger_page_says_what_was_decided_called_and_not_done(service: Running) -> None:
    text = look(service, "/ledger?node=n1").text
    for part in (
        "Decision 7, 2026-01-01 06:12 UTC", "high, risk 90 %: swap instead of drain", "ECC errors rose",
        "Over budget: rack r1 is full", "Breaker open: scores jumped", "swap n1: done",
        "/spec/taints: (none) → predrain.io/at-risk", "drain n1: not done, the stage is soft",
        "Values written",
        "checkpoint train-7: done", "empty: no workloads left to evict",
        "much unsaved work", "probed: passed",
    ):  # fmt: skip
        assert part in text
    assert look(service, "/ledger?node=n1").rows[1][1:] == ["n1", *RUNG.cells.values()]
    page = look(service, "/ledger")
    assert "5 nodes: high 1" in page.text
    assert ("/ledger?node=n1", "n1") in page.links
    assert "the ledger has no records of node 'n9'" in look(service, "/ledger?node=n9").text


def test_the_ledger_is_searched_by_node_action_and_day(service: Running) -> None:
    assert look(service, "/ledger?node=n%3F&verb=swap&since=&until=").column(0) == ["2026-01-01 06:12 UTC"]
    assert look(service, "/ledger?verb=drain").column(0) == ["No matches. Show all"]
    assert look(service, "/ledger?until=2025-12-31").column(0) == ["No matches. Show all"]
    assert service.client().send("GET", "/ledger?since=soon")[0] == 400


def test_the_fleet_says_what_was_last_done_on_a_node(service: Running) -> None:
    page = look(service, "/")
    out, nodes = page.rows[:2], page.rows[2:]
    assert out[1] == ["n1", "drain", "2026-01-01 06:12 UTC", "not known", "a test failed"]
    assert nodes[0][-2] == "Last action"
    assert [row[-2] for row in nodes[1:]] == ["swap 2026-01-01 06:12", "", "", "", ""]


def test_a_node_shows_its_risk_with_what_was_done_about_it(service: Running) -> None:
    page = look(service, "/nodes/n1")
    (chart,) = [attributes for tag, attributes in page.tags if tag == "svg" and attributes.get("class") == "chart"]
    assert chart["aria-label"] == "Risk of n1, what was done about it, and what failed"
    assert "2026-01-01T06:12:00Z: swap" in page.text
    assert "Out of service since 2026-01-01 06:12 UTC (drain): a test failed." in page.text
    assert "Out of service" not in look(service, "/nodes/n2").text


def test_without_a_ledger_or_outcomes_the_pages_say_so(tmp_path: Path) -> None:
    write_scores(tmp_path, small_fleet())
    with running(tmp_path) as started:
        assert "No ledger is configured. Start the service with --ledger FILE" in look(started, "/ledger?node=n1").text
        assert "No alert is evaluated yet" in look(started, "/outcomes").text
        assert "no ledger configured" in look(started, "/nodes/n1").text
        next(tmp_path.glob("decisions/*/risks.parquet")).unlink()
        page = look(started, "/gpus/GPU-n1-0")
        assert "No earlier decision about this GPU is stored." in page.text


def test_the_history_follows_the_folder(tmp_path: Path) -> None:
    a_week(tmp_path)
    assert [score.risk for score in past_scores(tmp_path, ["GPU-n3-0"])["GPU-n3-0"]] == pytest.approx([0.05] * 4)
    assert past_scores(tmp_path, ["GPU-n9-0"])["GPU-n9-0"] == []
    later = DECIDED + timedelta(hours=6)
    write_scores(
        tmp_path, [record("GPU-n3-0", "n3", None, decided=later), record("new", "n9", 0.2, decided=later)], later
    )
    assert [score.tier for score in past_scores(tmp_path, ["GPU-n3-0"])["GPU-n3-0"]] == ["watch"] * 4 + ["unknown"]
    assert past_scores(tmp_path, ["GPU-n3-0"])["GPU-n3-0"][-1].risk is None
    assert len(past_scores(tmp_path, ["new"])["new"]) == 1
    write_scores(tmp_path, [record("new", "n9", 0.4, "elevated", decided=later)], later)  # written again
    assert [score.risk for score in past_scores(tmp_path, ["new"])["new"]] == pytest.approx([0.4])


def test_a_risk_of_one_can_be_drawn(tmp_path: Path) -> None:
    for hours in (6, 0):
        decided = DECIDED - timedelta(hours=hours)
        write_scores(tmp_path, [record("g", "n", 1.0, "high", decided=decided)], decided)
    with running(tmp_path) as started:
        assert "100 % of an incident" in look(started, "/gpus/g").text


def test_a_damaged_decision_is_left_out_and_logged(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    a_week(tmp_path)
    (tmp_path / "decisions" / "20260101T000000Z" / "risks.parquet").write_bytes(b"damaged")
    assert len(past_scores(tmp_path, ["GPU-n1-0"])["GPU-n1-0"]) == 3
    assert len([line for line in caplog.messages if "left out" in line]) == 1


def test_drains_come_to_what_the_last_alert_before_them_was_judged_to_be_by_the_costs_weighed_then() -> None:
    time = datetime(2026, 1, 1, tzinfo=UTC)
    job = JobView("job", 8, checkpointed_at=time - timedelta(minutes=30), can_checkpoint=True)
    worth, unweighed = evaluate_drain(8, [job], 0.25, timedelta(hours=24), CostBenefitConfig(), time), {"worth": None}
    hour = ["2026-01-01T01:00:00Z", "2026-01-01T02:00:00+00:00"]
    drains = [{"node": node, "at": hour[1], "worth": asdict(worth)} for node in ("right", "wrong", "later", "unjudged")]
    alerts = [
        {"node": node, "at": when, "verdict": verdict}
        for node, when, verdict in (
            ("right", hour[1], "right"), ("right", hour[0], "wrong"), ("wrong", hour[0], "wrong"),
            ("later", "2026-01-01T03:00:00Z", "right"), ("unjudged", hour[0], "inconclusive"),
        )
    ]  # fmt: skip
    came = drains_came_to([*drains, {**drains[0], **unweighed}], alerts)
    assert (came["right"], came["wrong"], came["open"]) == (1, 1, 3)
    stop = 8 * (5 + 15) / 60  # a checkpoint and a restart; a failure costs half an interval more, and a longer repair
    assert came["saved"] == pytest.approx(8 * 24 + 8 * 1.25 - (stop + 8 * (2 + 12)))
    assert came["lost"] == pytest.approx(stop + 8 * 2)


@pytest.fixture(scope="module")
def scores(small_fleet: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two decisions of the simulated fleet, a day before its end; every fourth GPU is raised."""
    folder = tmp_path_factory.mktemp("scores")
    dataset = Dataset.open(small_fleet)
    here = dataset.inventory()
    here = here[here["removed_at"].isna()].drop_duplicates("gpu")
    for back in (30, 24):
        decided = (dataset.meta.span[1] - timedelta(hours=back)).replace(minute=0, second=0, microsecond=0)
        records = [
            record(gpu, node, 0.2 if i % 4 == 0 else 0.01, "elevated" if i % 4 == 0 else "clear", decided=decided)
            for i, (gpu, node) in enumerate(zip(here["gpu"], here["node"], strict=True))
        ]
        write_scores(folder, records, decided)
    write_facts(ScoresFolder(folder), dataset)
    return folder


@pytest.fixture(scope="module")
def scored_service(scores: Path, small_fleet: Path) -> Iterator[Running]:
    now = Dataset.open(small_fleet).meta.span[1] - timedelta(hours=23)
    with running(scores, clock=lambda: now) as started:
        yield started


def test_outcomes_begin_with_the_backtest_and_give_the_precision_so_far(tmp_path: Path) -> None:
    measured = {
        "since": "2025-10-01T00:00:00Z", "until": "2025-12-31T00:00:00Z", "episode_precision": 0.25,
        "episode_precision_low": 0.125, "episode_precision_high": 0.5, "episodes_right": 5, "episodes_known": 20,
        "incidents": 30, "caught": 9,
    }  # fmt: skip
    write_scores(tmp_path, of_five_nodes(), backtest=measured)
    weeks = _by_week(
        [
            {"at": time, "verdict": verdict}
            for time, verdict in (
                ("2026-01-06T00:00:00+00:00", "right"), ("2026-01-07T00:00:00+00:00", "wrong"),
                ("2026-01-14T00:00:00+00:00", "right"), ("2026-01-14T00:00:00+00:00", "open"),
            )
        ]
    )  # fmt: skip
    assert [(each["week"], each["precision"]) for each in weeks] == [("2026-01-05", 1 / 2), ("2026-01-12", 2 / 3)]
    with running(tmp_path) as started:
        text = look(started, "/outcomes").text
    assert "5 of 20" in text
    assert "25 % of the alerts would have been right" in text
    assert "9 of 30 node failures would have been caught" in text


def test_the_facts_name_each_unit_and_each_alert(scores: Path, small_fleet: Path) -> None:
    dataset, facts = Dataset.open(small_fleet), read_facts(scores)
    assert facts.data_end == dataset.meta.span[1]
    assert len(facts.places) == dataset.inventory()["gpu"].nunique()
    assert sum(facts.outcomes["verdicts"].values()) == len(facts.outcomes["alerts"]) > 0


def test_a_gpu_shows_hour_by_hour_the_telemetry_that_its_reasons_rest_on(scored_service, scores, small_fleet):
    dataset, facts = Dataset.open(small_fleet), read_facts(scores)
    unit = sorted(facts.courses)[0]
    end = dataset.meta.span[1]
    samples = pd.concat([dataset.read_bucket(bucket).to_pandas() for bucket in dataset.buckets()])
    rows = samples[(samples["gpu"] == unit) & (samples["timestamp"] < end)]
    means = facts.courses[unit]["gpu_temp_c"]
    assert len(means) == 7 * 24
    for back, mean in enumerate(reversed(means)):
        begin = pd.Timestamp(end) - pd.Timedelta(hours=back + 1)
        in_hour = rows[(rows["timestamp"] >= begin) & (rows["timestamp"] < begin + pd.Timedelta(hours=1))]["gpu_temp_c"]
        assert mean == (None if in_hour.isna().all() else pytest.approx(in_hour.astype(float).mean(), rel=1e-4))
    text = look(scored_service, f"/gpus/{unit}").text
    assert "Telemetry behind the reasons" in text
    assert f"{max(mean for mean in means if mean is not None):,.5g}" in text


@pytest.mark.parametrize("content", ["", "[]", "{}", '{"places": {"g": 1}}', '{"places": {"g": [1, 2, 3, 4, 5]}}'])
def test_damaged_facts_are_left_out_and_logged(tmp_path: Path, content: str, caplog: pytest.LogCaptureFixture) -> None:
    assert read_facts(tmp_path).outcomes is None
    (tmp_path / FACTS).write_text(content)
    assert read_facts(tmp_path).outcomes is None
    assert "the facts of the fleet cannot be read" in caplog.text

"""What is shipped for operators reads only metrics that the Helm chart's processes and `predrain retrain` export."""

import contextlib
import hashlib
import json
import re
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from evaluation.backtest.promotion_gate import Criterion, GateVerdict
from pipeline.promotion import PromotionResult
from pipeline.retraining import page_of
from serving.scores.writing import ScoresFolder, ScoringResult, record_attempt
from tests.chart import ALL, CHART, objects, rendered
from tests.serving.http.world import small_fleet
from tests.serving.score_folder import write_scores
from tests.waiting import free_port

DASHBOARD = CHART / "files" / "predrain.json"
RULES = CHART / "files" / "predrain-rules.yaml"
SCRAPED = {"cluster", "instance", "le"}
"""Labels that Prometheus itself adds, or that a histogram has."""

Labels = dict[str, set[str]]


def queries() -> list[str]:
    board = json.loads(DASHBOARD.read_text(encoding="utf-8"))
    shown = [target["expr"] for panel in board["panels"] for target in panel.get("targets", ())]
    rules = yaml.safe_load(RULES.read_text(encoding="utf-8"))
    alerts = [rule["expr"] for group in rules["groups"] for rule in group["rules"]]
    assert len(shown) > 20
    assert len(alerts) > 20
    return [*shown, *alerts]


def read_by(query: str) -> Labels:
    """Give the metrics that a query reads, each with the labels that it selects or groups by."""
    grouped = {word.strip() for labels in re.findall(r"\bby \(([^)]*)\)", query) for word in labels.split(",")}
    by_metric: Labels = {}
    for name, selector in re.findall(r"(predrain_\w+)(?:{([^}]*)})?", query):
        by_metric.setdefault(name, set()).update(re.findall(r"(\w+)\s*(?:!?=|[!=]~)", selector), grouped)
    return {name: labels - SCRAPED - {""} for name, labels in by_metric.items()}


def args_of(component: str) -> list[str]:
    """Give the arguments with which the chart starts a component that stays up."""
    (pod,) = (
        document["spec"]["template"]["spec"]
        for key, document in objects(rendered(ALL)).items()
        if key[0] in ("Deployment", "StatefulSet") and key[2] == f"predrain-{component}"
    )
    args: list[str] = pod["containers"][0]["args"]
    return args


@contextlib.contextmanager
def process(args: list[str], folder: Path) -> Iterator[None]:
    command = [str(Path(sys.executable).with_name("predrain")), *args]
    with (folder / "log").open("ab") as log:
        started = subprocess.Popen(command, cwd=folder, stdout=log, stderr=log)
    try:
        yield
    finally:
        started.terminate()
        started.wait(timeout=120)


def scrape(port: int, wanted: str, token: str | None = None) -> Labels:
    """Read a page once it has a metric: its metrics with their labels; None is known of a family without samples."""
    request = urllib.request.Request(f"http://127.0.0.1:{port}/metrics")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    ends = time.monotonic() + 240
    while True:
        page = ""
        with contextlib.suppress(OSError), urllib.request.urlopen(request, timeout=5) as answer:
            page = answer.read().decode()
        if f"TYPE {wanted} " in page:
            break
        assert time.monotonic() < ends, f"no {wanted} in {page}"
        time.sleep(0.3)
    return labels_of(page)


def labels_of(page: str) -> Labels:
    """Give the metrics of a page with their labels; None is known of a family without samples."""
    by_metric: Labels = {}
    for family in text_string_to_metric_families(page):
        tails = ("_bucket", "_sum", "_count") if family.type == "histogram" else ("",)
        for tail in tails if family.type != "counter" else ("_total",):
            by_metric.setdefault(family.name + tail, set())
        for sample in family.samples:
            by_metric.setdefault(sample.name, set()).update(sample.labels)
    return by_metric


def local(args: list[str], folder: Path, port: int, **instead: Any) -> list[str]:
    """Give a chart's arguments with this machine's folders and port."""
    changed = []
    for arg in args:
        name = arg.partition("=")[0]
        if name in instead:
            changed += instead[name]
            continue
        here = re.sub("/data|/ledger(?=/)|/etc/predrain", str(folder), arg)
        changed.append(re.sub(r"0\.0\.0\.0:\d+", f"127.0.0.1:{port}", here).replace("0.0.0.0", "127.0.0.1"))
    return changed


def scores(folder: Path) -> None:
    now = datetime.now(UTC).replace(minute=0, second=0, microsecond=0)
    write_scores(folder, small_fleet(now), now)
    summary = {
        "format": 2, "decision_time": now.isoformat(), "expires_at": (now + timedelta(hours=9)).isoformat(),
        "tiers": {"high": 1, "unknown": 1}, "alerts": 1, "newest_sample": now.isoformat(),
        "newest_sample_age_seconds": 1.0,
        "duration_seconds": 2.0, "model": {"fitted_at": (now - timedelta(days=1)).isoformat()},
    }  # fmt: skip
    decision = folder / "decisions" / now.strftime("%Y%m%dT%H%M%SZ")
    (decision / "summary.json").write_text(json.dumps(summary))
    (decision / "risks.parquet").touch()
    result = ScoringResult(now, True, decision, summary)
    record_attempt(ScoresFolder(folder), datetime.now(UTC), result)


@pytest.fixture(scope="module")
def exported(tmp_path_factory: pytest.TempPathFactory) -> Labels:
    """What the chart's processes export, all started as the chart starts them, beside a fleet in files."""
    folder = tmp_path_factory.mktemp("chart")
    scores(folder / "scores")
    nodes = [{"name": f"n{number}", "cluster": "c", "group": "g"} for number in range(1, 6)]
    (folder / "cluster.json").write_text(json.dumps({"format": 1, "nodes": nodes}))
    (folder / "act.yaml").write_text(
        "policy: {thresholds: {watch: 0.1, elevated: 0.3, high: 0.6}, stages: {ceiling: hard, pinned: {c/g: hard}},"
        " hysteresis: {rise_after: 1}}\ncontroller: {lease: 2m}\n"
    )
    token = "a-token-that-is-long-enough-for-anyone"
    (folder / "tokens.txt").write_text(f"read sha256:{hashlib.sha256(token.encode()).hexdigest()} prometheus\n")
    (folder / "receiver.txt").write_text(f"{token}\n")
    (folder / "targets.txt").write_text("127.0.0.1:9\n")
    ports = {name: free_port() for name in ("act", "serve", "exporters", "receive")}
    started = {
        "act": local(
            args_of("act"), folder, ports["act"], **{
                "--scheduler": [f"--cluster={folder}/cluster.json"], "--events": [],
            },
        ),
        "serve": local(
            args_of("serve"), folder, ports["serve"],
        ),
        "exporters": local(
            args_of("exporters"), folder, ports["exporters"], **{
                "--targets": [f"--targets={folder}/targets.txt"],
            },
        ),
        "receive": local(
            args_of("receiver"), folder, ports["receive"], **{
                "--tokens": [f"--tokens={folder}/receiver.txt"],
            },
        ),
    }  # fmt: skip
    by_metric: Labels = {}
    with contextlib.ExitStack() as stack:
        for args in started.values():
            stack.enter_context(process(args, folder))
        by_metric |= scrape(ports["act"], "predrain_act_last_round_timestamp_seconds")
        by_metric |= scrape(ports["serve"], "predrain_scores_age_seconds", token)
        by_metric |= scrape(ports["exporters"], "predrain_exporters_targets")
        by_metric |= scrape(ports["receive"], "predrain_receiver_last_write_timestamp_seconds", token)
    worse = Criterion("precision", "the champion", 0.2, 0.1, "no less", "failed", "0.1 is less")
    at = datetime(2026, 1, 1, tzinfo=UTC)
    verdict = GateVerdict("the recipe", "the champion", (worse,), 9, 3, 3, 3, 1, at, at)
    refused = PromotionResult("refused", "predrain", 2, 1, 1, dry_run=False, verdict=verdict)
    return by_metric | labels_of(page_of(at, refused))  # of `predrain retrain`, by the textfile collector


def test_each_series_that_a_rule_or_a_panel_reads_is_exported_by_something_that_the_chart_starts(exported):
    missing = []
    for query in queries():
        for name, labels in read_by(query).items():
            if name not in exported:
                missing.append(f"{name} in {query}")
            elif exported[name] and not labels <= exported[name]:
                missing.append(f"{name} without {labels - exported[name]} in {query}")
    assert missing == []

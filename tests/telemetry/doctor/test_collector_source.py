"""Looking at what the collector of exporters wrote."""

import json
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from telemetry.collect.exporters.page import PageReader
from telemetry.collect.exporters.targets import Target
from telemetry.collect.exporters.watch import TargetWatch
from telemetry.collect.series.identity import SeriesCatalogue
from telemetry.dataset.channels import CATALOGUE
from telemetry.doctor.collector_source import observe_collector
from telemetry.doctor.diagnosis import diagnose
from telemetry.doctor.report import as_text
from telemetry.errors import InputError
from tests.telemetry.doctor.looks import NOW


def target(**given: Any) -> dict[str, Any]:
    """Give what the collector writes of a target, with changes."""
    watch = TargetWatch(Target("http://n:9400/metrics"), PageReader(SeriesCatalogue(CATALOGUE)), 150.0)
    whole = watch.as_state(0.0)
    unknown = set(given) - set(whole)
    assert unknown == set(), "the collector does not write these"
    return whole | {"collector": "host:1", "seen_at": NOW.isoformat(), "scrapes": 100} | given


def state(folder: Path, targets: dict[str, Any], **collector: Any) -> Path:
    whole = {
        "seen_at": NOW.isoformat(),
        "interval_s": 30.0,
        "scrapes": 1000,
        "late": 0,
        "rows_dropped": 0,
        "problem": None,
    }
    path = folder / "exporters.json"
    path.write_text(
        json.dumps({"written_at": NOW.isoformat(), "collectors": {"host:1": whole | collector}, "targets": targets})
    )
    return path


def told(folder: Path, targets: dict[str, Any], **collector: Any) -> list[str]:
    return [each.what for each in observe_collector(state(folder, targets, **collector), now=NOW).findings]


def test_a_healthy_collector_is_fine(tmp_path: Path) -> None:
    path = state(tmp_path, {"n1:9400": target(gpus={"GPU-1": 41}), "n2:9400": target(gpus={"GPU-2": 41})})
    diagnosis = diagnose(observe_collector(path, now=NOW), None, "", CATALOGUE)
    assert diagnosis.healthy
    assert diagnosis.observation.facts["channels a GPU"] == "41"
    assert "2 GPUs on 2 nodes" in as_text(diagnosis)


def test_targets_that_fail_are_grouped_by_how(tmp_path: Path) -> None:
    failing = target(failures_in_row=4, failures_total=4, last_failure_kind="timeout", last_failure="no page in 10 s")
    targets = {f"n{number}:9400": failing for number in range(7)} | {
        "gone:9400": failing | {"last_failure_kind": "refused", "last_failure": None},
        "flaky:9400": target(failures_total=20),
    }
    path = state(tmp_path, targets)
    seen = observe_collector(path, now=NOW)
    assert [each.what for each in seen.findings] == [
        "7 of the targets (n0:9400, n1:9400, n2:9400, n3:9400, n4:9400 and 2 more) cannot be scraped now: timeout "
        "(no page in 10 s)",
        "1 of the targets (gone:9400) cannot be scraped now: refused",
        "1 of the targets (flaky:9400) often cannot be scraped",
    ]
    assert seen.findings[1].do.startswith("Nobody listens there")
    assert not diagnose(seen, None, "", CATALOGUE).healthy


def test_targets_that_answer_and_yet_are_not_well(tmp_path: Path) -> None:
    targets = {
        "frozen:9400": target(hung=True, gpus={"GPU-1": 41}),
        "slow:9400": target(scrape_duration_s=8.0, gpus={"GPU-2": 41}),
        "early:9400": target(clock_skew_s=-60.0, gpus={"GPU-3": 41}),
        "poor:9400": target(gpus={"GPU-4": 22}),
        "odd:9400": target(problems={"bad line": 3}, unexplained=["DCGM_FI_DEV_SHINY"], gpus={"GPU-5": 41}),
    }
    assert told(tmp_path, targets) == [
        "1 of the targets (frozen:9400) give the same page for ever",
        "1 of the targets (slow:9400) answer slowly",
        "1 of the targets (early:9400) have a clock that is off ours",
        "1 of the targets (poor:9400) have GPUs with fewer channels than the others",
        "parts of pages were left out: bad line (3)",
    ]


def test_the_collector_itself(tmp_path: Path) -> None:
    good = {"n1:9400": target(gpus={"GPU-1": 41})}
    assert told(tmp_path, good, seen_at=(NOW - timedelta(hours=5)).isoformat()) == [
        "the collector host:1 has been silent for 5h"
    ]
    assert told(tmp_path, good, problem="disk full", rows_dropped=1200, late=200, clock_jumps=2) == [
        "host:1 cannot land its rows: disk full",
        "host:1 had to drop 1,200 rows",
        "20% of the scrapes of host:1 start late",
        "the clock of host:1 was set 2 times",
    ]
    assert told(tmp_path, {}) == ["no target was scraped"]


def test_no_state_and_other_json(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no collector of exporters has written its state there"):
        observe_collector(tmp_path / "exporters.json", now=NOW)
    for text in ("{}", "[1]", '{"collectors": {}, "targets": {"a": 1}}'):
        (tmp_path / "exporters.json").write_text(text)
        with pytest.raises(InputError, match="the file is not a collector's state"):
            observe_collector(tmp_path / "exporters.json", now=NOW)

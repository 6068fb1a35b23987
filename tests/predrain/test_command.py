"""The command as a user meets it: help, exit codes, messages, JSON, progress; `init` and `promote`."""

import json
import os
import shutil
import subprocess
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pipeline.params import load_params
from pipeline.promotion import PromotionResult
from predrain import console
from predrain.console import progress
from predrain.options import instant_option, prometheus_address
from tests.processes import PREDRAIN, invoke
from tests.telemetry.helpers import run_import, samples_frame

VERBS = (
    *("simulate", "import", "prepare", "features", "train", "promote"),
    *("backtest", "report", "doctor", "score", "serve", "act"),
)
SOURCES = (
    *("compact", "prometheus", "openmetrics", "exporters", "receive", "nvml"),
    *("kernel-log", "gpud", "slurm", "kubernetes", "tickets", "diagnostics"),
)


@pytest.mark.parametrize("arguments", [*((verb,) for verb in VERBS), *(("collect", source) for source in SOURCES),
                                   *(("ledger", verb) for verb in ("why", "list", "replay", "export")),
                                   ("prior", "build"), ("collect",), ("ledger",)])  # fmt: skip
def test_every_verb_has_help_with_an_example(arguments: tuple[str, ...]) -> None:
    output = invoke(*arguments, "--help")
    assert f"Example: predrain {' '.join(arguments)}" in output.stdout
    if arguments == ("simulate",):
        assert all(f"{name}:" in output.stdout for name in ("base", "drift", "epidemic", "noprecursor", "announced"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ("features --dataset absent --out matrix", "absent"),
        ("import --inventory file --events fleet --out matrix", "fleet/events.parquet"),
        ("import --inventory file --samples fleet --out matrix", "fleet/telemetry"),
        ("serve --scores file", "(--scores file). Give the folder that `predrain score --out` writes."),
        ("serve --scores fleet", "(--scores fleet). Give the folder that `predrain score --out` writes."),
        ("act --scores file --cluster file --settings file", '(file). Write JSON with a "format" and "nodes"'),
        ("act --scores absent --cluster file --settings file", '(file). Write JSON with a "format" and "nodes"'),
    ],
)
def test_bad_input_exits_with_1_and_one_line_without_a_traceback(tmp_path: Path, arguments: str, message: str) -> None:
    (tmp_path / "fleet").mkdir()
    for name in ("file", "fleet/dataset.json"):
        (tmp_path / name).write_text("no: json")
    failed = invoke(*arguments.split(), cwd=tmp_path, code=1)
    assert failed.stderr.startswith("predrain: error: ")
    assert message in failed.stderr
    assert failed.stderr.count("\n") == 1
    assert not (tmp_path / "matrix").exists()


def test_a_reader_that_has_enough_of_the_output_is_no_error() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    with os.fdopen(writes) as closed:
        ended = subprocess.run([*PREDRAIN, "simulate", "--help"], stdout=closed, stderr=subprocess.PIPE, check=False)
    assert (ended.returncode, ended.stderr) == (1, b"")


def test_what_a_backtest_comes_to_is_printed_with_the_path_of_its_page_last(small_backtest: Path) -> None:
    output = invoke("report", "--show", small_backtest).stdout
    lines = output.rstrip().splitlines()
    assert lines[-1] == f"Report: {(small_backtest / 'report' / 'index.html').resolve()}"
    assert any(line.startswith("ensemble of the profile (mean_log_odds) ") and line.endswith("*") for line in lines)
    for mechanism in ("best single model", "ensemble of the paper (intersection)", "cascade"):
        assert any(line.startswith(mechanism) for line in lines)
    summary = json.loads(invoke("report", "--show", small_backtest, "--json").stdout)
    assert (summary["profile"], summary["report"]) == ("mean_log_odds", str(small_backtest / "report" / "index.html"))


def test_a_report_of_a_dataset_begins_with_the_verdict_and_what_each_action_nets(
    small_fleet: Path, small_backtest: Path, small_params_file: Path, tmp_path: Path
) -> None:
    backtest = tmp_path / "replay"
    shutil.copytree(small_backtest, backtest)
    inputs = ["--dataset", small_fleet, "--matrix", backtest / "matrix", "--params", small_params_file]
    invoke("report", "--backtest", backtest, *inputs)
    page = (backtest / "report" / "index.html").read_text()
    output = invoke("report", "--show", backtest).stdout
    answer = output.splitlines()[-5]  # before two lines on actions, and the path of the page
    positions = [page.index(f"<strong>{answer}"), page.index("Net GPU-hours by action"), page.index("<table>")]
    assert positions == sorted(positions)


def test_prepare_takes_the_dataset_that_the_parameters_name(tmp_path: Path, small_fleet: Path) -> None:
    (tmp_path / "params.yaml").write_text(f"data: {{dataset: {small_fleet}}}\n")
    invoke("prepare", "--out", "data/dataset", cwd=tmp_path)
    original = (small_fleet / "dataset.json").read_bytes()
    assert (tmp_path / "data" / "dataset" / "dataset.json").read_bytes() == original
    assert (tmp_path / "data" / "dataset-truth" / "risk.parquet").is_file()


@pytest.mark.parametrize(
    ("kept", "message"),
    [("home/thesis.txt", "exists and is not a dataset"), ("home/fleet/dataset.json", "or nested")],
)
def test_prepare_replaces_no_folder_of_another_tool(tmp_path: Path, small_fleet: Path, kept: str, message: str) -> None:
    inside = kept.startswith("home/fleet")
    if inside:
        shutil.copytree(small_fleet, tmp_path / "home" / "fleet")
    else:
        (tmp_path / "home").mkdir()
        (tmp_path / kept).write_text("precious")
    (tmp_path / "params.yaml").write_text(f"data: {{dataset: {'home/fleet' if inside else small_fleet}}}\n")
    refused = invoke("prepare", "--out", "home", cwd=tmp_path, code=1)
    assert message in refused.stderr
    assert (tmp_path / kept).is_file()


@pytest.mark.parametrize(
    ("verb", "source"), [("backtest", "dataset"), ("features", "dataset"), ("backtest", "matrix"), ("train", "matrix")]
)
def test_results_are_not_written_into_their_source(tmp_path: Path, verb: str, source: str) -> None:
    (tmp_path / source).mkdir()
    refused = invoke(verb, f"--{source}", tmp_path / source, "--out", f"{tmp_path}/{source}/x", code=1)
    assert f"is inside the {source}" in refused.output
    assert not list((tmp_path / source).iterdir())


def test_import_says_what_it_understood_and_a_second_one_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "hosts.csv").write_text(
        "gpu,node,slot,pci_bus_id,installed_at\n"
        "GPU-a,n1,0,0000:3b:00.0,2026-01-01T00:00:00Z\nGPU-b,n1,1,0000:5e:00.0,2026-01-01T00:00:00Z\n"
    )
    (tmp_path / "dmesg.log").write_text(
        "2026-02-03T04:05:06+00:00 n1 kernel: NVRM: Xid (PCI:0000:3b:00): 79, GPU has fallen off the bus.\n"
    )
    (tmp_path / "tickets.csv").write_text(
        "timestamp,node,gpu,type,code\n2026-02-03T06:00:00+01:00,n1,GPU-a,repair,swap\n"
        "2026-02-04T06:00:00+01:00,n1,GPU-z,failure,dead\n"
    )
    command = ["import", "--events", "dmesg.log", "tickets.csv", "--inventory", "hosts.csv", "--out", "fleet"]
    first = invoke(*command, "--json", cwd=tmp_path)
    result = json.loads(first.stdout)
    assert result["changed"] is True
    assert result["units"] == 2
    assert result["events"] == {"xid": 1, "repair": 1}
    assert sum(result["quarantined"].values()) == 1
    assert result["notes"] is None
    assert json.loads(invoke(*command, "--json", cwd=tmp_path).stdout)["changed"] is False
    hours = "".join(f"2026-02-03T{hour:02}:00:00Z,n1,GPU-a,300\n" for hour in range(24))
    (tmp_path / "hourly.csv").write_text(f"timestamp,node,gpu,power_w\n{hours}")
    assert "`telemetry.step: 1h`" in invoke(*command, "--samples", "hourly.csv", cwd=tmp_path).stdout


@pytest.mark.parametrize(
    ("written", "instant"),
    [
        ("2026-03-01", datetime(2026, 3, 1, tzinfo=UTC)),
        ("2026-03-01T12:00:00+02:00", datetime(2026, 3, 1, 10, tzinfo=UTC)),
        ("1d12h", datetime(2026, 2, 28, 12, tzinfo=UTC)),
    ],
)
def test_an_instant_may_be_a_day_a_time_with_its_zone_or_how_long_ago(written, instant):
    assert instant_option(written, "--at", datetime(2026, 3, 2, tzinfo=UTC)) == instant


def test_the_environment_names_a_prometheus_where_no_other_source_is_given(monkeypatch):
    monkeypatch.setenv("PREDRAIN_PROMETHEUS", "http://prom:9090")
    assert prometheus_address(None, None, ()) == "http://prom:9090"
    assert prometheus_address("http://other:9090") == "http://other:9090"
    assert prometheus_address(None, "fleet") is None


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    now = [100.0]
    monkeypatch.setattr(console.time, "monotonic", lambda: now[0])
    return now


def test_a_long_job_says_now_and_then_how_far_it_is_how_fast_and_how_long_still(clock, capsys):
    with progress("features") as advance:
        advance(2_000_000, 10_000_000)  # an earlier run had done so much
        for step in range(1, 61):
            clock[0] += 1
            advance(2_000_000 + 50_000 * step, 10_000_000)
    out, err = capsys.readouterr()
    assert out == ""
    assert err.splitlines() == [
        "predrain: features: 3,500,000 of 10,000,000 (35%), 50,000 a second, about 0:02:10 left",
        "predrain: features: 5,000,000 of 10,000,000 (50%), 50,000 a second, about 0:01:40 left",
    ]


def test_slow_and_standing_jobs_are_reported_too(clock, capsys):
    with progress("backtest") as advance:
        for n_done in (0, 0, 1):
            advance(n_done, 12)
            clock[0] += 40
    assert capsys.readouterr().err.splitlines() == [
        "predrain: backtest: 0 of 12 (0%)",
        "predrain: backtest: 1 of 12 (8%), 0.013 a second, about 0:14:40 left",
    ]


@pytest.mark.parametrize("is_there", [True, False])
def test_the_parameters_have_the_step_of_the_dataset_and_its_counts_are_shown(tmp_path: Path, is_there: bool) -> None:
    if is_there:
        samples = samples_frame(every="30min")
        samples.loc[0, "gpu_temp_c"] = 1e9
        run_import(tmp_path, samples=samples, step=timedelta(minutes=30), out="fleet", max_loss=1.0)
    result = invoke("init", tmp_path / "model", "--dataset", "../fleet", "--json")
    output = json.loads(result.stdout)
    params = load_params([tmp_path / "model" / "predrain.yaml"])
    assert params.telemetry.step == (timedelta(minutes=30) if is_there else None)
    assert params.data.dataset == "../fleet"
    assert (output.get("samples"), output.get("quarantined")) == (
        (24, {"value out of range": 1}) if is_there else (None, None)
    )


def test_an_absent_store_is_one_line_and_is_not_made(tmp_path: Path) -> None:
    result = invoke("promote", "--rollback", "--registry", f"sqlite:///{tmp_path / 'no.db'}", code=1)
    assert "store does not exist" in result.output
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(("action", "code"), [("promoted", 0), ("forced", 0), ("refused", 1)])
def test_a_verdict_is_printed_and_is_the_exit_code(action: str, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decision = PromotionResult(action, "predrain", 2, 1, 1 if action == "refused" else 2, dry_run=False)
    monkeypatch.setattr("pipeline.promotion.promote", lambda *_args, **_kwargs: decision)
    result = invoke("promote", "--matrix", "m", "--json", code=code)
    assert json.loads(result.output)["action"] == action


SCORE = "score --dataset d --model m --out s"
DASK = "--dataset d --out m --dask-workers 2"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("backtest --out replay", "--dataset or --matrix"),
        ("backtest --dataset a --matrix b --out replay", "--dataset or --matrix"),
        (f"backtest {DASK}", "require --engine dask"),
        (f"features {DASK}", "require --engine dask"),
        (f"features {DASK} --engine dask --dask-address tcp://h:1", "give either --dask-address or"),
        ("collect compact --dataset d --interval 99999999999999d", "is too long a duration"),
        ("promote", "the gate compares on recent data"),
        ("promote --matrix a --dataset b", "give either --dataset or --matrix"),
        ("promote --force", "--force requires --reason"),
        ("promote --rollback --to 3", "--rollback takes no"),
        (f"{SCORE} --at 2026-01-01T06:00:00Z --interval 5m", "--at and --interval cannot be combined"),
        (f"{SCORE} --at soon", "'soon' is not a time: write 2026-03-01T12:00:00Z, 2026-03-01 (00:00 UTC), or 90d"),
        (f"{SCORE} --at 2026-01-01T06:00:00", "has no time zone"),
        (f"{SCORE} --interval often", "'often' is not a duration"),
        (f"{SCORE} --interval 0s", "at least 1s"),
    ],
)
def test_what_makes_no_sense_is_a_usage_error_that_makes_nothing(tmp_path: Path, words: str, message: str) -> None:
    assert message in invoke(*words.split(), cwd=tmp_path, code=2).output
    assert not list(tmp_path.iterdir())

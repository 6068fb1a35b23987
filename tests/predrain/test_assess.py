"""`predrain assess` on small simulated fleets: what it answers, what it recommends, and that it writes nowhere else."""

import inspect
import json
import re
import shlex
import shutil
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from types import SimpleNamespace

import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml
from typer import BadParameter

from evaluation.value.ladder import Assumptions
from features.matrix.matrix import FeatureMatrix
from foundation.durations import parse_duration
from pipeline.assessment import workflow
from pipeline.assessment.text import commands, data, recommendation, write_page
from pipeline.assessment.workflow import repairs, settings_of, write_settings
from pipeline.params import Params, with_step
from policy.budget import BudgetConfig
from policy.ladder.cost_benefit import CostBenefitConfig
from policy.ladder.probes import ProbeConfig
from policy.ladder.rungs import RUNGS
from predrain.assess import _asked_scheduler, assess
from scheduler.controller.settings import read_settings
from simulator.simulate import simulate
from telemetry.dataset.store import Dataset
from tests.light_models import lightgbm_alone
from tests.processes import invoke
from tests.telemetry.collect.prometheus.fake_prometheus import FakePrometheus, serving
from tests.telemetry.helpers import events_frame, inventory_frame, samples_frame, write_csv

LIGHT = lightgbm_alone(
    20,
    "features: {windows: [1h], history_windows: [7d, 30d]}",
    "training: {candidate_windows: [14d, 28d], refit_every: 14d, augmentation: 2}",
)


class Fleets:
    """Assessments of simulated fleets, each made once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.params = folder / "light.yaml"
        self.params.write_text(LIGHT)

    def assess(self, scenario: str, acceleration: float) -> Path:
        """Assess a fleet, and give the folder that it was written to."""
        dataset, out = self.folder / f"{scenario}-{acceleration:g}", self.folder / f"{scenario}-{acceleration:g}-out"
        if not out.exists():
            simulate(dataset, gpus=64, days=45, seed=101, scenario=scenario, acceleration=acceleration)
            (out / "verdict.txt").write_text(self.run(dataset, out))
        return out

    def run(self, dataset: Path | None, out: Path, *more: str | Path) -> str:
        source = [] if dataset is None else ["--dataset", dataset]
        arguments = ["assess", *source, "--out", out, "--params", self.params, *more]
        result = invoke(*arguments)
        return result.stdout


@pytest.fixture(scope="session")
def fleets(tmp_path_factory: pytest.TempPathFactory) -> Fleets:
    return Fleets(tmp_path_factory.mktemp("assess"))


def read(out: Path) -> dict:
    return json.loads((out / "assessment.json").read_text())


def test_failures_that_announce_themselves_are_predictable_and_the_ladder_says_what_pays(fleets):
    out = fleets.assess("announced", 80)
    content, text = read(out), (out / "verdict.txt").read_text()
    assert content["predictable"]["answer"] == "yes"
    assert "YES" in text
    assert f"Recommended: {', '.join(content['recommended'])} (" in text
    held_back = content["replayed"]["held_back"]
    assert held_back, "nodes in repair use the budget of so small a fleet"
    assert f"Disruption budgets prevented {held_back} drains" in text
    alone = next(row for row in content["policies"] if row["policy"] == "hard rules alone")
    assert alone["net_high"] >= 0, "today's practice is neutral at worst"


ROW = {
    "rung": str, "actions": int, "known": int, "right": int, "gpu_hours_saved": float, "gpu_hours_spent": float,
    "net": float, "net_low": float, "net_high": float,
}  # fmt: skip


@pytest.mark.parametrize(("scenario", "rate"), [("announced", 80), ("noprecursor", 90)])
def test_the_ladder_has_a_row_a_rung_and_a_recommended_one_never_loses(fleets, scenario, rate):
    content = read(fleets.assess(scenario, rate))
    assert [row["rung"] for row in content["ladder"]] == list(RUNGS)
    for row in content["ladder"]:
        assert {name: type(row[name]) for name in ROW} == ROW
        assert row["net_low"] <= row["net"] <= row["net_high"]
        assert row["net"] == pytest.approx(row["gpu_hours_saved"] - row["gpu_hours_spent"])
        assert 0 <= row["right"] <= row["known"]
    chosen, net = content["recommended"], content["recommended_net"]
    assert chosen[0] == "publish"
    assert set(chosen) <= set(RUNGS)
    assert set(net) == {"value", "low", "high"}
    assert (net["low"] > 0) == (len(chosen) > 1)


@pytest.mark.parametrize(("low", "named"), [(-89.0, True), (12.0, False)])
def test_an_action_that_is_not_significant_alone_is_recommended_with_the_reason(low, named):
    row = {"rung": "drain", "net_low": low}
    net = {"value": 2_904.0, "low": 569.0, "high": 5_830.0}
    content = {"ladder": [row], "recommended": ["publish", "drain"], "recommended_net": net,
               "predictable": {"answer": "yes"}}  # fmt: skip
    text = " ".join(recommendation(content))
    assert "The set nets 2,904 GPU-hours (569 to 5,830)" in text
    assert ("drain alone is not significant" in text) == named


def test_gangs_of_the_operators_size_are_replayed_on_the_same_scores(fleets):
    single = fleets.assess("announced", 80)
    out = shutil.copytree(single, fleets.folder / "gangs-out")
    fleets.run(fleets.folder / "announced-80", out, "--gpus-per-job", "64", "--no-checkpoint-on-request")
    content, single_gpus = read(out), read(single)
    assert content["predictable"] == single_gpus["predictable"]
    assert (content["jobs"]["from"], content["jobs"]["mean_gpus_by_gpu_hours"]) == ("a generated load", 64)
    sizes = [size["gpus_per_job"] for size in content["by_job_size"]]
    assert sizes == [8, 64, None], "no larger one fits, and last come sizes as in a trace"


@pytest.mark.parametrize("option", ["--gpus-per-job", "--largest-job"])
def test_more_gpus_than_there_are_is_refused(fleets, option):
    out = fleets.assess("noprecursor", 90)
    arguments = ["assess", "--dataset", fleets.folder / "noprecursor-90", "--out", out, "--params", fleets.params]
    result = invoke(*arguments, option, "4096", code=1)
    assert "4096 exceeds the" in result.stderr


def test_the_page_needs_nothing_else_has_the_verdict_first_and_escapes_what_it_is_given(fleets, tmp_path):
    page = (fleets.assess("announced", 80) / "index.html").read_text()
    assert "<h1>YES. Failures are predictable here.</h1>" in page
    order = [
        page.index(part)
        for part in ("<h1>", "Recommended:", "<caption>GPU-hours that each action", "predrain act", "channels")
    ]
    assert order == sorted(order)
    assert not re.search(r"(src|href)=.(?!#)|url\((?!#)|@import", page)
    assert page.index("<figure>") < page.index("<caption>GPU-hours that each action"), "the picture comes first"
    content = read(fleets.assess("base", 15))
    content["data"]["to_do"][0] |= {"what": "<script>1</script>", "steps": ["`<b>` & more"]}
    written = write_page(content, tmp_path, "<i>mine</i>", []).read_text()
    assert "<script>" not in written
    assert "<i>" not in written
    assert "<code>&lt;b&gt;</code> &amp; more" in written
    assert "TOO FEW FAILURES TO TELL" in written


@pytest.mark.parametrize(
    ("rungs", "stage"),
    [(["publish"], "shadow"), (["publish", "probe"], "soft"), (["publish", "avoid"], "soft"),
     (["publish", "swap"], "hard"), (["publish", "probe", "drain"], "hard")],
)  # fmt: skip
def test_the_recommended_settings_allow_no_more_than_the_rungs_need(rungs, stage):
    assert settings_of(rungs, {"high": 0.3})["stage"] == stage


def test_failures_without_precursors_are_said_not_to_be_predictable(fleets):
    out = fleets.assess("noprecursor", 90)
    assert read(out)["predictable"]["answer"] == "no"
    assert read(out)["recommended"] == ["publish"]
    text = (out / "verdict.txt").read_text()
    assert "NO. Failures are not predictable" in text
    assert "only round-robin probes of idle nodes could pay" in text


def test_a_handful_of_failures_is_too_few_to_tell_and_how_many_more_is_said(fleets):
    out = fleets.assess("base", 15)
    content, text = read(out), (out / "verdict.txt").read_text()
    assert 0 < sum(content["data"]["failures"].values()) <= 8
    assert content["predictable"]["answer"] == "too few failures"
    assert content["predictable"]["more"] >= 10
    assert f"TOO FEW FAILURES TO TELL. About {content['predictable']['more']} more are needed" in text


def test_channels_that_are_dropped_are_named_group_by_group_with_how_they_are_switched_on(tmp_path):
    simulate(tmp_path / "whole", gpus=16, days=5, seed=3, scenario="base", acceleration=90)
    dataset = Dataset.open(tmp_path / "whole")
    dropped = [name for name in dataset.meta.channels if name.startswith(("pcie", "nvlink"))]
    table = pa.concat_tables([dataset.read_bucket(bucket) for bucket in dataset.buckets()]).drop_columns(dropped)
    pq.write_table(table, tmp_path / "samples.parquet")
    files = {"samples": tmp_path / "samp*.parquet", "inventory": tmp_path / "whole" / "inventory.parquet"}
    arguments = [f"--{name}={path}" for name, path in files.items()]
    invoke("assess", *arguments, "--events", dataset.path / "events.parquet", "--json", "--out", tmp_path / "out")
    to_do = {todo["what"].split(":")[0]: todo for todo in read(tmp_path / "out")["data"]["to_do"]}
    for group, failures, counter in (("PCIe", "bus", "PCIE_REPLAY"), ("NVLink", "interconnect", "NVLINK")):
        assert f"precursors of {failures} failures" in to_do[group]["shows"]
        assert any(counter in step for step in to_do[group]["steps"]), to_do[group]["steps"]
    assert any(name in to_do["PCIe"]["what"] for name in dropped)


def test_a_fleet_without_failures_is_said_to_have_none(fleets):
    out = fleets.assess("noprecursor", 0.001)
    assert read(out)["predictable"]["answer"] == "no failures"
    assert "NO FAILURES" in (out / "verdict.txt").read_text()


def test_the_three_commands_that_it_names_run_as_they_stand_and_take_the_recommended_settings(fleets, monkeypatch):
    out = fleets.assess("announced", 80)
    lines = (out / "verdict.txt").read_text().split("Next steps\n")[1].splitlines()
    train, score, act = (line.split()[1:] for line in lines)
    monkeypatch.chdir(fleets.folder)
    for command in (train, score):
        invoke(*command)
    chosen = read(out)["settings"]
    (summary,) = (out / "scores" / "decisions").rglob("summary.json")
    assert json.loads(summary.read_text())["thresholds"] == pytest.approx(chosen["thresholds"], rel=1e-3)
    nodes = sorted(Dataset.open(fleets.folder / "announced-80").inventory()["node"].unique())
    cluster = {"format": 1, "nodes": [{"name": name, "cluster": "c", "group": "g"} for name in nodes]}
    (fleets.folder / "cluster.json").write_text(json.dumps(cluster))
    act[act.index("kubernetes")] = "file"
    result = invoke(*act, "--cluster", "cluster.json")
    assert "policy.horizon" not in result.output, "that of the settings is the scores'"
    settings = read_settings(out / "act.yaml").policy
    assert settings.stages.ceiling == chosen["stage"]
    assert settings.thresholds.high == pytest.approx(chosen["thresholds"]["high"], rel=1e-3)


@pytest.mark.parametrize("kind", ["kubernetes", "slurm", "file"])
def test_the_settings_and_the_commands_are_for_the_scheduler_that_is_named(tmp_path, monkeypatch, kind):
    settings = settings_of(["publish", "avoid"], {"watch": 0.1, "elevated": 0.2, "high": None}) | {"scheduler": kind}
    write_settings(tmp_path / "act.yaml", settings, Params(), Assumptions())
    assert (read_settings(tmp_path / "act.yaml").slurm is not None) == (kind == "slurm")
    content = {"predictable": {"answer": "yes"}, "ladder": [{}], "settings": settings}
    line = commands(content, tmp_path, "fleet", [])[-1]
    assert f"predrain act --scheduler {kind} " in line
    assert ("--cluster cluster.json" in line) == (kind == "file")
    monkeypatch.setattr("typer.prompt", lambda *_args, **_more: kind)
    assert _asked_scheduler().value == kind
    monkeypatch.setattr("typer.prompt", lambda *_args, **_more: "pbs")
    with pytest.raises(BadParameter):
        _asked_scheduler()


def test_the_settings_hold_what_was_assumed_and_every_other_budget(tmp_path):
    costs = CostBenefitConfig(timedelta(minutes=9), timedelta(minutes=40), verify=timedelta(hours=3))
    assumed = Assumptions(costs, ProbeConfig(duration=timedelta(minutes=20)), spare_nodes=3)
    write_settings(tmp_path / "act.yaml", settings_of(["publish"], {}) | {"scheduler": "file"}, Params(), assumed)
    policy, defaults = read_settings(tmp_path / "act.yaml").policy, BudgetConfig()
    assert (policy.cost_benefit, policy.probes) == (costs, assumed.probes)
    fleet, *budgets = policy.budget.disruption_budgets
    assert (fleet.scope, fleet.allowed(1000)) == ("fleet", 3)
    assert [budget for budget in defaults.disruption_budgets if budget.scope != "fleet"] == budgets
    assert policy.budget.rate_limits == defaults.rate_limits


def test_samples_every_half_hour_are_scored_by_the_commands_that_it_names(fleets, monkeypatch):
    dataset, out = fleets.folder / "half-hours", fleets.folder / "half-hours-out"
    simulate(dataset, gpus=32, days=45, seed=101, scenario="announced", acceleration=90, step=timedelta(minutes=30))
    lines = fleets.run(dataset, out).split("Next steps\n")[1].splitlines()
    monkeypatch.chdir(fleets.folder)
    for line in lines[:2]:
        invoke(*shlex.split(line)[1:])
    (decided,) = (out / "scores" / "decisions").rglob("*.parquet")
    risks = pq.read_table(decided).to_pandas()["risk"]
    assert len(risks) == 32
    assert risks.notna().mean() > 0.9, "a GPU that failed may be unknown"


def test_again_it_makes_nothing_anew_and_writes_nothing_outside(fleets):
    out = fleets.assess("noprecursor", 90)
    mtimes = {path: path.stat().st_mtime_ns for path in sorted(fleets.folder.rglob("*"))}
    dataset = fleets.folder / "noprecursor-90"
    assert json.loads(fleets.run(dataset, out, "--json")) == read(out)
    changed = {path.name for path in sorted(fleets.folder.rglob("*")) if mtimes.get(path) != path.stat().st_mtime_ns}
    assert changed <= {out.name, "assessment.json", "act.yaml", "index.html"}


def test_the_backtest_is_repeated_if_the_truth_changes_and_not_if_its_folder_moves(fleets, tmp_path, monkeypatch):
    def started(*_, **__):
        raise KeyboardInterrupt

    result, params = fleets.assess("noprecursor", 90), Params.model_validate(yaml.safe_load(LIGHT))
    monkeypatch.setattr(workflow, "backtest_matrix", started)
    out = shutil.copytree(result, tmp_path / "out")
    truth = shutil.copytree(fleets.folder / "noprecursor-90-truth", tmp_path / "truth")
    matrix = FeatureMatrix.open(out / "matrix")
    params = with_step(params, matrix.config.step, "fleet")
    assert workflow._backtested(matrix, params, out, truth, 100, lambda _: print).failures
    risks = truth / "risk.parquet"
    pd.read_parquet(risks).assign(risk=0.5).to_parquet(risks)
    with pytest.raises(KeyboardInterrupt):
        workflow._backtested(matrix, params, out, truth, 100, lambda _: print)


def test_only_the_checkpoint_interval_is_assumed_otherwise_than_by_the_controller():
    arguments = {name: parameter.default for name, parameter in inspect.signature(assess).parameters.items()}
    assumed = Assumptions()
    assert assumed.costs == CostBenefitConfig(checkpoint_every=timedelta(hours=1))
    options = {"checkpoint_every": "checkpoint_every", "checkpoint": "checkpoint", "restart": "restart"}
    options |= {"verify": "diagnostic"}
    assert {name: parse_duration(arguments[option]) for name, option in options.items()} == {
        name: getattr(assumed.costs, name) for name in options
    }
    assert parse_duration(arguments["probe"]) == assumed.probes.duration == ProbeConfig().duration


def test_a_killed_backtest_is_not_taken_for_the_run_whose_files_it_replaced(tmp_path, monkeypatch):
    def killed(*_, **__):
        raise KeyboardInterrupt

    stamp = tmp_path / "replay" / "replay.json"
    stamp.parent.mkdir()
    stamp.write_text('{"inputs": "of an earlier run"}')
    monkeypatch.setattr(workflow, "backtest_matrix", killed)
    with pytest.raises(KeyboardInterrupt):
        workflow._backtested(SimpleNamespace(digest="m"), Params(), tmp_path, None, 100, lambda _: print)
    assert not stamp.exists()


def test_files_are_imported_and_judged_as_the_dataset_they_make(fleets):
    out = fleets.assess("base", 15)
    dataset = Dataset.open(fleets.folder / "base-15")
    files = fleets.folder / "files"
    files.mkdir()
    samples = pa.concat_tables([dataset.read_bucket(bucket) for bucket in dataset.buckets()])
    pq.write_table(samples, files / "samples.parquet")
    for name in ("inventory", "events"):
        shutil.copy(fleets.folder / "base-15" / f"{name}.parquet", files)
    options = [word for name in ("samples", "inventory", "events") for word in (f"--{name}", files / f"{name}.parquet")]
    fleets.run(None, fleets.folder / "files-out", *options)
    of_files, of_dataset = read(fleets.folder / "files-out"), read(out)
    assert of_files["data"]["units"] == of_dataset["data"]["units"]
    assert of_files["predictable"]["answer"] == of_dataset["predictable"]["answer"]
    assert (of_files["jobs"]["from"], of_dataset["jobs"]["from"]) == ("a generated load", "the dataset")


def test_what_matches_of_a_prometheus_is_fetched_into_the_folder_and_judged(fleets):
    server, out = FakePrometheus(), fleets.folder / "prometheus-out"
    now = int(time.time()) // 600 * 600_000
    for gpu, node, cluster in [(0, "n1", "a"), (1, "n1", "a"), (2, "n1", "a"), (3, "n1", "a"), (4, "n2", "b")]:
        labels = {"Hostname": node, "gpu": str(gpu), "UUID": f"GPU-{gpu}", "modelName": "NVIDIA H100 80GB HBM3"}
        labels["cluster"] = cluster
        server.add("DCGM_FI_DEV_GPU_TEMP", labels, [(now - step * 600_000, 50.0) for step in range(1, 288)])
    tickets = fleets.folder / "tickets.csv"
    failed = datetime.fromtimestamp(now / 1000 - 86_400, UTC)
    tickets.write_text(f"timestamp,node,gpu,type,code\n{failed.isoformat()},n1,GPU-2,failure,gpu_lost\n")
    (fleets.folder / "token").write_text("s3cret")
    arguments = ["assess", "--prometheus", "", "--since", "2d", "--events", tickets, "--bearer-token-file"]
    arguments += [fleets.folder / "token", "--header", "X-Scope-OrgID=hpc", "--out", out, "--params", fleets.params]
    arguments += ["--match", '{cluster="a"}']
    with serving(server):
        arguments[2] = server.url
        result = invoke(*arguments)
    printed = result.stdout
    assert "4 GPUs, at most " in result.stderr, "before anything is fetched"
    assert all(request.headers["Authorization"] == "Bearer s3cret" for request in server.asked)
    assert server.queries()[0].endswith("[300001ms]"), "five minutes may tell how much there is"
    assert "4 GPUs on 1 node" in printed
    assert "node failures: 1 (1 other)" in printed
    assert "TOO FEW FAILURES" in printed


def test_unknown_columns_are_written_to_a_mapping_that_nothing_is_imported_by(tmp_path: Path) -> None:
    samples = write_csv(tmp_path / "smi.csv", samples_frame().rename(columns={"gpu_temp_c": "gpu core temp"}))
    hosts = write_csv(tmp_path / "hosts.csv", inventory_frame())
    command = ["assess", "--samples", samples, "--inventory", hosts, "--out", tmp_path / "out"]
    for name in ("mapping.yaml", "mapping-2.yaml"):
        result = invoke(*command, code=1)
        assert f"guesses are in {tmp_path / 'out' / name}" in result.stderr
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["mapping-2.yaml", "mapping.yaml"]
    assert re.search("gpu core temp: .*gpu_temp_c", (tmp_path / "out" / "mapping.yaml").read_text())
    result = invoke("import", "--samples", samples, "--suggest-mapping", tmp_path / "out" / "mapping.yaml", code=1)
    assert "already exists" in result.stderr


@pytest.mark.parametrize("text", ["samples: [\n", "- a\n", "sample: {columns: {}}\n"])
def test_a_mapping_that_is_none_of_files_is_refused_and_not_passed_over(tmp_path: Path, text: str) -> None:
    (tmp_path / "mapping.yaml").write_text(text)
    samples = write_csv(tmp_path / "smi.csv", samples_frame())
    hosts = write_csv(tmp_path / "hosts.csv", inventory_frame())
    command = ["assess", "--samples", samples, "--inventory", hosts, "--mapping", tmp_path / "mapping.yaml"]
    result = invoke(*command, "--out", tmp_path / "out", code=1)
    assert "mapping.yaml" in result.stderr
    assert not (tmp_path / "out").exists()


def test_tickets_that_name_no_gpu_of_the_inventory_are_said_beside_no_failures(tmp_path: Path, fleets: Fleets) -> None:
    samples = write_csv(tmp_path / "smi.csv", samples_frame())
    hosts = write_csv(tmp_path / "hosts.csv", inventory_frame())
    tickets = write_csv(tmp_path / "tickets.csv", events_frame([("00:30", "GPU-9", "failure", "gpu_lost")]))
    folder = tmp_path / "my out"
    text = fleets.run(None, folder, "--samples", samples, "--inventory", hosts, "--events", tickets)
    assert "NO FAILURES" in text
    assert "quarantined (`quarantine/` of the dataset): unknown gpu 1\n" in text
    assert "  the events contain no XID\n" in text
    assert "predrain train" not in text, "there is no backtest that it could take"
    assert "Next steps\n  record failures" in text


def test_commands_quote_their_paths() -> None:
    for line in commands(
        {"predictable": {"answer": "yes"}, "ladder": [{}], "settings": {"scheduler": "kubernetes"}},
        Path("my out"),
        "my fleet",
        [Path("a b.yaml")],
    ):
        assert not {"my", "out", "fleet", "b.yaml"} & set(shlex.split(line)), line
        assert {"my out/scores", "my out/bundle"} & set(shlex.split(line)), line


def test_repairs_that_name_no_gpu_are_said_beside_the_figures() -> None:
    events = pd.DataFrame({"type": ["repair", "replacement", "failure"], "gpu": ["GPU-1", None, None]})
    content = {
        "unit": "gpu",
        "units": 2,
        "nodes": 1,
        "days": 1,
        "samples": 9,
        "jobs": 0,
        "failures": {},
        "node_failures": 0,
        "unit_failures": 0,
        "set_aside": {},
    }
    content |= {"missing_channels": [], "to_do": [], "repairs": repairs(events, "gpu")}
    assert any("1 of 2 repairs name no GPU" in line for line in data(content)[0])
    assert not any("repairs" in line for line in data(content | {"repairs": repairs(events, "node")})[0])

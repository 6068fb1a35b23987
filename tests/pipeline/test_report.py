"""The report: what it says, that it needs nothing else, and that it is the same every time."""

import doctest
import itertools
import re
from dataclasses import replace
from datetime import UTC, datetime, timedelta

import numpy as np
import pandas as pd
import pytest
from defusedxml import ElementTree

from evaluation.metrics.evaluation import evaluate
from evaluation.metrics.oracle import oracle_predictions
from pipeline.report import tables, wording
from pipeline.report.context import AlertEntry, ReportContext, Simulated, select_alerts
from pipeline.report.plots import PLOTS, as_file, net_by_job_size
from pipeline.report.report import render_report
from tests.models.fleet_predictions import T0, fleet, truth_of
from tests.page import Page

MODELS = (
    ("mean_rank", "sliding", 0.6), ("mean_rank", "train_once", 2.5), ("parallel", "sliding", 0.8),
    ("xgboost", "sliding", 0.7), ("xgboost", "train_once", 2.5), ("logistic", "sliding", 1.5),
    ("random", "sliding", 30),
)  # fmt: skip


@pytest.fixture(scope="module")
def predictions():
    return fleet(21, MODELS, units=40, times=40, incidents=30, k=3, per_fold=10)


@pytest.fixture(scope="module")
def evaluation(predictions):
    reach = timedelta(hours=24, minutes=10)
    oracle = oracle_predictions(predictions, truth_of(predictions), 3)
    return evaluate(predictions, k=3, bootstrap=60, seed=1, oracle=oracle, drain_reach=reach)


@pytest.fixture(scope="module")
def context(predictions):
    folds = pd.DataFrame(
        {
            "fold": [0, 1, 2, 3] * 2,
            "variant": ["sliding"] * 4 + ["train_once"] * 4,
            "refit_at": pd.to_datetime([T0 + timedelta(hours=60 * i) for i in range(4)] * 2),
            "span": pd.to_timedelta([14, 28, 28, 14] * 2, unit="D"),
            "n_positive": 40,
            "n_negative": 800,
        }
    )
    folds["train_end"] = folds["refit_at"] - timedelta(days=1)
    folds["train_start"] = folds["train_end"] - folds["span"]
    alerts = tuple(
        AlertEntry(
            decision_time=row.decision_time.to_pydatetime(),
            node=row.node,
            unit=row.unit,
            risk=row.risk,
            label=int(row.label) if pd.notna(row.label) else None,
            failure_class=row.failure_class if pd.notna(row.failure_class) else None,
            incident_start=row.incident_start.to_pydatetime() if pd.notna(row.incident_start) else None,
            reasons=("temperature 80 C, 12 above its <peers>", "3 XID 63 in 7 days"),
            method="exact tree contributions of xgboost",
        )
        for row in select_alerts(predictions, "mean_rank", "sliding", 5).itertuples()
    )
    return ReportContext(
        dataset="demo <fleet>",
        dataset_digest="0123abcd",
        code_revision="deadbeef",
        span=(T0 - timedelta(days=60), T0 + timedelta(days=10)),
        unit="gpu",
        simulated=Simulated("drift", 7, 12.5),
        profile="mean_rank",
        every=timedelta(hours=6),
        gap=timedelta(minutes=10),
        horizon=timedelta(hours=24),
        folds=folds,
        skipped=("window: 84 days is longer than the history at every refit",),
        alerts=alerts,
        params={"training.window": "auto", "models.parallel.combiner": "parallel"},
    )


@pytest.fixture(scope="module")
def html(evaluation, context):
    return render_report(evaluation, context)


@pytest.fixture(scope="module")
def page(html):
    return Page(html)


def svgs(page):
    return [attributes for tag, attributes in page.tags if tag == "svg"]


def test_the_page_needs_nothing_else(html, page):
    assert "http:" not in html
    assert "https:" not in html
    assert "@import" not in html
    assert not re.search(r"url\((?!#)", html)
    assert page.links
    assert all(link.startswith("#") for link, _ in page.links)
    assert not {"script", "link", "iframe", "img", "object"} & {tag for tag, _ in page.tags}


def test_every_link_leads_to_one_place(html, page):
    targets = {link.removeprefix("#") for link, _ in page.links} | set(re.findall(r"url\(#([^)]+)\)", html))
    targets |= set(" ".join(svg["aria-labelledby"] for svg in svgs(page)).split())
    assert targets <= set(page.ids)


def test_headings_descend_one_level_at_a_time_and_tables_are_captioned(page):
    levels = [level for level, _ in page.headings]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in itertools.pairwise(levels))
    assert len(page.tables) >= 8
    for caption, rows in page.tables:
        assert caption
        assert len({len(row) for row in rows}) == 1


def test_plots_have_a_title_and_a_description_and_take_the_pages_colours(html, page):
    assert len(svgs(page)) == 4
    for svg in svgs(page):
        assert svg["role"] == "img"
        assert svg["viewbox"]
    assert "<title id=" in html
    assert "<desc id=" in html
    assert "var(--ink)" in html
    assert not re.search(r"#010203|#040506|#070809", html)


def test_a_simulated_fleet_is_called_simulated_with_its_acceleration(evaluation, context, page):
    assert "Simulated fleet. Scenario drift, seed 7; failure rates multiplied by 12.5" in page.text
    assert "40 GPUs on 40 nodes of a simulated fleet (scenario drift, seed 7" in page.text
    slow = Page(render_report(evaluation, replace(context, simulated=Simulated("base", 1, 1.0)))).text
    assert "multiplied" not in slow
    assert "failure rates as calibrated" in slow
    real = Page(render_report(evaluation, replace(context, simulated=None))).text
    assert "Simulated fleet" not in real
    assert f"of a fleet ({context.dataset}) were replayed at 40 decision times, every 6 h from 2026-01-30" in real


def test_the_summarys_numbers_are_the_evaluations(evaluation, page):
    row = evaluation.row("mean_rank", "sliding")
    right, wrong = row["episodes_right"], row["episodes_known"] - row["episodes_right"]
    assert 0 < row["episodes_known"] <= row["episodes"] < row["alerts"]
    precision, alone = (
        f"{100 * row[name]:.1f} % [{100 * row[f'{name}_low']:.1f}, {100 * row[f'{name}_high']:.1f} %]"
        for name in ("episode_precision", "precision")
    )
    assert f"mean_rank raised {row['alerts']} node alerts, at most 3 per decision time" in page.text
    assert f"{row['episodes']} drain episodes" in page.text
    assert f"{wrong} were wrong and {right} right: a precision of {precision}" in page.text
    assert f"within 24 h is {alone}" in page.text
    assert f"caught {row['caught']} of the {row['incidents']} incidents" in page.text
    assert f"half of them at least {row['lead_time_median_hours']:.1f} h before" in page.text
    oracle = evaluation.row("oracle", "oracle")
    assert f"a precision of {100 * oracle['precision_at_k']:.1f} % at the same K" in page.text
    assert f"mean_rank reaches {100 * row['oracle_share_precision_at_k']:.1f} % of that" in page.text


def test_every_model_is_in_the_table_with_its_interval(evaluation, page):
    rows = page.table("All models, pooled over all folds")
    names = [(row[0].split()[0], row[1]) for row in rows[1:]]
    assert names == [
        ("mean_rank", "sliding"), ("mean_rank", "trained once"), ("parallel", "sliding"), ("xgboost", "sliding"),
        ("xgboost", "trained once"), ("logistic", "sliding"), ("random", "sliding"), ("oracle", ""),
    ]  # fmt: skip
    row = evaluation.row("xgboost", "sliding")
    for column, name in ((3, "episode_precision"), (4, "precision_at_k")):
        low, high = row[f"{name}_low"], row[f"{name}_high"]
        assert rows[4][column] == f"{100 * row[name]:.1f} % [{100 * low:.1f}, {100 * high:.1f} %]"
    assert rows[0][-1] == "of the oracle"
    assert rows[-1][-1].startswith("100 %")


def test_what_did_not_help_is_reported(predictions, context):
    of_profile = predictions[predictions["model"] == "mean_rank"].copy()
    static = of_profile[of_profile["variant"] == "sliding"].assign(variant="train_once")
    variants = pd.concat([of_profile[of_profile["variant"] == "sliding"], static])
    measured = evaluate(variants, k=3, bootstrap=40, seed=0)
    rendered = Page(render_report(measured, context))
    [row] = rendered.table("the same model trained once")[1:]
    assert row[3:5] == ["0.0 [0.0, 0.0]", "not significant"]


def test_alerts_are_shown_with_outcome_and_reasons_and_escaped(html, page, context):
    rows = page.table("Alerts of mean_rank with the highest risk")
    assert len(rows) == 1 + len(context.alerts)
    assert rows[1][0].startswith(context.alerts[0].unit)
    assert "temperature 80 C, 12 above its <peers> 3 XID 63 in 7 days" in rows[1][4]
    assert "<peers>" not in html
    assert "demo &lt;fleet&gt;" in html
    right = next(alert for alert in context.alerts if alert.label == 1)
    assert f"right: {right.failure_class}" in " ".join(row[3] for row in rows)
    assert "by exact tree contributions of xgboost. They explain the score, not the cause" in page.text


def test_each_outcome_has_its_own_text(evaluation, context):
    t = datetime(2026, 2, 1, tzinfo=UTC)
    alerts = (
        AlertEntry(t, "n1", "g1", 0.5, 1, "memory", t + timedelta(hours=13.4)),
        AlertEntry(t, "n1", "g2", 0.4, 0, None, None, (), "exact tree contributions of xgboost"),
        AlertEntry(t, "n1", "n1", None, None, None, None),
    )
    rows = Page(render_report(evaluation, replace(context, alerts=alerts))).table("Alerts of mean_rank")[1:]
    assert [row[3] for row in rows] == ["right: memory 13.4 h later", "wrong: no incident followed", "not known yet"]
    assert [row[2] for row in rows] == ["50.0 %", "40.0 %", "–"]
    assert [row[4] for row in rows] == ["not explained", "no single feature raised the score", "not explained"]


def test_selected_alerts_are_the_riskiest_each_incident_once(predictions):
    chosen = select_alerts(predictions, "mean_rank", "sliding", 8)
    assert chosen["alert"].all()
    assert (np.diff(chosen["risk"]) <= 0).all()
    assert not chosen.dropna(subset=["incident"]).duplicated(["unit", "incident"]).any()
    assert chosen["risk"].iloc[0] == predictions[predictions["model"] == "mean_rank"].query(
        "variant == 'sliding' and alert"
    )["risk"].max()  # fmt: skip
    categories = predictions.astype(dict.fromkeys(("model", "variant", "unit", "node", "gpu"), "category"))
    pd.testing.assert_index_equal(select_alerts(categories, "mean_rank", "sliding", 8).index, chosen.index)


def test_figures_by_gpu_stand_beside_those_by_node(predictions, context):
    pairs = predictions.assign(node=predictions["unit"].str[:-1])
    measured = evaluate(pairs, k=3, bootstrap=0, seed=1)
    rows = Page(render_report(measured, context)).table("By GPU")
    row = measured.row("mean_rank", "sliding")
    assert row["unit_alerts_labelled"] > row["alerts_labelled"]
    assert rows[1][:4] == ["mean_rank ensemble", "sliding", str(row["unit_alerts_labelled"]),
                           wording.percent(row["unit_precision"])]  # fmt: skip


def test_a_fleet_of_nodes_is_called_nodes(evaluation, context):
    rendered = Page(render_report(evaluation, replace(context, unit="node"))).text
    assert "40 nodes of a simulated fleet" in rendered
    assert "GPU" not in rendered.replace("predrain", "")


def test_a_period_without_incidents_or_outcomes_still_has_a_report(predictions, context):
    quiet = predictions.assign(
        label=pd.array([0] * len(predictions), dtype="Int8"),
        incident=pd.array([pd.NA] * len(predictions), dtype="Int64"),
        incident_start=pd.Series(pd.NaT, index=predictions.index).dt.tz_localize("UTC"),
        failure_class=pd.Series([None] * len(predictions), dtype="str", index=predictions.index),
    )
    rendered = Page(render_report(evaluate(quiet, k=3, bootstrap=30, seed=0), context)).text
    assert "No incident occurred" in rendered
    assert "Too few incidents to compare risks with outcomes." in rendered
    assert "a precision of 0 %" in rendered
    unknown = predictions.assign(label=pd.array([pd.NA] * len(predictions), dtype="Int8"))
    rendered = Page(render_report(evaluate(unknown, k=3, bootstrap=30, seed=0), replace(context, alerts=()))).text
    assert "the precision is unknown" in rendered
    assert "No alerts to show." in rendered


def test_without_truth_the_report_claims_no_oracle(predictions, context):
    rendered = Page(render_report(evaluate(predictions, k=3, bootstrap=0, seed=0), context))
    assert "The best possible precision on this fleet is unknown" in rendered.text
    assert "of the oracle" not in rendered.table("All models")[0]
    assert "No intervals: backtest.bootstrap is 0." in rendered.text


def test_the_papers_mechanisms_stand_side_by_side_at_equal_alerts(evaluation, context):
    rendered = tables.mechanisms(evaluation, context)
    assert [row[0].text for row in rendered.rows] == [
        "best single model",
        "ensemble of the paper",
        "ensemble of the profile",
    ]
    sliding, static = (evaluation.row("mean_rank", variant) for variant in ("sliding", "train_once"))
    assert [cell.text for cell in rendered.rows[2][1:3]] == [
        wording.percent(row["precision_at_k"]) for row in (sliding, static)
    ]
    assert rendered.rows[2][3].text == wording.points(sliding["precision_at_k"] - static["precision_at_k"])
    assert rendered.rows[1][2].text == wording.NONE
    _, *lines = rendered.lines()
    assert [line.endswith(" *") for line in lines] == [False, False, True]
    alone = evaluation.table[evaluation.table["model"].isin(["mean_rank", "random"])]
    assert tables.mechanisms(replace(evaluation, table=alone), context) is None


def test_every_plot_is_an_image_that_needs_no_page_and_no_network(evaluation):
    for draw in PLOTS.values():
        for plot in (draw(evaluation, "mean_rank"), None):
            root = ElementTree.fromstring(as_file(plot))
            assert root.tag == "{http://www.w3.org/2000/svg}svg"
            assert int(root.get("width", "0")) > 100  # without it, `dvc plots show` draws a thumbnail
            assert "var(" not in as_file(plot)
            assert "http" not in as_file(plot).replace("http://www.w3.org/2000/svg", "")


def test_the_picture_of_the_ladder_has_each_rung_and_size_and_no_mark_without_a_measurement():
    row = {"break_even": 0.2, "right": 0, "known": 0, "net": 5.0, "net_low": -1.0, "net_high": 9.0}
    ladder = [row | {"rung": rung} for rung in ("publish", "probe", "drain")]
    ladder[2] |= {"right": 3, "known": 10, "break_even": None}
    sizes = [{"gpus_per_job": size, "ladder": ladder} for size in (8, 1024, None)]
    svg = as_file(net_by_job_size({"by_job_size": sizes}))
    texts = {element.text for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")}
    assert {"probe", "drain", "8", "1,024", "net GPU-hours"} <= texts
    assert "publish" not in texts
    assert net_by_job_size({}) is None


def test_numbers_are_worded_as_documented():
    assert doctest.testmod(wording).failed == 0

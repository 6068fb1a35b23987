"""Renders the report, a self-contained HTML page, and its summary."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pandas as pd
from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from evaluation.metrics.comparison import SLIDING
from evaluation.metrics.evaluation import Evaluation
from evaluation.metrics.lead_time import TOP_SHARE
from evaluation.metrics.oracle import ORACLE
from features.wording import duration
from foundation.text import quantity
from pipeline.report import plots, tables, wording
from pipeline.report.context import ReportContext
from pipeline.report.sections import decisions, what_changed
from pipeline.report.wording import count, day, hours, interval_text, number, percent

_FOLDER = Path(__file__).parent


def render_report(
    evaluation: Evaluation,
    context: ReportContext,
    value: Mapping[str, Any] | None = None,
    verdict: Sequence[str] = (),
) -> str:
    """Render the page; it makes no network requests, and the same results give the same bytes.

    ``value``, ``verdict``: content of ``value.json`` and its summary in sentences, if actions were replayed.
    """
    profile = context.profile
    images = {name: draw(evaluation, profile) for name, draw in plots.PLOTS.items()}
    images["net_by_action"] = None if value is None else plots.net_by_action(value)
    against_once = "Each model with sliding training and the same model trained once, on the same bootstrap samples."
    against_best = (
        "Each ensemble and the best single learner, on the same bootstrap samples. The learner was chosen on these "
        "decisions, which favors it."
    )
    against_base = "The best single learner and each baseline, on the same bootstrap samples."
    return render(
        "report.html.j2",
        context=context,
        evaluation=evaluation,
        verdict=verdict,
        summary=sentences(evaluation, context),
        plots={name: plot and (Markup(plot.svg), plot.caption) for name, plot in images.items()},  # noqa: S704 - escaped there
        models=tables.models(evaluation, context),
        mechanisms=tables.mechanisms(evaluation, context),
        by_unit=tables.by_unit(evaluation, context),
        sliding=tables.paired(evaluation, "sliding", against_once),
        ensembles=tables.paired(evaluation, "ensemble", against_best),
        baselines=tables.paired(evaluation, "baseline", against_base),
        equal_alerts=tables.equal_alerts(evaluation),
        classes=tables.by_class(evaluation, profile),
        folds=tables.folds(evaluation, context),
        made_of=tables.made_of(context),
        sections=[section for section in (decisions(context), what_changed(context)) if section is not None],
        outcome=tables.outcome,
        percent=wording.percent,
        minute=wording.minute,
        methods=sorted({alert.method for alert in context.alerts if alert.method}),
        day=wording.day,
        duration=duration,
    )


def render(template: str, **values: Any) -> str:
    """Render a template of this folder with inlined styles; values are escaped."""
    environment = Environment(
        loader=FileSystemLoader(_FOLDER),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    style = Markup((_FOLDER / "style.css").read_text(encoding="utf-8"))  # noqa: S704 - our own stylesheet
    return environment.get_template(template).render(style=style, **values)


def sentences(evaluation: Evaluation, context: ReportContext) -> list[str]:
    """Summarize the replay in sentences: number, precision, recall and lead time of alerts, and the oracle."""
    row = evaluation.row(context.profile, SLIDING)
    texts = [_replayed(evaluation, context)]
    if row is None:
        return [*texts, f"The profile's model, {context.profile}, made no predictions."]
    texts.append(_alerts(evaluation, context, row))
    if row["incidents"]:
        texts.append(_precision_before_failure(row))
    return [*texts, _beside(evaluation, context, row)]


def _replayed(evaluation: Evaluation, context: ReportContext) -> str:
    fleet = f"fleet ({context.dataset})"
    if context.simulated is not None:
        rate = context.simulated.acceleration
        faster = "failure rates as calibrated" if rate == 1 else f"failure rates multiplied by {rate:g}"
        fleet = f"simulated fleet (scenario {context.simulated.scenario}, seed {context.simulated.seed}, {faster})"
    return (
        f"{_size(evaluation, context)} of a {fleet} were replayed at {count(evaluation.times)} "
        f"decision times, every {duration(context.every)} from {day(evaluation.first_time)} to "
        f"{day(evaluation.last_time)}. Each model used only data known at the decision time. It ranked the nodes by "
        f"the risk of an incident that starts between {duration(context.gap)} and {duration(context.gap)} plus "
        f"{duration(context.horizon)} later."
    )


def _size(evaluation: Evaluation, context: ReportContext) -> str:
    nodes = quantity(evaluation.nodes, "node")
    return nodes if context.unit == "node" else f"{quantity(evaluation.units, 'GPU')} on {nodes}"


def _alerts(evaluation: Evaluation, context: ReportContext, row: pd.Series) -> str:
    text = f"{context.profile} raised {quantity(int(row['alerts']), 'node alert')}, at most {evaluation.k} per "
    text += f"{context.budget_period}. "
    if row["alerts"]:
        horizon = duration(evaluation.drain_horizon(context.gap))
        text += (
            f"They form {quantity(int(row['episodes']), 'drain episode')}, {number(row['episodes_per_day'], 1)} a day. "
            f"An episode lasts {horizon} and includes later alerts of its node. The node with the most alerts has "
            f"{percent(row['alerts_of_one_node'] / row['alerts'])} of them. "
        )
    if not row["episodes_known"]:
        return text + "No episode has a known outcome, so the precision is unknown."
    false_episodes = row["episodes_known"] - row["episodes_right"]
    return text + (
        f"Of the {count(row['episodes_known'])} episodes with a known outcome, {count(false_episodes)} were wrong and "
        f"{count(row['episodes_right'])} right: a precision of {percent(row['episode_precision'])}"
        f"{_spaced(_interval(row, 'episode_precision'))}. Random nodes would reach "
        f"{percent(row['episode_base_rate'])}. The precision per alert within {duration(context.horizon)} is "
        f"{percent(row['precision'])}{_spaced(_interval(row, 'precision'))}; that of random nodes is "
        f"{percent(row['base_rate'])}."
    )


def _precision_before_failure(row: pd.Series) -> str:
    text = (
        f"It caught {count(row['caught'])} of the {count(row['incidents'])} incidents that could have been caught "
        f"(recall {percent(row['recall'])}{_spaced(_interval(row, 'recall'))})"
    )
    if row["caught"]:
        text += (
            f", half of them at least {hours(row['lead_time_median_hours'])} before they began "
            f"(quartiles {hours(row['lead_time_q25_hours'])} and {hours(row['lead_time_q75_hours'])})"
        )
    return text + (
        f". In {percent(row['capture'])} of the incidents, the node was among the riskiest "
        f"{percent(TOP_SHARE).replace('.0', '')} at the last decision before it."
    )


def _beside(evaluation: Evaluation, context: ReportContext, row: pd.Series) -> str:
    oracle = evaluation.row(ORACLE, ORACLE)
    if oracle is None:
        return (
            "The best possible precision on this fleet is unknown: only a simulation records the true risks, and none "
            "were given."
        )
    text = (
        f"An oracle that ranks by the true risk reaches a precision of {percent(oracle['precision_at_k'])} at the "
        f"same K. {context.profile} reaches {percent(row['oracle_share_precision_at_k'])} of that"
        f"{_spaced(_interval(row, 'oracle_share_precision_at_k'))}. "
        "Precision depends on the fleet as much as on the model."
    )
    if evaluation.oracle_coverage < 1:
        known = percent(evaluation.oracle_coverage)
        text += f" (True risks exist for {known} of the rows. The oracle ranks the others, GPUs already down, last.)"
    return text


def _interval(row: pd.Series, name: str) -> str:
    return interval_text(percent(row[f"{name}_low"]), percent(row[f"{name}_high"]))


def _spaced(text: str) -> str:
    return f" {text}" if text else ""

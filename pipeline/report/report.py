"""Write the report: one HTML file that needs nothing else, byte-identical for the same results."""

from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined
from markupsafe import Markup

from evaluation.metrics.evaluation import Evaluation
from features.wording import duration
from foundation.files import disk_errors, write_bytes
from pipeline.report import plots, summary, tables, wording
from pipeline.report.context import ReportContext
from pipeline.report.decisions import decisions
from pipeline.report.drift import what_changed

_HERE = Path(__file__).parent


def write_report(out: Path, *, evaluation: Evaluation, context: ReportContext) -> Path:
    """Write ``OUT/report/index.html``.

    The page makes no request of any kind: styles and plots are inlined. It holds no time of writing, so the same
    results give the same bytes.

    ``out``: the output folder of a backtest; made where it does not exist.
    Raises ``InputError`` if it cannot be written; an older report stays as it was.
    """
    target = out / "report" / "index.html"
    with disk_errors(target):
        target.parent.mkdir(parents=True, exist_ok=True)
        write_bytes(target, render_report(evaluation, context).encode())
    return target


def render_report(evaluation: Evaluation, context: ReportContext) -> str:
    """Render the page."""
    profile = context.profile
    drawn = {name: draw(evaluation, profile) for name, draw in plots.PLOTS.items()}
    against_once = "Each model refitted on a sliding span against the same model trained once, on the same resamples."
    against_best = (
        "Each ensemble against the best single learner, on the same resamples. The learner was chosen after the fact "
        "on these very decisions, which favours it."
    )
    against_base = "The best single learner against each baseline, on the same resamples."
    return render(
        "report.html.j2",
        context=context,
        evaluation=evaluation,
        summary=summary.sentences(evaluation, context),
        plots={name: plot and (Markup(plot.svg), plot.caption) for name, plot in drawn.items()},  # noqa: S704 - escaped there
        models=tables.models(evaluation, context),
        mechanisms=tables.mechanisms(evaluation, context),
        by_unit=tables.by_unit(evaluation, context),
        sliding=tables.paired(evaluation, "sliding", against_once),
        ensembles=tables.paired(evaluation, "ensemble", against_best),
        baselines=tables.paired(evaluation, "baseline", against_base),
        equal_alerts=tables.equal_alerts(evaluation),
        months=tables.by_month(evaluation, profile),
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
    """Render a page of this folder, its styles in it; texts are escaped."""
    environment = Environment(
        loader=FileSystemLoader(_HERE), autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    style = Markup((_HERE / "style.css").read_text(encoding="utf-8"))  # noqa: S704 - our own stylesheet
    return environment.get_template(template).render(style=style, **values)

"""Plots of the report as inline SVG, byte-identical for the same numbers, for light and dark pages.

Text and lines are drawn in placeholder colours that are replaced by the page's CSS variables. Series use the Okabe-Ito
palette, which colour-blind readers can distinguish on both backgrounds, and different line styles.
"""

import io
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any, Final

import matplotlib as mpl
import numpy as np
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.backends.backend_svg import FigureCanvasSVG
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from evaluation.metrics.comparison import SLIDING, TRAIN_ONCE
from evaluation.metrics.evaluation import Evaluation
from evaluation.metrics.oracle import ORACLE
from models.config import ALL_LEARNERS
from pipeline.report import wording

_INK = "#010203"
_FAINT = "#040506"
_PAGE = "#070809"
_CSS = {_INK: "var(--ink)", _FAINT: "var(--line)", _PAGE: "var(--page)"}

ACCENT, SECOND = "#d55e00", "#0072b2"
_COLOURS = ("#0072b2", "#009e73", "#cc79a7", "#56b4e9", "#e69f00", "#7f7f7f")
_STYLES = ("-", (0, (5, 1.5)), (0, (3, 1.2, 1, 1.2)), (0, (1, 1)), (0, (7, 2)))
_SETTINGS = {
    "svg.hashsalt": "predrain",
    "svg.fonttype": "none",
    "font.family": "sans-serif",
    "font.size": 10.0,
    "text.color": _INK,
    "axes.edgecolor": _FAINT,
    "axes.labelcolor": _INK,
    "axes.facecolor": "none",
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "figure.facecolor": "none",
    "grid.color": _FAINT,
    "grid.linewidth": 0.6,
    "legend.frameon": False,
    "legend.fontsize": 9.0,
    "lines.linewidth": 1.4,
    "xtick.color": _INK,
    "ytick.color": _INK,
    "xtick.labelcolor": _INK,
    "ytick.labelcolor": _INK,
    "path.simplify": False,
}


_SVG = "http://www.w3.org/2000/svg"
_NO_DATA = f'<svg xmlns="{_SVG}" viewBox="0 0 300 40" width="300"><text x="10" y="25">no data yet</text></svg>'


@dataclass(frozen=True, slots=True)
class Plot:
    """A plot of the report.

    ``svg``: an ``svg`` element with title and description for screen readers.
    """

    svg: str
    caption: str


def precision_recall(evaluation: Evaluation, profile: str) -> Plot | None:
    """Precision-recall curves, by alert budget, of the profile, each learner and the oracle."""
    curves = evaluation.pr_curves[evaluation.pr_curves["variant"] != TRAIN_ONCE]
    by_model = {model: curve.dropna() for model, curve in curves.groupby("model", sort=True)}
    row = evaluation.row(profile, SLIDING)
    if row is None or profile not in by_model or by_model[profile].empty:
        return None

    def draw(axes: Axes) -> None:
        other_learners = [model for model in ALL_LEARNERS if model in by_model and model != profile]
        for i, model in enumerate(other_learners):
            curve = by_model[model]
            # colours and styles repeat at different lengths, so that thirty learners can be distinguished
            colour, style = _COLOURS[i % len(_COLOURS)], _STYLES[i % len(_STYLES)]
            axes.plot(curve["recall"], curve["precision"], color=colour, linestyle=style, label=model)
        if ORACLE in by_model:
            curve = by_model[ORACLE]
            name = "oracle (best possible)"
            axes.plot(curve["recall"], curve["precision"], color=_INK, linestyle=(0, (2, 2)), label=name)
        curve = by_model[profile]
        axes.plot(curve["recall"], curve["precision"], color=ACCENT, linewidth=2.6, label=profile)
        at_k = curve[curve["k"] == evaluation.k]
        axes.plot(at_k["recall"], at_k["precision"], "o", color=ACCENT, markersize=8, markeredgecolor=_PAGE)
        axes.axhline(row["base_rate"], color=_INK, linewidth=0.9, linestyle=":", label="base rate")
        axes.set(xlabel="recall of positive rows", ylabel="precision", xlim=(0, 1.01), ylim=(0, None))
        _in_percent(axes.xaxis, axes.yaxis)
        axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.02))

    caption = (
        f"Precision against recall of positive rows as the alert budget grows from 1 to all at each decision time. "
        f"The dot is {profile} at K = {evaluation.k}: a precision of {wording.percent(row['precision_at_k'])}."
    )
    return _render("precision-recall", "Precision and recall", caption, draw, height=3.9, width=8.6)


def precision_by_month(evaluation: Evaluation, profile: str) -> Plot | None:
    """Precision at K by calendar month, with and without sliding training."""
    monthly = evaluation.monthly[(evaluation.monthly["model"] == profile) & (evaluation.monthly["labelled"] > 0)]
    sliding = monthly[monthly["variant"] == SLIDING].set_index("month")
    trained_once = monthly[monthly["variant"] == TRAIN_ONCE].set_index("month")
    if sliding.empty:
        return None
    months = list(sliding.index)

    def draw(axes: Axes) -> None:
        place = np.arange(len(months))
        axes.plot(place, sliding["precision_at_k"], "o-", color=ACCENT, linewidth=2.2, label="sliding")
        if not trained_once.empty:
            precision = trained_once["precision_at_k"].reindex(months)
            axes.plot(place, precision, "s", linestyle=_STYLES[1], color=SECOND, label="trained once")
        axes.plot(place, sliding["base_rate"], ":", color=_INK, linewidth=1.0, label="base rate")
        axes.set_xticks(place, months)
        axes.set(ylabel=f"precision at K = {evaluation.k}", ylim=(0, None), xlim=(-0.4, len(months) - 0.6))
        _in_percent(axes.yaxis)
        axes.legend(loc="best")

    comparison = " and trained once" if not trained_once.empty else ""
    caption = f"Precision at K of {profile} by calendar month, with sliding training{comparison}."
    return _render("by-month", "Precision by month", caption, draw, height=3.1)


def lead_times(evaluation: Evaluation, profile: str) -> Plot | None:
    """Histogram of lead times, from the first right alert to the incident."""
    rows = evaluation.lead_times
    rows = rows[(rows["model"] == profile) & (rows["variant"] == SLIDING)]
    lead = rows["lead_time_hours"].dropna().to_numpy()
    if lead.size == 0:
        return None
    width = max(1.0, np.ceil(lead.max() / 24))
    edges = np.arange(0, np.ceil(lead.max() / width) * width + width / 2, width)
    if len(edges) < 2:
        edges = np.array([0.0, width])
    quartiles = np.quantile(lead, [0.25, 0.5, 0.75])

    def draw(axes: Axes) -> None:
        axes.hist(lead, bins=edges.tolist(), color=SECOND, edgecolor=_PAGE, linewidth=1.0)
        axes.axvline(quartiles[1], color=ACCENT, linewidth=2.0, label=f"median {quartiles[1]:.1f} h")
        axes.set(xlabel="hours from the first right alert to the incident", ylabel="incidents", xlim=(0, edges[-1]))
        axes.yaxis.set_major_locator(MaxNLocator(integer=True))
        axes.legend(loc="best")

    caption = (
        f"Lead time of the {len(lead)} incidents that {profile} caught ({len(rows) - len(lead)} more were not caught). "
        f"Quartiles: {', '.join(wording.hours(value) for value in quartiles)}."
    )
    return _render("lead-times", "Lead time", caption, draw, height=2.8)


def calibration(evaluation: Evaluation, profile: str) -> Plot | None:
    """Reliability diagram: observed rates against predicted risks, both logarithmic."""
    bins = evaluation.calibration
    of_profile = bins[(bins["model"] == profile) & (bins["variant"] == SLIDING)]
    drawn = of_profile[(of_profile["observed_rate"] > 0) & (of_profile["mean_risk"] > 0)]
    row = evaluation.row(profile, SLIDING)
    if drawn.empty or row is None:
        return None
    points = drawn[["mean_risk", "observed_rate"]].to_numpy()
    low, high = 10.0 ** np.floor(np.log10(points.min())), 1.0

    def draw(axes: Axes) -> None:
        axes.plot([low, high], [low, high], ":", color=_INK, linewidth=1.0, label="perfect calibration")
        # standard errors, so that a bin of three positives is not over-interpreted
        error = np.sqrt(drawn["observed_rate"] * (1 - drawn["observed_rate"]) / drawn["rows"])
        error = np.minimum(error, 0.95 * drawn["observed_rate"])
        axes.errorbar(
            drawn["mean_risk"], drawn["observed_rate"], yerr=error, fmt="o", color=ACCENT, ecolor=ACCENT,
            elinewidth=1.2, markersize=6, markeredgecolor=_PAGE, label=profile,
        )  # fmt: skip
        axes.set(xscale="log", yscale="log", xlabel="predicted risk", ylabel="observed rate")
        axes.set(xlim=(low, high), ylim=(low, high))
        _in_percent(axes.xaxis, axes.yaxis)
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_minor_formatter(FuncFormatter(lambda _value, _at: ""))
        axes.grid(visible=False, which="minor")
        axes.legend(loc="upper left")

    hidden = len(of_profile) - len(drawn)
    hidden_note = f" {hidden} of {len(of_profile)} bins without an incident are not drawn." if hidden else ""
    caption = (
        f"Predicted risks of {profile} and observed rates, in bins of equal size (smaller at high risks). Bars are one "
        f"standard error. Mean risk is {wording.number(row['risk_ratio'])} times the base rate; the expected "
        f"calibration error is {wording.percent(row['calibration_error'])}.{hidden_note}"
    )
    return _render("calibration", "Calibration", caption, draw, height=3.6, width=5.4)


def net_by_action(content: Mapping[str, Any]) -> Plot | None:
    """Net GPU-hours of each rung, with its interval.

    ``content``: content of ``value.json``. Returns None if nothing was replayed.
    """
    rows = content["ladder"][1:]
    if not rows:
        return None
    net, low, high = (np.array([row[key] for row in rows], np.float64) for key in ("net", "net_low", "net_high"))

    def draw(axes: Axes) -> None:
        place = np.arange(len(rows))
        for chosen, colour in ((net > 0, ACCENT), (net <= 0, SECOND)):
            error = [(net - low)[chosen], (high - net)[chosen]]
            axes.errorbar(net[chosen], place[chosen], xerr=error, fmt="o", color=colour, markersize=7, elinewidth=2.0)
        axes.axvline(0, color=_INK, linewidth=0.9)
        axes.set_yticks(place, [row["rung"] for row in rows])
        axes.set(xlabel="net GPU-hours", ylim=(len(rows) - 0.5, -0.5))
        axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _at: f"{value:,.0f}"))

    caption = (
        "Net GPU-hours of each action alone in a replay of the fleet's failures and jobs, with 95 % intervals by node. "
        "An action pays on its own if its interval is right of zero. The recommendation compares sets of actions."
    )
    return _render("net-by-action", "Net GPU-hours by action", caption, draw, height=2.3)


def net_by_job_size(content: Mapping[str, Any]) -> Plot | None:
    """Net GPU-hours of each rung by job size, and its break-even precision next to the measured one.

    ``content``: an assessment. Returns None if it was not replayed with several job sizes.
    """
    sizes = [size for size in content.get("by_job_size") or () if size["gpus_per_job"] is not None]
    if not sizes:
        return None
    gpus = [size["gpus_per_job"] for size in sizes]
    rungs = [row["rung"] for row in sizes[0]["ladder"][1:]]

    def draw(axes: Any) -> None:
        net_axes, share_axes = axes
        for place, rung in enumerate(rungs):
            rows = [next(row for row in size["ladder"] if row["rung"] == rung) for size in sizes]
            style = {"color": _COLOURS[place % len(_COLOURS)], "linestyle": _STYLES[place % len(_STYLES)]}
            net, break_even, measured = (
                np.array([np.nan if value is None else value for value in values], dtype=np.float64)
                for values in (
                    [row["net"] for row in rows], [row["break_even"] or None for row in rows],
                    [row["right"] / row["known"] if row["known"] and row["right"] else None for row in rows],
                )
            )  # fmt: skip
            error = np.abs(np.array([[row["net_low"], row["net_high"]] for row in rows], dtype=np.float64).T - net)
            shifted = np.array(gpus) * 1.05 ** (place - len(rungs) // 2)
            net_axes.errorbar(shifted, net, yerr=error, marker="o", markersize=4, elinewidth=1.0, label=rung, **style)
            share_axes.plot(gpus, break_even, **style)
            share_axes.plot(shifted, measured, "o", color=style["color"], markersize=5)
        net_axes.axhline(0, color=_INK, linewidth=0.9)
        net_axes.set(ylabel="net GPU-hours")
        net_axes.set_yscale("symlog", linthresh=100)
        net_axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _at: f"{value:,.0f}"))
        share_axes.set(ylabel="break-even (lines), measured (dots)", yscale="log")
        _in_percent(share_axes.yaxis)
        for axes_one in axes:
            axes_one.set(xscale="log", xlabel="GPUs of a job")
            axes_one.set_xticks(gpus, [f"{size:,}" for size in gpus])
            axes_one.minorticks_off()
        share_axes.legend(*net_axes.get_legend_handles_labels(), loc="upper left", bbox_to_anchor=(1.0, 1.02))

    caption = (
        "Left: net GPU-hours of each action by job size, with 95 % intervals. Right: the precision at which it breaks "
        "even (lines) and its measured precision (dots; for probes, the share that finds a fault). An action pays if "
        "its dot is above its line. avoid costs nothing."
    )
    return _render("job-size", "Net GPU-hours by job size", caption, draw, height=3.6, width=10.4, columns=2)


PLOTS: Final[Mapping[str, Callable[[Evaluation, str], Plot | None]]] = {
    "precision_recall": precision_recall,
    "by_month": precision_by_month,
    "lead_times": lead_times,
    "calibration": calibration,
}
"""All plots of a backtest, by name."""


def as_file(plot: Plot | None) -> str:
    """Return a plot as a standalone SVG document for a white page."""
    svg = _NO_DATA if plot is None else plot.svg.replace("<svg ", f'<svg xmlns="{_SVG}" ', 1)
    svg = re.sub(r'style="max-width: (\d+)px"', r'width="\1"', svg, count=1)
    for css, colour in (("var(--ink)", "#222"), ("var(--line)", "#ccc"), ("var(--page)", "#fff")):
        svg = svg.replace(css, colour)
    return svg + "\n"


def _in_percent(*of: Axis) -> None:
    for axis in of:
        axis.set_major_formatter(FuncFormatter(lambda value, _at: f"{100 * value:g} %"))


def _render(
    key: str,
    title: str,
    description: str,
    draw: Callable[[Any], None],
    *,
    height: float,
    width: float = 7.2,
    columns: int = 1,
) -> Plot:
    with mpl.rc_context({**mpl.rcParamsDefault, **_SETTINGS}):
        figure = Figure(figsize=(width, height), layout="constrained")
        FigureCanvasSVG(figure)
        draw(figure.subplots(ncols=columns))
        buffer = io.StringIO()
        figure.savefig(buffer, format="svg", metadata=dict.fromkeys(("Date", "Creator", "Format", "Type")))
    return Plot(svg=_inline(buffer.getvalue(), key, title, description), caption=description)


def _inline(document: str, key: str, title: str, description: str) -> str:
    """Convert an SVG document to an element of an HTML page: no prologue, no namespaces, ids prefixed with ``key``."""
    svg = document[document.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>", "", svg, flags=re.DOTALL)
    svg = re.sub(r"<!--.*?-->", "", svg, flags=re.DOTALL)
    svg = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", svg)
    svg = svg.replace("xlink:href", "href")
    used_ids = set(re.findall(r'href="#([^"]+)"', svg)) | set(re.findall(r"url\(#([^)]+)\)", svg))
    svg = re.sub(r'\sid="([^"]+)"', lambda match: f' id="{key}-{match[1]}"' if match[1] in used_ids else "", svg)
    svg = re.sub(r'href="#', f'href="#{key}-', svg)
    svg = re.sub(r"url\(#", f"url(#{key}-", svg)
    for colour, css in _CSS.items():
        svg = svg.replace(colour, css)
    # inherit the page's font; keep sizes
    svg = re.sub(r"font: ([\d.]+px)[^;\"]*", r"font-size: \1", svg)
    head = (
        f'<svg role="img" aria-labelledby="{key}-title {key}-desc"'
        f'><title id="{key}-title">{escape(title)}</title><desc id="{key}-desc">{escape(description)}</desc>'
    )
    opening = re.match(r"<svg([^>]*)>", svg)
    assert opening is not None
    box = re.search(r'viewBox="[^"]+"', opening[1])
    assert box is not None
    width = re.search(r'width="([\d.]+)pt"', opening[1])
    assert width is not None
    # points to CSS pixels; the stylesheet lets it shrink but not grow
    style = f' {box[0]} style="max-width: {float(width[1]) * 4 / 3:.0f}px"'
    return head.replace('role="img"', f'role="img"{style}', 1) + svg[opening.end() :].strip()

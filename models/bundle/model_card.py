"""Model card of a bundle: intended use, training data, evaluation and limits."""

import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

import yaml

from foundation.text import quantity
from models.config import PRIOR

_STATISTICS = (
    ("episode_precision", "precision of drain episodes", 1),
    ("precision_at_k", "precision at K", 1),
    ("recall", "incidents caught", 1),
    ("average_precision", "average precision", 0),
    ("roc_auc", "ROC-AUC", 0),
    ("base_rate", "base rate", 1),
)
_BY_MODEL = (
    ("precision_at_k", "precision at K", 1),
    ("recall", "incidents caught", 1),
    ("average_precision", "average precision", 0),
    ("brier_skill", "Brier skill", 0),
    ("risk_ratio", "mean risk / base rate", 0),
)
_PARAMS = ("decision", "labels", "training", "models", "backtest", "seed")
_RARE = 10  # incidents of a class below which its recall is unreliable


def model_card(manifest: Mapping[str, Any]) -> str:
    """Return the model card as Markdown.

    ``manifest``: a bundle's manifest, with ``profile``, ``fitted`` and ``features``; and, if known, ``data`` (``unit``,
    ``units``, ``incidents``, ``first``, ``last``), ``params``, ``dataset_digest``, ``code_revision``, ``simulated``,
    and ``metrics`` from :meth:`evaluation.metrics.evaluation.Evaluation.to_metrics`.
    """
    fitted = manifest["fitted"]
    parts = [
        "# Model card",
        "",
        f"The bundle scores with the model of the profile, `{manifest['profile']}`.",
        "",
        "## Intended use",
        "",
        f"The model ranks the units of one fleet by the risk of a hardware failure, and alerts at most {fitted['k']} "
        "nodes per decision time. Risks are valid for the fleet that the models were trained on. They do not indicate "
        "the cause of a failure, and do not generalize to fleets with other hardware, drivers or monitoring.",
        "",
        "## Training data",
        "",
        *_trained(manifest),
        "",
        "## Features",
        "",
        *_features(manifest),
        "",
        "## Evaluation",
        "",
        *_measured(manifest),
        "",
        "## Calibration",
        "",
        *_calibration(manifest),
        "",
        "## Limits",
        "",
        *_limits(manifest),
        *_settings(manifest),
    ]
    return "\n".join(parts) + "\n"


def promotion_section(decision: Mapping[str, Any]) -> str:
    """Return the model card section that compares a version with the champion."""
    previous = decision["champion_before"]
    opponent = f"version {previous}, the champion" if previous is not None else "no champion: the baselines"
    lines = ["", "## Comparison at promotion", ""]
    lines.append(
        f"Version {decision['version']} of `{decision['model']}` against {opponent}: **{decision['action']}**."
    )
    if decision["reason"]:
        lines.append(f"Reason given: {decision['reason']}.")
    lines += [f"Note: {note}" for note in decision["notes"]]
    verdict = decision["verdict"]
    if verdict is None:
        return "\n".join([*lines, "No comparison was made."]) + "\n"
    lines += [
        "",
        f"{quantity(verdict['rows'], 'decision')} on {quantity(verdict['nodes'], 'node')} "
        f"at {quantity(verdict['times'], 'time')} from "
        f"{verdict['first_time']} to {verdict['last_time']}, {quantity(verdict['incidents'], 'incident')}, "
        f"{quantity(verdict['k'], 'alert')} "
        "per decision time for each side. Neither side was trained on these decisions.",
        "",
        "| criterion | against | other | this version | limit | outcome | finding |",
        "|---|---|---|---|---|---|---|",
    ]
    for criterion in verdict["criteria"]:
        cells = (
            criterion["name"], criterion["against"], _plain(criterion["champion"]), _plain(criterion["challenger"]),
            criterion["limit"], criterion["outcome"], criterion["why"],
        )  # fmt: skip
        lines.append("| " + " | ".join(str(cell).replace("|", "/") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def _trained(manifest: Mapping[str, Any]) -> list[str]:
    fitted = manifest["fitted"]
    lines = [
        f"- Decision times from {fitted['train_start']} to {fitted['train_end']} "
        f"({fitted['span_seconds'] / 86_400:g} days), fitted at {fitted['refit_at']}.",
        f"- {fitted['n_positive']} positive rows (of which {fitted['n_augmented']} augmented) of "
        f"{quantity(fitted['n_incidents'], 'incident')}, {fitted['n_negative']} negative rows. Negatives are "
        "sampled, and scores are corrected for the sampling.",
    ]
    if fitted.get("thinned_to"):
        lines.append(
            f"- `training.memory` limited the negatives to {fitted['thinned_to']} per positive, fewer than "
            "`training.negative_ratio`."
        )
    data = manifest.get("data")
    if data:
        lines.append(
            f"- The dataset: {data['units']} units ({data['unit']}), {quantity(data['incidents'], 'incident')} known "
            f"by the refit, from {data['first']} to {data['last']}."
        )
    lines.append(
        f"- Dataset `{manifest.get('dataset_digest', 'unknown')}`, code `{manifest.get('code_revision', 'unknown')}`."
    )
    simulated = manifest.get("simulated")
    if simulated:
        facts = ", ".join(f"{key} {simulated[key]}" for key in sorted(simulated))
        lines.append(f"- **The fleet was simulated** ({facts}).")
    if fitted["stand_in"]:
        lines.append(f"- **No model could be fitted**: every model is replaced by `{fitted['stand_in']}`.")
    if fitted["stand_in"] == PRIOR:
        lines.append("- **Prior only**: the fleet had no failure to learn from. Scores only rank; nothing is promised.")
    elif fitted["prior_weight"] is not None:
        lines.append(f"- The prior (a model of other fleets) has a weight of {fitted['prior_weight']:.2g}.")
    return lines


def _features(manifest: Mapping[str, Any]) -> list[str]:
    groups = Counter(column["group"] for column in manifest["features"])
    lines = [f"{len(manifest['features'])} features.", "", "| group | features | channels |", "|---|---|---|"]
    for group in sorted(groups):
        channels = sorted({str(c["channel"]) for c in manifest["features"] if c["group"] == group and c["channel"]})
        further = f" and {len(channels) - 8} more" if len(channels) > 8 else ""
        lines.append(f"| {group} | {groups[group]} | {', '.join(channels[:8])}{further} |")
    for name, used_groups in sorted(manifest["fitted"]["groups"].items()):
        if set(used_groups) != set(groups):
            lines += ["", f"`{name}` uses only {', '.join(used_groups)}."]
    return lines


def _measured(manifest: Mapping[str, Any]) -> list[str]:
    metrics = manifest.get("metrics") or {}
    figures = _profile(manifest)
    if not figures:
        return ["No backtest was given."]
    lines = [
        f"Backtest from {metrics.get('first_time')} to {metrics.get('last_time')} with sliding training and a budget "
        f"of {metrics.get('k')} nodes per decision time. Brackets are 95 % intervals.",
    ]
    if metrics.get("dataset_digest") not in (None, manifest.get("dataset_digest")):
        lines.append(f"**The backtest used another dataset**, `{metrics['dataset_digest']}`.")
    differs = (manifest.get("decisions") or {}).get("differs") or []
    if differs:
        lines.append(
            f"**The backtest used other parameters**; its figures do not describe this model: {'; '.join(differs)}."
        )
    lines += ["", "| | value | interval |", "|---|---|---|"]
    for key, name, share in _STATISTICS:
        low, high = figures.get(f"{key}_low"), figures.get(f"{key}_high")
        bounds = "" if low is None or high is None else f"[{_value(low, share)}, {_value(high, share)}]"
        lines.append(f"| {name} | {_value(figures.get(key), share)} | {bounds} |")
    by_model = {name: variants["sliding"] for name, variants in metrics["models"].items() if variants.get("sliding")}
    if len(by_model) > 1:
        lines += ["", "All models of the backtest:", "", "| model | " + " | ".join(n for _, n, _ in _BY_MODEL) + " |"]
        lines.append("|---|" + "---|" * len(_BY_MODEL))
        for name, statistics in by_model.items():
            cells = " | ".join(_value(statistics.get(key), share) for key, _, share in _BY_MODEL)
            lines.append(f"| `{name}` | {cells} |")
    return lines


def _calibration(manifest: Mapping[str, Any]) -> list[str]:
    fitted = manifest["fitted"]
    calibrator = (fitted.get("calibrators") or {}).get(manifest["profile"]) or {}
    lines = []
    if not fitted["calibrated"]:
        lines.append("**Risks are not calibrated**: too few incidents. They are derived from the base rate.")
    elif calibrator:
        lines.append(
            f"`{calibrator['method']}` calibration of scores to risks, fitted on a slice later than the training rows."
        )
    figures = _profile(manifest)
    if figures and figures.get("risk_ratio") is not None:
        lines.append(
            f"Out of sample, in the backtest: mean risk over base rate {_value(figures['risk_ratio'], 0)}, Brier skill "
            f"{_value(figures.get('brier_skill'), 0)}."
        )
    return lines or ["Unknown."]


def _limits(manifest: Mapping[str, Any]) -> list[str]:
    lines = [
        "- Precision depends on the fleet as much as on the model: compare it with the base rate.",
        "- Failures without a precursor in telemetry or history cannot be predicted, at any threshold.",
        "- Risks age as the fleet changes; refit as often as the backtest did.",
        "- Ranks and alerts are valid only if all units of a decision time are scored in one call.",
    ]
    classes = (_profile(manifest) or {}).get("by_class") or {}
    for name, statistics in classes.items():
        n, caught = statistics["incidents"], statistics["caught"]
        note = ": too few for an interval" if n < _RARE else ", almost none" if caught < n / 10 else ""
        lines.append(f"- Failures of class `{name}`: {caught} of {n} were alerted in the backtest{note}.")
    return lines


def _settings(manifest: Mapping[str, Any]) -> list[str]:
    params = {key: value for key, value in (manifest.get("params") or {}).items() if key in _PARAMS}
    return ["", "## Parameters", "", "```yaml", yaml.safe_dump(params).rstrip(), "```"] if params else []


def _profile(manifest: Mapping[str, Any]) -> Mapping[str, Any] | None:
    models = (manifest.get("metrics") or {}).get("models") or {}
    sliding = (models.get(manifest["profile"]) or {}).get("sliding")
    return sliding or None


def _value(value: float | None, share: int) -> str:
    if value is None or math.isnan(value):
        return "undefined"
    return f"{100 * value:.3g} %" if share else f"{value:.3f}"


def _plain(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"

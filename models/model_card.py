"""The model card of a bundle: what it is for, what it was made from, how good it was, what it cannot do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

_SHOWN = (
    ("precision_at_k", "precision at K", 1),
    ("recall", "incidents caught", 1),
    ("average_precision", "average precision", 0),
    ("roc_auc", "ROC-AUC", 0),
    ("base_rate", "base rate", 1),
)


def model_card(manifest: Mapping[str, Any]) -> str:
    """Write the card.

    Parameters
    ----------
    manifest : mapping
        A bundle's manifest, with ``profile``, ``fitted`` and ``features``; ``metrics`` as
        :meth:`models.evaluation.Evaluation.to_metrics` gives them, if known.

    Returns
    -------
    str
        Markdown, the same for the same manifest.
    """
    fitted = manifest["fitted"]
    days = fitted["span_seconds"] / 86_400
    groups = sorted({column["group"] for column in manifest["features"]})
    lines = [
        "# Model card",
        "",
        f"The profile's model is `{manifest['profile']}`; the bundle also holds {_names(fitted['models'])}.",
        "",
        "## For what",
        "",
        f"Ranks the units of one fleet by the risk of a hardware failure and alerts at most {fitted['k']} of them at a "
        "decision time. Risks are meant for the fleet that the models were trained on. They are no statement about the "
        "cause of a failure, and none about fleets of other hardware, drivers or monitoring.",
        "",
        "## Trained on",
        "",
        f"- Decision times from {fitted['train_start']} to {fitted['train_end']} ({days:g} days), refitted at "
        f"{fitted['refit_at']}.",
        f"- {fitted['n_positive']} positive rows (of which {fitted['n_augmented']} augmented) of "
        f"{fitted['n_incidents']} incidents, {fitted['n_negative']} negative rows; negatives are sampled and scores "
        "corrected for it.",
        f"- {len(manifest['features'])} features of the groups {', '.join(groups) or 'none'}.",
        f"- Dataset `{manifest.get('dataset_digest', 'unknown')}`, code `{manifest.get('code_revision', 'unknown')}`.",
    ]
    simulated = manifest.get("simulated")
    if simulated:
        lines.append(f"- **The fleet was simulated** ({_pairs(simulated)}).")
    if fitted["stand_in"]:
        lines.append(f"- **Nothing could be fitted**: every model is stood in for by `{fitted['stand_in']}`.")
    if not fitted["calibrated"]:
        lines.append("- **Risks are not calibrated on data**: too few incidents; they follow from the base rate.")
    lines += ["", "## How good", "", *_measured(manifest), "", "## Limits", ""]
    lines += [
        "- A precision says as much about the fleet as about the model: compare it with the base rate.",
        "- Risks age as the fleet changes; refit as often as the backtest did.",
        "- Ranks and alerts need all units of a decision time in one call.",
    ]
    return "\n".join(lines) + "\n"


def _measured(manifest: Mapping[str, Any]) -> list[str]:
    metrics = manifest.get("metrics") or {}
    mine = ((metrics.get("models") or {}).get(manifest["profile"]) or {}).get("sliding")
    if not mine:
        return ["No backtest was given."]
    lines = [
        f"Backtest from {metrics.get('first_time')} to {metrics.get('last_time')} with a budget of {metrics.get('k')} "
        "at a decision time, refitted on a sliding span; brackets are 95 % intervals.",
        "",
        "| | value | interval |",
        "|---|---|---|",
    ]
    for key, name, share in _SHOWN:
        low, high = mine.get(f"{key}_low"), mine.get(f"{key}_high")
        bounds = "" if low is None or high is None else f"[{_value(low, share)}, {_value(high, share)}]"
        lines.append(f"| {name} | {_value(mine.get(key), share)} | {bounds} |")
    return lines


def _value(value: float | None, share: int) -> str:
    if value is None:
        return "undefined"
    return f"{100 * value:.3g} %" if share else f"{value:.3f}"


def _names(names: list[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


def _pairs(facts: Any) -> str:
    if not isinstance(facts, Mapping):
        return str(facts)
    return ", ".join(f"{key} {facts[key]}" for key in sorted(facts))

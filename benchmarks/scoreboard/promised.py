"""Promises made and kept, counted over all fleets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pandas as pd

from benchmarks.scoreboard.store import Stored
from pipeline.report.wording import count, percent

ANNOUNCED = "announced"
"""Scenario whose failures announce themselves: there a high precision must be promised."""

SPEAKABLE = 0.01
"""A precision below this is nothing to promise."""

TARGET, NEEDED_RECALL, NEEDED_FLEETS = 0.85, 0.10, 4
"""Precision to be promised on ``announced``, incidents to be caught with it, and on how many of five fleets."""


def promise_table(parts: Mapping[str, Sequence[Stored]]) -> pd.DataFrame:
    """Gather what each fleet's profile promised.

    Parameters
    ----------
    parts : mapping of str to sequence of Stored
        The recommended profile's parts by scenario.

    Returns
    -------
    DataFrame
        ``scenario``, ``fleet`` and the columns of :attr:`models.promises.Promises.pooled`; empty where there are none.
    """
    frames = []
    for scenario, stored in parts.items():
        for part in stored:
            frame = part.frame("promises")
            if frame is not None:
                mine = frame[frame["model"] == part.facts["profile"]]
                frames.append(mine.assign(scenario=scenario, fleet=part.path.name))
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def promise_lines(table: pd.DataFrame) -> list[str]:
    """Tell them: one row a scenario and target, then what was asked for.

    Parameters
    ----------
    table : DataFrame
        As :func:`promise_table` returns it.

    Returns
    -------
    list of str
        Markdown.
    """
    if table.empty:
        return ["No fleet left any promise."]
    lines = [
        "| scenario | precision promised | fleets | with a promise | kept | broken | drains under promise | their "
        "precision | incidents caught | highest that could be promised at the end, by fleet |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (scenario, target), mine in table.groupby(["scenario", "target"], sort=False):
        made = mine[mine["promised"] > 0]
        judged = made[made["kept"].notna()]
        hits, known = mine["hits"].sum(), mine["known_drains"].sum()
        cells = [
            f"`{scenario}`",
            percent(float(target)),
            count(len(mine)),
            count(len(made)),
            count(judged["kept"].astype(bool).sum()),
            count((~judged["kept"].astype(bool)).sum()),
            count(known),
            percent(hits / known) if known else "–",
            percent(float(made["recall"].mean())) if len(made) else "–",
            ", ".join(percent(float(best)) if best >= SPEAKABLE else "none" for best in mine["best"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    judged = table[(table["promised"] > 0) & table["kept"].notna()]
    kept = int(judged["kept"].astype(bool).sum())
    lines += ["", f"Over all scenarios and targets, {kept} of {len(judged)} promises that brought drains were kept."]
    asked = table[(table["scenario"] == ANNOUNCED) & (table["target"].sub(TARGET).abs() < 1e-9)]
    if len(asked):
        good = asked["kept"].fillna(value=False).astype(bool) & (asked["recall"] >= NEEDED_RECALL)
        met = "met" if int(good.sum()) >= min(NEEDED_FLEETS, len(asked)) else "not met"
        lines.append(
            f"On `{ANNOUNCED}`, a precision of {percent(TARGET)} was promised and kept out of time at a recall of at "
            f"least {percent(NEEDED_RECALL)} on {int(good.sum())} of {len(asked)} fleets: **{met}** (asked: "
            f"{NEEDED_FLEETS} of 5)."
        )
    return lines

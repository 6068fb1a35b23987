"""Promises made and kept, counted over all fleets.

A part keeps what promises are made of: the profile's risks, and a matrix without features, which tells labels as of any
time. So what was promised can be told anew, by other rules, without replaying a fleet.
"""

from __future__ import annotations

import hashlib
import json
import multiprocessing
import shutil
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.scoreboard.plan import promising_digest
from benchmarks.scoreboard.store import Stored
from evaluation.backtest.promises import walk_promises
from evaluation.metrics.comparison import SLIDING
from features.matrix.matrix import FeatureMatrix
from features.matrix.meta import (
    EVENTS_NAME,
    INVENTORY_NAME,
    META_NAME,
    ROW_COLUMNS,
    MatrixPart,
)
from models.config import PrecisionTargetsSection
from pipeline.artefacts import write_frame, write_json
from pipeline.report.wording import count, join, percent

ANNOUNCED = "announced"
"""Scenario whose failures announce themselves: there a high precision must be promised."""

SPEAKABLE = 0.01
"""A precision below this is nothing to promise."""

TARGET, NEEDED_RECALL, NEEDED_FLEETS = 0.85, 0.10, 4
"""Precision to be promised on ``announced``, incidents to be caught with it, and on how many of five fleets."""


_LABELS, _ROWS = "labels", "part-all.parquet"


def keep_labels(matrix: FeatureMatrix, part: Path) -> None:
    """Keep a matrix of the decision grid without features, from which labels as of any time can be told."""
    folder = part / _LABELS
    folder.mkdir()
    for name in (EVENTS_NAME, INVENTORY_NAME):
        shutil.copyfile(matrix.path / name, folder / name)
    grid = [("augmented", "=", False)]
    files = [matrix.path / matrix_part.file for matrix_part in matrix.meta.parts]
    rows = pa.concat_tables([pq.read_table(file, columns=list(ROW_COLUMNS), filters=grid) for file in files])
    pq.write_table(rows.unify_dictionaries(), folder / _ROWS, compression="zstd")
    established = max(matrix_part.established for matrix_part in matrix.meta.parts)
    meta = replace(
        matrix.meta,
        counts={**matrix.meta.counts, "rows": len(rows), "augmented": 0},
        parts=(MatrixPart(_ROWS, len(rows), 0, established),),
    )
    (folder / META_NAME).write_bytes(meta.encode())


def promises_of(part: Stored, section: PrecisionTargetsSection) -> pd.DataFrame:
    """Walk the promises of a part's profile, or take those that the same rules made earlier.

    ``section``: ``models.precision_targets``.
    Returns: :attr:`evaluation.backtest.promises.Promises.pooled` of the profile; empty where the part kept no labels.
    """
    if not (part.path / _LABELS).is_dir():
        return pd.DataFrame()
    inputs = json.dumps([promising_digest(), section.model_dump(mode="json"), part.facts["key"]], sort_keys=True)
    key = hashlib.sha256(inputs.encode()).hexdigest()
    frame_path, key_path = part.path / "promises.parquet", part.path / "promises.json"
    if key_path.is_file() and json.loads(key_path.read_text(encoding="utf-8"))["key"] == key:
        return pd.read_parquet(frame_path)
    key_path.unlink(missing_ok=True)
    rows, profile = part.rows(), part.facts["profile"]
    predictions = pd.DataFrame(
        {
            "model": profile,
            "variant": SLIDING,
            "decision_time": pd.to_datetime(rows["time_ms"], unit="ms", utc=True).astype("datetime64[ms, UTC]"),
            "unit": pd.Categorical.from_codes(rows["unit"], categories=part.units()),
            "fold": rows["fold"],
            "risk": part.scores(profile, SLIDING)["risk"],
        }
    )
    folds = pd.DataFrame({"variant": SLIDING, "fold": np.unique(rows["fold"])})
    matrix = FeatureMatrix.open(part.path / _LABELS)
    promises = walk_promises(predictions, folds, matrix, section, k=int(part.facts["k"])).pooled
    write_frame(promises, frame_path)
    write_json({"key": key}, key_path)  # last: without it they are made again
    return promises


def promise_table(
    parts: Mapping[str, Sequence[Stored]], section: PrecisionTargetsSection, jobs: int = 1
) -> pd.DataFrame:
    """Gather what each fleet's profile promised.

    ``parts``: the recommended profile's parts by scenario, and those that were replayed for their promises alone.
    ``section``: ``models.precision_targets``.
    ``jobs``: parts at a time, each in a process of its own.
    Returns: ``scenario``, ``fleet`` and the columns of ``Promises.pooled``; empty where there are
    none.
    """
    named = [(scenario, part) for scenario, stored in parts.items() for part in stored]
    walk = partial(promises_of, section=section)
    if jobs == 1:
        walked = [walk(part) for _, part in named]
    else:
        with ProcessPoolExecutor(max_workers=jobs, mp_context=multiprocessing.get_context("spawn")) as pool:
            walked = list(pool.map(walk, [part for _, part in named]))
    frames = [
        frame.assign(scenario=scenario, fleet=part.path.name)
        for (scenario, part), frame in zip(named, walked, strict=True)
        if len(frame)
    ]
    return pd.concat(frames, ignore_index=True) if frames else pd.DataFrame()


def promise_lines(table: pd.DataFrame, section: PrecisionTargetsSection) -> list[str]:
    """Tell them: what a promise is of, one row a scenario and target, then what was asked for.

    ``table``: as :func:`promise_table` returns it.
    """
    if table.empty:
        return ["No fleet left any promise."]
    horizon = section.horizon
    own = "the labels' horizon"
    within = own if horizon is None else f"{horizon / timedelta(hours=1):g} hours (or {own} where that is longer)"
    lines = [
        "A promise is of **drains**, not of alerts: a GPU's first alert at or above the threshold begins one, its "
        f"alerts within {within} belong to it, over refits too, and it is right if a failure follows the first within "
        f"that time. Every other precision on this page is of alerts, one a row, and of {own}.",
        "",
        "| scenario | precision promised | fleets | with a promise | kept | broken | without a drain of known outcome "
        "| drains under promise | their precision | incidents caught | highest that could be promised at the end, by "
        "fleet |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
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
            count(len(made) - len(judged)),
            count(known),
            percent(hits / known) if known else "–",
            percent(float(made["recall"].mean())) if len(made) else "–",
            ", ".join(percent(float(best)) if best >= SPEAKABLE else "none" for best in mine["best"]),
        ]
        lines.append("| " + " | ".join(cells) + " |")
    lines += ["", _counted(table)]
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


def _counted(table: pd.DataFrame) -> str:
    """Count promises kept over all scenarios, on how many fleets, and those that nothing is known of."""
    made = table[table["promised"] > 0]
    judged = made[made["kept"].notna()]
    kept = int(judged["kept"].astype(bool).sum())
    on = join(
        [f"{count(mine['fleet'].nunique())} of `{name}`" for name, mine in judged.groupby("scenario", sort=False)]
    )
    summary = f"Over all scenarios and targets, {kept} of {len(judged)} promises that brought drains were kept"
    summary += f" (fleets: {on}; a fleet's targets are nested, so its promises are not independent)." if on else "."
    if len(made) > len(judged):
        summary += f" {count(len(made) - len(judged))} more brought no drain whose outcome is known."
    return summary

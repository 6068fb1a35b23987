"""The process behind the fleet page that reads a dataset, so that the service itself never loads pandas.

``python -m predrain.page_reader FOLDERS facts`` writes one JSON object and ends; ``… channels`` answers a line of JSON
with a line of JSON until its input ends. Started by ``predrain serve``, never by a person.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas as pd


def command(scores: Path, dataset: Path, ledger: Path | None) -> list[str]:
    """Return the command that begins a reader.

    ``ledger``: the controller's ledger: its drains tell which silence was ours, its diagnostics what an alert came to.
    """
    more = [] if ledger is None else ["--ledger", str(ledger.absolute())]
    return [
        *(sys.executable, "-P", "-m", "predrain.page_reader"),  # -P: what lies where we run is none of ours
        *("--scores", str(scores.absolute()), "--dataset", str(dataset.absolute()), *more),
    ]


def main() -> int:
    """Read what the arguments ask for."""
    parser = argparse.ArgumentParser(prog="predrain.page_reader")
    parser.add_argument("--scores", type=Path, required=True)
    parser.add_argument("--dataset", type=Path, required=True)
    parser.add_argument("--ledger", type=Path)
    parser.add_argument("what", choices=("facts", "channels"))
    given = parser.parse_args()
    os.nice(5)  # answers of the service go before plots
    from features.errors import InputError as OurError
    from telemetry.errors import InputError

    try:
        if given.what == "facts":
            json.dump(facts(given.scores, given.dataset, given.ledger), sys.stdout, allow_nan=False)
        else:
            _answer(given.dataset)
    except (InputError, OurError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def facts(scores: Path, dataset: Path, ledger: Path | None) -> dict[str, Any]:
    """Return where units stand, and what came of earlier alerts.

    Returns: JSON-able: ``places`` (by unit: cluster, group, rack, model), ``outcomes``
    (:func:`serving.pages.alert_outcomes.outcomes_of`), ``data_end`` and ``made_at``.
    Raises ``InputError`` if the dataset or the ledger cannot be read.
    """
    from serving.pages.alert_outcomes import labels_of, outcomes_of
    from telemetry.dataset.store import Dataset

    found = Dataset.open(dataset)
    inventory, events = found.inventory(), found.events()
    if ledger is not None and ledger.exists():
        events = _with_our_own(events, ledger)
    end = found.meta.span[1]
    return {
        "places": _places(inventory),
        "outcomes": outcomes_of(scores, events, inventory, data_end=end, labels=labels_of(scores)),
        "data_end": end.isoformat(),
        "made_at": datetime.now(UTC).isoformat(timespec="seconds"),
    }


def _places(inventory: pd.DataFrame) -> dict[str, list[str]]:
    from features.installations import units_of
    from serving.pages.locations import FIELDS

    latest = inventory.assign(unit=units_of(inventory)).sort_values("installed_at", kind="stable")
    columns = [
        latest[name].astype(object).where(latest[name].notna(), "") if name in latest else [""] * len(latest)
        for name in FIELDS
    ]
    return {str(unit): list(map(str, place)) for unit, *place in zip(latest["unit"], *columns, strict=True)}


def _with_our_own(events: pd.DataFrame, ledger: Path) -> pd.DataFrame:
    """Add what a controller did and found out: its drains, and the diagnostics of the nodes that it emptied."""
    import pandas as pd
    import pyarrow as pa

    from scheduler.ledger.export import diagnostic_events, drain_events
    from scheduler.ledger.reader import LedgerReader
    from telemetry.dataset.schema import EVENTS

    reader = LedgerReader(ledger)
    try:
        own = drain_events(reader.marks()) + diagnostic_events(reader.results())
    finally:
        reader.close()
    if not own:
        return events
    return pd.concat([events, pa.Table.from_pylist(own, schema=EVENTS).to_pandas()], ignore_index=True)


def _answer(dataset: Path) -> None:
    from serving.pages.channels import channels_of
    from telemetry.dataset.store import Dataset
    from telemetry.errors import InputError

    for line in sys.stdin:
        try:
            asked = json.loads(line)
            # Opened anew each time: it may have been replaced.
            answer = channels_of(Dataset.open(dataset), asked["node"], asked["unit"])
        except (InputError, OSError) as error:
            answer = {"error": str(error)}
        sys.stdout.write(json.dumps(answer, allow_nan=False) + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())

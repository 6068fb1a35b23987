"""Our own drains and releases as events, so that training knows which silence was ours."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from foundation.files import write_bytes
from policy.fleet import Level

SOURCE = "predrain"
"""``source`` of our events: features and labels know our own drains by it."""

VERIFIED = "verification"
"""``source`` of the diagnostics that we let run on emptied nodes."""

_CODES = {"passed": "pass", "failed": "fail"}


def drain_events(marks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Make events of what was confirmed.

    ``marks``: as :meth:`scheduler.ledger.reader.LedgerReader.marks` gives them, oldest first.
    Returns: in the layout of :data:`EVENTS`: one ``drain`` when a node is taken out of service, with
    the tier as its code, and one with the code ``release`` when it is given back. ``gpu`` is null: the node is out as a
    whole. A taint followed by a drain is one event.
    """
    out: set[str] = set()
    events: list[dict[str, Any]] = []
    for mark in marks:
        node, hard = mark["node"], mark["verb"] in ("swap", "drain")
        if hard == (node in out):
            continue
        if not hard and Level[mark["to"].upper()] >= Level.SWAP:
            continue
        (out.add if hard else out.discard)(node)
        action = mark["action"]
        at = datetime.fromisoformat(mark["settled_at"])
        events.append(
            {
                "timestamp": at, "node": node, "gpu": None, "type": "drain",
                "code": action["tier"] if hard else "release", "detail": "; ".join(action["reasons"][:3]),
                "source": SOURCE, "known_at": at,
            }
        )  # fmt: skip
    return events


def diagnostic_events(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Make events of what our diagnostics came to.

    ``results``: as :meth:`scheduler.ledger.reader.LedgerReader.results` gives them.
    Returns: a ``diagnostic`` of each GPU that was in the node, with the code ``pass``, ``fail`` or ``inconclusive``.
    Where some failed and the diagnostic names them, the others are ``inconclusive``: it may have ended at the first
    fault. Their ``source`` does not begin with ours: unlike a drain, a result says something of the hardware.
    """
    events: list[dict[str, Any]] = []
    for result in results:
        at, named = datetime.fromisoformat(result["at"]), result["failed_units"]
        for unit in result["units"] or [None]:
            code = _CODES.get(result["result"], "inconclusive")
            if code == "fail" and named and unit not in named:
                code = "inconclusive"
            events.append(
                {
                    "timestamp": at, "node": result["node"], "gpu": unit, "type": "diagnostic", "code": code,
                    "detail": result["message"], "source": VERIFIED, "known_at": at,
                }
            )  # fmt: skip
    return events


def write_events(events: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write events as Parquet, as ``predrain import --events`` reads them.

    Raises ``InputError`` if the disk is full or the folder may not be written to.
    """
    import pyarrow as pa  # noqa: PLC0415 - the controller itself needs none of it
    import pyarrow.parquet as pq  # noqa: PLC0415

    from telemetry.dataset.schema import EVENTS  # noqa: PLC0415

    content = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist([dict(event) for event in events], schema=EVENTS), content)
    write_bytes(file, content.getvalue())

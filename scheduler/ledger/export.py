"""Export of a ledger's drains and diagnostics as events."""

from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from foundation.files import write_bytes
from policy.fleet import Level

SOURCE = "predrain"
"""``source`` of exported drains, by which features and labels recognize them."""

VERIFIED = "verification"
"""``source`` of exported diagnostics and probes."""

_CODES = {"passed": "pass", "failed": "fail"}


def drain_events(marks: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert confirmed hard markers to events.

    ``marks``: from :meth:`scheduler.ledger.reader.LedgerReader.marks`, oldest first.
    Returns: in the layout of :data:`EVENTS`, one ``drain`` when a node is taken out of service, with the tier as code,
    and one with code ``release`` when it is returned. ``gpu`` is None, because the whole node is affected. A taint
    followed by a drain is one event.
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
        time = datetime.fromisoformat(mark["settled_at"])
        events.append(
            {
                "timestamp": time, "node": node, "gpu": None, "type": "drain",
                "code": action["tier"] if hard else "release", "detail": "; ".join(action["reasons"][:3]),
                "source": SOURCE, "known_at": time,
            }
        )  # fmt: skip
    return events


def diagnostic_events(results: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Convert results of diagnostics to events.

    Returns: a ``diagnostic`` for each GPU of the node, with code ``pass``, ``fail``, ``inconclusive``, or
    ``probe_pass``, which voids no earlier evidence.
    If a failed diagnostic names GPUs, the others are ``inconclusive``, because it may have stopped at the first fault.
    The ``source`` differs from that of drains because, unlike a drain, a result is evidence about the hardware.
    """
    events: list[dict[str, Any]] = []
    for result in results:
        time, named = datetime.fromisoformat(result["at"]), result["failed_units"]
        for unit in result["units"] or [None]:
            code = _CODES.get(result["result"], "inconclusive")
            code = "probe_pass" if (code, result.get("rung")) == ("pass", "probe") else code
            if code == "fail" and named and unit not in named:
                code = "inconclusive"
            events.append(
                {
                    "timestamp": time, "node": result["node"], "gpu": unit, "type": "diagnostic", "code": code,
                    "detail": result["message"], "source": VERIFIED, "known_at": time,
                }
            )  # fmt: skip
    return events


def write_events(events: Sequence[Mapping[str, Any]], file: Path) -> None:
    """Write events as Parquet for ``predrain import --events``.

    Raises ``InputError`` if the disk is full or the folder is not writable.
    """
    import pyarrow as pa  # needed for the export only
    import pyarrow.parquet as pq

    from telemetry.dataset.schema import EVENTS

    content = pa.BufferOutputStream()
    pq.write_table(pa.Table.from_pylist([dict(event) for event in events], schema=EVENTS), content)
    write_bytes(file, content.getvalue())

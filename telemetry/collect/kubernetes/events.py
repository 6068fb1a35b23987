"""Kubernetes events about GPUs and their nodes: which of them are ours, and how often each has happened."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import datetime

from telemetry.collect.event import Event
from telemetry.collect.kubernetes.api import Object, timestamp_ms
from telemetry.collect.kubernetes.node_tracker import SOURCE
from telemetry.collect.kubernetes.rules import KubernetesRules
from telemetry.milliseconds import from_ms
from telemetry.xids.pci import normalise_pci_bus_id
from telemetry.xids.xid_message import parse_xid_message

_DETAIL_LENGTH = 400


@dataclass(frozen=True, slots=True)
class Notice:
    """A Kubernetes event that a rule names; ``count``: the server counts repeats instead of keeping each."""

    uid: str
    kind: str
    node: str
    count: int
    first_ms: int | None
    last_ms: int | None
    type: str
    code: str
    detail: str
    gpu: str | None = None
    pci_bus_id: str | None = None


def notice_of(event: Object, rules: KubernetesRules) -> Notice | None:
    """Return what matters of a ``v1`` Event, or None where no rule names it or it names no node.

    Of an XID whose message names no GPU the code is kept as ``xid_N`` in an event of type ``other``: an XID without a
    GPU would count as one of every GPU of the node, and the kernel log tells which it was.
    """
    about = event.get("involvedObject") or {}
    reason, message = str(event.get("reason") or ""), str(event.get("message") or "")
    found = rules.for_event(str(about.get("kind") or ""), reason, message)
    source = event.get("source") or {}
    node = about.get("name") if about.get("kind") == "Node" else source.get("host")
    uid = (event.get("metadata") or {}).get("uid")
    if found is None or not node or not uid:
        return None
    rule, groups = found
    kind, code = str(rule.type), rule.code or reason
    gpu, address = groups.get("gpu"), normalise_pci_bus_id(groups.get("pci", ""))
    detail = f"{reason}: {message}" if message else reason
    if kind == "xid":
        xid = parse_xid_message(message)
        number = xid.code if xid is not None else groups.get("xid")
        if number is None:
            return None
        gpu, address = gpu or (xid.gpu if xid else None), address or (xid.pci_bus_id if xid else None)
        code = rule.code or str(int(number))
        if gpu is None and address is None:
            kind, code = "other", f"xid_{code}"
    series = event.get("series") or {}
    stamps = [series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime")]
    stamps += [event.get("firstTimestamp"), (event.get("metadata") or {}).get("creationTimestamp")]
    known = [ms for ms in map(timestamp_ms, stamps) if ms is not None]
    first_ms = next((ms for ms in map(timestamp_ms, (event.get("firstTimestamp"), event.get("eventTime"))) if ms), None)
    return Notice(
        uid=uid,
        kind=str(about["kind"]),
        node=str(node),
        count=int(series.get("count") or event.get("count") or 1),
        first_ms=first_ms,
        last_ms=known[0] if known else None,
        type=kind,
        code=code,
        detail=detail[:_DETAIL_LENGTH],
        gpu=gpu,
        pci_bus_id=address,
    )


class NoticeTracker:
    """Which Kubernetes events were reported already: their counts by uid, by kind of object."""

    def __init__(self, reported: Mapping[str, Mapping[str, int]] | None = None) -> None:
        self.reported = {kind: dict(counts) for kind, counts in (reported or {}).items()}

    def update(self, notice: Notice, at: datetime) -> list[Event]:
        """Return our events for what is new in a Kubernetes event.

        One when it is first seen, at its first and, if it was repeated since, one more at its last occurrence; then one
        each time the count has risen.
        """
        counts = self.reported.setdefault(notice.kind, {})
        before = counts.get(notice.uid, 0)
        if notice.count <= before:
            return []
        counts[notice.uid] = notice.count
        moments = [notice.last_ms]
        first_also = before == 0 and notice.count > 1 and notice.first_ms is not None
        if first_also and notice.first_ms != notice.last_ms:
            moments.insert(0, notice.first_ms)
        news = notice.count - before
        made = []
        for number, ms in enumerate(moments):
            repeated = news - (len(moments) - 1) if number == len(moments) - 1 else 1
            made.append(
                Event(
                    timestamp=at if ms is None else from_ms(ms),
                    node=notice.node,
                    type=notice.type,
                    source=SOURCE,
                    known_at=at,
                    code=notice.code,
                    detail=notice.detail + (f" ({repeated} times)" if repeated > 1 else ""),
                    gpu=notice.gpu,
                    pci_bus_id=notice.pci_bus_id,
                )
            )
        return made

    def forget(self, notice: Notice) -> None:
        """Forget an event that the server deleted (after an hour by default)."""
        self.reported.get(notice.kind, {}).pop(notice.uid, None)

    def keep_only(self, kind: str, uids: Iterable[str]) -> None:
        """Forget all events about a kind of object that are not in this listing."""
        kept = set(uids)
        self.reported[kind] = {uid: count for uid, count in self.reported.get(kind, {}).items() if uid in kept}

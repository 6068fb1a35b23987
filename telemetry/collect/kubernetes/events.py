"""Kubernetes events about GPUs and their nodes: which of them a rule names, and how often each has happened."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from foundation.instants import from_ms
from foundation.kubernetes.api import Object, timestamp_ms
from foundation.kubernetes.watching import Tracker
from telemetry.collect.event import Event
from telemetry.collect.kubernetes.nodes import SOURCE
from telemetry.collect.kubernetes.rules import KubernetesRules
from telemetry.identity.pci import normalise_pci_bus_id
from telemetry.xids.xid_message import parse_xid_message

_DETAIL_LENGTH: Final = 400


@dataclass(frozen=True, slots=True)
class Notice:
    """A Kubernetes event that a rule names; ``count``: the server counts repeats instead of keeping each."""

    uid: str
    node: str
    count: int
    last_ms: int | None
    type: str
    code: str
    detail: str
    gpu: str | None = None
    pci_bus_id: str | None = None


def notice_of(event: Object, rules: KubernetesRules) -> Notice | None:
    """Return what matters of a ``v1`` Event, or None where no rule names it or it names no node.

    Of an XID whose message names no GPU the code is kept as ``xid_N`` in an event of type ``other``: an XID without a
    GPU would count as one of every GPU of the node, and the kernel log names it.
    """
    about, metadata = event.get("involvedObject") or {}, event.get("metadata") or {}
    reason, message = str(event.get("reason") or ""), str(event.get("message") or "")
    match = rules.for_event(str(about.get("kind") or ""), reason, message)
    node = about.get("name") if about.get("kind") == "Node" else (event.get("source") or {}).get("host")
    uid = metadata.get("uid")
    if match is None or not node or not uid:
        return None
    rule, groups = match
    kind, code = str(rule.type), rule.code or reason
    gpu, address = groups.get("gpu"), normalise_pci_bus_id(groups.get("pci", ""))
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
    stamps += [event.get("firstTimestamp"), metadata.get("creationTimestamp")]
    return Notice(
        uid=uid,
        node=str(node),
        count=int(series.get("count") or event.get("count") or 1),
        last_ms=next((ms for ms in map(timestamp_ms, stamps) if ms is not None), None),
        type=kind,
        code=code,
        detail=(f"{reason}: {message}" if message else reason)[:_DETAIL_LENGTH],
        gpu=gpu,
        pci_bus_id=address,
    )


class NoticeTracker(Tracker[Notice, int]):
    """How often each Kubernetes event was reported already, by uid.

    ``is_known``: whether a node is one of the fleet; events of others are left out.
    """

    def __init__(
        self, known: Mapping[str, int] | None = None, *, is_known: Callable[[str], bool] = lambda _node: True
    ) -> None:
        super().__init__(known or {})
        self._is_known = is_known

    def update(self, view: Notice, at: datetime) -> list[Event]:
        """Return our event for each rise of the count of a Kubernetes event, of its last occurrence."""
        repeats = view.count - self.known.get(view.uid, 0)
        if repeats <= 0 or not self._is_known(view.node):
            return []
        self.known[view.uid] = view.count
        when = at if view.last_ms is None else from_ms(view.last_ms)
        detail = view.detail + (f" ({repeats} times)" if repeats > 1 else "")
        return [Event(when, view.node, view.type, SOURCE, at, view.code, detail, view.gpu, view.pci_bus_id)]

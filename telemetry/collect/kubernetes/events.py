"""Kubernetes events about GPUs and their nodes: which of them a rule names, and how often each has happened."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from foundation.instants import from_ms
from foundation.kubernetes.api import Object, timestamp_ms
from foundation.kubernetes.watching import Tracker
from telemetry.accounting import Accounting
from telemetry.collect.kubernetes.faults import xid_faults
from telemetry.collect.kubernetes.nodes import SOURCE
from telemetry.collect.kubernetes.rules import KubernetesRules
from telemetry.dataset.event import Event
from telemetry.identity.pci import normalise_pci_bus_id
from telemetry.kernel_log.xid_message import DETAIL_LENGTH, KernelFinding

TABLE: Final = "Kubernetes events"
"""Table of the accounting."""


@dataclass(frozen=True, slots=True)
class Notice:
    """A Kubernetes event that a rule names; ``count``: the server counts repeats instead of keeping each.

    ``faults``: one each makes an event; ``code`` is that of a fault that has none.
    """

    uid: str
    node: str
    count: int
    last_ms: int | None
    type: str
    code: str
    detail: str
    faults: tuple[KernelFinding, ...] = (KernelFinding(""),)


class NoticeReader:
    """Reads ``v1`` Events; those that no rule names are left out by reason."""

    def __init__(self, rules: KubernetesRules, accounting: Accounting | None = None) -> None:
        self._rules = rules
        self._accounting = Accounting() if accounting is None else accounting

    def __call__(self, event: Object) -> Notice | None:
        """Return what matters of an event, or None where it is left out."""
        about, metadata = event.get("involvedObject") or {}, event.get("metadata") or {}
        reason, message = str(event.get("reason") or ""), str(event.get("message") or "")
        match = self._rules.for_event(str(about.get("kind") or ""), reason, message)
        node = about.get("name") if about.get("kind") == "Node" else (event.get("source") or {}).get("host")
        uid = metadata.get("uid")
        if match is None or match[0].type == "ignore":
            self._leave_out(f"event {'without a rule' if match is None else 'that a rule ignores'}: {reason}")
            return None
        if not node or not uid:
            self._leave_out("event without a node")
            return None
        rule, groups = match
        named = KernelFinding("", gpu=groups.get("gpu"), pci_bus_id=normalise_pci_bus_id(groups.get("pci", "")))
        faults, kind = [named], str(rule.type)
        if kind == "xid":
            xids = xid_faults("", reason, message)
            if groups.get("xid"):
                code = str(int(groups["xid"]))
                xids = [xid for xid in xids if xid.code == code][:1] or [KernelFinding("xid", code)]
            faults = [
                KernelFinding("xid", xid.code, None, named.gpu or xid.gpu, named.pci_bus_id or xid.pci_bus_id)
                for xid in xids
            ]
            kind, faults = (kind, faults) if faults else ("other", [named])
        series = event.get("series") or {}
        stamps = [series.get("lastObservedTime"), event.get("lastTimestamp"), event.get("eventTime")]
        stamps += [event.get("firstTimestamp"), metadata.get("creationTimestamp")]
        notice = Notice(
            uid=str(uid),
            node=str(node),
            count=int(series.get("count") or event.get("count") or 1),
            last_ms=next((ms for ms in map(timestamp_ms, stamps) if ms is not None), None),
            type=kind,
            code=rule.code or reason,
            detail=(f"{reason}: {message}" if message else reason)[:DETAIL_LENGTH],
            faults=tuple(faults if rule.code is None else [faults[0]._replace(code="")]),
        )
        self._accounting.take(TABLE, 1, {})
        return notice

    def _leave_out(self, why: str) -> None:
        self._accounting.take(TABLE, 1, {why[:200]: 1})


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
        """Return the events for each rise of the count of a Kubernetes event, of its last occurrence."""
        repeats = view.count - self.known.get(view.uid, 0)
        if repeats <= 0 or not self._is_known(view.node):
            return []
        self.known[view.uid] = view.count
        when = at if view.last_ms is None else from_ms(view.last_ms)
        detail = view.detail + (f" ({repeats} times)" if repeats > 1 else "")
        return [
            Event(when, view.node, view.type, SOURCE, at, fault.code or view.code, detail, fault.gpu, fault.pci_bus_id)
            for fault in view.faults
        ]

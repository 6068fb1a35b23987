"""Collector that watches nodes, events and pods of a cluster, and stages events, jobs and inventory."""

import logging
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

from pydantic import TypeAdapter

from foundation.errors import InputError
from foundation.instants import from_ms
from foundation.kubernetes.api import ApiRefused, Object, Unreachable, timestamp_ms
from foundation.kubernetes.client import KubernetesClient, input_error
from foundation.kubernetes.watching import ChangeKind, Resource, Tracker, follow
from foundation.running import Failing, backoff_s
from telemetry.accounting import Accounting
from telemetry.collect.kubernetes.jobs import JobTracker, PodRun, pod_run
from telemetry.collect.kubernetes.nodes import SOURCE, NodeTracker, ObservedKubernetesNode, view_of
from telemetry.collect.kubernetes.rules import KubernetesRules
from telemetry.collect.outbox import Outbox
from telemetry.dataset.event import Event
from telemetry.identity.devices import normalise_pci_bus_id
from telemetry.kernel_log.catalogue import DETAIL_LENGTH, KernelFinding
from telemetry.kernel_log.mentions import xid_faults
from telemetry.staging.folder import StagingFolder

TABLE: Final = "Kubernetes events"


@dataclass(frozen=True, slots=True)
class Notice:
    """A Kubernetes event that matches a rule; ``count``: occurrences, which the server aggregates.

    ``faults``: each becomes an event; ``code`` is used for faults without their own.
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
    """Parses ``v1`` Events; those without a rule are left out and counted."""

    def __init__(self, rules: KubernetesRules, accounting: Accounting | None = None) -> None:
        self._rules = rules
        self._accounting = Accounting() if accounting is None else accounting

    def __call__(self, event: Object) -> Notice | None:
        """Return the notice of an event, or None if it is left out."""
        involved, metadata = event.get("involvedObject") or {}, event.get("metadata") or {}
        reason, message = str(event.get("reason") or ""), str(event.get("message") or "")
        match = self._rules.for_event(str(involved.get("kind") or ""), reason, message)
        node = involved.get("name") if involved.get("kind") == "Node" else (event.get("source") or {}).get("host")
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

    def _leave_out(self, reason: str) -> None:
        self._accounting.take(TABLE, 1, {reason[:200]: 1})


class NoticeTracker(Tracker[Notice, int]):
    """Tracks the reported count of each Kubernetes event by UID.

    ``is_known``: whether a node is tracked; events of other nodes are left out.
    """

    def __init__(
        self, known: Mapping[str, int] | None = None, *, is_known: Callable[[str], bool] = lambda _node: True
    ) -> None:
        super().__init__(known or {})
        self._is_known = is_known

    def update(self, view: Notice, now: datetime) -> list[Event]:
        """Return the events of new occurrences, dated by the last one."""
        repeats = view.count - self.known.get(view.uid, 0)
        if repeats <= 0 or not self._is_known(view.node):
            return []
        self.known[view.uid] = view.count
        time = now if view.last_ms is None else from_ms(view.last_ms)
        detail = view.detail + (f" ({repeats} times)" if repeats > 1 else "")
        return [
            Event(time, view.node, view.type, SOURCE, now, fault.code or view.code, detail, fault.gpu, fault.pci_bus_id)
            for fault in view.faults
        ]


log = logging.getLogger(__name__)

WRITER: Final = "kubernetes"
_COUNTS: Final = TypeAdapter(dict[str, int])
_CODECS: Final[dict[str, TypeAdapter[Any]]] = {
    "nodes": TypeAdapter(dict[str, ObservedKubernetesNode]),
    "pods": TypeAdapter(dict[str, PodRun]),
}
"""Codecs of the saved state of tracked objects; all other kinds are counts by UID or name."""


class KubernetesCollector:
    """Collects one cluster into one staging folder, with a watch thread per kind of object.

    ``cluster``: name in the inventory and in the state file's name (default there: the server's address).
    ``node_selector``: selects the nodes, with or without GPUs; without it, only nodes with GPUs.
    Raises ``InputError`` if another process collects the same cluster into this folder, or the state is corrupt.
    """

    def __init__(
        self,
        api: KubernetesClient,
        staging: StagingFolder,
        rules: KubernetesRules,
        *,
        cluster: str | None = None,
        node_selector: str | None = None,
        jobs: bool = True,
        clock: Callable[[], datetime] = lambda: datetime.now(UTC),
    ) -> None:
        self._api = api
        self._clock = clock
        self._lock = threading.Lock()
        self._failing = Failing(log)
        self.outbox = Outbox(
            staging, f"{WRITER}-{re.sub(r'[^A-Za-z0-9.-]+', '-', cluster or api.name).strip('-.')[:80]}"
        )
        # State of earlier builds has no "resources": start from scratch.
        self._saved: dict[str, Any] = self.outbox.position.get("resources", {})
        self.nodes = NodeTracker(self._known("nodes"), cluster=cluster, all_nodes=node_selector is not None)
        self._jobs = JobTracker(api, rules, self._known("pods"))
        self._rules, self._notices = rules, NoticeReader(rules, self.outbox.accounting)
        self._events: list[Event] = []
        self._job_rows: list[dict[str, Any]] = []
        self._places: list[dict[str, Any]] = []
        self._resources: list[Resource] = []
        # Nodes first: events of unknown nodes are left out.
        self._add("nodes", self.nodes, lambda node: view_of(node, rules), labelSelector=node_selector)
        for kind in rules.event_kinds():
            name, field_selector = f"events of {kind}", f"involvedObject.kind={kind}"
            notices = NoticeTracker(self._known(name), is_known=lambda node: node in self.nodes.known)
            self._add(name, notices, self._notices, fieldSelector=field_selector)
        if jobs:
            no_diagnostics = f"!{rules.prefix}/diagnostic"  # predrain's own diagnostic pods
            self._add("pods", self._jobs, self._pod, fieldSelector="spec.nodeName!=", labelSelector=no_diagnostics)

    def once(self) -> None:
        """List all objects, compare them with the saved state, and write the changes.

        Raises ``InputError`` if the server rejects a request or does not respond, or the disk is full.
        """
        for resource in self._resources:
            try:
                self._take(resource, "listed", *self._api.list_all(resource.path, resource.params, resource.view))
            except (ApiRefused, Unreachable) as error:
                raise input_error(error, self._api, resource.path) from error
        self._commit()

    def run(self, stop: threading.Event, *, interval_s: float = 60.0) -> None:
        """Watch the cluster until ``stop`` is set; write every ``interval_s`` seconds, and at the end.

        Raises ``InputError`` if the first listing or the last write fails.
        """
        if not any(resource.version for resource in self._resources):
            self.once()
        log.info("%s: following %s", self._api.name, ", ".join(resource.name for resource in self._resources))
        for resource in self._resources:
            threading.Thread(
                target=follow,
                args=(self._api, resource, self._take, stop.wait),
                name=f"follow {resource.name}",
                daemon=True,  # a watch may block indefinitely
            ).start()
        while not stop.wait(interval_s):
            with self._lock:
                self._commit_or_wait(stop)
        with self._lock:
            self._commit()
        log.info("%s: stopped, all rows staged", self._api.name)

    def accounting(self) -> Accounting:
        """Return the accounting of node conditions, Kubernetes events and pods so far."""
        accounts = Accounting()
        accounts.add(self.outbox.accounting)
        self.nodes.account(accounts)
        for resource in self._resources:
            for reason, number in resource.unreadable.items():
                accounts.read(resource.name, number)
                accounts.left_out(resource.name, f"unreadable: {reason}", number)
        return accounts

    def close(self) -> None:
        """Release the lock on the state."""
        self.outbox.close()

    def _add(
        self, name: str, tracker: Tracker[Any, Any], read: Callable[[Object], Any], **selectors: str | None
    ) -> None:
        params = {key: selector for key, selector in selectors.items() if selector}
        version = self._saved.get(name, {}).get("version")
        self._resources.append(Resource(name, f"/api/v1/{name.split(maxsplit=1)[0]}", params, read, tracker, version))

    def _pod(self, pod: Object) -> PodRun | None:
        run = pod_run(pod, self._rules)
        left_out = {} if run is not None else {"requests no GPU, or has not started": 1}
        self.outbox.accounting.take("pods", 1, left_out)
        return run

    def _known(self, name: str) -> Any:
        codec = _CODECS.get(name, _COUNTS)
        return codec.validate_python(self._saved.get(name, {}).get("known", {}))

    def _take(self, resource: Resource, kind: ChangeKind, views: list[Any], version: str) -> None:
        with self._lock:
            self._events += resource.tracker.take(kind, views, self._clock())
            resource.version = version

    def _commit_or_wait(self, stop: threading.Event) -> None:
        """Commit with retries; meanwhile the caller's lock blocks the watch threads, which bounds memory."""
        while True:
            try:
                self._commit()
            except InputError as error:
                if stop.wait(backoff_s(self._failing.failed("writing", error, level=logging.ERROR))):
                    return
            else:
                self._failing.recovered("writing")
                return

    def _commit(self) -> None:
        """Write pending rows and the position. If the disk is full, keep the rows and raise ``InputError``."""
        self._job_rows += self._jobs.changed_rows()
        self._places += self.nodes.observations(self._clock())
        self._saved = {
            resource.name: {
                "version": resource.version,
                "known": _CODECS.get(resource.name, _COUNTS).dump_python(resource.tracker.known, mode="json"),
            }
            for resource in self._resources
        }
        self.outbox.commit({"resources": self._saved}, events=self._events, jobs=self._job_rows, inventory=self._places)
        self._events, self._job_rows, self._places = [], [], []
        self.outbox.flush()

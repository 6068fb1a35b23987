"""The ledger in SQLite: decisions with their inputs, calls and their outcomes; append-only."""

import contextlib
import hashlib
import json
import sqlite3
import weakref
import zlib
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

import orjson

from foundation.errors import InputError
from foundation.running import Patience, bounded
from policy.episodes import Alert
from policy.fleet import Level, NodeView
from policy.plan import Action, Plan
from scheduler.ledger.schema import connect
from scheduler.ports.codec import object_of, plain_of
from scheduler.ports.errors import LedgerError
from scheduler.ports.records import FindingKind, Intent, PendingCall, RoundRecord, Settled, digest_of
from scheduler.ports.stored_state import state_json

_BESIDE_UNITS: Final = tuple(field.name for field in fields(NodeView) if field.name != "units")
_bounded = bounded("the ledger", LedgerError)


class SqliteLedger:
    """A ledger.

    ``path``: created if missing. None: in memory.
    ``cluster``: the cluster it must belong to; None: not checked. Unsettled calls of another cluster would be settled
    from nodes of the same name in this one.
    ``required``: False: an invalid file raises ``LedgerError`` in each call, which tries to reopen it.
    ``longest_s``: limit on each call; on a disk that hangs, calls raise ``LedgerError``.
    Raises ``InputError`` if the file is required and not a ledger, corrupt, or of another version or cluster, and
    ``LedgerError`` if it is required and does not respond.

    The inputs of decisions are compressed blobs keyed by digest, so that unchanged scores, settings and nodes are
    stored once. Units with their scores are one blob, the rest of the nodes another.
    """

    def __init__(
        self, path: Path | None, cluster: str | None = None, *, required: bool = True, longest_s: float = 60.0
    ) -> None:
        self._path, self._cluster = path, cluster
        self.patience = None if path is None else Patience(longest_s)
        self._connection: sqlite3.Connection | None = None
        self._file: tuple[int, int] | None = None
        try:
            self._open()
        except (InputError, LedgerError):
            if required:
                raise

    def close(self) -> None:
        """Close the file; one that does not respond stays open until the process ends."""
        with contextlib.suppress(LedgerError):
            self._close()

    @_bounded
    def _close(self) -> None:
        if self._connection is not None:
            self._connection.close()

    @_bounded
    def _open(self) -> sqlite3.Connection:
        self._connection = connect(self._path, writable=True, cluster=self._cluster)
        weakref.finalize(self, self._connection.close).atexit = False  # closing waits for a statement that hangs
        self._file = None if self._path is None else _identity(self._path)
        return self._connection

    @property
    def _link(self) -> sqlite3.Connection:
        try:
            return self._connection or self._open()
        except InputError as error:
            raise LedgerError(str(error)) from error

    @_bounded
    def begin(self, record: RoundRecord) -> int:
        """Record a decision before it is carried out; return its number."""
        plan = record.plan
        with self._adding():
            inputs = {name: self._keep(value) for name, value in inputs_of(record).items()}
            number = self._add(
                "INSERT INTO rounds (at, holder, code, model, decided_at, inputs, plan, digest, summary) "
                "VALUES (?, ?, ?, ?, ?, ?, ?, ?, ?)",
                _words(plan.now), record.holder, record.code,
                None if record.model is None else _text(plain_of(record.model)),
                None if record.decided_at is None else _words(record.decided_at),
                _text(inputs), self._keep(plain_of(plan)), digest_of(plan),
                _text(_summary(plan, len(record.fleet), record.notes)),
            )  # fmt: skip
            for name, decision in plan.nodes.items():
                causes = {
                    key: cause.message
                    for key, cause in plan.open_causes.items()
                    if cause.freezes(decision.group, decision.node)
                }
                content = {**plain_of(decision), "over_budget": plan.over_budget.get(name), "breaker": causes}
                self._add("INSERT INTO decisions VALUES (?, ?, ?)", number, name, _text(content))
            for alert in plan.alerts:
                time = alert.at.timestamp()
                self._add("INSERT INTO alerts VALUES (?, ?, ?, ?)", number, alert.unit, time, _text(plain_of(alert)))
            return number

    @_bounded
    def begin_releases(self, plan: Plan, holder: str, code: str) -> int:
        """Record releases without a decision; they cannot be replayed."""
        with self._adding():
            return self._add(
                "INSERT INTO rounds (at, holder, code, inputs, plan, digest, summary) VALUES (?, ?, ?, ?, ?, ?, ?)",
                _words(plan.now), holder, code, _text({}), self._keep(plain_of(plan)), digest_of(plan),
                _text(_summary(plan, 0, ())),
            )  # fmt: skip

    @_bounded
    def call(self, call: Intent | PendingCall) -> int:
        """Record a call before it is made; return its number."""
        decision, verb = (call.round, call.verb) if isinstance(call, Intent) else (None, call.kind)
        with self._adding():
            return self._add(
                "INSERT INTO calls (round, at, node, verb, content) VALUES (?, ?, ?, ?, ?)",
                decision, _words(call.at), call.node, verb, _text(plain_of(call)),
            )  # fmt: skip

    @_bounded
    def settle(self, number: int, settled: Settled) -> None:
        """Record the outcome of a call."""
        with self._adding(at_once=False):
            self._add(
                "INSERT INTO settled VALUES (?, ?, ?, ?, ?)",
                number, _words(settled.at), settled.kind, int(settled.confirmed), _text(plain_of(settled)),
            )  # fmt: skip

    @_bounded
    def skip(self, number: int, time: datetime, action: Action, reason: str) -> None:
        """Record that an action was not carried out."""
        with self._adding():
            self._add(
                "INSERT INTO skipped VALUES (?, ?, ?, ?, ?)", number, _words(time), action.node, action.verb, reason
            )

    @_bounded
    def unsettled(self) -> tuple[tuple[int, Action], ...]:
        """Return the actions of decisions whose outcome is not recorded, oldest first."""
        return self._unsettled("NOT NULL", Action, _action)

    @_bounded
    def last_digest(self) -> str | None:
        """Return the digest of the last recorded decision."""
        rows = self._read("SELECT digest FROM rounds ORDER BY id DESC LIMIT 1")
        return rows[0][0] if rows else None

    @_bounded
    def alerts(self, since: datetime) -> tuple[Alert, ...]:
        """Return the alerts that started since a time, each once."""
        rows = self._read("SELECT content FROM alerts WHERE at >= ? ORDER BY at, unit", since.timestamp())
        try:
            return tuple(dict.fromkeys(object_of(Alert, json.loads(text), "alert") for (text,) in rows))
        except (ValueError, TypeError, RecursionError) as error:
            raise LedgerError(f"an alert in the ledger cannot be read: {error}") from error

    @_bounded
    def open_calls(self) -> tuple[tuple[int, PendingCall], ...]:
        """Return calls of evacuations without an outcome, oldest first; workloads have only their identity."""
        return self._unsettled("NULL", PendingCall, _identified)

    @_bounded
    def find(self, time: datetime, node: str, kind: FindingKind, message: str, content: Mapping[str, Any]) -> None:
        """Record a finding; ``content``: further JSON fields."""
        with self._adding():
            self._add(
                "INSERT INTO findings (at, node, kind, content) VALUES (?, ?, ?, ?)",
                _words(time), node, kind, _text({"message": message, **plain_of(content)}),
            )  # fmt: skip

    @_bounded
    def service(self, since: datetime) -> tuple[tuple[datetime, str, bool], ...]:
        """Return when nodes were taken out of service or returned: time, node, True if taken out."""
        rows = self._read(
            "SELECT s.at, i.node, i.verb, json_extract(i.content, '$.to') FROM calls i JOIN settled s "
            "ON s.call = i.id WHERE s.confirmed = 1 AND i.verb IN ('swap', 'drain', 'release') AND s.at >= ? "
            "ORDER BY i.id", _words(since),
        )  # fmt: skip
        return tuple(
            (datetime.fromisoformat(at), node, verb != "release")
            for at, node, verb, to in rows
            if verb != "release" or Level[to.upper()] < Level.SWAP
        )

    @_bounded
    def was_released(self, node: str, since: datetime) -> bool:
        """Whether a release of all markers of a node was confirmed since a time."""
        rows = self._read(
            "SELECT 1 FROM calls i JOIN settled s ON s.call = i.id WHERE i.node = ? AND i.verb = 'release' "
            "AND s.confirmed = 1 AND s.at >= ? AND json_extract(i.content, '$.to') = 'none' LIMIT 1",
            node, _words(since),
        )  # fmt: skip
        return bool(rows)

    def _unsettled(self, decision: str, kind: Any, part: Callable[[Any], Any]) -> tuple[tuple[int, Any], ...]:
        rows = self._read(
            f"SELECT id, content FROM calls WHERE round IS {decision} "  # noqa: S608 - a constant expression
            "AND id NOT IN (SELECT call FROM settled) ORDER BY id LIMIT 1000"
        )
        try:
            return tuple((number, object_of(kind, part(json.loads(text)), f"call {number}")) for number, text in rows)
        except (ValueError, TypeError, KeyError, RecursionError) as error:
            raise LedgerError(f"an open call in the ledger cannot be read: {error}") from error

    def _keep(self, value: Any) -> str:
        plain = value if isinstance(value, bytes) else orjson.dumps(value, option=orjson.OPT_SORT_KEYS)
        digest = hashlib.sha256(plain).hexdigest()
        if not self._link.execute("SELECT 1 FROM blobs WHERE digest = ?", (digest,)).fetchone():
            self._link.execute("INSERT INTO blobs VALUES (?, ?)", (digest, zlib.compress(plain, 1)))
        return digest

    def _add(self, command: str, *values: Any) -> int:
        return self._link.execute(command, values).lastrowid or 0

    def _read(self, command: str, *values: Any) -> list[Any]:
        try:
            return self._link.execute(command, values).fetchall()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise LedgerError(f"the ledger cannot be read: {error}") from error

    @contextlib.contextmanager
    def _adding(self, *, at_once: bool = True) -> Iterator[None]:
        """Add rows in one transaction.

        It is synced to disk at its end, or, without ``at_once``, with the next one: the outcome of a call need not
        survive a power failure, because the call is settled again then. It survives a crash of the process either way.
        """
        link = self._link
        if at_once and self._path is not None and _identity(self._path) != self._file:
            # further rows would go to an unlinked file, and be lost with this process
            raise LedgerError(f"the ledger {self._path} was removed or replaced while open: restart the controller")
        try:
            link.execute(f"PRAGMA synchronous = {'FULL' if at_once else 'NORMAL'}")
            link.execute("BEGIN IMMEDIATE")
            try:
                yield
                link.execute("COMMIT")
            except BaseException:
                if link.in_transaction:
                    link.execute("ROLLBACK")
                raise
        except sqlite3.Error as error:
            raise LedgerError(f"the ledger cannot be written: {error}") from error


def _action(content: Any) -> Any:
    """Return the action of a recorded call without fields that only another version has."""
    return {field.name: content["action"][field.name] for field in fields(Action)}


def _identified(content: Any) -> Any:
    """Reduce the workload of a recorded call to its identity: other fields change between versions."""
    workload = content.get("workload") if isinstance(content, dict) else None
    if not isinstance(workload, dict):
        return content
    return content | {
        "workload": {name: workload[name] for name in ("name", "uid", "kind", "node") if name in workload}
    }


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        status = path.stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino


def inputs_of(record: RoundRecord) -> dict[str, Any]:
    """Return the inputs of a decision as JSON or plain values, split by how often they change.

    Nodes and units are by far the largest part, and are serialized directly by orjson because this delays the first
    write of a decision.
    """
    return {
        "units": orjson.dumps({node.name: node.units for node in record.fleet}),
        "nodes": orjson.dumps([{name: getattr(node, name) for name in _BESIDE_UNITS} for node in record.fleet]),
        "state": state_json(record.state),
        "signals": plain_of(record.signals),
        "config": plain_of(record.config),
    }


def fleet_of(nodes: Any, units: Any) -> tuple[NodeView, ...]:
    """Rebuild nodes with their units from :func:`inputs_of`."""
    return tuple(
        object_of(NodeView, {**node, "units": units[node["name"]]}, f"node {i}") for i, node in enumerate(nodes)
    )


def _summary(plan: Plan, nodes: int, notes: Iterable[str]) -> dict[str, Any]:
    return {
        "nodes": nodes, "tiers": dict(Counter(node.tier for node in plan.nodes.values())),
        "actions": [f"{action.verb} {action.node}" for action in plan.actions], "over_budget": dict(plan.over_budget),
        "uses": plain_of(plan.uses), "breaker": {key: cause.message for key, cause in plan.open_causes.items()},
        "stages": {group: state.stage for group, state in plan.stages.items()}, "reasons": list(plan.reasons),
        "notes": list(notes),
    }  # fmt: skip


def _text(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, allow_nan=False, sort_keys=True, separators=(",", ":"))


def _words(value: datetime) -> str:
    return value.astimezone(UTC).isoformat(timespec="milliseconds")

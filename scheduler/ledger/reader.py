"""Queries of a ledger: decisions and their reasons, calls, findings and replay."""

import json
import sqlite3
import weakref
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

from foundation.errors import InputError
from policy.config import PolicyConfig
from policy.decide import decide
from policy.episodes import AlertOutcome
from policy.fleet import Level, Signals
from scheduler.ledger.rungs import Call, RungUse, Verdict
from scheduler.ledger.schema import connect
from scheduler.ledger.sqlite_ledger import fleet_of
from scheduler.ports.codec import object_of, plain_of
from scheduler.ports.stored_state import state_from_json
from telemetry.identity.nodes import NodeNames


@dataclass(frozen=True, slots=True)
class Replayed:
    """A replayed decision.

    ``differences``: differences from the recorded plan, as ``path: then -> now``; empty if identical.
    """

    number: int
    code: str
    differences: tuple[str, ...]
    plan: dict[str, Any]


class LedgerReader:
    """Reads a ledger, even while a controller writes to it.

    Raises ``InputError`` if it is missing, corrupt or of another version.
    """

    def __init__(self, path: Path) -> None:
        self._location = str(path)
        self._link = connect(path, writable=False)
        self.close = weakref.finalize(self, self._link.close)

    def rounds(self, limit: int = 50) -> list[dict[str, Any]]:
        """List the latest decisions with their calls, newest first."""
        rows = self._rows(
            "SELECT id, at, holder, code, model, decided_at, summary FROM rounds ORDER BY id DESC LIMIT ?", limit
        )
        return [
            {
                "decision": number, "at": at, "holder": holder, "code": code, "model": _json(model),
                "scores_of": decided, **_json(summary), "calls": self._calls("round = ?", number),
                "skipped": self._skipped("round = ?", number),
            }
            for number, at, holder, code, model, decided, summary in rows
        ]  # fmt: skip

    def why(self, node: str, limit: int = 20) -> list[dict[str, Any]]:
        """Return the decisions about a node, newest first, with reasons, calls, breaker, budgets and skipped actions.

        Raises ``InputError`` if the ledger has no record of the node.
        """
        rows = self._rows(
            "SELECT d.round, r.at, r.code, r.model, r.decided_at, r.summary, d.content FROM decisions d JOIN rounds r "
            "ON r.id = d.round WHERE d.node = ? ORDER BY d.round DESC LIMIT ?", node, limit,
        )  # fmt: skip
        if not rows:
            raise InputError(
                f"the ledger has no records of node {node!r}",
                self._location,
                "Check the name; nodes that were never at risk have no records.",
            )
        return [
            {
                "decision": number, "at": at, "code": code, "model": _json(model), "scores_of": decided,
                "breaker": _json(summary)["breaker"], **_json(content),
                "budget": [use for use in _json(summary)["uses"] if use["lost"]],
                "calls": self._calls("round = ? AND node = ?", number, node),
                "skipped": self._skipped("round = ? AND node = ?", number, node),
            }
            for number, at, code, model, decided, summary, content in rows
        ]  # fmt: skip

    def node(self, name: str) -> str:
        """Return a node's name as recorded; raises ``InputError`` if it is ambiguous."""
        tables = ("decisions", "calls", "findings")
        rows = self._rows(" UNION ".join(f"SELECT node FROM {table}" for table in tables))  # noqa: S608 - constants
        names = NodeNames(node for (node,) in rows)
        if names.is_ambiguous(name):
            candidates = ", ".join(names.candidates(name))
            raise InputError(f"node {name!r} is ambiguous", self._location, f"Give one of {candidates}.")
        return names.written(name)

    def work(self, node: str, limit: int = 200) -> list[dict[str, Any]]:
        """Return the calls and findings of a node's evacuations, oldest first.

        Returns: ``at``, ``kind``, ``workload``, ``means``, ``key``, ``answer``, ``message`` and ``wrote`` of a call;
        ``at``, ``kind``, ``message`` and further content of a finding, whose ``answer`` is None. Empty for a node that
        was never evacuated.
        """
        calls = self._rows(
            "SELECT c.at, c.verb, c.content, s.kind, s.content FROM calls c LEFT JOIN settled s ON s.call = c.id "
            "WHERE c.round IS NULL AND c.node = ? ORDER BY c.id DESC LIMIT ?", node, limit,
        )  # fmt: skip
        findings = self._rows(
            "SELECT at, kind, content FROM findings WHERE node = ? ORDER BY id DESC LIMIT ?", node, limit
        )
        work: list[dict[str, Any]] = []
        for at, kind, content, answer, settled in calls:
            call, outcome = _json(content), _json(settled) or {}
            workload = call["workload"] or {}
            work.append(
                {
                    "at": at, "kind": kind, "workload": workload.get("name"), "uid": workload.get("uid"),
                    "means": call["means"], "key": call["key"], "answer": answer or "not known",
                    "message": outcome.get("message", ""), "meant": call["writes"], "wrote": outcome.get("writes", []),
                    "request": call.get("request"),
                }
            )  # fmt: skip
        for at, kind, content in findings:
            finding = _json(content)
            work.append({"message": finding.pop("message"), **finding, "at": at, "kind": kind, "answer": None})
        return sorted(work, key=lambda entry: entry["at"])[-limit:]

    def last_actions(self) -> dict[str, tuple[str, str]]:
        """Return the last action on each node except publishing: verb or kind of finding, and time."""
        newest = self._rows(
            "SELECT i.node, i.verb, s.at FROM calls i JOIN settled s ON s.call = i.id WHERE i.id IN "
            "(SELECT MAX(i.id) FROM calls i JOIN settled s ON s.call = i.id WHERE s.confirmed = 1 "
            "AND i.round IS NOT NULL AND i.verb <> 'publish' GROUP BY i.node) "
            "UNION ALL SELECT node, kind, at FROM findings WHERE id IN (SELECT MAX(id) FROM findings GROUP BY node)"
        )
        return {node: (done, at) for node, done, at in sorted(newest, key=lambda row: row[2])}

    def rungs(self, node: str | None, now: datetime, limit: int = 50, alerts: Sequence[Verdict] = ()) -> list[RungUse]:
        """Return the actions of the ladder with their expected and incurred costs and outcomes, newest first.

        ``node``: None: all. ``alerts``: evaluated alerts in addition to those that the controller recorded.
        """
        rows = self._rows(
            "SELECT c.id, c.at, c.node, c.verb, c.round, c.content, s.kind, s.confirmed, d.content FROM calls c "
            "LEFT JOIN settled s ON s.call = c.id LEFT JOIN decisions d ON d.round = c.round AND d.node = c.node "
            "WHERE c.verb IN ('avoid', 'probe', 'checkpoint', 'swap', 'drain') AND (? IS NULL OR c.node = ?) "
            "AND (c.round IS NOT NULL OR json_extract(c.content, '$.request') IS NOT NULL) ORDER BY c.id DESC LIMIT ?",
            node, node, limit,
        )  # fmt: skip
        drained = {(row[4], row[2]) for row in rows if row[3] == "drain" and row[7]}
        verdicts = sorted([*self._verdicts(), *alerts], key=lambda verdict: verdict[1], reverse=True)
        requested: dict[str, Call] = {}
        calls: list[Call] = []
        for number, at, name, verb, decision, text, answer, confirmed, decided in rows:
            content = _json(text)
            if decision is None:
                request = json.dumps([name, content["request"]])  # one request can have a call for each job
                if request in requested:
                    requested[request].keys.add(content["key"])
                    continue
            elif verb == "swap" and (decision, name) in drained:
                continue  # the taint of a drain
            ended_at = self._ended_at(number, name) if verb in ("swap", "drain") else None
            call = Call(
                at, name, verb, decision, content, answer, bool(confirmed), _json(decided) or {}, {content["key"]},
                ended_at, self._findings(name, at, ended_at), self._idle_cost(at) if verb == "probe" else None,
            )  # fmt: skip
            calls.append(call)
            if decision is None:
                requested[request] = call
        return [call.use(verdicts, now) for call in calls]

    def _ended_at(self, number: int, node: str) -> datetime | None:
        """Return when the next action ended the time out of service that a call began."""
        rows = self._rows(
            "SELECT s.at FROM calls c JOIN settled s ON s.call = c.id WHERE c.node = ? AND c.id > ? AND s.confirmed "
            "AND (c.verb IN ('swap', 'drain') OR (c.verb = 'release' "
            "AND lower(json_extract(c.content, '$.to')) NOT IN ('swap', 'drain'))) ORDER BY c.id LIMIT 1",
            node, number,
        )  # fmt: skip
        return datetime.fromisoformat(rows[0][0]) if rows else None

    def _findings(self, node: str, since: str, until: datetime | None) -> list[dict[str, Any]]:
        rows = self._rows("SELECT at, kind, content FROM findings WHERE node = ? AND at >= ? ORDER BY id", node, since)
        return [
            {**_json(content), "kind": kind}
            for at, kind, content in rows
            if until is None or datetime.fromisoformat(at) <= until
        ]

    def _newest_inputs(self, until: str) -> dict[str, str]:
        rows = self._rows(
            "SELECT inputs FROM rounds WHERE at <= ? AND decided_at IS NOT NULL ORDER BY id DESC LIMIT 1", until
        )
        inputs: dict[str, str] = _json(rows[0][0]) if rows else {}
        return inputs

    def _idle_cost(self, at: str) -> float | None:
        """Return ``policy.probes.idle_cost`` at a time; None: not recorded."""
        try:
            cost: float = self._blob(self._newest_inputs(at)["config"])["probes"]["idle_cost"]
        except (ValueError, KeyError, TypeError):
            return None
        return cost

    def _verdicts(self) -> list[Verdict]:
        """Return the outcomes of alerts that the newest decision was based on."""
        try:
            signals = self._blob(self._newest_inputs("9")["signals"])
            outcomes = object_of(tuple[AlertOutcome, ...], signals["outcomes"], "outcomes")
        except (ValueError, KeyError, TypeError):
            return []
        return [
            (outcome.alert.node, outcome.alert.at, outcome.alert.horizon, outcome.verdict)
            for outcome in outcomes
            if outcome.verdict != "open"
        ]

    def counts(self) -> dict[str, int]:
        """Count the confirmed actions by verb; the taint that a drain sets in the same decision is not a swap."""
        return dict(
            self._rows(
                "SELECT i.verb, COUNT(*) FROM calls i JOIN settled s ON s.call = i.id AND s.confirmed WHERE "
                "i.verb <> 'swap' OR NOT EXISTS (SELECT 1 FROM calls j JOIN settled t ON t.call = j.id AND t.confirmed "
                "WHERE j.round = i.round AND j.node = i.node AND j.verb = 'drain') GROUP BY i.verb"
            )
        )

    def out_of_service(self) -> dict[str, dict[str, Any]]:
        """Return the nodes that the latest decision takes out of service, or keeps out.

        Returns: ``level`` (``swap`` or ``drain``) and ``expires_at`` (may be None) of the decision, ``reasons``: the
        hard rules that apply, else its first two reasons, and ``since``: the first confirmed call after the last return
        to service; None: no call is confirmed.
        """
        decisions = self._rows(
            "SELECT round, node, content FROM decisions WHERE round = (SELECT MAX(id) FROM rounds "
            "WHERE inputs <> '{}') AND json_extract(content, '$.target') IN ('swap', 'drain') ORDER BY node"
        )  # rounds without inputs only release nodes
        out: dict[str, dict[str, Any]] = {}
        for latest, node, text in decisions:
            content, since, returned = _json(text), None, False
            for decision, at, verb, to in self._rows(
                "SELECT i.round, s.at, i.verb, json_extract(i.content, '$.to') FROM calls i JOIN settled s "
                "ON s.call = i.id WHERE i.node = ? AND s.confirmed AND i.verb IN ('swap', 'drain', 'release') "
                "ORDER BY i.id", node,
            ):  # fmt: skip
                hard = verb != "release" or Level[to.upper()] >= Level.SWAP
                since = (since or at) if hard else None
                returned = not hard and decision > latest
            if not returned:
                out[node] = {
                    "level": content["target"], "reasons": content["rules"] or content["reasons"][:2],
                    "expires_at": content["expires_at"], "since": since,
                }  # fmt: skip
        return out

    def actions(
        self, node: str = "*", verb: str = "", since: str = "", until: str = "", *, before: int = 0, limit: int = 50
    ) -> list[dict[str, Any]]:
        """List calls, newest first; ``decision`` is None for calls of an evacuation, a probe or a checkpoint request.

        ``node``: a name, or a pattern with ``*`` and ``?``. ``verb``: of :data:`policy.plan.VERBS` or
        :data:`scheduler.ports.records.CallKind`; empty: any.
        ``since``, ``until``: ISO 8601 timestamp or a prefix of one; empty: any. ``before``: number of a call.
        """
        return self._calls(
            "i.node GLOB ? AND (? = '' OR i.verb = ?) AND i.at >= ? AND (? = '' OR i.at < ?) AND (? = 0 OR i.id < ?)",
            node, verb, verb, since, until, until, before, before, order="i.id DESC", limit=limit,
        )  # fmt: skip

    def drains(self, since: str) -> list[dict[str, Any]]:
        """List confirmed drains, newest first, with their cost-benefit evaluation (None if there was none)."""
        rows = self._rows(
            "SELECT i.at, i.node, json_extract(d.content, '$.worth') FROM calls i "
            "JOIN settled s ON s.call = i.id AND s.confirmed LEFT JOIN decisions d ON d.round = i.round "
            "AND d.node = i.node WHERE i.verb = 'drain' AND i.at >= ? ORDER BY i.id DESC",
            since,
        )
        return [{"at": at, "node": node, "worth": _json(worth)} for at, node, worth in rows]

    def results(self) -> list[dict[str, Any]]:
        """Return the results of diagnostics and probes, each once, oldest first."""
        rows = self._rows("SELECT node, content FROM findings WHERE kind IN ('verified', 'probed') ORDER BY id")
        by_key: dict[str, dict[str, Any]] = {}
        for node, text in rows:
            content = _json(text)
            by_key.setdefault(content["key"], {"node": node, **content})
        return list(by_key.values())

    def replay(self, number: int) -> Replayed:
        """Replay a decision from its recorded inputs and compare the plans.

        Raises ``InputError`` if the decision is unknown, or this version cannot read its inputs.
        """
        rows = self._rows("SELECT code, inputs, plan FROM rounds WHERE id = ?", number)
        if not rows:
            raise InputError(f"unknown decision {number}", self._location, "`predrain ledger list` shows them.")
        code, inputs, digest = rows[0]
        try:
            recorded_inputs = {name: self._blob(entry) for name, entry in _json(inputs).items()}
            recorded = self._blob(digest)
            fleet = fleet_of(recorded_inputs["nodes"], recorded_inputs["units"])
            state = state_from_json(recorded_inputs["state"])
            signals = object_of(Signals, recorded_inputs["signals"], "signals")
            config = object_of(PolicyConfig, recorded_inputs["config"], "config")
            now = object_of(datetime, recorded["now"], "plan.now")
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise InputError(
                f"decision {number} cannot be replayed by this version: {error}",
                self._location,
                f"Replay it with predrain {code}, which made it.",
            ) from None
        repeated = json.loads(json.dumps(plain_of(decide(fleet, state, signals, config, now))))
        return Replayed(number, code, tuple(_differences(recorded, repeated, "")), recorded)

    def marks(self) -> list[dict[str, Any]]:
        """Return all confirmed hard markers and releases, oldest first."""
        rows = self._rows(
            "SELECT i.content, s.at FROM calls i JOIN settled s ON s.call = i.id WHERE s.confirmed = 1 "
            "AND i.verb IN ('swap', 'drain', 'release') ORDER BY i.id"
        )
        return [{**_json(text), "settled_at": at} for text, at in rows]

    def _calls(self, condition: str, *values: Any, order: str = "i.id", limit: int = -1) -> list[dict[str, Any]]:
        rows = self._rows(
            f"SELECT i.id, i.round, i.at, i.node, i.verb, i.content, s.kind, s.confirmed, s.content FROM calls i "  # noqa: S608 - constants
            f"LEFT JOIN settled s ON s.call = i.id WHERE {condition} ORDER BY {order} LIMIT ?",
            *values, limit,
        )  # fmt: skip
        calls = []
        for number, decision, at, node, verb, content, kind, confirmed, settled in rows:
            intent, outcome = _json(content), _json(settled) or {}
            calls.append(
                {
                    "call": number, "decision": decision, "at": at, "node": node, "verb": verb, "to": intent.get("to"),
                    "key": intent["key"], "answer": kind or "not known", "confirmed": bool(confirmed),
                    "message": outcome.get("message", ""), "read": intent.get("read"),
                    "meant": intent["writes"], "wrote": outcome.get("writes", []),
                }
            )  # fmt: skip
        return calls

    def _skipped(self, condition: str, *values: Any) -> list[dict[str, Any]]:
        rows = self._rows(f"SELECT at, node, verb, why FROM skipped WHERE {condition} ORDER BY rowid", *values)  # noqa: S608 - constants
        return [{"at": at, "node": node, "verb": verb, "why": why} for at, node, verb, why in rows]

    def _blob(self, digest: str) -> Any:
        rows = self._rows("SELECT content FROM blobs WHERE digest = ?", digest)
        if not rows:
            raise ValueError(f"blob {digest[:12]} is missing")
        try:
            return json.loads(zlib.decompress(rows[0][0]))
        except zlib.error as error:
            raise ValueError(f"blob {digest[:12]} is damaged: {error}") from None

    def _rows(self, command: str, *values: Any) -> list[Any]:
        try:
            return self._link.execute(command, values).fetchall()
        except (sqlite3.Error, UnicodeDecodeError) as error:
            raise InputError(
                f"the ledger cannot be read: {error}", self._location, "Run again, or check the disk."
            ) from None


def _json(text: str | None) -> Any:
    try:
        return None if text is None else json.loads(text)
    except (ValueError, TypeError, RecursionError) as error:
        raise InputError(f"a row is damaged: {error}", "the ledger", "Keep the file, and start a new ledger.") from None


def _differences(recorded: Any, repeated: Any, place: str) -> Iterator[str]:
    if isinstance(recorded, dict) and isinstance(repeated, dict):
        for name in sorted({*recorded, *repeated}):
            yield from _differences(recorded.get(name), repeated.get(name), f"{place}.{name}" if place else str(name))
    elif isinstance(recorded, list) and isinstance(repeated, list) and len(recorded) == len(repeated):
        for i, (expected, actual) in enumerate(zip(recorded, repeated, strict=True)):
            yield from _differences(expected, actual, f"{place}[{i}]")
    elif recorded != repeated:
        yield f"{place}: {json.dumps(recorded)} -> {json.dumps(repeated)}"

"""Actions in a ledger: what each was expected to save and to cost, what it has cost, and its outcome."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import datetime, timedelta
from typing import Any, Final

_HOUR: Final = timedelta(hours=1)
_TESTS: Final = {"passed": "test passed", "failed": "test failed", "inconclusive": "test inconclusive"}
_VERDICTS: Final = {
    "right": "an incident followed", "wrong": "no incident followed", "inconclusive": "incident cannot be evaluated",
}  # fmt: skip
_ANSWERS: Final = {"acknowledged": "checkpoint written", "unanswered": "no checkpoint written"}

Verdict = tuple[str, datetime, timedelta, str]
"""Node, time, horizon and verdict of an evaluated alert."""


@dataclass(frozen=True, slots=True)
class RungUse:
    """One action of the ladder on a node.

    ``saves``: expected GPU-hours saved, net of ``costs``; ``costs``: expected GPU-hours; None: not known.
    ``cost``: GPU-hours so far: out of service for a swap or drain; for a probe, idle GPU-hours times
    ``policy.probes.idle_cost``, because an idle GPU under test costs energy and wear only; for a written checkpoint,
    the expected cost, because schedulers do not report its duration. None: not known.
    ``basis``: how ``cost`` was determined.
    """

    at: str
    node: str
    rung: str
    decision: int | None
    reason: str
    saves: float | None
    costs: float | None
    cost: float | None
    basis: str
    outcome: str

    @property
    def cells(self) -> dict[str, str]:
        """Columns of a table of actions, after time and node; amounts are in GPU-hours."""
        return {
            "Action": self.rung,
            "Expected to save": _gpu_hours(self.saves),
            "Expected cost": _gpu_hours(self.costs),
            "Cost so far": _gpu_hours(self.cost) + (f" ({self.basis})" if self.basis else ""),
            "Outcome": self.outcome,
            "Reason": self.reason,
        }

    def to_json(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        return asdict(self)


def _gpu_hours(value: float | None) -> str:
    return "not known" if value is None else f"{value:z,.2f}"


@dataclass(frozen=True, slots=True)
class Call:
    """A recorded call for an action.

    ``content``, ``decision``: as recorded. ``keys``: of this call and of its repetitions and parts.
    ``ended_at``: end of the time out of service; None: it has not ended.
    ``findings``: about the node since the call and before ``ended_at``, oldest first.
    ``idle_cost``: cost of an idle GPU-hour under test, in GPU-hours; None: not known.
    """

    at: str
    node: str
    rung: str
    number: int | None
    content: Mapping[str, Any]
    answer: str | None
    confirmed: bool
    decision: Mapping[str, Any]
    keys: set[str]
    ended_at: datetime | None
    findings: Sequence[Mapping[str, Any]]
    idle_cost: float | None

    def use(self, verdicts: Iterable[Verdict], now: datetime) -> RungUse:
        """Return the action with its costs and outcome; ``verdicts``: newest first."""
        expected = self._expected()
        reasons = self.content["action"]["reasons"] if self.number is not None else expected.get("reasons", ())
        cost, basis = self._cost(expected.get("costs"), now)
        return RungUse(
            self.at, self.node, self.rung, self.number, reasons[0] if reasons else "not known", expected.get("saves"),
            expected.get("costs"), cost, basis, self._outcome(verdicts),
        )  # fmt: skip

    def _expected(self) -> Mapping[str, Any]:
        """Return the expected saving and cost; decisions of older versions record the net saving only, or nothing."""
        if self.number is None:
            return self.content.get("request") or {}
        worth = self.decision.get("worth")
        if worth is None or "expected" in worth:
            return {} if worth is None else worth["expected"][self.rung]
        return {"drain": {"saves": worth["saved"] - worth["lost"]}, "swap": {"saves": worth["swap"]}}.get(self.rung, {})

    def _cost(self, expected: float | None, now: datetime) -> tuple[float | None, str]:
        if not self.confirmed:
            return (0.0, "not carried out") if self.answer is not None else (None, "")
        if self.rung == "avoid":
            return 0.0, "the node stays in service"
        if self.rung == "checkpoint":
            return (expected, "estimated") if self._found("acknowledged") else (None, "")
        if self.rung == "probe":
            return self._probe_cost()
        gpus = (self.decision.get("worth") or {}).get("gpus") or len(self.content["read"]["view"]["units"])
        hours = max((self.ended_at or now) - datetime.fromisoformat(self.at), timedelta()) / _HOUR
        state = "out of service" if self.ended_at is not None else "out of service, not yet released"
        return (gpus * hours, f"{hours:.1f} h {state}") if gpus else (None, f"{hours:.1f} h {state}, GPUs not known")

    def _probe_cost(self) -> tuple[float | None, str]:
        result = self._found("probed")
        if result is None:
            return None, ""
        idle = f"{result['idle_gpu_hours']:.2f} idle GPU-hours"
        if self.idle_cost is None:
            return None, idle
        return result["idle_gpu_hours"] * self.idle_cost, f"{idle} at {self.idle_cost:g} each"

    def _outcome(self, verdicts: Iterable[Verdict]) -> str:
        if not self.confirmed:
            return "not known" if self.answer is None else f"not carried out: {self.answer}"
        started = datetime.fromisoformat(self.at)
        verdict = next(
            (
                verdict
                for node, alerted_at, horizon, verdict in verdicts
                if node == self.node and alerted_at <= started <= alerted_at + horizon
            ),
            "open",
        )
        result = self._found({"probe": "probed", "swap": "verified", "drain": "verified"}.get(self.rung, ""))
        parts = [_TESTS.get(result["result"], result["result"])] if result is not None else []
        parts += [text for kind, text in _ANSWERS.items() if self.rung == "checkpoint" and self._found(kind)]
        if verdict in _VERDICTS and "test failed" not in parts:  # a failed test counts as an incident
            parts.append(_VERDICTS[verdict])
        return ", ".join(parts) or "not yet known"

    def _found(self, kind: str) -> Mapping[str, Any] | None:
        """Return the first finding of a kind; those of a probe or a checkpoint have the key of the call."""
        keyed = self.number is None
        found = (finding for finding in self.findings if finding["kind"] == kind)
        return next((finding for finding in found if not keyed or finding.get("key") in self.keys), None)

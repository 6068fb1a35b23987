"""``predrain ledger``: query decisions and their reasons, replay a decision, export drains as events."""

import sys
from collections import Counter
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from foundation.text import percent, quantity
from predrain.console import FAILED, print_json, printable
from predrain.options import JsonOption

if TYPE_CHECKING:
    from scheduler.ledger.rungs import RungUse

ledger_app = typer.Typer(
    name="ledger",
    help="Query the audit log of decisions and actions.\n\nExample: predrain ledger why gpu-node-17",
    no_args_is_help=True,
    add_completion=False,
)

LedgerOption = Annotated[Path, typer.Option("--ledger", help="Ledger file.")]
LimitOption = Annotated[int, typer.Option(help="Maximum number of decisions, newest first.", min=1)]


@ledger_app.command("why")
def why(
    node: Annotated[str, typer.Argument(help="Node name.")],
    ledger: LedgerOption = Path("ledger.db"),
    limit: LimitOption = 20,
    as_json: JsonOption = False,
) -> None:
    """Show the actions on a node and its decisions, with reasons, costs, outcomes and the scheduler's responses.

    Example: predrain ledger why gpu-node-17
    """
    from scheduler.ledger.reader import LedgerReader

    reader = LedgerReader(ledger)
    node = reader.node(node)
    decisions, work = reader.why(node, limit), reader.work(node)
    rungs = reader.rungs(node, datetime.now(UTC), limit)
    if as_json:
        print_json({"node": node, "decisions": decisions, "work": work, "rungs": [rung.to_json() for rung in rungs]})
        return
    _table(rungs)
    for decision in decisions:
        risk = "no risk known" if decision["risk"] is None else f"risk {percent(decision['risk'])}"
        wanted_level, level = decision["wanted"], decision["target"]
        level += "" if wanted_level == level else f" instead of {wanted_level}"
        _write(f"decision {decision['decision']}, {_time(decision['at'])}: {decision['tier']}, {risk}, {level}")
        model = decision["model"]
        if model is not None:
            _write(f"  model {model['profile']} {model['digest'][:12]}, scores of {decision['scores_of']}")
        for reason in decision["reasons"]:
            _write(f"  why: {reason}")
        request = decision.get("request")
        if request:
            for reason in request["reasons"]:
                _write(f"  why {request['rung']}: {reason}")
        if decision["over_budget"]:
            _write(f"  over budget: {decision['over_budget']}")
        for cause in decision["breaker"].values():
            _write(f"  breaker open: {cause}")
        _calls(decision["calls"], decision["skipped"])
    if work:
        _write("work on it:")
    for entry in work:
        of_workload = f" {entry['workload']}" if entry.get("workload") else ""
        outcome = f" through {entry['means']}: {entry['answer']}" if entry["answer"] is not None else ""
        message = f": {entry['message']}" if entry["message"] else ""
        _write(f"  {_time(entry['at'])} {entry['kind']}{of_workload}{outcome}{message}")


@ledger_app.command("list")
def listing(ledger: LedgerOption = Path("ledger.db"), limit: LimitOption = 20, as_json: JsonOption = False) -> None:
    """List actions with costs and outcomes, and decisions with an action or a new report.

    Example: predrain ledger list --json
    """
    from scheduler.ledger.reader import LedgerReader

    reader = LedgerReader(ledger)
    decisions, rungs = reader.rounds(limit), reader.rungs(None, datetime.now(UTC), limit)
    if as_json:
        print_json({"decisions": decisions, "rungs": [rung.to_json() for rung in rungs]})
        return
    _table(rungs)
    for decision in decisions:
        tiers = ", ".join(f"{name} {count}" for name, count in decision["tiers"].items()) or "all clear"
        verbs = "".join(
            f", {verb} {count}" for verb, count in Counter(call["verb"] for call in decision["calls"]).items()
        )
        nodes = quantity(decision["nodes"], "node")
        _write(f"decision {decision['decision']}, {_time(decision['at'])}: {nodes}, {tiers}{verbs}")
        _calls([call for call in decision["calls"] if not call["confirmed"]], decision["skipped"])


@ledger_app.command("replay")
def replay(
    number: Annotated[int, typer.Argument(metavar="ID", help="Number of the decision.")],
    ledger: LedgerOption = Path("ledger.db"),
    as_json: JsonOption = False,
) -> None:
    """Repeat a decision from its recorded inputs; exit with 1 if the result differs.

    Example: predrain ledger replay 17
    """
    from scheduler.ledger.reader import LedgerReader

    replayed = LedgerReader(ledger).replay(number)
    equal = not replayed.differences
    if as_json:
        content = {"decision": number, "code": replayed.code, "equal": equal, "differences": list(replayed.differences)}
        print_json(content)
    else:
        result = "identical" if equal else "differs"
        _write(f"decision {number} of predrain {replayed.code}: {result}")
        for difference in replayed.differences:
            _write(f"  {difference}")
    if not equal:
        raise typer.Exit(FAILED)


@ledger_app.command("export")
def export(
    out: Annotated[Path, typer.Option(help="Output file (Parquet).")],
    ledger: LedgerOption = Path("ledger.db"),
) -> None:
    """Export drains, releases and diagnostics of predrain as events for `predrain import --events`.

    Example: predrain ledger export --out drains.parquet
    """
    from scheduler.ledger.export import diagnostic_events, drain_events, write_events
    from scheduler.ledger.reader import LedgerReader

    reader = LedgerReader(ledger)
    events = drain_events(reader.marks()) + diagnostic_events(reader.results())
    write_events(events, out)
    _write(f"{quantity(len(events), 'event')} in {out}")


def _table(rungs: "Sequence[RungUse]") -> None:
    """Print actions as a table; the last column is not padded."""
    if not rungs:
        return
    rows = [("Time", "Node", *rungs[0].cells), *((_time(rung.at), rung.node, *rung.cells.values()) for rung in rungs)]
    texts = [[printable(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in list(zip(*texts, strict=True))[:-1]]
    for row in texts:
        padded = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=False))
        _write("  ".join((*padded, row[-1])))
    _write("Amounts are in GPU-hours. Savings are net of the cost.")


def _time(text: str) -> str:
    return f"{text[:10]} {text[11:19]} UTC"


def _calls(calls: list[dict[str, Any]], skipped: list[dict[str, Any]]) -> None:
    for call in calls:
        message = f": {call['message']}" if call["message"] else ""
        _write(f"  {_time(call['at'])} {call['verb']} {call['node']}: {call['answer']}{message}")
    for skip in skipped:
        _write(f"  {_time(skip['at'])} {skip['verb']} {skip['node']}: not done, {skip['why']}")


def _write(line: str) -> None:
    sys.stdout.write(printable(line) + "\n")

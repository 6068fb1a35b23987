"""``predrain ledger``: query decisions and their reasons, replay a decision, export drains as events."""

import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from foundation.text import quantity
from predrain.console import FAILED, print_json, printable
from predrain.options import JsonOption

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
    """Show the decisions about a node, with their reasons and the scheduler's responses.

    Example: predrain ledger why gpu-node-17
    """
    from scheduler.ledger.reader import LedgerReader

    reader = LedgerReader(ledger)
    node = reader.node(node)
    decisions, work = reader.why(node, limit), reader.work(node)
    if as_json:
        print_json({"node": node, "decisions": decisions, "work": work})
        return
    for decision in decisions:
        risk = "no risk known" if decision["risk"] is None else f"risk {decision['risk']:.1%}"
        wanted_level, level = decision["wanted"], decision["target"]
        level += "" if wanted_level == level else f" instead of {wanted_level}"
        _write(f"decision {decision['decision']}, {decision['at']}: {decision['tier']}, {risk}, {level}")
        model = decision["model"]
        if model is not None:
            _write(f"  model {model['profile']} {model['digest'][:12]}, scores of {decision['scores_of']}")
        for reason in decision["reasons"]:
            _write(f"  why: {reason}")
        request = decision.get("request")
        if request:
            saves, costs = request["saves"], request["costs"]
            _write(f"  {request['rung']}: expected to save {saves:.2f} GPU-hours, costs {costs:.2f}")
            for reason in request["reasons"]:
                _write(f"  why: {reason}")
        if decision["over_budget"]:
            _write(f"  over budget: {decision['over_budget']}")
        for cause in decision["breaker"].values():
            _write(f"  breaker open: {cause}")
        _calls(decision)
    if work:
        _write("work on it:")
    for entry in work:
        of_workload = f" {entry['workload']}" if entry.get("workload") else ""
        outcome = f" through {entry['means']}: {entry['answer']}" if entry["answer"] is not None else ""
        cost_text = ""
        if "idle_gpu_hours" in entry:
            cost_text = (
                f" ({entry['idle_gpu_hours']:.2f} idle GPU-hours, expected to save {entry['expected']['saves']:.2f})"
            )
        message = f": {entry['message']}" if entry["message"] else ""
        _write(f"  {entry['at']} {entry['kind']}{of_workload}{outcome}{message}{cost_text}")


@ledger_app.command("list")
def listing(ledger: LedgerOption = Path("ledger.db"), limit: LimitOption = 20, as_json: JsonOption = False) -> None:
    """List decisions with an action or a new report.

    Example: predrain ledger list --json
    """
    from scheduler.ledger.reader import LedgerReader

    decisions = LedgerReader(ledger).rounds(limit)
    if as_json:
        print_json({"decisions": decisions})
        return
    for decision in decisions:
        tiers = ", ".join(f"{name} {count}" for name, count in decision["tiers"].items()) or "all clear"
        _write(f"decision {decision['decision']}, {decision['at']}: {quantity(decision['nodes'], 'node')}, {tiers}")
        _calls(decision)


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
    from scheduler.ledger.reader import LedgerReader, diagnostic_events, drain_events, write_events

    reader = LedgerReader(ledger)
    events = drain_events(reader.marks()) + diagnostic_events(reader.results())
    write_events(events, out)
    _write(f"{quantity(len(events), 'event')} in {out}")


def _calls(decision: dict[str, Any]) -> None:
    for call in decision["calls"]:
        message = f": {call['message']}" if call["message"] else ""
        _write(f"  {call['at']} {call['verb']} {call['node']}: {call['answer']}{message}")
        for write in call["wrote"]:
            old, new = (write[name] if write[name] is not None else "(none)" for name in ("before", "after"))
            _write(f"    {write['path']}: {old} -> {new}")
    for skip in decision["skipped"]:
        _write(f"  {skip['at']} {skip['verb']} {skip['node']}: not done, {skip['why']}")


def _write(line: str) -> None:
    sys.stdout.write(printable(line) + "\n")

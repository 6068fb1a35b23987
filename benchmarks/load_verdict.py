"""What a load run must have shown, and what it did."""

from __future__ import annotations

import os
from typing import Any, Final

import numpy as np

from benchmarks.load_ground import Supervisor
from benchmarks.load_traffic import Ledger

GROWTH: Final = 0.08
"""Memory may differ by as much between the halves of a process' warm life."""

_SLACK_MIB: Final = 24.0
_KILL_WINDOW_S: Final = 2.0


def judged(
    ledger: Ledger, supervisor: Supervisor, done: dict[str, int], code: int, seconds: float
) -> dict[str, Any]:  # fmt: skip
    """Compare what was answered and held with what must hold; ``faults`` says in words where it does not."""
    faults = [f"a wrong answer: {each}" for each in ledger.wrong[:5]]
    near = [each for each in ledger.dropped if any(-0.1 < each - kill < _KILL_WINDOW_S for kill in supervisor.kills)]
    if len(near) < len(ledger.dropped):
        faults.append(f"{len(ledger.dropped) - len(near)} requests came to nothing without a kill")
    if code != 0:
        faults.append(f"it ended with {code}")
    faults += [f"it logged an error: {each}" for each in supervisor.errors[:3]]
    growth = [_growth(life) for life in supervisor.lives]
    faults += [
        f"memory grew from {first:.0f} to {last:.0f} MiB in a life"
        for first, last in (each for each in growth if each is not None)
        if last - first > max(GROWTH * first, _SLACK_MIB)
    ]
    answered = sum(ledger.answers.values())
    took = np.sort(np.array(ledger.took_s)) * 1e3
    return {
        "faults": faults,
        "answers": statuses(ledger),
        "done": done,
        "in_flight": len(near),
        "memory": [each for each in growth if each is not None],
        "p99_ms": float(np.quantile(took, 0.99)) if took.size else None,
        "line": {
            "name": "serve_load", "value": answered, "unit": f"requests answered in {seconds:g} s, none wrong",
            "peer": None, "ratio": None, "limit_share": None, "checked": not faults,
        },
    }  # fmt: skip


def show(found: dict[str, Any]) -> None:
    """Print what was seen."""
    for what, count in sorted(found["answers"].items()):
        print(f"{what:<28}{count:>9,}")
    print(f"meanwhile: {found['done']}; requests under way at a kill: {found['in_flight']}")
    print(f"memory of each life, MiB, early and late: {[tuple(map(round, each)) for each in found['memory']]}")
    print(f"node look-ups: p99 {found['p99_ms']:.1f} ms (load average {os.getloadavg()[0]:.1f})")
    print(f"faults: {found['faults'] or 'none'}")


def statuses(ledger: Ledger) -> dict[str, int]:
    """Count answers by kind and status."""
    with ledger.lock:
        return {f"{kind} {status}": count for (kind, status), count in ledger.answers.items()}


def _growth(life: list[tuple[float, float]]) -> tuple[float, float] | None:
    """Give a process' memory early and late in its warm life; None where that was too short to tell."""
    if not life or life[-1][0] - life[0][0] < 20:
        return None
    warm = [mib for at, mib in life if at - life[0][0] > min(30.0, 0.5 * (life[-1][0] - life[0][0]))]
    third = max(1, len(warm) // 3)
    return float(np.median(warm[:third])), float(np.median(warm[-third:]))

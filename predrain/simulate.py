"""``predrain simulate``: write a simulated fleet as a dataset."""

from __future__ import annotations

from datetime import UTC
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from predrain.console import progress, show
from predrain.options import JsonOption, instant_option


class ExplainingScenarios(TyperCommand):
    """Reads the scenarios' explanations only when ``--help`` is asked for."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        from simulator.scenarios.named import SCENARIOS

        listed = "\n\n".join(f"{name}: {scenario.explanation}" for name, scenario in SCENARIOS.items())
        self.epilog = f"Scenarios\n\n{listed}\n\nExample: predrain simulate --gpus 512 --days 120 --seed 7 --out fleet"
        super().format_help(ctx, formatter)


def simulate(
    out: Annotated[Path, typer.Option(help="Folder of the dataset to write; replaced if it is one already.")],
    gpus: Annotated[int, typer.Option(help="Number of GPUs; 8 to a node.")] = 512,
    days: Annotated[int, typer.Option(help="Length in days.")] = 120,
    seed: Annotated[int, typer.Option(help="Seed; the same seed gives the same bytes.")] = 7,
    scenario: Annotated[str, typer.Option(help="One of the scenarios explained below.")] = "base",
    start: Annotated[
        str, typer.Option(help="First day, from 00:00 UTC, or 30d ago; the last one ends --days later.")
    ] = "2026-01-01",
    truth: Annotated[
        Path | None, typer.Option(help="Folder for the hidden truth; default: OUT-truth, a sibling. Never inside OUT.")
    ] = None,
    acceleration: Annotated[
        float, typer.Option(help="Factor on all failure rates, so that a small fleet has enough.")
    ] = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Write the telemetry, events, inventory and jobs of a simulated fleet that ages and fails.

    The true risk of each GPU goes to a folder next to the dataset that only the evaluation reads.
    """
    with progress("simulating") as advance:
        from simulator.simulate import simulate as run

        summary = run(
            out.resolve(),
            gpus=gpus,
            days=days,
            seed=seed,
            scenario=scenario,
            start=instant_option(start, "--start").astimezone(UTC).replace(hour=0, minute=0, second=0, microsecond=0),
            truth=truth,
            acceleration=acceleration,
            progress=advance,
        )
        show(summary, as_json=as_json)

"""``predrain simulate``: write a simulated fleet as a dataset."""

from datetime import UTC
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand

from predrain.console import progress, show
from predrain.options import JsonOption, instant_option


class ExplainingScenarios(TyperCommand):
    """Loads the scenarios' explanations only for ``--help``."""

    def format_help(self, ctx: Any, formatter: Any) -> None:
        """Write the help."""
        from simulator.scenarios import SCENARIOS

        listed = "\n\n".join(f"{name}: {scenario.explanation}" for name, scenario in SCENARIOS.items())
        self.epilog = f"Scenarios\n\n{listed}\n\nExample: predrain simulate --gpus 512 --days 120 --seed 7 --out fleet"
        super().format_help(ctx, formatter)


def simulate(
    out: Annotated[Path, typer.Option(help="Dataset directory; an existing dataset is replaced.")],
    gpus: Annotated[int, typer.Option(help="Number of GPUs, 8 per node.")] = 512,
    days: Annotated[int, typer.Option(help="Length in days.")] = 120,
    seed: Annotated[int, typer.Option(help="Seed; results are reproducible byte by byte.")] = 7,
    scenario: Annotated[str, typer.Option(help="Scenario, see below.")] = "base",
    start: Annotated[str, typer.Option(help="First day (00:00 UTC), such as 2026-01-01 or 30d (ago).")] = "2026-01-01",
    truth: Annotated[
        Path | None, typer.Option(help="Output directory of the hidden truth, outside of OUT. Default: OUT-truth.")
    ] = None,
    acceleration: Annotated[
        float, typer.Option(help="Factor on all failure rates, for enough failures in a small fleet.")
    ] = 1.0,
    as_json: JsonOption = False,
) -> None:
    """Simulate a fleet with failures: telemetry, events, inventory and jobs.

    The hidden true risk of each GPU is written to a separate folder that only the evaluation reads.
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

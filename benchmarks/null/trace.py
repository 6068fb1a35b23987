"""The runs on a real cluster's faults: as they are, and with every fault handed to a node drawn at random."""

from __future__ import annotations

from pathlib import Path

from benchmarks.gpu_cluster_faults import EXPECTED, HONEST_CAPTURE, LEAK, NAME, counted, predrain, write_inventory
from benchmarks.null.finding import CAPTURE, MEASURES, Finding, Outcome, measure
from benchmarks.null.owners import ShuffledOwners
from benchmarks.null.sizes import ROOT
from pipeline.matrix_stage import make_matrix
from pipeline.params import Params, load_params
from telemetry.store import Dataset

FILE = "fault_trace.json"
"""The file of the published InfiniteHBD-Trace (see ``benchmarks/gpu_cluster_faults.py``) that is read."""

_FILES = (ROOT / "params.yaml", ROOT / "params" / f"{NAME}.yaml")


def why_not(trace: Path | None) -> str | None:
    """Say why the real cluster cannot be looked at, None where it can."""
    if trace is None:
        return "--trace was not given"
    return None if (trace / FILE).is_file() else f"there is no {FILE} in {trace}"


def trace_params() -> Params:
    """Take the parameters of the trace, with the alerts of the profile that params.yaml recommends."""
    params = load_params(list(_FILES))
    profile = load_params([_FILES[0]]).models.profile
    return params.model_copy(update={"models": params.models.model_copy(update={"profile": profile})})


def run_trace(trace: Path, work: Path, seed: int, params: Params | None = None) -> dict[str, Outcome]:
    """Import the trace, check its counts, and run it as it is (``real``) and shuffled (``real shuffled``)."""
    dataset = work / "real"
    params = trace_params() if params is None else params
    predrain(
        "import", "--events", trace / FILE, "--inventory", write_inventory(trace, work),
        "--mapping", ROOT / "params" / f"{NAME}-mapping.yaml", "--out", dataset,
        "--params", _FILES[0], "--params", _FILES[1],
    )  # fmt: skip
    counts = counted(Dataset.open(dataset))
    if counts != EXPECTED:
        raise SystemExit(f"the imported counts are {counts}, expected {EXPECTED}: is this the published file?")
    matrix = make_matrix(dataset, params, work / "real-matrix")
    return {
        "real": measure("real", matrix, params, (*MEASURES, CAPTURE)),
        "real shuffled": measure("real shuffled", ShuffledOwners(matrix, seed), params),
    }


def beyond_honest(outcome: Outcome) -> tuple[Finding, ...]:
    """Give what a fault history alone cannot have told, as far as is known of this trace from outside.

    A ROC-AUC above :data:`benchmarks.gpu_cluster_faults.LEAK`; or a capture whose whole interval lies above that of
    counting the faults of the last 30 days.
    """
    return tuple(
        each
        for each in outcome.findings
        if (each.measure == "roc_auc" and each.value > LEAK)
        or (each.measure == CAPTURE and each.low > HONEST_CAPTURE and each.value > HONEST_CAPTURE)
    )

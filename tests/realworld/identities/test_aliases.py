"""Other names of nodes, given in the mapping, in every table and log."""

from pathlib import Path

import pandas as pd
import pytest

from foundation.errors import InputError
from tests.telemetry.helpers import (
    DAY,
    all_samples,
    gpu,
    inventory_frame,
    run_import,
    samples_frame,
    without_inventory,
    write_csv,
)

ALIASES = "nodes: {aliases: {asset-4711: node-0, Old-Name: node-1}}"


@pytest.mark.parametrize("has_inventory", [True, False])
def test_every_table_may_use_an_alias(tmp_path: Path, has_inventory: bool):
    samples = samples_frame().replace({"node": {"node-0": "ASSET-4711"}})
    events = pd.DataFrame({"node": ["Asset-4711", "old-name.example.com"], "gpu": [None, gpu(2)], "type": "failure"})
    events = events.assign(timestamp=(DAY + pd.Timedelta(minutes=30)).isoformat())
    jobs = write_csv(
        tmp_path / "jobs.csv",
        pd.DataFrame({"job": ["a"], "node": ["asset-4711"], "gpus": [2], "started_at": [DAY.isoformat()]}),
    )
    inventory = inventory_frame().replace({"node": {"node-1": "old-name"}})
    log = tmp_path / "ASSET-4711.log"
    log.write_text("2026-03-01T00:10:00+00:00 kernel: NVRM: Xid (PCI:0000:10:00): 79, pid=1, GPU has fallen off\n")
    if not has_inventory:
        samples["pci_bus_id"] = samples["gpu"].map(inventory.set_index("gpu")["pci_bus_id"])
    files = [write_csv(tmp_path / "events.csv", events), log]
    if has_inventory:
        made = run_import(tmp_path, samples=samples, events=files, jobs=jobs, inventory=inventory, mapping=ALIASES)
    else:
        rules = tmp_path / "mapping.yaml"
        rules.write_text(ALIASES)
        made = without_inventory(tmp_path, samples, events=files, jobs=jobs, mapping=rules)
    assert set(made.dataset.inventory()["node"]) == set(all_samples(made)["node"]) == {"node-0", "node-1"}
    placed = made.dataset.events()[["node", "gpu", "type"]]
    assert {tuple(row) for row in placed.astype(object).where(placed.notna(), None).values.tolist()} == {
        ("node-0", gpu(0), "xid"),
        ("node-0", None, "failure"),
        ("node-1", gpu(2), "failure"),
    }
    assert made.dataset.jobs()["node"].tolist() == ["node-0"]


@pytest.mark.parametrize("aliases", ["{a: n0, A: n1}", "{a: b, b: c}", "{'': n0}", "{a: ''}", "[a]"])
def test_aliases_that_contradict_each_other_are_refused(tmp_path: Path, aliases: str):
    with pytest.raises(InputError, match="alias"):
        run_import(tmp_path, samples=samples_frame(), mapping=f"nodes: {{aliases: {aliases}}}")

"""Words of drain reasons and tickets, and the event that each becomes."""

from datetime import timedelta
from pathlib import Path
from typing import Any

import pandas as pd
import pytest

from telemetry.importing import tickets as tickets_module
from telemetry.importing.tickets import RESOLVED_BEFORE_OPENED, UNKNOWN_GPU
from telemetry.phrases import classify
from tests.telemetry.helpers import run_import

WORDS = {
    "reason": {
        "replacement": [
            "RMA", "RMA'd gpu 3", "RMA #12345 complete", "GPU 3 swapped by vendor", "swapped GPU 3", "hardware swap",
            "swapped out GPU 3", "GPU3 replaced (S/N 123)", "H100 replaced, firmware updated",
            "vendor replaced GPU tray",
            "replaced gpu 3 after driver crash", "Replaced GPU 2 (driver 550)", "replaced as planned", "node replaced",
            "GPU replaced under RMA 4711", "GPU 2 swapped under RMA", "replaced GPU 3 on site",
            "RMA received, installed", "new GPU installed", "replacement GPU received and installed", "RMA closed",
            "replaced: GPU 3", "part replaced", "replaced under warranty by vendor", "unit exchanged",
            "GPU 3 replaced - pending burn-in",
            "GPU replacement performed on site", "GPU replaced while working on the fan",
        ],
        "repair": [
            "reseated GPU 4", "reseated cable", "no errors; reseated", "no failure found, GPU reseated",
            "PSU 2 replaced", "coolant hose replaced", "retimer board replaced", "riser card replaced",
            "GPU was not replaced but reseated", "NVLink bridge replaced", "replaced thermal paste",
            "fixed GPU 3 power cable", "GPU repair done", "GPU repaired after work with the vendor",
            "replaced: PSU 2", "repaired by vendor", "Repair: slot cleaned",
        ],
        "maintenance": ["Scheduled maintenance", "planned maintenance window"],
        "driver": ["firmware replaced by 1.2.3", "replaced GPU firmware", "GPU driver upgraded to 550"],
        "other": [
            "NHC: check_hw_swap:  Actual SWAP size (0 kB) less than minimum allowed (1048576 kB).",
            "NHC: check_hw_swap_free:  Not enough swap free (0 kB < 1 kB).", "swap full, job 4242 thrashing",
            "swap usage high on gpu-node-3", "out of swap", "SWAP partition missing", "swap", "Kill task failed",
            "fixed-width test reservation", "fixed IP address", "DNS fixed", "user repair shop quota", "replace config",
            "replaced slurm.conf on gpu nodes", "replaced by reservation maint-1", "repair filesystem",
            "row repair failed",
            "MPI RMA benchmark", "Replaced DIMM A4", "replaced NVMe disk", "IB cable swapped",
            # denied, or still to come
            "no RMA needed", "RMA not needed", "not replaced, watching", "no failure found", "false alarm",
            "pending RMA", "needs RMA", "GPU under RMA", "GPU 3 will be replaced next week",
            "waiting for replacement part",
            "replacement ordered", "RMA declined, returned to service", "unable to replace GPU", "in repair",
            # a part on its way is in no slot yet
            "RMA received", "replacement GPU delivered", "new GPU in stock", "RMA number issued", "RMA sent to vendor",
            "RMA started", "GPU replacement on hold", "to replace GPU 3", "replacement GPU on site", "part arrived",
            "spare GPU not available", "RMA opened", "swap requested", "replacement GPU DOA",
            "Working with vendor on RMA of GPU 2",
            "replace GPU tray - scheduled with NVIDIA FE Tue", "RMA GPU 3 (pending)", "swap GPU 2, waiting for part",
            # of something else
            "changed out air filter", "door gasket replaced", "replaced by gpu-node-77 in the reservation",
            "BMC reset, repaired SEL", "repair: reinstall OS", "fixed: nvidia-persistenced restarted",
            "replacement: rack door", "new GPU queue for users",
            # a GPU in another slot is the same GPU
            "swapped GPU slot 3 <-> slot 5", "GPU 2 swapped with GPU 5",
        ],
    },
    "ticket": {
        "replacement": [
            "swap", "rma", "Replaced", "GPU replacement", "GpuReplacement", "swap gpu 3", "swapped OAM 3",
            "Replaced GPU 1 under RMA", "swapped card for RMA 12", "GPU 故障 已更换", "GPU reemplazada",
            "GPU ausgetauscht", "GPU 3 wurde ersetzt", "Karte defekt, getauscht", "GPU remplacé", "carte remplacée",
            "se reemplazó la GPU", "GPU sostituita", "GPU vervangen", "A placa GPU foi substituída", "更换完成",
            "GPU を交換しました", "replaced the GPU and power cable", "Austausch GPU erledigt",
            "GPU-Tausch durchgeführt", "Reemplazo de GPU completado", "换卡完成", "GPU 3 换新", "sostituzione GPU",
        ],
        "repair": [
            "re-seated the OAM module", "repaired", "reseat", "fixed", "Hardware repair", "Netzteil getauscht",
            "GPU 已修复", "GPU reparada", "Grafikkarte repariert", "carte réparée", "alimentation remplacée",
            "Mainboard gewechselt", "GPU neu gesteckt", "GPU instandgesetzt", "carte réinsérée", "重新插拔 GPU",
            "replaced GPU power cable", "replaced GPU riser", "remplacement carte mère effectué",
        ],
        "failure": [
            "fault", "ECC", "GPU fell off the bus", "lost GPU", "node_failure", "fault_start", "GPU 2 dead",
            "GPU dropped off PCIe bus", "job failed, GPU lost", "PSU failed",
            "GPU not visible in nvidia-smi", "GPU 3 is not responding", "GPU can't be seen", "No devices were found",
            "Unable to determine the device handle for GPU 0000:3B:00.0", "only 7 of 8 GPUs visible",
            "7/8 GPUs detected", "GPU overheating", "dcgm diag failed", "HPL burn-in failed on gpu12",
            "lost GPU, broken pipe in training", "Slurm down because GPU lost",
            "7 GPUs instead of 8", "node shows only 7 GPUs", "GPU count mismatch: 7 of 8", "GPU 3 dropped",
            "GPU 掉卡", "GPU 故障", "GPU averiada",
            "GPU 1 defekt", "GPU ausgefallen", "GPU 1 en panne", "GPU défectueuse",
            "GPU died, we work with the vendor on the RMA",
            "GPU vanished", "GPU went offline", "GPU in bad state", "GPU stuck", "PCIe link degraded to x8",
            "GPU 3 nicht mehr sichtbar", "GPU wird nicht erkannt", "GPU 2 fehlt", "GPU gestört", "GPU hängt",
            "GPU 1 HS", "la carte GPU ne répond plus", "GPU non détecté", "GPU 1 no detectada", "fallo de GPU",
            "GPU caída", "GPU guasta", "GPU com defeito", "GPU丢失", "GPU 認識しない", "GPU falling off bus",
            "gres/gpu count reported lower than configured (7 < 8)", "GPUFellOffBus", "GPUMissing",
            "GPU off the bus after MCE errors", "cpu=8 uncorrectable ECC",
            "GPU clocks stuck at 210MHz", "CUDA error: uncorrectable ECC error encountered",
        ],
        "xid": [
            "Xid79 on gpu3", "SXid 20034", "NVRM: Xid (PCI:0000:10:00): 79", "XID error code 79", "GPUXid79",
            "Xid 79 after MCE errors",
        ],
        "diagnostic": ["Diagnostics", "burn-in"],
        "driver": ["Driver update"],
        "other": [
            "swapped to host memory", "swapped GPUs 2 and 3 between slots", "replacement of the job script",
            "disk failed",
            "failed login", "user failed to authenticate", "job failed with OOM", "BMC battery dead", "lost and found",
            "GPU retired from service", "password reset", "storage failed over", "fixed by reboot",
            "lunch", "GPU fell off the bus: false alarm", "NFF", "No replacement needed", "fault_end", "Node rebooted",
            "GPU quota not visible", "GPU fault not found", "GPU 3 无故障", "GPU 故障解除", "GPU 故障なし",
            "broken pipe in training", "dead letter queue", "Slurm down", "network is down", "conda env broken",
            "lost password", "error in the docs", "4 of 8 GPUs requested", "replaced toner", "Replaced network card",
            "Replaced SFP in leaf switch", "replaced CX7",
            "GPU muss ausgetauscht werden", "Austausch der GPU bestellt", "GPU nicht defekt", "GPU à remplacer",
            "Festplatte ausgetauscht", "disque remplacé", "remplacement prévu",
            "CPU board replaced", "Lustre down", "python import error", "license error GRID",
            "Austausch der GPU geplant", "RMA eröffnet", "la GPU será reemplazada mañana", "RMA demandée",
            "disco reemplazado", "Passwort gewechselt", "mot de passe remplacé", "需要更换GPU", "更换硬盘",
            "GPU 交換予定", "Auf GPU 1 kein Fehler", "fehlt Doku zu GPU", "Prolog error", "Kill task failed",
            "slurmd failed to start", "DIMM A1 uncorrectable ECC", "MCE hardware error CPU 3", "GPU pulled for swap",
            "RMA Portal login", "GPU0 and GPU4 swapped to isolate fault", "Segmentation fault in user code",
            "CUDA error: an illegal memory access", "Tausch GPU 3 geplant",
        ],
    },
}  # fmt: skip


@pytest.mark.parametrize(
    ("source", "kind", "text"),
    [(source, kind, text) for source, kinds in WORDS.items() for kind, texts in kinds.items() for text in texts],
)
def test_what_a_phrase_means(source: Any, kind: str, text: str) -> None:
    assert classify(text, source).type == kind


INVENTORY = pd.DataFrame(
    {
        "node": ["n1", "n1", "n2"],
        "gpu": ["GPU-aaa1", "GPU-bbb2", "GPU-ccc3"],
        "slot": ["0", "1", "0"],
        "pci_bus_id": ["0000:17:00.0", "0000:3b:00.0", "0000:17:00.0"],
        "serial": ["S100", "S101", "S102"],
        "installed_at": "2026-01-01T00:00:00Z",
    }
)


def imported(folder: Path, tickets: pd.DataFrame, columns: str) -> tuple[list[tuple[Any, ...]], Any]:
    rules = f"events: {{columns: {{{columns}}}, time: {{timezone: UTC}}}}"
    result = run_import(folder, events=tickets, inventory=INVENTORY, mapping=rules)
    account = result.accounting.tables["events"]
    assert account.unaccounted == 0
    events = result.dataset.events().astype(object)
    events = events.where(events.notna(), None)
    return [
        (row["timestamp"].strftime("%dT%H"), row["type"], row["node"], row["gpu"]) for row in events.to_dict("records")
    ], result


def test_a_resolved_ticket_is_a_failure_and_its_repair(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[str] = []
    monkeypatch.setattr(tickets_module, "classify", lambda text, source: read.append(text) or classify(text, source))
    tickets = pd.DataFrame(
        {
            "Opened": ["2026-03-01 10:00", "2026-03-02 10:00", "2026-03-03 10:00", "2026-03-04 10:00"],
            "Resolved": ["2026-03-01 15:00", "2026-03-02 20:00", None, "2026-03-04 12:00"],
            "Host": ["n1", "n1", "n2", "n2"],
            "Card": ["GPU-aaa1", "GPU-bbb2", "GPU-ccc3", "GPU-ccc3"],
            "Category": ["GPU fell off the bus", "RMA", "ECC errors", "lunch"],
        }
    )
    columns = "Opened: timestamp, Resolved: resolved_at, Host: node, Card: gpu, Category: type"
    events, result = imported(tmp_path, tickets, columns)
    assert events == [
        ("01T10", "failure", "n1", "GPU-aaa1"),
        ("01T15", "repair", "n1", "GPU-aaa1"),
        ("02T10", "failure", "n1", "GPU-bbb2"),
        ("02T20", "replacement", "n1", "GPU-bbb2"),
        ("03T10", "failure", "n2", "GPU-ccc3"),
        ("04T10", "other", "n2", "GPU-ccc3"),
    ]
    assert result.counts["tickets_resolved_without_work"] == 1
    assert read == tickets["Category"].tolist()  # a text is classified once, however many are distinct
    repair = result.dataset.events().iloc[1]
    assert repair["known_at"] - repair["timestamp"] == timedelta(minutes=10)
    assert {(row["phrase"], row["type"]) for row in result.phrases} == {
        ("GPU fell off the bus", "failure"), ("RMA", "replacement"), ("ECC errors", "failure"), ("lunch", "other")
    }  # fmt: skip


@pytest.mark.parametrize(
    ("column", "target", "value", "gpu"),
    [
        ("Card", "gpu", "GPU 1", "GPU-bbb2"),
        ("Card", "gpu", "3B:00.0", "GPU-bbb2"),
        ("Card", "gpu", "s101", "GPU-bbb2"),
        ("Card", "gpu", "gpu-AAA1", "GPU-aaa1"),
        ("Slot", "slot", "slot 0", "GPU-aaa1"),
        ("Bus", "pci_bus_id", "00000000:17:00.0", "GPU-aaa1"),
        ("Serial", "serial", "S100", "GPU-aaa1"),
        ("Slot", "slot", "7", None),
        ("Card", "gpu", "GPU 7", None),
    ],
)
def test_ways_to_name_a_gpu(tmp_path: Path, column: str, target: str, value: str, gpu: str | None) -> None:
    tickets = pd.DataFrame({"When": ["2026-03-01 10:00"], "Host": ["n1"], column: [value], "What": ["repaired"]})
    events, result = imported(tmp_path, tickets, f"When: timestamp, Host: node, {column}: {target}, What: type")
    assert events == [("01T10", "repair", "n1", gpu)]
    assert result.counts.get("repairs_without_a_gpu", 0) == int(gpu is None)
    assert result.counts.get(UNKNOWN_GPU, 0) == int(gpu is None)


def test_the_notes_of_a_resolution_tell_a_replacement_from_a_repair(tmp_path: Path) -> None:
    tickets = pd.DataFrame(
        {
            "opened_at": [f"2026-03-0{day} 10:00" for day in range(1, 6)],
            "resolved_at": ["2026-03-01 15:00", "2026-03-02 20:00", "2026-03-03 12:00", None, "2026-03-05 11:00"],
            "cmdb_ci": ["n1", "n1", "n2", "n2", "n1"],
            "Card": ["GPU-aaa1", "GPU-bbb2", "GPU-ccc3", "GPU-ccc3", "GPU-aaa1"],
            "short_description": ["GPU fell off the bus", "ECC errors", "more quota", "GPU lost", "node slow"],
            "close_notes": ["GPU replaced under RMA 4711", "Done", "quota raised", None, "reseated GPU 0"],
        }
    )
    columns = "opened_at: timestamp, cmdb_ci: node, Card: gpu, short_description: type, close_notes: resolution"
    events, result = imported(tmp_path, tickets, columns)
    assert events == [
        ("01T10", "failure", "n1", "GPU-aaa1"),
        ("01T15", "replacement", "n1", "GPU-aaa1"),
        ("02T10", "failure", "n1", "GPU-bbb2"),
        ("02T20", "repair", "n1", "GPU-bbb2"),
        ("03T10", "other", "n2", "GPU-ccc3"),
        ("04T10", "failure", "n2", "GPU-ccc3"),
        ("05T10", "other", "n1", "GPU-aaa1"),
        ("05T11", "repair", "n1", "GPU-aaa1"),
    ]
    details = result.dataset.events()["detail"].tolist()
    assert details[:2] == ["GPU fell off the bus", "GPU replaced under RMA 4711"]


def test_a_ticket_resolved_before_it_was_opened_has_no_second_event(tmp_path: Path) -> None:
    rows = [("2026-03-01T00:20:00Z", "2026-03-01T00:50:00Z"), ("2026-03-01T01:20:00Z", "2026-02-27T00:00:00Z")]
    tickets = pd.DataFrame(rows, columns=["timestamp", "resolved_at"]).assign(node="node-0", type="failure")
    result = run_import(tmp_path, events=tickets)
    assert sorted(result.dataset.events()["type"]) == ["failure", "failure", "repair"]
    assert result.dataset.meta.quarantine == {RESOLVED_BEFORE_OPENED: 1}

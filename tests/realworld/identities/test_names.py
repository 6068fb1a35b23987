"""One node under several spellings, in each source of an import."""

import random
from collections.abc import Callable
from pathlib import Path

import pandas as pd
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

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


def spelled(name: str, how: random.Random) -> str:
    forms = [
        f"{name}:9400",
        f"http://{name}:9400/metrics",
        name,
        name.upper(),
        name.title(),
        f"{name}.hpc.example.com",
        f"{name.upper()}.HPC.example.com",
        f"{name}.",
    ]
    return how.choice(forms)


def respell(frame: pd.DataFrame, seed: int) -> pd.DataFrame:
    how = random.Random(seed)
    return frame.assign(node=[spelled(node, how) for node in frame["node"]])


def events() -> pd.DataFrame:
    rows = [("01:00", gpu(0), "xid", "79"), ("01:10", None, "xid", "63"), ("01:20", gpu(3), "failure", "x")]
    frame = pd.DataFrame(rows, columns=["clock", "gpu", "type", "code"])
    frame["timestamp"] = [f"2026-03-01T{clock}:00Z" for clock in frame.pop("clock")]
    return frame.assign(node=["node-0", "node-1", "node-1"])


def jobs() -> pd.DataFrame:
    hours = [DAY + pd.Timedelta(hours=hour) for hour in range(2)]
    return pd.DataFrame({"job": ["a", "b"], "node": ["node-0", "node-1"], "gpus": [2, 1]}).assign(
        started_at=[hour.isoformat() for hour in hours],
        ended_at=[(hour + pd.Timedelta(minutes=30)).isoformat() for hour in hours],
    )


def dataset(folder: Path, seed: int | None) -> tuple[pd.DataFrame, ...]:
    folder.mkdir()
    frames = {"samples": samples_frame(), "events": events(), "jobs": jobs()}
    if seed is not None:
        frames = {name: respell(frame, seed + place) for place, (name, frame) in enumerate(frames.items())}
    table = write_csv(folder / "jobs.csv", frames.pop("jobs"))
    made = run_import(folder, inventory=inventory_frame(), jobs=table, **frames)
    return made.dataset.inventory(), made.dataset.events(), made.dataset.jobs(), all_samples(made)


@settings(max_examples=5, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(seed=st.integers(0, 10**6))
def test_spellings_of_nodes_give_the_same_dataset(tmp_path_factory: pytest.TempPathFactory, seed: int):
    folder = tmp_path_factory.mktemp("spelled")
    for plain, varied in zip(dataset(folder / "a", None), dataset(folder / "b", seed), strict=True):
        assert len(plain)
        pd.testing.assert_frame_equal(plain, varied)


def test_a_name_that_two_nodes_may_have_is_counted_and_not_guessed(tmp_path: Path):
    inventory = inventory_frame().assign(node=["rack", "rack", "Rack", "Rack"])
    rows = events().assign(node=["RACK", "RACK", "Rack"])
    made = run_import(tmp_path, inventory=inventory, samples=samples_frame().drop(columns="node"), events=rows)
    placed = made.dataset.events()
    assert placed[["node", "gpu"]].values.tolist() == [["rack", gpu(0)], ["Rack", gpu(3)]]
    assert made.quarantined == {"name of several nodes": 1}


def test_a_short_and_a_longer_name_of_samples_are_one_node_without_an_inventory(tmp_path: Path):
    frame = samples_frame(gpus=1)
    mixed = frame.assign(node=["gpu01", "gpu01.a.example", "GPU01:9400", "gpu01.a.example.", "gpu01", "gpu01"])
    made = without_inventory(tmp_path, mixed)
    assert made.dataset.inventory()[["node", "gpu"]].values.tolist() == [["gpu01", gpu(0)]]
    assert len(all_samples(made)) == len(frame)
    assert made.contradictions == ()


@pytest.mark.parametrize(
    "nodes", [["gpu01", "gpu01.a.example", "gpu01.b.example"], ["gpu01.a.example", "gpu01.b.example"]]
)
@pytest.mark.parametrize("known", [True, False])
def test_a_short_name_in_two_domains_is_reported_with_them(tmp_path, nodes, known, caplog):
    frame = samples_frame(gpus=len(nodes), per_node=1)
    spelled = frame.assign(node=frame["node"].map(lambda node: nodes[int(node[-1])]))
    if known:
        made = run_import(tmp_path, inventory=inventory_frame(len(nodes)).assign(node="gpu01"), samples=spelled)
    else:
        made = without_inventory(tmp_path, spelled)
    is_unclear = known or "gpu01" in nodes
    lines = [line for line in made.contradictions if "several nodes" in line]
    assert [line.startswith("node gpu01: also named gpu01.a.example and gpu01.b.example;") for line in lines] == (
        [True] if is_unclear else []
    )
    assert made.counts.get("nodes_named_in_several_domains", 0) == is_unclear
    assert ("node gpu01: also named" in caplog.text) == is_unclear
    assert sorted(set(all_samples(made)["node"])) == (["gpu01"] if known else sorted(nodes))


Spelling = Callable[[str], str]


def with_gpus(folder: Path, spelling: Spelling) -> tuple[pd.DataFrame, pd.DataFrame]:
    """Samples and events of a dataset whose sources spell the GPUs so."""
    frames = {"samples": samples_frame(), "events": events()}
    varied = {name: frame.assign(gpu=frame["gpu"].map(spelling, na_action="ignore")) for name, frame in frames.items()}
    result = run_import(folder, inventory=inventory_frame(), **varied)
    return all_samples(result), result.dataset.events()


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> tuple[pd.DataFrame, pd.DataFrame]:
    return with_gpus(tmp_path_factory.mktemp("plain"), str)


@pytest.mark.parametrize(
    "spelling",
    [
        str.upper,
        str.lower,
        lambda uuid: uuid.removeprefix("GPU-"),
        *(form.format for form in (" {} ", "[{}]", '"{}",', "UUID: {}", "{{{}}}", "MIG-{}/1/0", "{}/1/0", "{}::3")),
    ],
)
def test_spellings_of_gpus_give_the_same_dataset(tmp_path: Path, plain, spelling: Spelling):
    for expected, varied in zip(plain, with_gpus(tmp_path, spelling), strict=True):
        pd.testing.assert_frame_equal(varied, expected)


@pytest.mark.parametrize(
    ("known", "spelling"),
    [
        ("ip-10-0-0-1.ec2.internal", "10.0.0.1:9400"),
        ("10.0.0.1", "IP-10-0-0-1.us-west-2.compute.internal"),
        ("i-0abc", "aws:///us-east-1a/i-0abc"),
        ("gke-a100-1", "gce://project/zone-a/gke-a100-1"),
        ("n0", "azure:///subscriptions/x/resourceGroups/y/virtualMachines/N0"),
        ("n0", "node/n0"),
    ],
)
def test_an_event_is_of_the_node_that_a_cloud_names_otherwise(tmp_path: Path, known: str, spelling: str):
    inventory, samples = (frame.replace("node-0", known) for frame in (inventory_frame(), samples_frame()))
    made = run_import(tmp_path, inventory=inventory, samples=samples, events=events()[1:2].assign(node=spelling))
    assert made.dataset.events()["node"].tolist() == [known]


@pytest.mark.parametrize(
    "known", [["ip-10-0-0-1.ec2.internal", "ip-10-0-0-1.compute.internal"], ["ip-10-0-0-11", "n1"]]
)
def test_an_address_that_no_or_several_cloud_names_state_is_not_guessed(tmp_path: Path, known: list[str]):
    inventory, samples = (
        frame.replace({"node-0": known[0], "node-1": known[1]}) for frame in (inventory_frame(), samples_frame())
    )
    rows = pd.concat([events()[:1].assign(node=known[0]), events()[1:2].assign(node="10.0.0.1")])
    made = run_import(tmp_path, inventory=inventory, samples=samples, events=rows)
    assert made.dataset.events()["node"].tolist() == [known[0]]
    assert sum(made.quarantined.values()) == 1


@pytest.mark.parametrize(
    ("given", "expected"), [("123456", 0), ("00123456.0", 0), ("777777", None), ("0777777", 2), ("0654321", 3)]
)
def test_a_serial_number_without_its_leading_zeros_is_found_if_one_gpu_has_it(tmp_path: Path, given: str, expected):
    inventory = inventory_frame().assign(serial=["0123456", "00777777", "0777777", "654321"])
    rows = events()[1:2].assign(node=["node-0" if expected == 0 else "node-1"], serial=given)
    placed = run_import(tmp_path, inventory=inventory, samples=samples_frame(), events=rows).dataset.events()["gpu"]
    assert placed.astype(object).where(placed.notna(), None).tolist() == [None if expected is None else gpu(expected)]

"""The mapping file of Prometheus-like sources, and what it refuses."""

from pathlib import Path

import pytest

from foundation.errors import InputError
from telemetry.collect.series.mapping import DEFAULT_LABELS, load_source_mapping


def refusal(tmp_path: Path, text: str) -> str:
    path = tmp_path / "m.yaml"
    path.write_text(text)
    with pytest.raises(InputError) as error:
        load_source_mapping(path)
    return str(error.value).replace(str(tmp_path), "")


def test_given_labels_replace_and_others_keep_their_defaults(tmp_path: Path) -> None:
    (tmp_path / "m.yaml").write_text("labels: {gpu: [card, board], rack: location}\nnode: {drop_domain: true}\n")
    mapping = load_source_mapping(tmp_path / "m.yaml")
    assert mapping.label_names("gpu") == ("card", "board")
    assert mapping.label_names("rack") == ("location",)
    assert mapping.label_names("node") == DEFAULT_LABELS["node"]
    assert mapping.node.drop_domain


def test_refusals_say_what_where_and_what_to_do(tmp_path: Path) -> None:
    assert refusal(tmp_path, "metric: {}").endswith("(/m.yaml, metric). Did you mean 'metrics'?")
    assert refusal(tmp_path, "node: {drop_ports: true}").endswith(
        "(/m.yaml, node.drop_ports). Did you mean 'drop_port'?"
    )
    assert "labels cannot hold 'gpus'. Did you mean 'gpu'?" in refusal(tmp_path, "labels: {gpus: [a]}")
    assert "the factor of 'power_w' is 0.0: write a number other than 0" in refusal(tmp_path, "scale: {power_w: 0}")
    assert "is not valid YAML" in refusal(tmp_path, "metrics: {")
    with pytest.raises(InputError, match="the mapping file does not exist"):
        load_source_mapping(tmp_path / "none.yaml")

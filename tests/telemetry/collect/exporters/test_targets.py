from pathlib import Path

import pytest

from foundation.errors import InputError
from telemetry.collect.kubernetes import discovery
from telemetry.collect.scraping.targets import Target, parse_target, read_targets


@pytest.mark.parametrize(
    ("text", "url", "address"),
    [
        ("node07", "http://node07:9400/metrics", "node07:9400"),
        ("node07:9100", "http://node07:9100/metrics", "node07:9100"),
        ("10.0.0.7:9400/gpu", "http://10.0.0.7:9400/gpu", "10.0.0.7:9400/gpu"),
        ("fd00::7", "http://[fd00::7]:9400/metrics", "[fd00::7]:9400"),
        ("[fd00::7]:81", "http://[fd00::7]:81/metrics", "[fd00::7]:81"),
        ("https://h/", "https://h/metrics", "h"),
        ("https://h:1/m?token=geheim", "https://h:1/m?token=geheim", "h:1/m"),
    ],
)
def test_targets_are_read_as_people_write_them(text: str, url: str, address: str) -> None:
    target = parse_target(text, "test")
    assert target.url == url
    assert target.address == address


@pytest.mark.parametrize(
    "text", ["node 07", "node:99999", "node:x", "ftp://h/m", "http://", "a:b:c", "/metrics", "http://h:70000/m"]
)
def test_what_is_no_address(text: str) -> None:
    with pytest.raises(InputError) as caught:
        parse_target(text, "targets.txt, line 3")
    assert str(caught.value) == (
        f"{text!r} is not the address of a page (targets.txt, line 3). Write host, host:port or http(s)://host:port/path."
    )


def test_a_password_in_an_address_is_refused_and_not_repeated() -> None:
    with pytest.raises(InputError) as caught:
        parse_target("http://user:geheim@node07/metrics", "test")
    assert str(caught.value) == "the address of node07 holds a password (targets). Give it with --basic-auth-file."


def test_a_text_file_is_read_and_read_again(tmp_path: Path) -> None:
    path = tmp_path / "gpu-nodes.txt"
    path.write_text("# all\nn1\nn2:81  worker-2  # new\n\n")
    assert read_targets([str(path)]) == [
        Target("http://n1:9400/metrics"),
        Target("http://n2:81/metrics", "worker-2"),
    ]
    path.write_text("n3\n")
    assert read_targets([str(path)]) == [Target("http://n3:9400/metrics")]


@pytest.mark.parametrize("suffix", [".json", ".yaml"])
def test_file_sd_is_read(tmp_path: Path, suffix: str) -> None:
    path = tmp_path / f"targets{suffix}"
    path.write_text(
        '[{"targets": ["n1:9400", "n2:9400"], "labels": {"rack": "r1", "__metrics_path__": "/m", "job": "dcgm"}},'
        ' {"targets": ["n3:1"], "labels": {"node": "worker-3", "__scheme__": "https"}}, {"targets": []}]'
    )
    rack = (("rack", "r1"),)
    assert read_targets([str(path)]) == [
        Target("http://n1:9400/m", None, rack),
        Target("http://n2:9400/m", None, rack),
        Target("https://n3:1/metrics", "worker-3"),
    ]


def test_a_service_is_asked_each_time(monkeypatch: pytest.MonkeyPatch) -> None:
    running = [discovery.Exporter("http://10.0.0.1:9400", "n1")]
    asked = []

    def service_exporters(namespace: str, service: str, port: object) -> list[discovery.Exporter]:
        asked.append((namespace, service, port))
        return list(running)

    monkeypatch.setattr(discovery, "service_exporters", service_exporters)
    values = ["kubernetes:gpu-operator/dcgm:9400", "n9,n8:1"]
    assert [target.node for target in read_targets(values)].count("n1") == 1
    running.append(discovery.Exporter("http://10.0.0.2:9400", "n2"))
    assert len(read_targets(values)) == 4
    assert asked == [("gpu-operator", "dcgm", 9400)] * 2


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([], "no target is given (--targets). Give a file, kubernetes:NAMESPACE/SERVICE, or host:port."),
        (
            ["kubernetes:dcgm"],
            "'kubernetes:dcgm' is not a service (--targets). Write kubernetes:NAMESPACE/SERVICE[:PORT].",
        ),
        (
            ["missing.txt"],
            "the list of targets cannot be read: No such file or directory (missing.txt). Give a file with targets.",
        ),
    ],
)
def test_options_that_name_no_targets(values: list[str], message: str) -> None:
    with pytest.raises(InputError) as caught:
        read_targets(values)
    assert str(caught.value) == message

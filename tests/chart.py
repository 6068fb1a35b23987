"""The Helm chart, rendered by Helm's own code."""

from functools import cache
from pathlib import Path
from typing import Any

import typer
import yaml
from helm_python import Chart

from predrain.command import app

CHART = Path(__file__).parents[1] / "deploy" / "helm" / "predrain"
NEEDED = {"prometheus": {"url": "http://prometheus.monitoring:9090"}}
"""The one value that has no default."""

ALL: dict[str, Any] = {
    **NEEDED,
    "imagePullSecrets": [{"name": "registry"}],
    "params": {"seed": 7},
    "collect": {"kubernetes": {"extraArgs": ["--cluster=east"]},
                "tickets": {"enabled": True}, "exporters": {"enabled": True}, "receiver": {"enabled": True},
                "nodes": {"kernelLog": True, "nvml": True}},
    "monitoring": {"podMonitor": True, "rules": True, "dashboard": True, "labels": {"release": "prometheus"}},
    "networkPolicy": {"enabled": True},
    "nodeSelector": {"team.example/x": "y"},
    "tolerations": [{"key": "team.example/x", "operator": "Exists", "effect": "NoSchedule"}],
    "extraEnv": [{"name": "HTTPS_PROXY", "value": "http://proxy:3128"}],
    "extraVolumes": [{"name": "tokens-of-prometheus", "secret": {"secretName": "prometheus-token"}}],
    "extraVolumeMounts": [{"name": "tokens-of-prometheus", "mountPath": "/tokens"}],
    "serve": {"extraArgs": ["--stale-after=2h"]},
    "act": {
        "roles": {"checkpointAnnotations": True, "deviceTaints": True},
        "ledger": {"storageClass": "local"},
        "diagnosticJob": (CHART.parents[1] / "kubernetes" / "diagnostic-job.yaml").read_text(encoding="utf-8"),
        "settings": {"kubernetes": {"device_taints": True, "gpu_annotations": ["team.example/gpus: all #1"]}},
    },
}  # fmt: skip
"""All that can be asked for."""


@cache
def _chart() -> Chart:
    return Chart.load(CHART)


def rendered(
    values: dict[str, Any] = NEEDED, *, release: str = "predrain", namespace: str = "predrain"
) -> dict[str, str]:
    """Give what each template came to; ``ValueError`` with Helm's message where it refuses the values."""
    try:
        return _chart().render(values, name=release, namespace=namespace)
    except Exception as error:
        raise ValueError(str(error)) from error


def objects(texts: dict[str, str]) -> dict[tuple[str, str, str], dict[str, Any]]:
    """Give the objects by kind, namespace and name; none may be made twice."""
    made: dict[tuple[str, str, str], dict[str, Any]] = {}
    for name, text in texts.items():
        for document in yaml.safe_load_all(text) if name.endswith(".yaml") else ():
            if document is not None:
                metadata = document["metadata"]
                key = (document["kind"], metadata.get("namespace", ""), metadata["name"])
                assert key not in made, key
                made[key] = document
    return made


FOLDER = Path(__file__).parents[1] / "deploy" / "kubernetes"
VERSIONS = ("1.25", "1.30", "1.37")


def options(*words: str) -> set[str]:
    command = typer.main.get_command(app)
    for word in words:
        command = command.commands[word]
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}

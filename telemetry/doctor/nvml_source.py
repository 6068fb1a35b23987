"""Looking at this node's own GPUs through NVML, in a process of its own: a sick GPU may hold a call for ever."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from typing import Any, Final

from telemetry.collect.nvml.child import (
    Child,
    Ended,
    Graveyard,
    Process,
    Silent,
)
from telemetry.collect.nvml.device import ABSENT, NAMES
from telemetry.collect.nvml.reader import readable_channels
from telemetry.dataset.channel import Channel
from telemetry.doctor.observation import ChannelSeen, Finding, Observation
from telemetry.errors import InputError

_GPU_S: Final = 10.0
"""Seconds for one GPU: a healthy one answers everything within a tenth of one."""

_BETWEEN_S: Final = 2.0
"""Between the two readings; NVML's profiling counters need two."""


@dataclass(slots=True)
class _Node:
    driver: str = ""
    devices: dict[int, dict[str, Any]] = field(default_factory=dict)
    readings: list[dict[int, dict[str, float]]] = field(default_factory=list)
    lost: dict[int, str] = field(default_factory=dict)
    errors: Counter[str] = field(default_factory=Counter)
    hung: int | None = None
    at: int | None = None


def observe_nvml(
    *,
    channels: Mapping[str, Channel],
    now: datetime,
    start: Callable[[], Child] | None = None,
    sleep: Callable[[float], None] = time.sleep,
    deadline_s: float = _GPU_S,
) -> Observation:
    """Look at the GPUs of this node.

    Raises ``InputError`` if this node has no NVIDIA driver, or it does not answer.
    """
    child = Process(Graveyard()) if start is None else start()
    node = _Node()
    try:
        _take(child, node, "open", deadline_s)
        for turn in range(2):
            if node.hung is not None:
                break
            if turn:
                sleep(_BETWEEN_S)
            node.readings.append({})
            _take(child, node, "read", deadline_s)
    finally:
        child.end()
    return _judge(node, channels, now)


def _take(child: Child, node: _Node, what: str, deadline_s: float) -> None:
    try:
        child.ask({"do": what, "skip": []})
        while True:
            message = child.hear(deadline_s)
            if "failed" in message:
                raise _no_driver(int(message["failed"]))
            if "done" in message:
                return
            _note(node, message)
    except Silent:
        if node.at is None and what == "open":
            raise InputError(
                f"the driver does not answer within {deadline_s:g} s", "NVML", "Look at `dmesg` of this node."
            ) from None
        node.hung = node.at
    except Ended as ended:
        raise InputError(
            f"the process that asked the driver ended ({ended})", "NVML", "Run it again; look at `dmesg` of this node."
        ) from None


def _note(node: _Node, message: Mapping[str, Any]) -> None:
    if "at" in message:
        node.at = message["at"]
    if "driver" in message:
        node.driver = str(message["driver"])
    if "device" in message:
        node.devices[int(message["device"]["index"])] = message["device"]
    for what in ("lost", "unreadable"):
        if what in message:
            node.lost[int(message[what])] = NAMES.get(int(message["code"]), f"error_{message['code']}")
    if "row" in message:
        node.readings[-1][int(message["row"])] = message["values"]
        node.errors.update(message["errors"])


def _no_driver(code: int) -> InputError:
    if code in ABSENT:
        return InputError(
            f"this node has no NVIDIA driver that answers ({NAMES[code]})",
            "NVML",
            "Run it on a node with GPUs, or look at an exporter: `predrain doctor http://NODE:9400/metrics`.",
        )
    return InputError(
        f"the driver refuses: {NAMES.get(code, code)}", "NVML", "Look at `nvidia-smi` and `dmesg` of this node."
    )


def _judge(node: _Node, channels: Mapping[str, Channel], now: datetime) -> Observation:
    if not node.devices and not node.lost:
        raise InputError("the driver lists no GPU", "NVML", "Run it on a node with GPUs.")
    newest = node.readings[-1] if node.readings else {}
    seen = {}
    for name in channels:
        values = {index: row[name] for index, row in newest.items() if name in row}
        if values:
            seen[name] = ChannelSeen(name, len(values), constant=_constant(node, name, values))
    readable = readable_channels()
    cannot = {name: "NVML has no call for it" for name in channels if name not in readable}
    cannot["xid_last"] = "NVML tells XIDs one by one, as they happen"
    return Observation(
        kind="NVML",
        where="this node",
        at=now,
        units=len(node.devices),
        nodes=1,
        models=dict(Counter(str(each["model"]) for each in node.devices.values() if each.get("model"))),
        channels=seen,
        xid_events=True,
        cannot=cannot,
        facts={"driver": node.driver},
        findings=tuple(_findings(node)),
    )


def _constant(node: _Node, name: str, values: Mapping[int, float]) -> bool | None:
    if len(node.readings) < 2:
        return None
    return all(node.readings[0].get(index, {}).get(name) == value for index, value in values.items())


def _findings(node: _Node) -> list[Finding]:
    found = []
    for index, why in sorted(node.lost.items()):
        gpu = node.devices.get(index, {}).get("gpu", f"number {index}")
        found.append(Finding(f"GPU {gpu} does not answer: {why}", "Drain the node and look at `dmesg`."))
    if node.hung is not None:
        gpu = node.devices.get(node.hung, {}).get("gpu", f"number {node.hung}")
        found.append(
            Finding(f"a call into GPU {gpu} hangs: those after it were not read", "Drain the node and look at `dmesg`.")
        )
    if node.errors:
        told = ", ".join(f"{name} {count}" for name, count in sorted(node.errors.items()))
        found.append(Finding(f"some questions failed for the moment: {told}", problem=False))
    return found

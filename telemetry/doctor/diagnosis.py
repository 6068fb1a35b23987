"""From what a source has and what channels are worth: what is missing, and what to do about it in order of worth."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Final, Literal

from telemetry.dataset.channel import Channel
from telemetry.doctor.groups import LATER_FIELDS, OTHER, Group, counter_line, group_of, grouped
from telemetry.doctor.observation import ChannelSeen, Finding, Observation, SourceKind
from telemetry.doctor.worth import XIDS, Worth

_REMAP: Final = (
    "row_remap_uncorrectable_total",
    "row_remap_correctable_total",
    "row_remap_pending",
    "row_remap_failure",
)
_INFERENCE: Final = r"T4G?|P40|P4|A2|A10[GM]?|A16|L4|L20|L40S?"
_HOPPER_ON: Final = r"H20|H100|H200|H800|B[123]00|G[HB]\d{3}"

# Channels, boards, why they do not have them. Boards before Ampere retire pages, later ones remap rows. The boards'
# names are those of NVML.
_RULES: Final[tuple[tuple[tuple[str, ...], str, str], ...]] = (
    (
        ("retired_pages_*",),
        rf"\b(?:A(?:2|10|16|30|40|100|800)[GMX]?|L4|L20|L40S?|{_HOPPER_ON}|RTX (?:A\d{{4}}|\d{{4}} Ada|PRO))\b",
        "remaps rows instead",
    ),
    (_REMAP, r"\b(?:Tesla [KMPVT]\d+|P100|P40|P4|V100S?|T4G?|Quadro)\b", "retires pages instead"),
    (
        ("ecc_sbe_sram_volatile_total", "ecc_dbe_sram_volatile_total", "sram_threshold_exceeded"),
        r"\b(?:Tesla [KMPVT]\d+|P100|P40|P4|V100S?|T4G?|Quadro)\b",
        "is older than Ampere",
    ),
    (("nvlink_*",), rf"\b(?:{_INFERENCE}|RTX PRO|RTX \d{{4}} Ada|GeForce)\b", "has no NVLink"),
    (("fabric_health",), rf"^(?!.*\b(?:{_HOPPER_ON})\b)", "is on no NVSwitch fabric that reports its health"),
    (("fan_speed_pct",), rf"SXM|\b(?:{_INFERENCE}|A30|A40|A100|A800|{_HOPPER_ON})\b", "is cooled passively"),
    (("mem_temp_c", "memory_margin_c"), rf"\b(?:{_INFERENCE}|A40|RTX|GeForce)\b", "has no sensor in its memory"),
    (("*_ratio", "pcie_tx_bytes_s", "pcie_rx_bytes_s"), r"\b(?:GeForce|TITAN)\b", "has no profiling counters for DCGM"),
    (("ecc_*", "sram_threshold_exceeded", *_REMAP, "retired_pages_*"), r"\b(?:GeForce|GTX)\b", "has no ECC"),
)
_AMD: Final = re.compile(r"Instinct|\bMI\d{2,3}[AX]?\b|Radeon|\bAMD\b", re.IGNORECASE)


def absent_on(model: str, channel: str) -> str | None:
    """Say why a board cannot report a channel.

    ``model``: the board's model as exporters and the inventory name it, such as ``NVIDIA H100 80GB HBM3``.
    Returns: the reason, a clause; None if it can, or it is not known (AMD's boards among them).
    """
    if _AMD.search(model):
        return None
    for patterns, boards, reason in _RULES:
        if any(fnmatchcase(channel, each) for each in patterns) and re.search(boards, model, re.IGNORECASE):
            return reason
    return None


def absent_on_all(models: Iterable[str], channel: str) -> str | None:
    """Say why no board of a fleet can report a channel; None if one can, or it is not known, or there are none.

    Examples
    --------
    >>> absent_on_all(["NVIDIA L4"], "nvlink_replay_total")
    'NVIDIA L4 has no NVLink'
    """
    reasons: dict[str, str] = {}
    for model in models:
        reason = absent_on(model, channel)
        if reason is None:
            return None
        reasons[model] = reason
    if len(reasons) > 1 and len(set(reasons.values())) == 1:
        return f"every board here {next(iter(reasons.values()))}"
    return "; ".join(f"{model} {reason}" for model, reason in reasons.items()) or None


def how_to(group: Group, bad: Sequence[tuple[Channel, str]], kind: SourceKind) -> Iterator[str]:
    """Yield the steps that bring channels of a group, one line each."""
    if group.name == "scraping":
        yield "Scrape the exporters with `predrain collect exporters`, which measures it."
        return
    missing = [channel for channel, status in bad if status in ("missing", "unsure")]
    there = [channel.name for channel, status in bad if status in ("empty", "partly")]
    stale = [channel.name for channel, status in bad if status == "stale"]
    if group.name == "XIDs" and missing:
        yield "Follow the kernel log: `predrain collect kernel-log --source journal --dataset DATASET` on each node."
    if kind == "NVML":
        if missing or there:
            yield group.condition or "The driver does not give it: update the driver, or look at `nvidia-smi -q`."
        return
    lines = [(channel, counter_line(channel)) for channel in missing]
    now = [line for channel, line in lines if line and not LATER_FIELDS.intersection(channel.dcgm_names)]
    later = [line for channel, line in lines if line and LATER_FIELDS.intersection(channel.dcgm_names)]
    if now:
        yield "Add to the exporter's counter file (deploy/dcgm-exporter/predrain-counters.csv has it all):"
        yield from (f"    {line}" for line in now)
    if later:
        yield "With an exporter built on DCGM 4.6 or later add as well:"
        yield from (f"    {line}" for line in later)
    if kind == "dataset" and (now or later):
        yield "Then collect again: `predrain collect prometheus` for history, `predrain collect exporters` from now on."
    own = [channel.name for channel, line in lines if line is None]
    if own:
        yield f"No exporter gives {', '.join(own)}: map it from your own metrics (--mapping), or leave it."
    if there:
        yield (
            f"Some or all GPUs give no {', '.join(there)}: compare nodes that have it with nodes that have not "
            "(counter file, driver, ECC, MIG)."
        )
    if stale:
        yield f"{', '.join(stale)} came once and stopped: look at the exporters and their targets."
    if (now or later or there) and group.condition:
        yield group.condition


Status = Literal["ok", "partly", "stale", "empty", "missing", "unsure", "not on this board", "not from here"]
"""How a channel stands: ``partly`` lacks GPUs or values, ``empty`` is there without one value, ``unsure`` may be."""

BAD: Final = ("partly", "stale", "empty", "missing")
"""The statuses that something can be done about."""

STALE_AFTER_S: Final = 600.0
"""A channel whose newest value is older than this is stale: twice the look-back of Prometheus."""

_EXPORTERS: Final = ("exporter page", "Prometheus")

PARTLY_FROM: Final = 0.02
"""A channel that this share of the GPUs or of the rows lacks is said to be there only partly."""


@dataclass(frozen=True, slots=True)
class ChannelState:
    """How one channel stands.

    ``status``: one of :data:`Status`.
    ``used``: whether the model uses it; None if no model is known.
    ``worth``: its share of what the model goes by; None if unknown.
    ``remark``: why it stands so, in words; may be empty.
    """

    channel: Channel
    status: Status
    seen: ChannelSeen | None
    used: bool | None
    worth: float | None
    remark: str = ""


@dataclass(frozen=True, slots=True)
class ToDo:
    """One thing to do.

    ``worth``: their share of what the model goes by; None if the model never saw them, or none is known.
    ``used``: whether the model (or, without one, the list of precursors) goes by any of them.
    ``steps``: How, one line each.
    """

    title: str
    channels: tuple[str, ...]
    worth: float | None
    used: bool
    steps: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """What the doctor says.

    ``worth_said``: where that comes from, or why it is not known.
    ``todos``: in order of worth.
    """

    observation: Observation
    worth: Worth | None
    worth_said: str
    states: tuple[ChannelState, ...]
    todos: tuple[ToDo, ...]

    @property
    def lacking(self) -> tuple[str, ...]:
        """Channels that the model uses (without a model: of groups with precursors) and the source does not have."""
        return tuple(each.channel.name for each in self.states if each.status in BAD and _goes_by(each))

    @property
    def healthy(self) -> bool:
        """Whether nothing is missing that the model uses, and nothing else spoils the telemetry."""
        return not self.lacking and not any(finding.problem for finding in self.observation.findings)


def diagnose(
    observation: Observation, worth: Worth | None, worth_said: str, channels: Mapping[str, Channel]
) -> Diagnosis:
    """Judge what a look found.

    ``worth_said``: where that comes from, or why it is not known.
    Returns: a source that does not tell channels (:attr:`Observation.judged`) has no states, only findings.
    """
    states: list[ChannelState] = []
    todos: list[ToDo] = []
    if observation.judged:
        for group, mine in grouped(channels):
            judged = [_state(channel, observation, worth) for channel in mine]
            states += judged
            todo = _todo(group, judged, observation, worth)
            if todo is not None:
                todos.append(todo)
    todos += [_from_finding(each) for each in observation.findings if each.do]
    todos.sort(key=lambda todo: (not todo.used, -(todo.worth or 0.0)))  # stable: else the groups' own order
    return Diagnosis(observation, worth, worth_said, tuple(states), tuple(todos))


def _state(channel: Channel, observation: Observation, worth: Worth | None) -> ChannelState:
    name = channel.name
    seen = observation.channels.get(name)
    used = None if worth is None else name in worth.used
    share = None if worth is None else worth.of([name])
    there = seen is not None and seen.gpus > 0
    status, remark = _of_seen(seen, observation) if seen and there else _of_unseen(channel, seen, observation)
    return ChannelState(channel, status, seen, used, share, remark)


def _of_unseen(channel: Channel, seen: ChannelSeen | None, observation: Observation) -> tuple[Status, str]:
    reason = absent_on_all(observation.models, channel.name)
    if reason is not None:
        return "not on this board", reason
    elsewhere = _not_from_here(channel, observation)
    if elsewhere:
        return "not from here", elsewhere
    if channel.name == "xid_last" and observation.kind in _EXPORTERS:
        told = "single XIDs are told instead" if observation.xid_events else "left out until the first XID, or off"
        return "unsure", told
    if seen is None:
        return "missing", ""
    return "empty", f"{seen.sentinels:,} values say not supported" if seen.sentinels else "no value"


def _of_seen(seen: ChannelSeen, observation: Observation) -> tuple[Status, str]:
    if observation.kind in _EXPORTERS and seen.age_s is not None and seen.age_s > STALE_AFTER_S:
        return "stale", f"newest value {seen.age_s:,.0f} s old"
    # Boards that cannot report it are no lack.
    able = 1.0 - _share_unable(observation, seen.channel)
    expected = round(observation.units * able)
    if expected and 1.0 - seen.gpus / expected >= PARTLY_FROM:
        return "partly", f"{seen.gpus:,} of {expected:,} GPUs"
    nulls = 1.0 - (1.0 - (seen.null_share or 0.0)) / able if able else 0.0
    if nulls >= PARTLY_FROM:
        return "partly", f"{nulls:.0%} of the rows without a value"
    return "ok", ""


def _share_unable(observation: Observation, channel: str) -> float:
    """Share of the GPUs whose boards cannot report a channel."""
    unable = sum(count for model, count in observation.models.items() if absent_on(model, channel))
    return unable / (sum(observation.models.values()) or 1)


def _not_from_here(channel: Channel, observation: Observation) -> str:
    """Say why this kind of source cannot have a channel; empty if it can."""
    if channel.name in observation.cannot:
        return observation.cannot[channel.name]
    group = group_of(channel.name)
    if observation.kind == "dataset" or group is OTHER:
        return ""
    if group.name == "scraping":
        return "made by `predrain collect exporters`"
    if observation.kind == "NVML":
        return ""
    if observation.facts.get("exporter") == "AMD" and not channel.amd:
        return "AMD's exporter has no such metric"
    return "" if channel.dcgm_names or channel.amd else "no exporter has it"


def _todo(group: Group, states: list[ChannelState], observation: Observation, worth: Worth | None) -> ToDo | None:
    bad = [each for each in states if each.status in BAD or each.status == "unsure"]
    if group.name == "XIDs" and observation.xid_events:
        return None  # single XIDs are told, which is more than the gauge says
    if not bad:
        return None
    names = tuple(each.channel.name for each in bad)
    share = worth_of(group, names, worth)
    used = any(_goes_by(each) for each in bad)
    words = _in_words(bad)
    return ToDo(f"{group.name}: {words}", names, share, used, tuple(how_to(group, bad_channels(bad), observation.kind)))


def worth_of(group: Group, names: Iterable[str], worth: Worth | None) -> float | None:
    """Return what channels of a group are worth together, with what their events are; None if it is not known."""
    if worth is None:
        return None
    share = worth.of(names)
    if group.name == "XIDs" and XIDS in worth.shares:
        return (share or 0.0) + worth.shares[XIDS]
    return share


def bad_channels(states: list[ChannelState]) -> list[tuple[Channel, str]]:
    """Return the channels of states with their status."""
    return [(each.channel, each.status) for each in states]


def _in_words(bad: list[ChannelState]) -> str:
    by_status: dict[str, list[str]] = {}
    for each in bad:
        by_status.setdefault(each.status, []).append(each.channel.name)
    words = {
        "missing": "missing",
        "empty": "without a value",
        "partly": "only partly there",
        "stale": "stale",
        "unsure": "not seen",
    }
    return "; ".join(f"{', '.join(names)} {words.get(status, status)}" for status, names in by_status.items())


def _goes_by(state: ChannelState) -> bool:
    if state.used is None:
        return group_of(state.channel.name).precursor
    return state.used


def _from_finding(finding: Finding) -> ToDo:
    return ToDo(finding.what, (), None, finding.problem, (finding.do,))

"""The plan of a matrix: which columns it has, and the plans of its groups that fill them."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Literal

from features.config import GROUPS, DecisionSection, FeatureSection, Group
from features.errors import InputError
from features.groups.gaps import GapPlan
from features.groups.onset import OnsetPlan
from features.groups.peers import PeerPlan
from features.groups.static import StaticPlan
from features.groups.workload import WorkloadPlan
from features.times import duration_ms, instant_ms
from features.vocabulary import FeatureColumn
from features.windows.layout import ChannelLayout
from features.windows.pane_index import PaneSpec
from features.windows.statistics import WindowPlan
from telemetry.dataset.channel import ROLLUP_SUFFIXES, Channel


@dataclass(frozen=True, slots=True)
class FeaturePlan:
    """Every column of a matrix and the plans of its groups; a group that is off or has no columns is None.

    ``columns``: all columns, group by group in the order of :data:`features.config.GROUPS`.
    ``at``: where each group's columns begin.
    ``unit``: ``gpu`` or ``node``.
    """

    columns: tuple[FeatureColumn, ...]
    at: Mapping[Group, int]
    features: FeatureSection
    unit: str
    layout: ChannelLayout
    panes: PaneSpec
    telemetry: WindowPlan | None
    peers: PeerPlan | None
    onset: OnsetPlan | None
    gaps: GapPlan | None
    workload: WorkloadPlan | None
    static: StaticPlan | None

    @classmethod
    def of(
        cls,
        features: FeatureSection,
        channels: Mapping[str, Channel],
        *,
        unit: str,
        step: timedelta,
        decision: DecisionSection,
        static: StaticPlan | None,
        history: Sequence[FeatureColumn],
    ) -> FeaturePlan:
        """Make a plan.

        ``channels``: channels of the dataset, roll-ups included; empty without telemetry, and then only ``history`` and
        ``static`` have columns.
        ``history``: columns of the group ``history``.
        Raises ``InputError`` if ``features.channels`` names a channel that is not there.
        """
        channels = chosen_channels(features.channels, channels)
        layout = ChannelLayout.of(channels)
        on = set(features.groups)
        sampled = on if channels else set()
        telemetry = WindowPlan.telemetry(layout, features.windows) if "telemetry" in sampled else None
        peers = PeerPlan.of(layout, features.peer_window, unit=unit) if "peers" in sampled else None
        onset = OnsetPlan.of(layout, features.onset, step=step) if "onset" in sampled else None
        workload = WorkloadPlan.of(layout, features.windows) if "workload" in sampled else None
        gaps = None
        if "gaps" in sampled:
            gaps = GapPlan.of(layout, features.windows, step=step, delay=features.delay, unit=unit)
        columns: dict[Group, Sequence[FeatureColumn]] = {
            "telemetry": telemetry.columns if telemetry else (),
            "history": history if "history" in on else (),
            "peers": peers.columns if peers else (),
            "onset": onset.columns if onset else (),
            "gaps": gaps.columns if gaps else (),
            "workload": workload.columns if workload else (),
            "static": static.columns if static and "static" in on else (),
        }
        at: dict[Group, int] = {}
        flat: list[FeatureColumn] = []
        for group in GROUPS:
            at[group] = len(flat)
            flat += columns[group]
        return cls(
            columns=tuple(flat),
            at=at,
            features=features,
            unit=unit,
            layout=layout,
            panes=PaneSpec.of(
                every=duration_ms(decision.every),
                origin=instant_ms(decision.origin),
                delay=duration_ms(features.delay),
                step=duration_ms(step),
                reach=duration_ms(_reach(features, with_onset=onset is not None)),
            ),
            telemetry=telemetry,
            peers=peers,
            onset=onset,
            gaps=gaps,
            workload=workload,
            static=static if columns["static"] else None,
        )

    def of_groups(self, groups: Collection[Group]) -> FeaturePlan:
        """Return the plan of some groups alone, whose columns have the same values as among all."""
        columns = tuple(column for column in self.columns if column.group in groups)
        ahead = {group: sum(column.group in GROUPS[:place] for column in columns) for place, group in enumerate(GROUPS)}
        return replace(
            self,
            columns=columns,
            at=ahead,
            telemetry=self.telemetry if "telemetry" in groups else None,
            peers=self.peers if "peers" in groups else None,
            onset=self.onset if "onset" in groups else None,
            gaps=self.gaps if "gaps" in groups else None,
            workload=self.workload if "workload" in groups else None,
            static=self.static if "static" in groups else None,
        )

    @property
    def reads_samples(self) -> bool:
        """Whether any column is made of samples."""
        plans = (self.telemetry, self.peers, self.onset, self.gaps, self.workload)
        return any(plan is not None and plan.columns for plan in plans)

    @property
    def look_back(self) -> timedelta:
        """How old a sample can be, counted from the decision time, and still matter to a row."""
        return _reach(self.features, with_onset=self.onset is not None) + self.features.delay

    @property
    def near(self) -> FeaturePlan:
        """The plan without the group ``onset``, which looks back further than the others; its columns stay unfilled."""
        reach = duration_ms(_reach(self.features, with_onset=False))
        return replace(self, onset=None, panes=replace(self.panes, reach=reach))


def _reach(features: FeatureSection, *, with_onset: bool) -> timedelta:
    """Return the largest age that any group looks at."""
    doubles = 2 * max(features.windows[-1], features.peer_window)
    return max(doubles, *(past for _, past in features.onset)) if with_onset else doubles


def chosen_channels(names: Sequence[str] | Literal["auto"], channels: Mapping[str, Channel]) -> Mapping[str, Channel]:
    """Take the named channels of a dataset, each with its roll-up columns; ``auto``: all of them.

    Raises ``InputError`` if a named channel is not there.
    """
    if names == "auto":
        return channels
    wanted = set(names)
    for name in names:
        if name not in channels:
            near = difflib.get_close_matches(name, channels, n=1, cutoff=0.4)
            hint = f"Did you mean '{near[0]}'?" if near else f"It has: {', '.join(sorted(channels)) or 'none'}."
            raise InputError(f"the dataset has no channel '{name}'", "parameter features.channels", hint)
        wanted |= {name + suffix for suffix in ROLLUP_SUFFIXES.get(channels[name].kind, ())}
    return {name: channel for name, channel in channels.items() if name in wanted}

"""The plan of a matrix: its columns, and the plans of the feature groups that compute them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal, Self

from features.config import GROUPS, FeatureSection, Group
from features.groups.gaps import GapPlan
from features.groups.history import history_columns
from features.groups.onset import OnsetPlan
from features.groups.peers import PeerPlan
from features.groups.static import StaticPlan
from features.groups.workload import WorkloadPlan
from features.matrix.meta import MatrixConfig
from features.vocabulary import FeatureColumn
from features.windows.layout import ChannelLayout, unknown_channel
from features.windows.pane_index import PaneSpec
from features.windows.window_plan import WindowPlan
from foundation.times import duration_ms, instant_ms
from telemetry.dataset.channels import ROLLUP_SUFFIXES, Channel
from telemetry.dataset.schema import Unit


@dataclass(frozen=True, slots=True)
class FeaturePlan:
    """All columns of a matrix and the plans of its groups; None for a group that is off or has no columns.

    ``columns``: all columns, group by group in the order of :data:`features.config.GROUPS`.
    ``offsets``: first column of each group.
    """

    columns: tuple[FeatureColumn, ...]
    offsets: Mapping[Group, int]
    features: FeatureSection
    unit: Unit
    layout: ChannelLayout
    panes: PaneSpec
    telemetry: WindowPlan | None
    peers: PeerPlan | None
    onset: OnsetPlan | None
    gaps: GapPlan | None
    workload: WorkloadPlan | None
    static: StaticPlan | None

    @classmethod
    def of(cls, config: MatrixConfig, static: StaticPlan | None) -> Self:
        """Plan the columns; without channels only ``history`` and ``static`` have any.

        Raises ``InputError`` if ``features.channels`` names an unknown channel.
        """
        features, unit, step, decision = config.features, config.unit, config.step, config.decision
        channels = chosen_channels(features.channels, config.channels)
        layout = ChannelLayout.of(channels)
        enabled = set(features.groups)
        sampled = enabled if channels else set()
        gaps, windows = None, features.windows
        telemetry = WindowPlan.telemetry(layout, windows) if "telemetry" in sampled else None
        peers = PeerPlan.of(layout, features.peer_window, unit=unit) if "peers" in sampled else None
        onset = OnsetPlan.of(layout, features.onset, step=step) if "onset" in sampled else None
        workload = WorkloadPlan.of(layout, windows) if "workload" in sampled else None
        if "gaps" in sampled:
            gaps = GapPlan.of(layout, windows, step=step, delay=features.delay, unit=unit)
        static = static if static and static.columns and "static" in enabled else None
        columns: dict[Group, Sequence[FeatureColumn]] = {
            group: plan.columns if plan else ()
            for group, plan in zip(GROUPS, (telemetry, None, peers, onset, gaps, workload, static), strict=True)
        }
        if "history" in enabled:
            columns["history"] = history_columns(features, unit=unit)
        sizes = [len(columns[group]) for group in GROUPS]
        return cls(
            columns=tuple(column for group in GROUPS for column in columns[group]),
            offsets={group: sum(sizes[:place]) for place, group in enumerate(GROUPS)},
            features=features,
            unit=unit,
            layout=layout,
            panes=PaneSpec.of(
                interval=duration_ms(decision.every),
                origin=instant_ms(decision.origin),
                delay=duration_ms(features.delay),
                step=duration_ms(step),
                look_back=duration_ms(_look_back(features, with_onset=onset is not None)),
            ),
            telemetry=telemetry,
            peers=peers,
            onset=onset,
            gaps=gaps,
            workload=workload,
            static=static,
        )

    @property
    def reads_samples(self) -> bool:
        """Whether any column depends on samples."""
        plans = (self.telemetry, self.peers, self.onset, self.gaps, self.workload)
        return any(plan is not None and plan.columns for plan in plans)

    @property
    def look_back(self) -> timedelta:
        """Maximum age, from the decision time, of a sample that can affect a row."""
        return _look_back(self.features, with_onset=self.onset is not None) + self.features.delay


def _look_back(features: FeatureSection, *, with_onset: bool) -> timedelta:
    """Return the longest look-back of any group."""
    doubles = 2 * max(features.windows[-1], features.peer_window)
    return max(doubles, *(baseline for _, baseline in features.onset)) if with_onset else doubles


def chosen_channels(names: Sequence[str] | Literal["auto"], channels: Mapping[str, Channel]) -> Mapping[str, Channel]:
    """Select channels of a dataset with their roll-up columns; ``auto``: all.

    Raises ``InputError`` if a named channel does not exist.
    """
    if names == "auto":
        return channels
    chosen = set(names)
    for name in names:
        if name not in channels:
            raise unknown_channel(name, channels, "parameter features.channels")
        chosen |= {name + suffix for suffix in ROLLUP_SUFFIXES.get(channels[name].kind, ())}
    return {name: channel for name, channel in channels.items() if name in chosen}

"""What happened to each GPU, from a dataset's events and inventory: by the same rules that make labels."""

from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from features.config import LabelSection
    from policy.episodes import Happening
    from scheduler.controller.facts import NodeHistories


class DatasetHistory:
    """Reads a dataset's events and inventory; again where an import replaced them.

    ``events``: None: that of the folder.
    ``scores``: folder of the scores that are acted on; None: predrain's own section of labels counts.

    Incidents are those of :func:`features.labels.incidents.find_incidents` with the section of labels that the newest
    decision of the scores names, so that an alert is evaluated by what its model takes for an incident. All else is
    that of :func:`serving.scores.alert_outcomes.happenings_of`. The history is complete up to the end of the dataset's
    span, or where there is no ``dataset.json`` up to the last time at which anything became known.
    """

    def __init__(self, folder: Path, events: Path | None = None, scores: Path | None = None) -> None:
        self._folder, self._scores = folder, scores
        self._files = (events or folder / "events.parquet", folder / "inventory.parquet", folder / "dataset.json")
        self._key: tuple[Any, ...] | None = None
        self._happenings: list[tuple[datetime, str, Happening]] = []
        self._homes: dict[str, str] = {}
        self._until: datetime | None = None

    def read(self, now: datetime) -> "NodeHistories":
        """Give what was known at ``now``.

        Raises ``SourceError`` if the files cannot be read.
        """
        from pyarrow.lib import ArrowException

        from foundation.errors import InputError
        from foundation.files import stamp_of
        from scheduler.controller.facts import NodeHistories
        from scheduler.ports.errors import SourceError

        try:
            labels = self._labels()
            key = (*map(stamp_of, self._files), labels)
            if key != self._key:
                self._load(labels)
                self._key = key
        except (OSError, ArrowException, KeyError, ValueError, InputError) as error:
            raise SourceError(f"cannot read events and inventory from {self._folder}: {error}") from error
        units: dict[str, list[Happening]] = {}
        for known_at, unit, happening in self._happenings:
            if known_at <= now:
                units.setdefault(unit, []).append(happening)
        return NodeHistories(units, dict(self._homes), self._until)

    def _labels(self) -> "LabelSection":
        from features.config import LabelSection
        from serving.scores.alert_outcomes import label_settings_of

        return LabelSection() if self._scores is None else label_settings_of(self._scores)[0]

    def _load(self, labels: "LabelSection") -> None:
        import pyarrow.parquet as pq

        from features.labels.incidents import find_incidents
        from serving.scores.alert_outcomes import happenings_of
        from telemetry.dataset.installations import Installations
        from telemetry.dataset.meta import read_meta

        events, inventory = (pq.read_table(file).to_pandas() for file in self._files[:2])
        incidents = find_incidents(events, inventory, labels)
        self._happenings = list(happenings_of(events, Installations.of(inventory), incidents))
        until = _when(events["known_at"].max()) if len(events) else datetime.fromtimestamp(0, UTC)
        if self._files[2].is_file():
            until = read_meta(self._folder).span[1]
        self._until = until
        stays = inventory[inventory["gpu"].notna()].sort_values("installed_at")
        self._homes = dict(zip(stays["gpu"], stays["node"], strict=True))


def _when(value: Any) -> datetime:
    when: datetime = value.to_pydatetime()
    return when.astimezone(UTC)

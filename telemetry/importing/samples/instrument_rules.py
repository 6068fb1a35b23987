"""Rules for frozen telemetry and dead fields, from ``instruments.yaml``."""

from pathlib import Path
from typing import Final

from pydantic import BaseModel, ConfigDict

from foundation.yaml import read_yaml


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class MinRepetition(_Model):
    """Minimum number of samples and minutes before a condition counts as detected."""

    samples: int
    minutes: int


class _Frozen(_Model):
    vanished: MinRepetition
    energy: MinRepetition
    load: MinRepetition
    page: MinRepetition


class _DeviceFields(_Model):
    fewest: int
    channels: tuple[str, ...]


class _Activity(MinRepetition):
    channels: tuple[str, ...]
    busy_pct: float


class _LastingCounters(_Model):
    channels: tuple[str, ...]
    minutes: int


class InstrumentRules(_Model):
    """Content of ``instruments.yaml``."""

    power: tuple[str, ...]
    temperature: tuple[str, ...]
    load: str
    energy: str
    large_counters: tuple[str, ...]
    page_age: str
    device_fields: _DeviceFields
    frozen: _Frozen
    activity: _Activity
    lasting_counters: _LastingCounters
    kept: tuple[str, ...]

    @property
    def fluctuating(self) -> tuple[str, ...]:
        """Channels that fluctuate on every healthy GPU."""
        return *self.power, *self.temperature


RULES: Final = InstrumentRules.model_validate(
    read_yaml(Path(__file__).with_name("instruments.yaml").read_text(encoding="utf-8"))
)

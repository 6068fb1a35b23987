"""Settings of the Slurm adapter."""

from datetime import timedelta
from typing import Annotated, Final, Literal

from pydantic import Field, PositiveInt
from pydantic.dataclasses import dataclass as checked

from foundation.settings import PositiveTime

HIGHEST_WEIGHT: Final = 0xFFFFFFF0
"""Highest weight that scontrol accepts; Slurm reserves the numbers above it for "no value", "infinite" etc."""

_Word = Annotated[str, Field(pattern="^[A-Za-z0-9_.:=-]+$")]


@checked(frozen=True, slots=True)
class ProbeJobSettings:
    """The job that probes an idle node; all other jobs must be able to preempt its ``partition`` or ``qos``."""

    script: Annotated[str, Field(pattern="^/")]
    partition: _Word | None = None
    qos: _Word | None = None
    account: _Word | None = None
    time_limit: PositiveTime = timedelta(minutes=30)
    failed_exit_code: Annotated[int, Field(ge=1, le=255)] = 3
    output: Annotated[str, Field(pattern="^/")] = "/dev/null"

    def __post_init__(self) -> None:
        if self.partition is None and self.qos is None:
            raise ValueError("neither partition nor qos is given: give one that other jobs preempt")


@checked(frozen=True, slots=True)
class SlurmSettings:
    """Settings of the Slurm adapter; docs/reference/settings.md has the table of all settings."""

    folder: Annotated[str, Field(min_length=1)]
    cluster: _Word = "slurm"
    installation: _Word = "predrain"
    bin_dir: str | None = None
    slurm_conf: str | None = None
    rest_url: str | None = None
    rest_user: str | None = None
    rest_token_file: str | None = None
    hard_state: Literal["drain", "fail"] = "drain"
    soft_weight: Annotated[int, Field(ge=1, le=HIGHEST_WEIGHT)] = 1_000_000
    gres: _Word = "gpu"
    partitions: tuple[str, ...] = ()
    group_prefix: str | None = None
    rack_prefix: str | None = None
    domain_prefix: str | None = None
    opt_out_feature: _Word = "predrain_unmanaged"
    probe: ProbeJobSettings | None = None
    timeout: PositiveTime = timedelta(seconds=20)
    max_response_bytes: PositiveInt = 512 * 2**20

    def __post_init__(self) -> None:
        if self.rest_url is not None and not self.rest_url.startswith(("http://", "https://", "unix:/")):
            raise ValueError(f"rest_url is {self.rest_url!r}: give http://HOST:PORT, https://HOST:PORT or unix:/PATH")
        if self.rest_url is None and (self.rest_user is not None or self.rest_token_file is not None):
            raise ValueError("rest_user and rest_token_file are for slurmrestd: give rest_url too")
        if self.rest_url is not None and self.probe is not None:
            raise ValueError("probe needs the commands of Slurm: leave rest_url out")

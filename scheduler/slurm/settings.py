"""How the adapter finds Slurm, where it keeps what it must remember, and what its marks are."""

from __future__ import annotations

import re
from datetime import timedelta
from typing import Final, Literal

from pydantic import PositiveInt
from pydantic.dataclasses import dataclass as checked

from foundation.settings import PositiveTime

HIGHEST_WEIGHT: Final = 0xFFFFFFF0
"""scontrol refuses a higher one; Slurm keeps the numbers above it for "no value", "infinite" and the like."""

_WORD = re.compile(r"[A-Za-z0-9_.:=-]+\Z")


@checked(frozen=True, slots=True)
class SlurmSettings:
    """How the adapter works.

    docs/reference/slurm-actuator.md has the table of all settings.
    """

    folder: str
    cluster: str = "slurm"
    bin_dir: str | None = None
    slurm_conf: str | None = None
    rest_url: str | None = None
    rest_user: str | None = None
    rest_token_file: str | None = None
    hard_state: Literal["drain", "fail"] = "drain"
    soft_weight: int = 1_000_000
    gres: str = "gpu"
    partitions: tuple[str, ...] = ()
    group_prefix: str | None = None
    rack_prefix: str | None = None
    domain_prefix: str | None = None
    opt_out_feature: str = "predrain_unmanaged"
    timeout: PositiveTime = timedelta(seconds=20)
    max_response_bytes: PositiveInt = 512 * 2**20

    def __post_init__(self) -> None:
        if not self.folder:
            raise ValueError("folder is empty: give a folder on a disk that all controllers share")
        if not 0 < self.soft_weight <= HIGHEST_WEIGHT:
            raise ValueError(f"soft_weight is {self.soft_weight}: give a number from 1 to {HIGHEST_WEIGHT}")
        for name in ("cluster", "gres", "opt_out_feature"):
            if not _WORD.match(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)!r}: give a name of letters, digits, _ . : = -")
        if self.rest_url is not None and not self.rest_url.startswith(("http://", "https://", "unix:/")):
            raise ValueError(f"rest_url is {self.rest_url!r}: give http://HOST:PORT, https://HOST:PORT or unix:/PATH")
        if self.rest_url is None and (self.rest_user is not None or self.rest_token_file is not None):
            raise ValueError("rest_user and rest_token_file are for slurmrestd: give rest_url too")

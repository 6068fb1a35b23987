"""How the adapter finds Slurm, where it keeps what it must remember, and what its marks are."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Final, Literal

from policy.ranges import PositiveInt, PositiveTime, check_ranges

HIGHEST_WEIGHT: Final = 0xFFFFFFF0
"""scontrol refuses a higher one; Slurm keeps the numbers above it for "no value", "infinite" and the like."""

_WORD = re.compile(r"[A-Za-z0-9_.:=-]+\Z")


@dataclass(frozen=True, slots=True)
class SlurmSettings:
    """How the adapter works.

    ``folder``: on a disk that all replicas of the controller share and that locks files for all of them: the safety
    state, the switches, the lease and what checkpoints were asked for. It must exist.
    ``cluster``: what the cluster is called in budgets, stages and the ledger.
    ``bin_dir``: folder of ``scontrol``, ``sinfo``, ``squeue`` and ``scancel``; None: the PATH.
    ``slurm_conf``: ``SLURM_CONF``; None: as the environment has it.
    ``rest_url``: slurmrestd: ``http://HOST:PORT``, ``https://…`` or ``unix:/PATH``; None: the commands are used.
    ``rest_user``, ``rest_token_file``: sent to slurmrestd. The file holds the JWT and is read at each request, so that
    it may be renewed.
    ``hard_state``: ``drain`` or ``fail``: the state that takes a node out of service.
    ``soft_weight``: added to a node's weight as the soft mark; Slurm fills nodes of lower weight first.
    ``gres``: nodes that have this generic resource are the fleet.
    ``partitions``: only nodes of these; none: of all.
    ``group_prefix``, ``rack_prefix``, ``domain_prefix``: prefix of the node feature that names it: with ``rack_`` the
    feature ``rack_b7`` puts a node into rack ``b7``. A node without such a feature is in the group of its first
    partition, and in no rack and no NVLink domain.
    ``opt_out_feature``: a node with this feature is left alone.
    ``timeout``: for each command or request. Slurm's own MessageTimeout (10 s) should fit in.
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
        check_ranges(self)
        for name in ("cluster", "gres", "opt_out_feature"):
            if not _WORD.match(getattr(self, name)):
                raise ValueError(f"{name} is {getattr(self, name)!r}: give a name of letters, digits, _ . : = -")
        if self.rest_url is not None and not self.rest_url.startswith(("http://", "https://", "unix:/")):
            raise ValueError(f"rest_url is {self.rest_url!r}: give http://HOST:PORT, https://HOST:PORT or unix:/PATH")
        if self.rest_url is None and (self.rest_user is not None or self.rest_token_file is not None):
            raise ValueError("rest_user and rest_token_file are for slurmrestd: give rest_url too")

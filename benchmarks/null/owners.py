"""A feature matrix whose labels are handed to units drawn at random, and one with a feature that reads the future."""

from __future__ import annotations

import hashlib
from datetime import datetime, timedelta
from typing import Any

import numpy as np
import pandas as pd

from features.labels.labelling import label_rows
from features.matrix.matrix import FeatureMatrix
from features.vocabulary import FeatureColumn


class Wrapped:
    """A feature matrix with something of it replaced."""

    def __init__(self, matrix: Any, tag: str) -> None:
        self._matrix = matrix
        self._digest = hashlib.sha256(f"{matrix.digest} {tag}".encode()).hexdigest()

    def __getattr__(self, name: str) -> Any:
        return getattr(self._matrix, name)

    @property
    def digest(self) -> str:
        """Digest of the matrix and of what replaced a part of it."""
        return self._digest


class ShuffledOwners(Wrapped):
    """A matrix whose incidents belong to GPUs drawn at random, each incident on its own, at its own time."""

    def __init__(self, matrix: FeatureMatrix, seed: int) -> None:
        super().__init__(matrix, f"owners shuffled {seed}")
        self._seed = seed
        stays = matrix.inventory
        column = "gpu" if matrix.unit == "gpu" else "node"
        self._unit = stays[column].to_numpy(dtype=object)
        self._from = stays["installed_at"].to_numpy(dtype="datetime64[ms]")
        removed = stays["removed_at"].fillna(pd.Timestamp("2200-01-01", tz="UTC"))
        self._until = removed.to_numpy(dtype="datetime64[ms]")

    def incidents(self, as_of: datetime | None = None) -> pd.DataFrame:
        """Give the incidents with their new owners; an incident keeps its owner whenever it is asked for."""
        found: pd.DataFrame = self._matrix.incidents(as_of).copy()
        owners = []
        for unit, start in zip(found["unit"], found["start"], strict=True):
            at = np.datetime64(start.tz_convert(None), "ms")
            there = np.flatnonzero((self._from <= at) & (at < self._until))
            name = f"{self._seed} {unit} {start.value}".encode()
            owners.append(self._unit[there[int.from_bytes(hashlib.blake2b(name, digest_size=8).digest()) % len(there)]])
        found["unit"] = pd.array(owners, dtype="str")
        # the new owners' incidents may overlap, which those of one GPU never do: the later one is dropped
        found = found.sort_values(["unit", "start"], kind="stable")
        end = found["end"].fillna(pd.Timestamp("2200-01-01", tz="UTC"))
        before = end.groupby(found["unit"]).cummax().groupby(found["unit"]).shift()
        found = found[~(before > found["start"])]
        return found.sort_values(["start", "unit"], kind="stable", ignore_index=True)

    def labels(self, as_of: datetime | None = None, *, horizon: timedelta | None = None) -> pd.DataFrame:
        """Label the rows by the new owners' incidents; our own drains and leavers belong to the old ones."""
        labels = self._matrix.config.labels.model_copy(update={"censor_leavers": False})
        if horizon is not None:
            labels = labels.model_copy(update={"horizon": horizon})
        return label_rows(
            self._matrix.rows,
            self.incidents(as_of),
            self._matrix.inventory,
            labels,
            data_end=self._matrix.span[1],
            as_of=as_of,
        )


class ReadsTheFuture(Wrapped):
    """A matrix with one more feature: whether an incident follows, hidden in noise as large as the signal."""

    def __init__(self, matrix: Any, seed: int, *, strength: float = 2.0) -> None:
        super().__init__(matrix, f"reads the future {seed} {strength}")
        label = matrix.labels(None)["label"].fillna(0).to_numpy(dtype=np.float32)
        noise = np.random.default_rng(seed).normal(size=len(label))
        self._leak = (strength * label + noise).astype(np.float32)
        leaking = FeatureColumn.of("telemetry", "from_the_future", "mean", window=timedelta(hours=6))
        self._columns = [*matrix.columns, leaking]

    @property
    def columns(self) -> list[FeatureColumn]:
        """The columns and the one that leaks."""
        return self._columns

    def values(self, row_indices: Any = None) -> np.ndarray:
        """Features of rows, the one that leaks last."""
        leak = self._leak if row_indices is None else self._leak[np.asarray(row_indices)]
        return np.column_stack([self._matrix.values(row_indices), leak])

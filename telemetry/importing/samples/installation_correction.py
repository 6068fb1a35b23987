"""Correction of installations and of shared identities by the samples of one ingest.

:mod:`telemetry.importing.evidence` decides; this module applies its decisions and reports them.
"""

import logging
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Final

import numpy as np
import pandas as pd

from foundation.errors import InputError
from telemetry.identity.devices import place_identity
from telemetry.importing.evidence import (
    STRAY,
    correct_installations,
    rows_of,
    runs_of,
    shared_units,
    split_installations,
    with_places,
)
from telemetry.importing.samples.block import Spill
from telemetry.importing.samples.intake import SampleIntake
from telemetry.importing.slots import CLEARLY_MS, ObservedSlots, Replacements, stays_in_places

_LOG = logging.getLogger(__name__)
_LOGGED: Final = 50
_MIN_STRANGERS: Final = 2


@dataclass(slots=True)
class InstallationCorrection:
    """Corrects the installations of an intake, and the rows of its spill, in place.

    ``stored``: GPUs that the dataset already has. ``since_ms``: begin of the stored observations.
    ``is_live``: the source cannot be corrected by hand.
    """

    intake: SampleIntake
    spill: Spill
    step: timedelta
    stored: Collection[str]
    since_ms: int
    is_live: bool
    counts: Counter[str]
    _contradictions: list[str] = field(default_factory=list)

    def __call__(self) -> list[str]:
        """Run once; return the contradictions between samples and inventory, a line each.

        Raises ``InputError`` if most GPUs are on nodes that the inventory does not name.
        """
        rows = self._distinct_rows() if self.intake.moved else pd.DataFrame()
        installations = self.intake.installations
        stays = stays_in_places(self._observed_places(), installations.given)
        replacements = Replacements(stays, installations.given)
        in_places = stays[stays["gpu"].isin(replacements.contested)].drop(columns="unit")
        if len(rows):
            runs = runs_of(rows, installations)
            in_places = pd.concat([runs[~runs["gpu"].isin(replacements.contested)], in_places], ignore_index=True)
        if len(in_places):
            self._correct(in_places, replacements)
        self._add_observed_places()
        return self._contradictions

    def _distinct_rows(self) -> pd.DataFrame:
        """Return the rows of moved units, without strays and with a name for each GPU of a shared identity."""
        intake = self.intake
        rows = rows_of(self.spill, intake.moved)
        if intake.installations.unit != "gpu":
            return rows
        shared, strays = shared_units(rows, self.step // timedelta(milliseconds=1))
        self._leave_out(strays)
        rows = rows.drop(strays.index)
        in_rows = set(rows["unit"].tolist())
        shared += sorted(
            code for code in in_rows - {*shared} if intake.installations.is_shared(intake.installations.units[code])
        )
        return self._distinguish(rows, shared) if shared else rows

    def _correct(self, runs: pd.DataFrame, replacements: Replacements) -> None:
        intake, installations = self.intake, self.intake.installations
        known = set() if self.is_live else set(installations.given["gpu"].dropna())
        strangers = set(runs["gpu"][~runs["node"].isin(installations.given["node"])]) & known
        if len(strangers) > _MIN_STRANGERS and 2 * len(strangers) > len(known):
            example = runs[runs["gpu"].isin(strangers)].iloc[0]
            raise InputError(
                f"{len(strangers)} GPUs are on nodes that the inventory does not name, such as {example['gpu']} on "
                f"{example['node']!r}",
                "samples, column node",
                "Map the column that names the node, not a pod or an address, or import without --inventory.",
            )
        is_from_start = runs["first_ms"] - min(intake.first_ms, self.since_ms) <= CLEARLY_MS
        corrected, contradictions = correct_installations(
            installations.given,
            runs.assign(is_from_start=is_from_start),
            unit=installations.unit,
            replacements=replacements,
        )
        self.counts["installations_from_samples"] += len(intake.moved)
        for line in contradictions[:_LOGGED]:
            _LOG.warning("samples contradict the inventory: %s", line)
        self._contradictions += contradictions
        intake.installations = installations.changed(corrected)

    def _leave_out(self, strays: pd.DataFrame) -> None:
        intake = self.intake
        self.spill.strays = pd.MultiIndex.from_frame(strays[["unit", "node", "ms"]])
        names, nodes = np.array(intake.installations.units, object), np.array(intake.installations.node_names, object)
        times = [datetime.fromtimestamp(ms / 1000, UTC).isoformat() for ms in strays["ms"].tolist()]
        columns = {"timestamp": times, "node": nodes[strays["node"]], "gpu": names[strays["unit"]]}
        intake.quarantine.set_aside_frame(STRAY, "samples", Path("samples"), pd.DataFrame(columns), lost=False)

    def _distinguish(self, rows: pd.DataFrame, shared: Sequence[int]) -> pd.DataFrame:
        """Rename GPUs with a shared identity by node and place; return the rows of all moved units, renamed."""
        intake, names = self.intake, dict[tuple[int, int], str]()
        installations = intake.installations
        newest = intake.places.frame().groupby(["unit", "node"])[["pci_bus_id", "slot"]].last()
        for unit in shared:
            gpu, codes = installations.units[unit], set(rows["node"][rows["unit"] == unit])
            nodes = sorted(codes, key=installations.node_names.__getitem__)
            for node in nodes:
                place = newest.loc[(unit, node)].to_dict() if (unit, node) in newest.index else {}
                stored_name = installations.gpu(gpu, installations.node_names[node])
                name = place_identity(installations.node_names[node], **place) if stored_name == gpu else stored_name
                names[unit, node] = name or f"{installations.node_names[node]}@{gpu}"
            places = ", ".join(installations.node_names[node] for node in nodes)
            line = f"{gpu} is on {len(nodes)} nodes at one time: {places}"
            self._contradictions.append(f"{line}; GPUs are named by node and place, such as {names[unit, nodes[0]]}")
            _LOG.warning("%s", self._contradictions[-1])
        self.counts["identities_on_several_nodes"] += len(shared)
        installations.learn([name for name in dict.fromkeys(names.values()) if name not in installations.units], [])
        self.spill.renamed = {place: installations.units.index(name) for place, name in names.items()}
        by_node = {
            (installations.units[unit], installations.node_names[node]): name for (unit, node), name in names.items()
        }
        first_ms = int(rows["ms"][rows["unit"].isin(shared)].min())
        intake.installations = installations.changed(
            split_installations(installations.given, by_node, first_ms, self.stored), shared=by_node
        )
        return rows_of(self.spill, (intake.moved - set(shared)) | set(self.spill.renamed.values()))

    def _observed_places(self) -> pd.DataFrame:
        """Return where the samples showed GPUs: ``gpu``, ``unit``, ``node``, and the columns of the intake's places."""
        installations, places = self.intake.installations, self.intake.places.frame()
        strays = self.spill.strays.droplevel("ms").unique() if len(self.spill.strays) else self.spill.strays
        places = places[~pd.MultiIndex.from_frame(places[["unit", "node"]]).isin(strays)] if len(strays) else places
        renamed = self.spill.renamed
        units = [renamed.get(key, key[0]) for key in zip(places["unit"], places["node"], strict=True)]
        return places.assign(
            unit=units,
            gpu=[installations.units[unit] for unit in units],
            node=[installations.node_names[node] for node in places["node"]],
        )

    def _add_observed_places(self) -> None:
        installations, named = self.intake.installations, self._observed_places()
        if named.empty:
            return
        slots = ObservedSlots(named)
        constant = named.assign(slot=named["slot"].mask(named["node"].isin(slots.renumbered)))
        self.intake.installations = installations.changed(with_places(installations.given, constant), slots=slots)

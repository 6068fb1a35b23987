"""Where the model comes from: a bundle's folder, or the champion of a registry; the last good one is kept."""

from __future__ import annotations

import hashlib
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

from features.errors import InputError
from models.bundle.manifest import MANIFEST
from models.bundle.store import Bundle, load_bundle

CHAMPION = "champion"
"""What stands for the champion of the registry where a folder may be named."""


@dataclass(frozen=True, slots=True)
class ServedModel:
    """A model that is ready to score.

    ``version``: its version in the registry; None for a bundle from a folder.
    ``note``: why a newer one was not taken, in words; empty: this is what was asked for.
    """

    bundle: Bundle
    version: int | None = None
    note: str = ""


class ModelSource(Protocol):
    """Gives the model to score with, each time anew."""

    def current(self) -> ServedModel:
        """Give the present model; one that was given before where the present one cannot be had.

        Raises ``InputError`` if there is none, and none was given before.
        """


class FolderModel:
    """The bundle in a folder; read again when it changes."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held: ServedModel | None = None

    def current(self) -> ServedModel:
        """Give the present model, see :class:`ModelSource`."""
        try:
            if self._held is None or self._digest() != self._held.bundle.digest:
                self._held = ServedModel(load_bundle(self._path, profile_only=True))
        except InputError as error:
            return _kept(self._held, error)
        return self._held

    def _digest(self) -> str:
        try:
            return hashlib.sha256((self._path / MANIFEST).read_bytes()).hexdigest()
        except OSError:
            return ""  # loading it says what is wrong


class ChampionModel:
    """The champion of a registered model; fetched again when another version is champion.

    ``registry``: ``sqlite:///PATH`` or a tracking server's address.
    """

    def __init__(self, registry: str, name: str) -> None:
        self._registry = registry
        self._name = name
        self._held: ServedModel | None = None

    def current(self) -> ServedModel:
        """Give the present model, see :class:`ModelSource`."""
        try:
            number = self._champion()
            if self._held is None or self._held.version != number:
                self._held = self._fetch(number)
        except InputError as error:
            return _kept(self._held, error)
        return self._held

    def _champion(self) -> int:
        from models.registry.champion import standing_of  # noqa: PLC0415 - MLflow takes seconds, which a folder need not spend

        number = standing_of(self._registry, self._name).champion
        if number is None:
            raise InputError(
                "there is no champion",
                f"model {self._name}, {self._registry}",
                "Make one with `predrain promote`, or give the folder of a bundle.",
            )
        return number

    def _fetch(self, number: int) -> ServedModel:
        from models.registry.champion import fetch_bundle, version_at  # noqa: PLC0415 - as above

        version = version_at(self._registry, self._name, number)
        with tempfile.TemporaryDirectory(prefix="predrain-champion-") as folder:
            folder_of = fetch_bundle(self._registry, self._name, version, Path(folder))
            bundle = load_bundle(folder_of, profile_only=True)
        if bundle.digest != version.digest:
            raise InputError(
                f"its bundle's digest is {bundle.digest[:12]}, registered was {version.digest[:12] or 'none'}",
                f"{self._name} version {number}",
                "Do not use this version; train and register a bundle again.",
            )
        return ServedModel(bundle, number)


def model_source(model: str, *, registry: str, name: str) -> ModelSource:
    """Make the source of what the command line names.

    ``model``: a bundle's folder, or :data:`CHAMPION` (a folder of that name: ``./champion``).
    """
    return ChampionModel(registry, name) if model == CHAMPION else FolderModel(Path(model))


def _kept(held: ServedModel | None, error: InputError) -> ServedModel:
    if held is None:
        raise error
    return replace(held, note=f"the model in use is kept: {error}")

"""The model that batch scoring takes: a folder's bundle or the registry's champion; the last good one is kept."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from features.errors import InputError
from models.bundle.store import load_bundle
from serving.champion.local_copy import ChampionCopy, named_bundle, temporary_folder
from serving.champion.sources import FolderBundle, NamedBundle, manifest_digest
from serving.champion.watcher import look
from serving.scores.records import ServedModel

CHAMPION = "champion"
"""What stands for the champion of the registry where a folder may be named."""


class CopiedChampion:
    """The champion of a registered model, copied by this process whenever it is asked for."""

    def __init__(self, registry: str, name: str) -> None:
        self._registry = registry
        self._name = name
        self._copy = ChampionCopy(temporary_folder())

    def named(self) -> NamedBundle:
        """Ask the registry, and name the champion's bundle.

        Raises ``InputError`` if there is no champion, or the registry cannot be asked.
        """
        look(self._copy, self._registry, self._name, verify=True)
        return named_bundle(self._copy)


class ModelSource:
    """Loads the bundle that is named, for batch scoring; again when another one is.

    ``named``: names the bundle.
    """

    def __init__(self, named: Callable[[], NamedBundle]) -> None:
        self._named = named
        self._loaded: ServedModel | None = None

    def current(self) -> ServedModel:
        """Give the present model; the one that was given before where the present one cannot be had.

        Raises ``InputError`` if there is none, and none was given before.
        """
        try:
            named, loaded = self._named(), self._loaded
            if loaded is None or loaded.version != named.version or loaded.bundle.digest != manifest_digest(named.path):
                self._loaded = loaded = ServedModel(load_bundle(named.path, profile_only=True), named.version)
        except InputError as error:
            if self._loaded is None:
                raise
            return replace(self._loaded, note=f"the model in use is kept: {error}")
        return loaded


def model_source(model: str, *, registry: str, name: str) -> ModelSource:
    """Make the source of what the command line names.

    ``model``: a bundle's folder, or :data:`CHAMPION` (a folder of that name: ``./champion``).
    """
    return ModelSource((CopiedChampion(registry, name) if model == CHAMPION else FolderBundle(Path(model))).named)

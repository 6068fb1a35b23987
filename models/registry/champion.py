"""Champion of a registered model: history, promotion and rollback.

The alias ``champion`` names the version in use; the tag :data:`HISTORY_TAG` of the registered model lists all champions
in order, the current one last. MLflow has no transaction over both, so each change is two writes, ordered so that the
state is unambiguous (:func:`_repair_history`) if the process is killed in between: a promotion appends to the list and
then moves the alias, a rollback moves the alias and then truncates the list. A list that continues past the alias is
truncated there. The first champion gets the alias first, so that a list without an alias always means that someone
removed the alias, and is an error rather than "no champion yet".
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from foundation.errors import InputError, TooEarlyError
from foundation.files import take_lock
from models.registry.store import CHAMPION, DIGEST_TAG, database_of, opened_store, refuse_absent, refuse_moved

HISTORY_TAG = "predrain.champions"
"""Tag of a registered model: versions of its champions in order, as a JSON list."""

PREVIOUS_TAG = "previous_champion"
"""Tag of a version: the previous champion (``none``: no version)."""

MANIFEST = "manifest.json"
"""File that marks a folder as a bundle (not imported: that would load every learner's library)."""

_HISTORY_LENGTH = 200  # MLflow allows 5,000 characters


@dataclass(frozen=True, slots=True)
class Version:
    """A version of a registered model; ``digest`` is its bundle's, empty if not recorded."""

    number: int
    digest: str
    tags: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class ChampionHistory:
    """A model's aliases and its champions so far.

    ``history``: champions in order, the current one last; empty without one.
    ``versions``: existing versions; others were deleted.
    ``unseated``: recorded champions, newest last, if the alias was removed manually; else empty.
    """

    aliases: Mapping[str, int]
    history: tuple[int, ...]
    versions: frozenset[int] = frozenset()
    unseated: tuple[int, ...] = ()

    @property
    def champion(self) -> int | None:
        """Current champion; None if there is none."""
        return self.history[-1] if self.history else None

    @property
    def previous(self) -> int | None:
        """Most recent earlier champion that was not deleted; None if there is none."""
        earlier = (version for version in reversed(self.history[:-1]) if version in self.versions)
        return next((version for version in earlier if version != self.champion), None)

    def refuse_unseated(self, model: str) -> None:
        """Reject a model that had a champion and has none any more.

        Raises ``InputError`` if someone removed the alias or deleted its version.
        """
        if not self.unseated:
            return
        existing = [version for version in dict.fromkeys(reversed(self.unseated)) if version in self.versions]
        names = ", ".join(f"version {version}" for version in existing) or "all of them are deleted"
        raise InputError(
            f"the alias '{CHAMPION}' is missing, but the model had champions (newest first: {names})",
            f"model {model}",
            f"Restore one: `predrain promote --to {existing[0] if existing else 'VERSION'} --force --reason WHY`.",
        )


def champion_history(tracking_uri: str, model: str) -> ChampionHistory:
    """Read the champion and its predecessors.

    Raises ``TooEarlyError`` if the store or model does not exist yet.
    """
    refuse_absent(tracking_uri)
    with opened_store(tracking_uri) as mlflow:
        try:
            return _champion_history(mlflow.MlflowClient(), model)
        except mlflow.exceptions.MlflowException as error:
            if error.error_code != "RESOURCE_DOES_NOT_EXIST":
                raise
            advice = "`predrain retrain` or `predrain train --registry` registers one; check the name."
            raise TooEarlyError(f"no model {model} is registered yet", tracking_uri, advice) from None


def version_at(tracking_uri: str, model: str, number: int) -> Version:
    """Read a version.

    Raises ``InputError`` if there is no such version.
    """
    with opened_store(tracking_uri) as mlflow:
        model_version = mlflow.MlflowClient().get_model_version(model, str(number))
    return Version(number, str(model_version.tags.get(DIGEST_TAG, "")), dict(model_version.tags))


def fetch_bundle(tracking_uri: str, model: str, version: Version, folder: Path) -> Path:
    """Return the folder of a version's bundle, downloaded if the store is remote; no code of the version runs.

    Raises ``InputError`` if the version has no bundle, its files are missing, or its digest is not the registered one.
    """
    location = f"{model} version {version.number}"
    advice = "Register the bundle again with `predrain train --registry`."
    bundles: list[Path] = []
    missing: OSError | None = None
    with opened_store(tracking_uri) as mlflow:
        uri = f"models:/{model}/{version.number}"
        try:
            downloaded = Path(mlflow.artifacts.download_artifacts(artifact_uri=uri, dst_path=str(folder)))
            # MLflow keeps the folder's name from its registration
            bundles = [manifest.parent for manifest in (downloaded / "artifacts").glob(f"*/{MANIFEST}")]
        except OSError as error:
            missing = error
        if not bundles:  # a moved store finds none of its files
            refuse_moved(mlflow.MlflowClient(), tracking_uri)
    if missing is not None:
        raise InputError(f"the files of the version cannot be read: {missing.strerror or missing}", location, advice)
    if len(bundles) != 1:
        raise InputError(f"the version contains {len(bundles) or 'no'} bundles", location, advice)
    digest = hashlib.sha256((bundles[0] / MANIFEST).read_bytes()).hexdigest()
    if digest != version.digest:
        raise InputError(
            f"the digest of the bundle is {digest[:12]}, but {version.digest[:12] or 'none'} was registered",
            location,
            "Do not use this version; train and register a bundle again.",
        )
    return bundles[0]


def set_champion(tracking_uri: str, model: str, version: int, *, expected: int | None, tags: Mapping[str, str]) -> None:
    """Make a version the champion.

    ``expected``: champion that the decision was based on; None: there was none.
    Raises ``InputError`` if another version became champion in the meantime; the champion is then unchanged.
    """
    with opened_store(tracking_uri) as mlflow:
        client = mlflow.MlflowClient()
        for key, value in {**tags, PREVIOUS_TAG: str(expected or "none")}.items():
            client.set_model_version_tag(model, str(version), key, value)
        current = _require_champion(client, model, expected)
        if not current.history:
            client.set_registered_model_alias(model, CHAMPION, str(version))
            _write_history(client, model, _history_until(current.unseated, version))
            return
        _write_history(client, model, (*current.history, version))
        _require_champion(client, model, expected)
        client.set_registered_model_alias(model, CHAMPION, str(version))


def restore_previous(tracking_uri: str, model: str, *, expected: int, tags: Mapping[str, str]) -> int:
    """Roll back to the previous champion; return its version.

    Raises ``InputError`` if there is none, or another version became champion in the meantime; nothing is changed then.
    """
    with opened_store(tracking_uri) as mlflow:
        client = mlflow.MlflowClient()
        current = _require_champion(client, model, expected)
        if current.previous is None:
            raise no_previous_champion(model, expected)
        for key, value in tags.items():
            client.set_model_version_tag(model, str(expected), key, value)
        client.set_registered_model_alias(model, CHAMPION, str(current.previous))
        _write_history(client, model, _history_until(current.history[:-1], current.previous))
        return current.previous


def tag_version(tracking_uri: str, model: str, version: int, tags: Mapping[str, str]) -> None:
    """Tag a version.

    Raises ``InputError`` if there is no such version.
    """
    with opened_store(tracking_uri) as mlflow:
        for key, value in tags.items():
            mlflow.MlflowClient().set_model_version_tag(model, str(version), key, value)


def no_previous_champion(model: str, version: int | None) -> InputError:
    """Build the error for a missing previous champion."""
    problem = f"version {version} has no previous champion" if version is not None else "there is no champion"
    return InputError(problem, f"model {model}", "Use `predrain promote --to VERSION`.")


@contextmanager
def promotion_lock(tracking_uri: str) -> Iterator[None]:
    """Lock out other promotions if the store is a file; no-op for a server.

    Raises ``InputError`` if another promotion is running.
    """
    database = database_of(tracking_uri)
    if database is None:
        yield  # on a server, only the check in `set_champion` protects
        return
    path = database.with_name(database.name + ".promotion-lock")
    advice = "Wait for its end, then run again."
    with take_lock(path, "another promotion is running on this store", tracking_uri, advice, mode=0o666):
        yield


def _champion_history(client: Any, model: str) -> ChampionHistory:
    registered_model = client.get_registered_model(model)
    aliases = {name: int(version) for name, version in registered_model.aliases.items()}
    versions = frozenset(int(version.version) for version in client.search_model_versions(f"name = '{model}'"))
    listed = _parse_history(registered_model.tags.get(HISTORY_TAG))
    champion = aliases.get(CHAMPION)
    if champion is None:
        return ChampionHistory(aliases, (), versions, unseated=listed)
    return ChampionHistory(aliases, _repair_history(listed, champion), versions)


def _parse_history(written: str | None) -> tuple[int, ...]:
    try:
        return tuple(int(version) for version in json.loads(written or "[]"))
    except (ValueError, TypeError):  # edited by hand
        return ()


def _repair_history(listed: tuple[int, ...], champion: int) -> tuple[int, ...]:
    """Return the list of champions ending with the alias, even after a killed or manual change."""
    if listed and listed[-1] == champion:
        return listed
    if len(listed) > 1 and listed[-2] == champion:  # killed between the two writes of a change
        return listed[:-1]
    return (*listed, champion)  # moved manually


def _history_until(history: tuple[int, ...], version: int) -> tuple[int, ...]:
    """Return a list of champions that ends with a version: truncated after it, or with it appended."""
    if version not in history:
        return (*history, version)
    return history[: len(history) - history[::-1].index(version)]


def _write_history(client: Any, model: str, history: tuple[int, ...]) -> None:
    client.set_registered_model_tag(model, HISTORY_TAG, json.dumps(history[-_HISTORY_LENGTH:], separators=(",", ":")))


def _require_champion(client: Any, model: str, expected: int | None) -> ChampionHistory:
    current = _champion_history(client, model)
    if current.champion != expected:
        names = ["none" if number is None else f"version {number}" for number in (expected, current.champion)]
        raise InputError(
            f"the champion was {names[0]} at the start of the comparison and is {names[1]} now",
            f"model {model}",
            "Run the promotion again to compare with the new champion.",
        )
    return current

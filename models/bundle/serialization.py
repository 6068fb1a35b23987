"""Serialization of learners, each in its library's own format; reading a file cannot run code.

LightGBM as text, XGBoost as JSON, sequence networks as safetensors, scikit-learn through skops with a fixed list of
types. Nothing is pickled. XGBoost and LightGBM do not validate the files that they read: the manifest's hash of each
file protects them.
"""

import hashlib
import io
import json
import os
import threading
import zipfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import lightgbm
import numpy as np
import xgboost
from sklearn.ensemble import RandomForestClassifier

from foundation.errors import InputError
from foundation.files import replacing
from models.config import PRIOR, SEQUENCE, THREADS
from models.learners.factory import Fit, LoadedLightGBM
from models.learners.prepared import ColumnSubset, PreparedClassifier, inner_of
from models.sequence.classifier import dump_sequence, load_sequence

TRUSTED: tuple[str, ...] = (
    "models.learners.prepared.PreparedClassifier",
    "models.learners.prepared.SignedLogScaler",
    "sklearn.neural_network._stochastic_optimizers.AdamOptimizer",
    "sklearn.tree._tree.Tree",
)
"""Types beyond skops' own list that a learner's file may contain; files with other types are rejected unread."""

_MAX_UNPACKED = 2**31
_MAX_KEPT = 2**31
_SKLEARN_TYPES = (RandomForestClassifier, PreparedClassifier)

# NumPy parses array headers as Python, and CPython before 3.11.5 fails if two threads parse (gh-106905).
_ONE_AT_A_TIME = threading.Lock()

_HASHING = threading.Lock()
"""Learners that share rows wait for the first one to hash them."""

# Earliest date of the zip format; fixed, so that bytes depend on content only.
_EPOCH = (1980, 1, 1, 0, 0, 0)


def write_learner(name: str, learner: Any, path: Path) -> None:
    """Write a learner, fitted or loaded; the same learner gives the same bytes."""
    learner = inner_of(learner)
    if name in SEQUENCE:
        path.write_bytes(dump_sequence(learner))
    elif name in ("lightgbm", PRIOR):
        path.write_text(learner.booster_.model_to_string(num_iteration=-1), encoding="utf-8", newline="\n")
    elif name == "xgboost":
        path.write_bytes(bytes(learner.get_booster().save_raw("json")))
    else:
        import skops.io  # takes seconds to import where PyTorch is installed

        path.write_bytes(_canonical(skops.io.dumps(learner)))


def read_learner(name: str, content: bytes, location: str, features: int) -> Any:
    """Read a fitted learner with a number of features, and test-score it; probabilities are bit-identical.

    Raises ``InputError`` if the file is invalid or contains an untrusted type.
    """
    learner = _read(name, content, location)
    try:
        predicted = np.asarray(learner.predict_proba(np.zeros((2, features), np.float32)))
        if predicted.shape != (2, 2) or not np.isfinite(predicted).all():
            raise _unreadable(name, location, "it has no probabilities")
    except (ValueError, lightgbm.basic.LightGBMError, xgboost.core.XGBoostError) as error:
        raise _unreadable(name, location, str(error)) from None
    return learner


def _read(name: str, content: bytes, location: str) -> Any:
    try:
        if name in ("lightgbm", PRIOR):
            return LoadedLightGBM(lightgbm.Booster(model_str=content.decode("utf-8")))
        if name == "xgboost":
            learner = xgboost.XGBClassifier(n_jobs=THREADS)
            learner.load_model(bytearray(content))
            return learner
        if name in SEQUENCE:
            return load_sequence(name, content)
    except (lightgbm.basic.LightGBMError, xgboost.core.XGBoostError, UnicodeDecodeError, ValueError) as error:
        raise _unreadable(name, location, str(error)) from None
    return _read_sklearn(name, content, location)


def _read_sklearn(name: str, content: bytes, location: str) -> Any:
    import skops.io

    try:
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > _MAX_UNPACKED:
                raise ValueError("its uncompressed size exceeds 2 GiB")
        foreign = sorted(set(skops.io.get_untrusted_types(data=content)) - set(TRUSTED))
    except (zipfile.BadZipFile, KeyError, ValueError, TypeError) as error:
        raise _unreadable(name, location, str(error)) from None
    if foreign:
        raise InputError(
            f"the learner's file has untrusted types: {', '.join(foreign)}",
            location,
            "Do not use this bundle. Train a new one.",
        )
    try:
        learner = skops.io.loads(content, trusted=list(TRUSTED))
    except (zipfile.BadZipFile, KeyError, ValueError, TypeError, AttributeError) as error:
        raise _unreadable(name, location, str(error)) from None
    if not isinstance(learner, _SKLEARN_TYPES):
        raise _unreadable(name, location, f"it holds a {type(learner).__name__}")
    return learner


def _unreadable(name: str, location: str, why: str) -> InputError:
    first = why.strip().splitlines()[0][:200] if why.strip() else "no reason given"
    return InputError(f"not a readable {name} model: {first}", location, "Train the bundle again.")


def _canonical(content: bytes) -> bytes:
    """Rewrite a skops file so that the same learner gives the same bytes.

    skops names nodes and arrays by memory address and timestamps entries, and scikit-learn leaves the padding of tree
    nodes uninitialized.
    """
    with zipfile.ZipFile(io.BytesIO(content)) as archive:
        entries = {name: archive.read(name) for name in archive.namelist()}
    schema = json.loads(entries.pop("schema.json"))
    names: dict[int, int] = {}
    files: dict[str, str] = {}
    _renumber(schema, names, files, [0])
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w") as archive:
        _add(archive, "schema.json", json.dumps(schema, separators=(",", ":")).encode())
        for old, new in files.items():
            _add(archive, new, _without_padding(entries.pop(old)))
    assert not entries, sorted(entries)
    return out.getvalue()


def _without_padding(content: bytes) -> bytes:
    if not content.startswith(b"\x93NUMPY"):
        return content
    array = np.load(io.BytesIO(content), allow_pickle=False)
    if array.dtype.names is None:
        return content
    clean = np.zeros(array.shape, array.dtype)
    for field in array.dtype.names:
        clean[field] = array[field]
    out = io.BytesIO()
    np.save(out, clean, allow_pickle=False)
    return out.getvalue()


def _renumber(node: Any, names: dict[int, int], files: dict[str, str], last: list[int]) -> None:
    """Assign numbers to nodes in order of appearance, in place."""
    if isinstance(node, list):
        for child in node:
            _renumber(child, names, files, last)
        return
    if not isinstance(node, dict):
        return
    if isinstance(node.get("__id__"), int):
        old = node["__id__"]
        # Whether equal plain values share an object is arbitrary: number each separately.
        if node.get("__loader__") == "JsonNode" or old not in names:
            last[0] += 1
            names[old] = last[0]
        node["__id__"] = names[old]
    if isinstance(node.get("file"), str):
        name = node["file"]
        files.setdefault(name, f"{len(files) + 1}{Path(name).suffix}")
        node["file"] = files[name]
    for child in node.values():
        _renumber(child, names, files, last)


def _add(archive: zipfile.ZipFile, name: str, content: bytes) -> None:
    entry = zipfile.ZipInfo(name, date_time=_EPOCH)
    entry.compress_type = zipfile.ZIP_DEFLATED
    entry.external_attr = 0o644 << 16
    archive.writestr(entry, content, compresslevel=6)


class FitStore:
    """Cache of fitted learners in a folder, keyed by training rows and settings.

    Cached learners score bit-identically. The folder is valid for one version of the code.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def __call__(self, fit: Fit, fit_learner: Callable[[], Any]) -> Any:
        """Return a fit's learner from the cache, or fit and cache it; a full disk does not stop the fit."""
        with _HASHING:
            path = self._folder / _key_of(fit)
        columns = fit.learner.columns if isinstance(fit.learner, ColumnSubset) else None
        try:
            with _ONE_AT_A_TIME:
                read = read_learner(fit.name, path.read_bytes(), str(path), len(columns or range(fit.rows.X.shape[1])))
            os.utime(path)
            return read if columns is None else ColumnSubset.around(read, columns)
        except (OSError, InputError):
            learner = fit_learner()
        with suppress(OSError):
            self._folder.mkdir(parents=True, exist_ok=True)
            with _ONE_AT_A_TIME, replacing(path) as temporary:
                write_learner(fit.name, learner, temporary)
        return learner

    def shrink(self) -> None:
        """Evict the least recently used learners until at most :data:`_MAX_KEPT` bytes remain."""
        files = [(path, path.stat()) for path in self._folder.glob("*") if path.is_file()]
        room = _MAX_KEPT
        for path, stat in sorted(files, key=lambda entry: -entry[1].st_mtime):
            room -= stat.st_size
            if room < 0:
                path.unlink(missing_ok=True)


def _key_of(fit: Fit) -> str:
    settings = {name: repr(value) for name, value in fit.learner.get_params(deep=True).items()}
    content = json.dumps([fit.name, fit.rows.digest, settings], sort_keys=True)
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()

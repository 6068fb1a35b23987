"""The files of a bundle: all that the manifest lists, each as it was saved. Nothing else is read."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import Any

from features.errors import InputError

SEAL = "seal"
"""Key of a manifest: the SHA-256 of the manifest without it, so that a changed manifest is noticed too."""


def sealed(content: Mapping[str, Any]) -> bytes:
    """Give a manifest's bytes, sealed; the same content gives the same bytes."""
    bare = {key: value for key, value in content.items() if key != SEAL}
    return _encoded({**bare, SEAL: hashlib.sha256(_encoded(bare)).hexdigest()})


def check_seal(raw: bytes, content: Mapping[str, Any], file: Path) -> None:
    """Refuse a manifest whose bytes are not those that were saved.

    Raises ``InputError`` if it was changed.
    """
    try:
        whole = sealed(content) == raw
    except ValueError:  # a number that JSON cannot hold
        whole = False
    if not whole:
        raise damaged(file, "is not the file that was saved: its seal does not fit its content")


def read_files(path: Path, manifest: Path, listed: Any) -> dict[str, bytes]:
    """Read the files of a bundle.

    ``listed``: SHA-256 by relative path.
    Returns: the content of each.
    Raises ``InputError`` if a file is missing or changed, or a name leads outside the bundle.
    """
    if not isinstance(listed, Mapping):
        raise damaged(manifest, "lacks or misstates 'files'")
    for name in sorted(listed):
        inside = PurePosixPath(name)
        if inside.is_absolute() or ".." in inside.parts or not inside.parts or "\0" in name:
            raise damaged(manifest, f"names a file outside the bundle: {name}")
    contents = {}
    for name, expected in sorted(listed.items()):
        file = path / name
        try:
            content = file.read_bytes()
        except OSError:
            raise damaged(file, "is missing") from None
        if hashlib.sha256(content).hexdigest() != expected:
            raise damaged(file, "is not the file that was saved: its SHA-256 differs from the manifest's")
        contents[name] = content
    return contents


def damaged(file: Path, why: str) -> InputError:
    """Say what is wrong with a file of a bundle."""
    return InputError(f"{file.name} {why}", str(file), "Restore the bundle or train it again.")


def _encoded(content: Mapping[str, Any]) -> bytes:
    return json.dumps(content, indent=1, sort_keys=True, ensure_ascii=False, allow_nan=False).encode() + b"\n"

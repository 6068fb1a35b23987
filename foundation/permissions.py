"""A check of permissions: scores and bundles, which drains follow from, are read only where nobody else may write."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterable
from pathlib import Path

from foundation.errors import InputError


def refuse_other_writers(folder: Path, inside: Iterable[Path] = ()) -> None:
    """Raise ``InputError`` if anyone could write a folder, or paths in it, who is neither we nor its owner.

    A group may write it that is one of this process's own. ``OSError`` where one of them is missing.

    Whoever named the folder trusts its owner, and the folders above it: volumes of containers are often open to all of
    the container. A signature would need a key that the same people can read.
    """
    folder = folder.resolve()
    owner = folder.stat().st_uid
    for path in (folder, *inside):
        seen = path.stat()
        groups = {os.getegid(), *os.getgroups()}
        others = seen.st_mode & stat.S_IWOTH or (seen.st_mode & stat.S_IWGRP and seen.st_gid not in groups)
        if others or seen.st_uid not in (os.geteuid(), owner, 0):
            raise InputError(
                "others may write it, and drains follow from it", str(path),
                "Take that right away (chmod -R go-w), and let the user who runs predrain, or the folder's, own it.",
            )  # fmt: skip

"""A JSON file that several processes read and replace as a whole, one at a time, under a lock beside it."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from scheduler.plain import object_of, plain_of
from telemetry.atomic import write_bytes
from telemetry.errors import InputError


@dataclass(frozen=True, slots=True)
class LockedJson:
    """The file.

    ``path``: the lock is ``.NAME.lock`` beside it.
    ``kind``: dataclass of its content, with a field ``format``.
    ``format``: version of the content; another one is refused.
    ``what``, ``the``: what it describes, in errors: ``a cluster``, ``the cluster``.
    ``where``: what its content is called in errors about a place in it.
    """

    path: Path
    kind: type
    format: int
    what: str
    the: str
    where: str

    def check(self, load: Callable[[], object]) -> None:
        """Make sure that it is there and can be used.

        ``load``: reads and checks it; :meth:`load` and whatever more its owner asks of it.
        Raises ``InputError`` if it is missing, or ``load`` raises ValueError.
        """
        where = str(self.path)
        if not self.path.is_file():
            raise InputError(f"there is no file of {self.what} here", where, "Write one, see the operator's page.")
        try:
            load()
        except ValueError as error:
            raise InputError(f"the file of {self.the} cannot be used: {error}", where, "Correct it.") from None

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep others from reading and writing it; the lock ends with the process at the latest."""
        descriptor = os.open(self.path.with_name(f".{self.path.name}.lock"), os.O_RDWR | os.O_CREAT, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield
        finally:
            os.close(descriptor)

    def load(self) -> Any:
        """Read it; the lock is held for as long as what was read is to be true.

        Raises ``ValueError`` if it is no JSON, of another format, or has an unknown key or a value of another kind.
        """
        content = json.loads(self.path.read_bytes())
        if not isinstance(content, dict) or content.get("format") != self.format:
            found = content.get("format") if isinstance(content, dict) else type(content).__name__
            raise ValueError(f"it has format {found!r}, this code reads {self.format}")
        return object_of(self.kind, content, self.where)

    def save(self, content: Any) -> None:
        """Replace it as a whole, or not at all, under the lock."""
        text = json.dumps(plain_of(content), indent=1, ensure_ascii=False, allow_nan=False)
        write_bytes(self.path, (text + "\n").encode())

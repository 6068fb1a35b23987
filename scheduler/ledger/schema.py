"""The ledger's file: its tables, what makes it append-only, and how a damaged or newer one is refused."""

from __future__ import annotations

import sqlite3
from pathlib import Path

from foundation.errors import InputError

VERSION = 1
"""Version of the schema; it rises when an older reader could no longer read a ledger."""

APPLICATION = 0x70726472
"""``prdr``: SQLite's application id, by which a file is known to be a ledger."""

_BUSY_S = 5.0

_TABLES = """
CREATE TABLE blobs (digest TEXT PRIMARY KEY, content BLOB NOT NULL) WITHOUT ROWID;
CREATE TABLE rounds (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at TEXT NOT NULL,
    holder TEXT NOT NULL,
    code TEXT NOT NULL,
    model TEXT,
    decided_at TEXT,
    inputs TEXT NOT NULL,
    plan TEXT NOT NULL,
    digest TEXT NOT NULL,
    summary TEXT NOT NULL
);
CREATE TABLE decisions (
    round INTEGER NOT NULL REFERENCES rounds (id),
    node TEXT NOT NULL,
    content TEXT NOT NULL,
    PRIMARY KEY (round, node)
) WITHOUT ROWID;
CREATE INDEX decisions_by_node ON decisions (node, round);
CREATE TABLE alerts (
    round INTEGER NOT NULL REFERENCES rounds (id),
    unit TEXT NOT NULL,
    at REAL NOT NULL,
    content TEXT NOT NULL
);
CREATE INDEX alerts_by_time ON alerts (at);
CREATE TABLE intents (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    round INTEGER NOT NULL REFERENCES rounds (id),
    at TEXT NOT NULL,
    node TEXT NOT NULL,
    verb TEXT NOT NULL,
    content TEXT NOT NULL
);
CREATE INDEX intents_by_node ON intents (node, id);
CREATE INDEX intents_by_round ON intents (round);
CREATE TABLE settled (
    intent INTEGER PRIMARY KEY REFERENCES intents (id),
    at TEXT NOT NULL,
    kind TEXT NOT NULL,
    confirmed INTEGER NOT NULL,
    content TEXT NOT NULL
);
CREATE TABLE skipped (
    round INTEGER NOT NULL REFERENCES rounds (id),
    at TEXT NOT NULL,
    node TEXT NOT NULL,
    verb TEXT NOT NULL,
    why TEXT NOT NULL
);
CREATE INDEX skipped_by_node ON skipped (node, round);
CREATE TABLE calls (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at TEXT NOT NULL,
    node TEXT NOT NULL,
    kind TEXT NOT NULL,
    content TEXT NOT NULL
);
CREATE INDEX calls_by_node ON calls (node, id);
CREATE TABLE calls_settled (
    call INTEGER PRIMARY KEY REFERENCES calls (id),
    at TEXT NOT NULL,
    kind TEXT NOT NULL,
    confirmed INTEGER NOT NULL,
    content TEXT NOT NULL
);
CREATE TABLE findings (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at TEXT NOT NULL,
    node TEXT NOT NULL,
    kind TEXT NOT NULL,
    content TEXT NOT NULL
);
CREATE INDEX findings_by_node ON findings (node, id);
"""

_NAMES = (
    "blobs", "rounds", "decisions", "alerts", "intents", "settled", "skipped", "calls", "calls_settled", "findings",
)  # fmt: skip


def connect(path: Path | None, *, writable: bool) -> sqlite3.Connection:
    """Open a ledger, or make one.

    ``path``: None: in memory.
    ``writable``: a ledger that is only read must exist.
    Returns: Write-ahead log, each commit forced to the disk, no change of a row but its insertion.
    Raises ``InputError`` if the file is no ledger, damaged, of a newer version, or cannot be opened.
    """
    where = "the ledger in memory" if path is None else str(path)
    if path is not None and not writable and not path.is_file():
        raise InputError("there is no ledger here", where, "Give the file that `predrain act` writes.")
    if path is not None and writable and not path.parent.is_dir():
        raise InputError("the folder of the ledger does not exist", where, "Make it, or give another file.")
    if path is not None and path.is_dir():
        raise InputError("a folder where the ledger's file belongs", where, "Give a file, such as ledger.db.")
    mode = "rwc" if writable else "ro"
    name = ":memory:" if path is None else f"{path.resolve().as_uri()}?mode={mode}"
    try:
        # a ledger may be dropped, and so closed, by another thread than that which made it
        link = sqlite3.connect(
            name, uri=path is not None, isolation_level=None, timeout=_BUSY_S, check_same_thread=False
        )
    except sqlite3.Error as error:
        raise InputError(f"the ledger cannot be opened: {error}", where, _AWAY) from None
    try:
        _check(link, path, where, writable)
    except (sqlite3.Error, InputError) as error:
        link.close()
        if isinstance(error, InputError):
            raise
        raise InputError(f"the ledger is damaged: {error}", where, _AWAY) from None
    return link


_AWAY = (
    "Keep the file for whoever looks into it, move it away, and begin with a new one: what safety needs stands in the "
    "scheduler."
)


def _check(link: sqlite3.Connection, path: Path | None, where: str, writable: bool) -> None:
    application = link.execute("PRAGMA application_id").fetchone()[0]
    version = link.execute("PRAGMA user_version").fetchone()[0]
    tables = {name for (name,) in link.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    if not tables and application == 0 and version == 0 and writable:
        _make(link)
    elif application != APPLICATION:
        raise InputError("this file is no ledger", where, "Give another file.")
    elif version > VERSION:
        raise InputError(
            f"the ledger has version {version}, this code knows {VERSION}", where, "Use the predrain that wrote it."
        )
    elif not set(_NAMES) <= tables:
        missing = ", ".join(sorted(set(_NAMES) - tables))
        raise InputError(f"the ledger is damaged: it lacks {missing}", where, _AWAY)
    else:
        check_result = link.execute("PRAGMA quick_check(1)").fetchone()[0]
        if check_result != "ok":
            raise InputError(f"the ledger is damaged: {check_result}", where, _AWAY)
    if writable:
        if path is not None:
            link.execute("PRAGMA journal_mode = WAL")
        link.execute("PRAGMA synchronous = FULL")
        link.execute("PRAGMA foreign_keys = ON")


def _make(link: sqlite3.Connection) -> None:
    triggers = "".join(
        f"CREATE TRIGGER {name}_no_{verb} BEFORE {verb} ON {name} "
        f"BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END;\n"
        for name in _NAMES
        for verb in ("update", "delete")
    )
    link.executescript(
        f"BEGIN IMMEDIATE;\n{_TABLES}{triggers}"
        f"PRAGMA application_id = {APPLICATION};\nPRAGMA user_version = {VERSION};\nCOMMIT;"
    )

"""The ledger file: tables, append-only triggers, and checks for corruption and version."""

import sqlite3
import time
from pathlib import Path

from foundation.errors import InputError

VERSION = 2
"""Version of the schema; others are rejected."""

APPLICATION = 0x70726472
"""``prdr``: SQLite's application id of a ledger."""

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
CREATE TABLE calls (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    round INTEGER REFERENCES rounds (id),
    at TEXT NOT NULL,
    node TEXT NOT NULL,
    verb TEXT NOT NULL,
    content TEXT NOT NULL
);
CREATE INDEX calls_by_node ON calls (node, id);
CREATE INDEX calls_by_round ON calls (round);
CREATE TABLE settled (
    call INTEGER PRIMARY KEY REFERENCES calls (id),
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
CREATE TABLE findings (
    id INTEGER PRIMARY KEY AUTOINCREMENT,
    at TEXT NOT NULL,
    node TEXT NOT NULL,
    kind TEXT NOT NULL,
    content TEXT NOT NULL
);
CREATE INDEX findings_by_node ON findings (node, id);
CREATE TABLE cluster (name TEXT NOT NULL);
"""

_NAMES = (
    "blobs", "rounds", "decisions", "alerts", "calls", "settled", "skipped", "findings",
)  # fmt: skip


def connect(path: Path | None, *, writable: bool, cluster: str | None = None) -> sqlite3.Connection:
    """Open or create a ledger.

    ``path``: None: in memory.
    ``writable``: create it if missing; a read-only ledger must exist.
    ``cluster``: the cluster it must belong to; a ledger without a cluster is assigned to it.
    Returns: a connection with a write-ahead log and synchronous commits; triggers reject updates and deletes.
    Raises ``InputError`` if the file is not a ledger, corrupt, of another version or cluster, or cannot be opened.
    """
    where = "the ledger in memory" if path is None else str(path)
    if path is not None and not writable and not path.is_file():
        raise InputError("no ledger found", where, "Give the file that `predrain act` writes.")
    if path is not None and writable and not path.parent.is_dir():
        raise InputError("the folder of the ledger does not exist", where, "Create it, or give another file.")
    if path is not None and path.is_dir():
        raise InputError("the ledger path is a folder", where, "Give a file, such as ledger.db.")
    mode = "rwc" if writable else "ro"
    name = ":memory:" if path is None else f"{path.resolve().as_uri()}?mode={mode}"
    try:
        # a ledger may be garbage-collected, and so closed, in another thread
        link = sqlite3.connect(
            name, uri=path is not None, isolation_level=None, timeout=_BUSY_S, check_same_thread=False
        )
    except sqlite3.Error as error:
        raise InputError(f"the ledger cannot be opened: {error}", where, _AWAY) from None
    try:
        if writable:
            _prepare(link, path)
        _check(link, where)
        if writable and cluster is not None:
            _claim(link, cluster, where)
    except InputError:
        link.close()
        raise
    except Exception as error:  # SQLite also raises UnicodeDecodeError for a corrupt schema
        link.close()
        what = "is in use" if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY else "is damaged"
        raise InputError(f"the ledger {what}: {error}", where, _AWAY) from None
    return link


_AWAY = "Keep the file, move it away, and start a new one: the safety state is in the scheduler."


def _check(link: sqlite3.Connection, where: str) -> None:
    application = link.execute("PRAGMA application_id").fetchone()[0]
    version = link.execute("PRAGMA user_version").fetchone()[0]
    tables = _tables(link)
    if application != APPLICATION:
        raise InputError("the file is not a ledger", where, "Give another file.")
    if version != VERSION:
        do = "Use the predrain that wrote it." if version > VERSION else _AWAY
        raise InputError(f"the ledger has version {version}, this code reads {VERSION}", where, do)
    if not set(_NAMES) <= tables:
        missing = ", ".join(sorted(set(_NAMES) - tables))
        raise InputError(f"the ledger is damaged: it lacks {missing}", where, _AWAY)
    check_result = link.execute("PRAGMA quick_check(1)").fetchone()[0]
    if check_result != "ok":
        raise InputError(f"the ledger is damaged: {check_result}", where, _AWAY)


def _tables(link: sqlite3.Connection) -> set[str]:
    return {name for (name,) in link.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def _prepare(link: sqlite3.Connection, path: Path | None) -> None:
    """Set up a connection for writing, and create the tables in an empty file."""
    if link.execute("PRAGMA application_id").fetchone()[0] == 0 and not _tables(link):
        link.execute("BEGIN IMMEDIATE")
        if not _tables(link):  # unless another process created them in the meantime
            _make(link)
        link.execute("COMMIT")
    elif link.execute("PRAGMA application_id").fetchone()[0] != APPLICATION:
        return
    if path is not None:
        _write_ahead(link)
    link.execute("PRAGMA synchronous = FULL")
    link.execute("PRAGMA foreign_keys = ON")


def _write_ahead(link: sqlite3.Connection) -> None:
    """Switch to the write-ahead log; retries because SQLite's busy timeout does not apply to the switch."""
    end = time.monotonic() + _BUSY_S
    while True:
        try:
            link.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() >= end:
                raise
            time.sleep(0.05)


def _claim(link: sqlite3.Connection, cluster: str, where: str) -> None:
    link.execute("BEGIN IMMEDIATE")
    row = link.execute("SELECT name FROM cluster").fetchone()
    if row is None:
        link.execute("INSERT INTO cluster VALUES (?)", (cluster,))
    link.execute("COMMIT")
    if row is not None and row[0] != cluster:
        raise InputError(f"this is the ledger of {row[0]}, not of {cluster}", where, "Use one ledger per cluster.")


def _make(link: sqlite3.Connection) -> None:
    for statement in _TABLES.split(";"):
        link.execute(statement)
    for name in _NAMES:
        for verb in ("update", "delete"):
            link.execute(
                f"CREATE TRIGGER {name}_no_{verb} BEFORE {verb} ON {name} "
                f"BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END"
            )
    link.execute(f"PRAGMA application_id = {APPLICATION}")
    link.execute(f"PRAGMA user_version = {VERSION}")

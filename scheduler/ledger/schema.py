"""The ledger file: tables, append-only triggers, and checks for corruption and version."""

import sqlite3
import time
from pathlib import Path

from foundation.errors import InputError

VERSION = 2
"""Version of the schema; others are rejected."""

APPLICATION_ID = 0x70726472
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

_TABLE_NAMES = ("blobs", "rounds", "decisions", "alerts", "calls", "settled", "skipped", "findings", "cluster")


def connect(path: Path | None, *, writable: bool, cluster: str | None = None) -> sqlite3.Connection:
    """Open or create a ledger.

    ``path``: None: in memory.
    ``writable``: create it if missing; a read-only ledger must exist.
    Returns: a connection; if writable, with a write-ahead log and synchronous commits.
    Raises ``InputError`` if the file is not a ledger, corrupt, of another version or cluster, or cannot be opened.
    """
    location = "the ledger in memory" if path is None else str(path)
    if path is not None and not writable and not path.is_file():
        raise InputError("no ledger found", location, "Give the file that `predrain act` writes.")
    if path is not None and writable and not path.parent.is_dir():
        raise InputError("the folder of the ledger does not exist", location, "Create it, or give another file.")
    if path is not None and path.is_dir():
        raise InputError("the ledger path is a folder", location, "Give a file, such as ledger.db.")
    mode = "rwc" if writable else "ro"
    name = ":memory:" if path is None else f"{path.resolve().as_uri()}?mode={mode}"
    try:
        # a ledger may be garbage-collected, and so closed, in another thread
        connection = sqlite3.connect(
            name, uri=path is not None, isolation_level=None, timeout=_BUSY_S, check_same_thread=False
        )
    except sqlite3.Error as error:
        raise InputError(f"the ledger cannot be opened: {error}", location, "Check its permissions.") from None
    try:
        if writable:
            _prepare(connection, path)
        _check(connection, location)
        if writable and cluster is not None:
            _assign_cluster(connection, cluster, location)
    except InputError:
        connection.close()
        raise
    except Exception as error:  # SQLite also raises UnicodeDecodeError for a corrupt schema
        connection.close()
        if getattr(error, "sqlite_errorcode", None) == sqlite3.SQLITE_BUSY:
            raise InputError(f"the ledger is in use: {error}", location, "Run again.") from None
        raise InputError(f"the ledger is damaged: {error}", location, _HINT) from None
    return connection


_HINT = "Keep the file: move it away, and start a new one: the safety state is in the scheduler."


def _check(connection: sqlite3.Connection, location: str) -> None:
    application = connection.execute("PRAGMA application_id").fetchone()[0]
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    tables = _tables(connection)
    if application != APPLICATION_ID:
        raise InputError("the file is not a ledger", location, "Give another file.")
    if version != VERSION:
        advice = "Use the predrain that wrote it." if version > VERSION else _HINT
        raise InputError(f"the ledger has version {version}, but this code reads {VERSION}", location, advice)
    if not set(_TABLE_NAMES) <= tables:
        missing = ", ".join(sorted(set(_TABLE_NAMES) - tables))
        raise InputError(f"the ledger is damaged: it lacks {missing}", location, _HINT)
    check_result = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
    if check_result != "ok":
        raise InputError(f"the ledger is damaged: {check_result}", location, _HINT)


def _tables(connection: sqlite3.Connection) -> set[str]:
    return {name for (name,) in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}


def _prepare(connection: sqlite3.Connection, path: Path | None) -> None:
    """Set up a connection for writing, and create the tables in an empty file."""
    if connection.execute("PRAGMA application_id").fetchone()[0] == 0 and not _tables(connection):
        connection.execute("BEGIN IMMEDIATE")
        if not _tables(connection):  # unless another process created them in the meantime
            _create_tables(connection)
        connection.execute("COMMIT")
    elif connection.execute("PRAGMA application_id").fetchone()[0] != APPLICATION_ID:
        return
    if path is not None:
        _enable_wal(connection)
    connection.execute("PRAGMA synchronous = FULL")
    connection.execute("PRAGMA foreign_keys = ON")


def _enable_wal(connection: sqlite3.Connection) -> None:
    """Switch to the write-ahead log; retries because SQLite's busy timeout does not apply to the switch."""
    end = time.monotonic() + _BUSY_S
    while True:
        try:
            connection.execute("PRAGMA journal_mode = WAL")
            return
        except sqlite3.OperationalError:
            if time.monotonic() >= end:
                raise
            time.sleep(0.05)


def _assign_cluster(connection: sqlite3.Connection, cluster: str, location: str) -> None:
    connection.execute("BEGIN IMMEDIATE")
    row = connection.execute("SELECT name FROM cluster").fetchone()
    if row is None:
        connection.execute("INSERT INTO cluster VALUES (?)", (cluster,))
    connection.execute("COMMIT")
    if row is not None and row[0] != cluster:
        raise InputError(f"this is the ledger of {row[0]}, not of {cluster}", location, "Use one ledger per cluster.")


def _create_tables(connection: sqlite3.Connection) -> None:
    for statement in _TABLES.split(";"):
        connection.execute(statement)
    for name in _TABLE_NAMES:
        for verb in ("update", "delete"):
            connection.execute(
                f"CREATE TRIGGER {name}_no_{verb} BEFORE {verb} ON {name} "
                f"BEGIN SELECT RAISE(ABORT, 'the ledger is append-only'); END"
            )
    connection.execute(f"PRAGMA application_id = {APPLICATION_ID}")
    connection.execute(f"PRAGMA user_version = {VERSION}")

"""Suggestions for exports of helpdesks: opened, resolved, host, slot and free text, in the words of several systems."""

from __future__ import annotations

from pathlib import Path

import pytest

from telemetry.dataset.channels import resolve_channels
from telemetry.importing.asking.guesses import suggest
from telemetry.importing.mapping import ImportMapping

EXPORTS = {
    "helpdesk": (
        "Ticket,Opened,Resolved,Host,Slot,Summary\nHD-1,2026-03-01 10:00,2026-03-02 09:00,n1,3,GPU fell off the bus\n",
        {"Opened": "timestamp", "Resolved": "resolved_at", "Host": "node", "Summary": "type"},
    ),
    "jira": (
        "Issue key,Created,Resolution Date,Server,GPU Index,Description\nOPS-1,2026-03-01,2026-03-02,n1,3,swap GPU\n",
        {
            "Created": "timestamp",
            "Resolution Date": "resolved_at",
            "Server": "node",
            "GPU Index": "slot",
            "Description": "type",
        },
    ),
    "servicenow": (
        "number,opened_at,resolved_at,cmdb_ci,short_description,state,close_notes\n"
        "INC1,2026-03-01 10:00,2026-03-02 09:00,n1,GPU lost,Closed,GPU replaced\n",
        {"opened_at": "timestamp", "cmdb_ci": "node", "short_description": "type", "close_notes": "resolution"},
    ),
    "zendesk": (
        "Id,Subject,Created at,Solved at,Asset name,Solution\n"
        "1,GPU lost,2026-03-01 10:00,2026-03-02 09:00,n1,GPU reseated\n",
        {
            "Created at": "timestamp",
            "Solved at": "resolved_at",
            "Asset name": "node",
            "Subject": "type",
            "Solution": "resolution",
        },
    ),
    "with a type and a time of its own": (
        "date,opened,closed,node,SN,category,comment\n"
        "2026-03-01T10:00Z,2026-03-01T11:00Z,2026-03-02T10:00Z,n1,1650123,failure,GPU lost\n",
        {
            "opened": "known_at",
            "closed": "resolved_at",
            "SN": "serial",
            "category": "type",
            "comment": "detail",
        },
    ),
}


@pytest.mark.parametrize(("text", "expected"), EXPORTS.values(), ids=EXPORTS)
def test_columns_of_a_helpdesk_are_recognised(tmp_path: Path, text: str, expected: dict[str, str]) -> None:
    path = tmp_path / "tickets.csv"
    path.write_text(text)
    guesses = suggest({"events": [path]}, ImportMapping(), resolve_channels({}))
    assert {guess.column: guess.target for guess in guesses if guess.column in expected} == expected

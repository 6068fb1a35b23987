"""Prometheus' own parser accepts and refuses the same lines."""

import shutil
import subprocess

import pytest

from tests.telemetry.exposition.test_grammar import READ, REFUSED

pytestmark = [
    pytest.mark.system,
    pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed"),
]

# Lines on which the two may differ, and why.
LENIENT = {
    ' a \t{ b = "c" , d="e" } \t 1\t': "promtool takes a blank at the end for a time stamp",
    r'a{b="\\ \" \n \d"} 1': "OpenMetrics allows a backslash before any character, promtool only before three",
    '{__name__="a",b="c"} 1': "dumps of series name their metric so",
    "# TYPE": "promtool takes it for a comment",
}


def is_quoted_name(line: str) -> bool:
    """Whether a line needs a Prometheus of version 3."""
    return line.startswith('{"') or 'a{"' in line


def promtool_refuses(line: str) -> bool:
    done = subprocess.run(
        ["promtool", "check", "metrics"], input=f"{line}\n".encode(), capture_output=True, check=False, timeout=60
    )
    return b"parsing error" in done.stderr


@pytest.mark.parametrize("line", [line for line, _ in READ if line not in LENIENT and not is_quoted_name(line)])
def test_what_we_read_promtool_reads(line: str) -> None:
    assert not promtool_refuses(line)


@pytest.mark.parametrize("line", [line for line, _, _ in REFUSED if line not in LENIENT and not is_quoted_name(line)])
def test_what_we_refuse_promtool_refuses(line: str) -> None:
    assert promtool_refuses(line)

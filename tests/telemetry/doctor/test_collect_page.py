"""docs/collect.md names no verb, option or file that is not there."""

import re
from pathlib import Path

import pytest
import typer

from predrain.collect.command import SOURCES
from predrain.doctor import doctor

ROOT = Path(__file__).resolve().parents[3]
PAGE = (ROOT / "docs" / "collect.md").read_text()
README = (ROOT / "deploy" / "dcgm-exporter" / "README.md").read_text()
DOCTOR = typer.Typer()
DOCTOR.command("doctor")(doctor)
# A command ends with its code span, its line (unless that ends in a backslash), or a comma between two of them.
COMMAND = re.compile(r"predrain (collect [a-z-]+|doctor)((?:[^`\n\\]|\\\n|\n(?=--))*)")


def commands() -> list[tuple[str, tuple[str, ...]]]:
    options = []
    units = [path.read_text() for path in sorted((ROOT / "deploy" / "systemd").glob("predrain-*.service"))]
    for text in (PAGE, README, *units):
        for verb, rest in COMMAND.findall(text):
            options.append((verb, tuple(re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest))))
    return sorted(set(options))


def options_of(verb: str) -> set[str]:
    group = typer.main.get_command(SOURCES)
    command = (
        typer.main.get_command(DOCTOR) if verb == "doctor" else group.commands.get(verb.removeprefix("collect "))  # type: ignore[attr-defined]  # SOURCES is a group
    )
    assert command is not None, f"there is no verb {verb!r}"
    return {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}


@pytest.mark.parametrize(("verb", "options"), commands())
def test_every_command_is_one(verb: str, options: tuple[str, ...]) -> None:
    assert set(options) <= options_of(verb)


def test_every_verb_of_collect_is_on_the_page() -> None:
    names = set(typer.main.get_command(SOURCES).commands)  # type: ignore[attr-defined]  # SOURCES is a group
    assert {name for name in names if f"collect {name}" not in PAGE} == set()


def test_every_link_leads_somewhere() -> None:
    for base, text in ((ROOT / "docs", PAGE), (ROOT / "deploy" / "dcgm-exporter", README)):
        for link in re.findall(r"\]\(([^)#:]+)\)", text):
            assert (base / link).exists(), link

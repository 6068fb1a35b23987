"""Generate the pages of docs/reference from code and catalogues: ``python -m tests.reference_pages``.

The template of a page is next to what it describes, with ``{{name}}`` as the place of a table or default. The
meaning of a key is the docstring below its field. ``--check`` writes nothing, and fails if a page differs.
"""

import ast
import dataclasses
import inspect
import re
import sys
import textwrap
from collections.abc import Iterable, Iterator, Sequence
from datetime import datetime, timedelta
from functools import cache
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any, get_args

import click
import typer
import yaml
from pydantic_core import PydanticUndefined

from foundation.durations import format_duration
from foundation.kubernetes import foreign_marks
from foundation.settings import Section
from pipeline.params import Params
from policy.config import PolicyConfig
from predrain.command import app
from scheduler.controller.settings import ControllerSettings
from scheduler.evacuation.settings import EvacuationSettings
from scheduler.kubernetes.settings import KubernetesSettings
from scheduler.slurm.settings import SlurmSettings
from telemetry.collect.kubernetes.rules import Rule, default_rules
from telemetry.dataset.channels import CATALOGUE
from telemetry.doctor.groups import channels_page
from telemetry.importing.mapping import ImportMapping
from telemetry.kernel_log.catalogue import drivers
from telemetry.phrases import catalogue

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "reference"


def pages() -> dict[str, str]:
    """Return the content of each page by its file name."""
    return {
        "node-conditions.md": _page("telemetry/collect/kubernetes/rules.md", _conditions()),
        "phrases.md": _page("telemetry/phrases.md", _phrases()),
        "kernel-messages.md": _page("telemetry/kernel_log/messages.md", {"messages": _messages()}),
        "foreign-marks.md": _page("foundation/kubernetes/foreign_marks.md", {"marks": _marks()}),
        "channels.md": channels_page(CATALOGUE),
        "cli.md": _page("predrain/cli.md", _commands()),
        "mapping.md": _page("telemetry/importing/mapping.md", _mapping()),
        "settings.md": _page("scheduler/controller/settings.md", _defaults() | {"policy": _policy()}),
        "params.md": _page("pipeline/params.md", {"parameters": _keys(_rows(Params, ""))}),
    }


def _page(template: str, tables: dict[str, str]) -> str:
    text = (ROOT / template).read_text(encoding="utf-8")
    made = "This page is generated (`python -m tests.reference_pages`)."
    for name, table in {"made": made, **tables}.items():
        text = text.replace(f"{{{{{name}}}}}", table)
    return text


def _conditions() -> dict[str, str]:
    rules = default_rules()

    def rows(subject: str) -> list[tuple[str, str, str, str]]:
        return [
            (rule.tool or "", f"`{_subject(rule)}`", rule.status if rule.condition else "", _type(rule))
            for rule in rules.rules
            if getattr(rule, subject)
        ]

    counted = {
        "whole GPUs": rules.gpu_resources,
        "a share of one GPU": rules.slice_resources,
        "a share, by annotation": rules.slice_annotations,
        "claims of drivers": rules.claim_drivers,
    }
    resources = [(what, ", ".join(f"`{name}`" for name in names)) for what, names in counted.items()]
    subjects = {"conditions": "condition", "events": "reason", "taints": "taint"}
    return {name: _table(rows(subject)) for name, subject in subjects.items()} | {"resources": _table(resources)}


def _phrases() -> dict[str, str]:
    content = catalogue().content
    rules = [
        (rule["type"], _code(rule["match"]), _code(rule.get("near")), rule.get("only", "")) for rule in content["rules"]
    ]
    lists = ("denied", "denied_after", "false_alarm", "planned", "done")
    return {
        "senses": ", ".join(sense["name"] for sense in content["senses"]),
        "rules": _table(rules),
        "words": _table((name, _code(text)) for name, text in content["words"].items()),
        "lists": _table((name, _code(content[name])) for name in lists),
    }


def _messages() -> str:
    parts = []
    for driver in drivers():
        if driver.rules:
            parts.append(f"## {driver.driver[0].upper()}{driver.driver[1:]}\n")
            parts.append("| event | meaning | example |\n|---|---|---|")
        for rule in driver.rules:
            event = {"": "–", "unclear": "counted as unclear"}.get(rule.type, f"`{rule.type}` `{rule.code}`")
            cells = (event, rule.meaning, f"`{' ⏎ '.join(rule.example.splitlines())}`")
            parts.append(_table([[cell.replace("|", "\\|") for cell in cells]]))
        if driver.rules:
            parts.append("")
    return "\n".join(parts).rstrip()


def _marks() -> str:
    rows = (
        (mark.tool, *mark.pattern, mark.value.replace("|", ", "), mark.meaning) for mark in foreign_marks.catalogue()
    )
    return _table((tool, f"{kind} `{key}`", f"`{value}`", meaning) for tool, kind, key, value, meaning in rows)


def _subject(rule: Rule) -> str:
    text = rule.condition or rule.taint or (rule.reason.pattern if rule.reason else "")
    return (text + (f" with message {rule.message.pattern}" if rule.message else "")).replace("|", "\\|")


def _type(rule: Rule) -> str:
    return f"{rule.type} `{rule.code}`" if rule.code else str(rule.type)


def _code(text: str | None) -> str:
    return "" if not text else "`` " + text.replace("|", "\\|") + " ``"


def _table(rows: Iterable[Sequence[str]]) -> str:
    return "\n".join("| " + " | ".join(row) + " |" for row in rows)


def _keys(rows: Iterable[tuple[str, str, str]]) -> str:
    return _table((f"`{key}`", default, meaning) for key, default, meaning in rows)


def _mapping() -> dict[str, str]:
    """Describe the keys that all tables have once."""
    rows = list(_rows(ImportMapping, ""))
    shared = [(key.removeprefix("samples."), *rest) for key, *rest in rows if key.startswith("samples.")]
    repeated = {f"{table}.{key}" for table in ("samples", "events", "inventory", "jobs") for key, *_ in shared}
    return {"shared": _keys(shared), "keys": _keys(row for row in rows if row[0] not in repeated)}


def _rows(model: type[Section], prefix: str) -> Iterator[tuple[str, str, str]]:
    """List dotted key, default and meaning of each field; NAME is a name that the user gives."""
    for name, field in model.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        section = next((kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section)), None)
        default = field.get_default(call_default_factory=True)
        if not isinstance(default, Section):
            shown = "required" if default is PydanticUndefined else f"`{_shown(default)}`"
            yield f"{prefix}{name}", shown, _meaning(model, name)
        if section is not None:
            yield from _rows(section, f"{prefix}{name}." + ("NAME." if isinstance(default, dict) else ""))


def _defaults() -> dict[str, str]:
    """Return the defaults of the controller's settings by section and key."""
    return {
        f"{kind.__name__.removesuffix('Settings').lower()}.{key}": f"`{_shown(value)}`"
        for kind in (ControllerSettings, EvacuationSettings, KubernetesSettings, SlurmSettings)
        for key, value, _ in _fields(kind)
    }


def _policy() -> str:
    """List the keys of the policy, those with one meaning in one row."""
    rows = []
    for meaning, fields in groupby(_fields(PolicyConfig), key=itemgetter(2)):
        keys, values, _ = zip(*fields, strict=True)
        assert meaning, keys
        rows.append(("`, `".join(keys), ", ".join(f"`{_shown(value)}`" for value in values), meaning.removesuffix(".")))
    return _keys(rows)


def _fields(kind: type) -> Iterator[tuple[str, object, str]]:
    """List dotted key, default and meaning of each field; the class docstring has lines ``name``: meaning."""
    lines = re.findall(r"^(``.+?``): (.*(?:\n(?!``|Raises).+)*)", inspect.getdoc(kind) or "", re.MULTILINE)
    meanings = {name: text for names, text in lines for name in re.findall(r"``(\w+)``", names)}
    for field in dataclasses.fields(kind):
        meaning = " ".join(meanings.get(field.name, "").split()).replace("``", "`").replace("None:", "`null`:")
        made = field.default_factory is not dataclasses.MISSING
        default = field.default_factory() if made else field.default
        if dataclasses.is_dataclass(default):
            yield from ((f"{field.name}.{key}", *rest) for key, *rest in _fields(type(default)))
        elif default is not dataclasses.MISSING:
            yield field.name, default, meaning


def _shown(value: object) -> str:
    """Write a default as YAML in one line."""
    if isinstance(value, timedelta):
        return format_duration(value)
    if isinstance(value, datetime):
        return value.isoformat().replace("+00:00", "Z")
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value) if getattr(value, field.name) != field.default]
        value = {name: getattr(value, name) for name in names}
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {_shown(entry)}" for key, entry in value.items()) + "}"
    if isinstance(value, tuple | list):
        return "[" + ", ".join(map(_shown, value)) + "]"
    return yaml.safe_dump(value, width=1000).removesuffix("\n...\n").strip().replace("''", '""')


@cache
def _meanings(kind: type) -> dict[str, str]:
    """Return the docstrings below the fields of a class."""
    (declared,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    assert isinstance(declared, ast.ClassDef)
    return {
        field.target.id: " ".join(text.value.value.split())
        for field, text in pairwise(declared.body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant)
    }


def _meaning(kind: type, name: str) -> str:
    return next(_meanings(base)[name] for base in kind.__mro__ if name in _meanings(base)).replace("``", "`")


def _commands() -> dict[str, str]:
    commands = list(_walk(typer.main.get_command(app), "predrain"))
    parts = []
    for name, command in commands:
        _, *more = (command.help or "").split("\n\n")
        text = "\n\n".join(" ".join(part.split()) for part in more)
        parts.append(f"### {name}\n\n" + re.sub(r"^(Examples?:) (.*)$", r"\1 `\2`", text, flags=re.MULTILINE) + "\n")
        options = [(f"`{'`, `'.join([*p.opts, *p.secondary_opts])}`", _help(p)) for p in command.params]
        parts.append("| option | meaning |\n|---|---|\n" + _table(options) + "\n")
    summaries = [
        (f"[`{name}`](#{name.replace(' ', '-')})", (c.help or "").partition("\n\n")[0]) for name, c in commands
    ]
    return {"commands": _table((name, " ".join(text.split())) for name, text in summaries), "options": "\n".join(parts)}


def _walk(group: Any, name: str) -> Iterator[tuple[str, click.Command]]:
    for word, command in sorted(group.commands.items()):
        if hasattr(command, "commands"):
            yield from _walk(command, f"{name} {word}")
        else:
            yield f"{name} {word}", command


def _help(parameter: Any) -> str:
    text = " ".join((parameter.help or "").split()).replace("|", "\\|")
    default = parameter.default
    plain = isinstance(default, str | int | float) and not isinstance(default, bool) and default != ""
    return f"{text} Default: `{default}`." if plain else f"{text} Required." if parameter.required else text


def outdated() -> dict[str, str]:
    """Return the new text of each page that differs, by its file name."""
    return {name: text for name, text in pages().items() if (FOLDER / name).read_text(encoding="utf-8") != text}


def main() -> None:
    differing = outdated()
    if differing and "--check" in sys.argv:
        sys.exit(f"docs/reference differs: {', '.join(differing)}. Run: python -m tests.reference_pages")
    for name, text in differing.items():
        (FOLDER / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()

"""README and docs: every command and link in them is real, and they stay short."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import typer

from predrain.command import app
from tests.reference_pages import outdated
from tests.serving.http.world import small_fleet

ROOT = Path(__file__).resolve().parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
OTHERS = sorted([*ROOT.glob("deploy/**/*.md"), *ROOT.glob("benchmarks/results/*.md"), *ROOT.glob("tests/*.md")])
UNITS = sorted((ROOT / "deploy" / "systemd").glob("predrain-*.service"))
COMMANDS = typer.main.get_command(app)
# A command ends with its code span, its line (unless that ends in a backslash), or a shell's operator.
COMMAND = re.compile(
    r"(?<![\w./-])(?<!-n )(?<!install )predrain ([a-z][a-z-]*(?: [a-z][a-z-]*)?)"
    r"((?:[^`\n\\;|]|\\\n|\n(?=--))*)"
)


def names(pages: list[Path]) -> list[str]:
    return [str(page.relative_to(ROOT)) for page in pages]


def code(text: str) -> list[str]:
    """Give fenced blocks and code spans, or what a unit runs."""
    if text.startswith(("#", "[")) and "\nExecStart=" in text:
        return re.findall(r"^Exec\w+=((?:.*\\\n)*.*)", text, re.MULTILINE)
    fenced = re.findall(r"^ *```[^\n]*\n(.*?)^ *```", text, re.DOTALL | re.MULTILINE)
    return [*fenced, *re.findall(r"`([^`]+)`", re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE))]


@pytest.mark.parametrize("name", names([*PAGES, *OTHERS, *UNITS]))
def test_every_command_is_a_verb_with_options_that_it_has(name: str) -> None:
    text = (ROOT / name).read_text()
    for block in code(text):
        for words, rest in COMMAND.findall(block):
            verb, _, second = words.partition(" ")
            command = COMMANDS.commands.get(verb)
            assert command is not None, f"{name}: predrain {words}"
            command = getattr(command, "commands", {}).get(second, command)
            known = {option for parameter in command.params for option in (*parameter.opts, *parameter.secondary_opts)}
            written = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", rest.partition(" #")[0]))
            assert written <= known | {"--help"}, f"{name}: predrain {words}"


def test_every_source_of_collect_is_on_its_page() -> None:
    page = (ROOT / "docs" / "collect.md").read_text()
    sources = COMMANDS.commands["collect"].commands
    assert {name for name in sources if f"collect {name}" not in page} == set()


def test_the_page_of_scores_names_every_field_of_a_record() -> None:
    page = (ROOT / "docs" / "reference" / "scores.md").read_text()
    assert {name for name in small_fleet()[0].to_json() if f"`{name}`" not in page} == set()


def test_generated_pages_are_up_to_date() -> None:
    assert outdated() == {}, "run: python -m tests.reference_pages"


@pytest.mark.parametrize("name", names([*PAGES, *OTHERS]))
def test_every_link_leads_somewhere(name: str) -> None:
    for link in re.findall(r"\]\(([^)\s#:]+)[^):\s]*\)", (ROOT / name).read_text()):
        assert ((ROOT / name).parent / link).exists(), link


def test_the_site_is_built_with_every_page_and_no_broken_link_or_anchor(tmp_path: Path) -> None:
    shutil.copy(ROOT / "mkdocs.yml", tmp_path)
    shutil.copytree(ROOT / "docs", tmp_path / "docs")
    command = [sys.executable, "-m", "zensical", "build", "--strict"]
    run = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    shown = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text())
    assert set(shown) | {"decisions"} == {
        "decisions" if page.startswith("decisions/") and not page.endswith("README.md") else page
        for page in (str(path.relative_to(ROOT / "docs")) for path in (ROOT / "docs").rglob("*.md"))
    }
    assert all((tmp_path / "site" / page).with_suffix(".html").exists() for page in shown if "README" not in page)


KEYS_AND_CATALOGUES = {
    *("channels.md", "foreign-marks.md", "kernel-messages.md", "node-conditions.md", "phrases.md"),
    *("cli.md", "mapping.md", "params.md", "settings.md"),
}


def test_readme_and_docs_stay_short() -> None:
    assert len((ROOT / "README.md").read_text().splitlines()) <= 150
    written = [page for page in (ROOT / "docs").rglob("*.md") if page.name not in KEYS_AND_CATALOGUES]
    words = {page: len(page.read_text().split()) for page in written}
    assert sum(count for page, count in words.items() if page.parent.name != "decisions") <= 15_000
    assert sum(count for page, count in words.items() if page.parent.name == "decisions") < 10_000

"""The fleet page in a real Chromium: used with mouse and keyboard, with and without JavaScript, at two sizes.

``predrain serve`` runs on scores of a simulated fleet and on the ledger that ``predrain act`` wrote from them.
"""

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from policy.risk_record import RiskRecord
from serving.scores.alert_outcomes import write_facts
from serving.scores.writing import ScoresFolder
from telemetry.dataset.store import Dataset
from tests.processes import predrain, serving
from tests.serving.http.world import record, token_line
from tests.serving.score_folder import write_scores

pytestmark = pytest.mark.system

ROOT = Path(__file__).parents[2]
TOKEN = "a-person-0123456789"
CREDENTIALS = {"username": "me", "password": TOKEN}
SIZES = {"desktop": (1440, 900), "phone": (390, 844)}
SETTINGS = """
policy:
  thresholds: {watch: 0.02, elevated: 0.1, high: 0.5}
  hysteresis: {rise_after: 1}
  stages: {pinned: {cluster-1/train: hard}}
"""


@dataclass
class Site:
    """A running service, and what it was told."""

    address: str
    risky: RiskRecord
    nodes: int
    why: str


def fleet(dataset: Path, decided: datetime) -> list[RiskRecord]:
    """Score the simulated GPUs by hand: one high, one elevated, some watched, one unknown."""
    here = Dataset.open(dataset).inventory()
    here = here[here["removed_at"].isna()].drop_duplicates("gpu")
    risks: dict[int, tuple[float | None, str]] = {3: (0.82, "high"), 12: (0.2, "elevated"), 20: (None, "unknown")}
    records = []
    for at, (gpu, node, slot) in enumerate(zip(here["gpu"], here["node"], here["slot"], strict=True)):
        risk, tier = risks.get(at, (0.03, "watch") if at % 17 == 5 else (0.0004 * (at % 9 + 1), "clear"))
        records.append(replace(record(str(gpu), str(node), risk, tier, decided=decided), slot=str(slot)))
    return records


@pytest.fixture(scope="module")
def site(small_fleet: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """The service on scores, a dataset, and a ledger."""
    folder = tmp_path_factory.mktemp("site")
    # an hour ago at least: a record is issued minutes after its decision, and none of the future is acted on
    decided = (datetime.now(UTC) - timedelta(hours=1)).replace(minute=0, second=0, microsecond=0)
    for back in (12, 6, 0):
        when = decided - timedelta(hours=back)
        records = fleet(small_fleet, when)
        write_scores(folder / "scores", records, when)
    summary = folder / "scores" / "decisions" / f"{decided:%Y%m%dT%H%M%SZ}" / "summary.json"
    content = json.loads(summary.read_text())
    summary.write_text(json.dumps(content | {"model": {"fitted_at": (decided - timedelta(days=1)).isoformat()}}))
    names = sorted({row.node for row in records})
    nodes = [
        {"name": name, "cluster": "cluster-1", "group": "train", "rack": f"r{at}"} for at, name in enumerate(names)
    ]
    (folder / "cluster.json").write_text(json.dumps({"format": 1, "nodes": nodes}))
    (folder / "act.yaml").write_text(SETTINGS)
    (folder / "tokens").write_text(token_line("read", TOKEN, "person"))
    predrain("act", "--cluster", "cluster.json", "--scores", "scores", "--settings", "act.yaml", cwd=folder)
    risky = next(row for row in records if row.tier == "high")
    why = predrain("ledger", "why", risky.node, cwd=folder).stdout
    assert "high, risk" in why
    write_facts(ScoresFolder(folder / "scores"), Dataset.open(small_fleet))
    options = ("--ledger", "ledger.db", "--tokens", "tokens")
    with serving(folder, "--no-extender", *options) as (_, port):
        yield Site(f"http://127.0.0.1:{port}", risky, len(names), why)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("chromium is not installed")
    quiet = ["--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
             "--disable-component-update", "--disable-sync"]  # fmt: skip
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=quiet)
        yield browser
        browser.close()


class Watched:
    """A tab whose console, requests and errors are noted."""

    def __init__(self, context: Any, site: Site) -> None:
        self.tab = context.new_page()
        self.site = site
        self.messages: list[str] = []
        self.foreign: list[str] = []
        self.tab.on("console", lambda message: self.messages.append(message.text))
        self.tab.on("pageerror", lambda error: self.messages.append(str(error)))
        self.tab.on("request", self._note)

    def _note(self, request: Any) -> None:
        if not request.url.startswith(self.site.address):
            self.foreign.append(request.url)

    def open(self, path: str = "/") -> Any:
        self.tab.goto(self.site.address + path)
        self.tab.wait_for_load_state()
        return self.tab


@pytest.fixture
def watched(chromium: Any, site: Site) -> Iterator[Watched]:
    """A tab of its own; at the end, nothing may have been complained of, and nobody else asked."""
    context = chromium.new_context(http_credentials=CREDENTIALS, viewport={"width": 1440, "height": 900})
    context.set_default_timeout(120_000)
    tab = Watched(context, site)
    yield tab
    context.close()
    assert tab.messages == []
    assert tab.foreign == []


def names(tab: Any) -> list[str]:
    """The rows' heads of the fleet's table."""
    return [name.strip() for name in tab.locator("table.fleet tbody th").all_inner_texts()]


def wait_for_racks(watched: Watched) -> None:
    """Wait until the dataset has been read."""
    for _ in range(60):
        if watched.tab.get_by_role("columnheader", name="Rack").count():
            return
        watched.tab.wait_for_timeout(500)
        watched.tab.reload()
    raise AssertionError("the dataset's racks did not come")


def test_a_person_finds_the_riskiest_gpu_reads_why_and_follows_to_the_ledger(watched: Watched, site: Site) -> None:
    tab = watched.open()
    assert tab.title() == "Fleet · predrain"
    wait_for_racks(watched)
    assert len(names(tab)) == site.nodes
    assert names(tab)[0] == site.risky.node

    # sort: by name, then the other way round, said to a screen reader, too
    tab.get_by_role("columnheader", name="Node").last.get_by_role("link").click()
    tab.wait_for_url("**/?sort=name")
    ascending = names(tab)
    assert tab.get_by_role("columnheader", name="Node").last.get_attribute("aria-sort") == "ascending"
    tab.get_by_role("columnheader", name="Node").last.get_by_role("link").click()
    tab.wait_for_url("**/?sort=-name")
    assert names(tab) == ascending[::-1]

    # search: the slash goes to the field, Enter finds
    tab.keyboard.press("/")
    assert tab.evaluate("document.activeElement.name") == "q"
    tab.keyboard.type(site.risky.unit[-12:])
    tab.keyboard.press("Enter")
    tab.wait_for_url(f"**q={site.risky.unit[-12:]}*")
    assert names(tab) == [site.risky.node]
    assert tab.locator("[data-map] a").count() == 1
    tab.get_by_role("link", name="Show all").click()
    tab.wait_for_url(lambda url: "q=" not in url)

    # filter: a choice is taken at once
    tab.get_by_role("checkbox", name="elevated").check(force=True)
    tab.wait_for_url("**tier=elevated*")
    assert len(names(tab)) == 1
    tab.get_by_role("link", name="Show all").click()
    tab.wait_for_url(lambda url: "tier=" not in url)
    rack = tab.locator("select[name=rack] option").nth(1).inner_text()
    tab.get_by_label("Rack").select_option(rack)
    tab.wait_for_url(f"**rack={rack}*")
    assert 0 < len(names(tab)) < site.nodes
    tab.get_by_role("link", name="Show all").click()

    # open the node, the GPU, and read
    tab.get_by_role("row").get_by_role("link", name=site.risky.node).last.click()
    assert tab.get_by_role("heading", level=1).inner_text().startswith(site.risky.node)
    tab.get_by_role("link", name=site.risky.unit).first.click()
    assert "82 % of an incident within 24 h" in tab.inner_text("main")
    assert "correctable ECC errors rose by 17,700; fleet 99th percentile 0" in tab.inner_text("main")
    assert tab.get_by_role("img", name=f"Risk of {site.risky.unit} over 3 decisions").is_visible()
    tab.get_by_text("Show as a table").click()
    assert tab.get_by_role("table", name=f"Scores of {site.risky.unit}, newest first").is_visible()

    # follow to the ledger: what the command says
    tab.get_by_role("link", name=f"Ledger of {site.risky.node}").click()
    text = tab.inner_text("main")
    for line in site.why.splitlines():
        if line.strip().startswith("why: "):
            assert line.split("why: ")[1] in text
        if " taint " in line:
            assert line.strip().split(": ")[0].replace(f" taint {site.risky.node}", f" taint {site.risky.node}") in text
    assert "at-risk=high:NoSchedule" in (tab.text_content("main") or "")

    tab.get_by_role("link", name="Outcomes").click()
    assert "Alert outcomes" in tab.inner_text("h1")


def test_the_heat_map_is_one_stop_of_the_tab_key_and_arrows_move_in_it(watched: Watched, site: Site) -> None:
    tab = watched.open()
    wait_for_racks(watched)
    stops = tab.locator("[data-map] a:not([tabindex='-1'])")
    assert stops.count() == 1
    stops.focus()
    first = tab.evaluate("document.activeElement.getAttribute('aria-label')")
    tab.keyboard.press("ArrowRight")
    second = tab.evaluate("document.activeElement.getAttribute('aria-label')")
    assert first != second
    assert stops.count() == 1
    tab.keyboard.press("ArrowDown")
    tab.keyboard.press("ArrowUp")
    tab.keyboard.press("ArrowLeft")
    tab.keyboard.press("Enter")
    tab.wait_for_url("**/nodes/*")
    label = tab.get_by_role("heading", level=1).inner_text()
    assert label.split()[0] in {name.split(":")[0] for name in (str(first), str(second))}


def test_everything_works_without_javascript(chromium: Any, site: Site) -> None:
    context = chromium.new_context(http_credentials=CREDENTIALS, java_script_enabled=False)
    tab = Watched(context, site).open()
    assert names(tab)[0] == site.risky.node
    tab.get_by_role("searchbox").fill(site.risky.node)
    tab.get_by_role("button", name="Show").click()
    assert names(tab) == [site.risky.node]
    tab.get_by_role("radio", name="GPUs").check(force=True)
    tab.get_by_role("button", name="Show").click()
    assert site.risky.unit in names(tab)
    tab.get_by_role("link", name=site.risky.unit).click()
    assert "82 % of an incident" in tab.inner_text("main")
    context.close()


ROLES = (ROOT / "tests" / "system" / "page_roles.js").read_text()

CONTRAST = (ROOT / "tests" / "system" / "page_contrast.js").read_text()


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_every_page_has_names_roles_headings_and_contrast_at_every_size(chromium: Any, site: Site, scheme: str) -> None:
    context = chromium.new_context(http_credentials=CREDENTIALS, color_scheme=scheme)
    watched = Watched(context, site)
    tab = watched.open()
    wait_for_racks(watched)
    gpu, node = site.risky.unit, site.risky.node
    pages = ["/", "/?show=gpus&sort=-name", "/?q=nowhere", f"/nodes/{node}", f"/gpus/{gpu}", "/outcomes",
             f"/ledger?node={node}", "/ledger", "/?sort=wrong", "/nodes/nowhere"]  # fmt: skip
    for size, (width, height) in SIZES.items():
        tab.set_viewport_size({"width": width, "height": height})
        for path in pages:
            tab.goto(site.address + path)
            assert tab.evaluate(ROLES) == [], (size, path)
            assert tab.evaluate(CONTRAST) == [], (size, path)
    context.close()
    assert watched.foreign == []
    refused = [line for line in watched.messages if "400" not in line and "404" not in line]
    assert refused == []

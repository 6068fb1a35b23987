"""The demo in a real Chromium: from a risk and its reasons to a drain, a failure that was spared, and the ledger."""

import re
import shutil

import pytest

from tests.screenshots import demo, drained

pytestmark = pytest.mark.system


def test_a_person_sees_a_risk_become_a_drain_and_a_failure_be_spared_at_any_size() -> None:
    sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    if path is None:
        pytest.skip("chromium is not installed")
    with demo("--speed", "3h") as address, sync_api.sync_playwright() as playwright:
        node = drained(address)  # failures were spared, and this node is at risk and drained
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        tab = browser.new_page(viewport={"width": 1280, "height": 800})
        tab.set_default_timeout(60_000)
        tab.goto(address)
        notice = tab.locator("p.notice").first.inner_text()
        assert int(re.search(r"(\d+) of \d+ failures were", notice)[1]) >= 1
        assert "expired" not in tab.inner_text("main")
        tab.get_by_role("link", name=node, exact=True).first.click()
        assert "of the increase in the score" in tab.inner_text("main")
        tab.get_by_role("link", name=f"Ledger of {node}").click()
        text = tab.inner_text("main")
        for word in ("high", "taint", "checkpoint", "drain"):
            assert word in text, word
        before = tab.locator("p.notice").first.inner_text()
        for width in (390, 820, 1280):
            tab.set_viewport_size({"width": width, "height": 844})
            for rest in ("", f"nodes/{node}", f"ledger?node={node}", "outcomes"):
                tab.goto(f"{address}{rest}")
                assert tab.evaluate("document.documentElement.scrollWidth <= window.innerWidth"), (rest, width)
        tab.wait_for_function("text => document.querySelector('p.notice').innerText !== text", arg=before)
        browser.close()

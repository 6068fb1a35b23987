"""Picture for README: the fleet page of ``predrain demo`` in Chromium, after it prevented failures.

``make screenshot`` writes docs/images/fleet.png.
"""

import contextlib
import io
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
from PIL import Image
from playwright.sync_api import sync_playwright

ROOT = Path(__file__).resolve().parents[1]
IMAGE = ROOT / "docs" / "images" / "fleet.png"
SPARED = 3
WITHIN_S = 600.0


@contextlib.contextmanager
def demo(*options: str) -> Iterator[str]:
    """Run the demo; gives its address."""
    code = "from predrain.command import main; main()"
    command = [sys.executable, "-c", code, "demo", "--listen", "127.0.0.1:0", *options]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as process:
        try:
            yield process.stdout.readline().strip()
        finally:
            process.terminate()
            process.wait(60)


def drained(address: str) -> str:
    """Wait until failures were spared and a node at high risk was emptied; gives its name."""
    ends = time.monotonic() + WITHIN_S
    while time.monotonic() < ends:
        spared = re.search(r"(\d+) of \d+ failures were", httpx.get(address, timeout=30).text)
        for node in httpx.get(f"{address}v1/nodes", timeout=30).json()["nodes"]:
            page = httpx.get(f"{address}ledger", params={"node": node["node"]}, timeout=30).text
            emptied = "checkpoint" in page and "evict" in page
            if spared and int(spared[1]) >= SPARED and node["tier"] == "high" and emptied:
                return str(node["node"])
        time.sleep(1)
    raise SystemExit("no node was drained in time")


def main() -> None:
    """Take the picture."""
    IMAGE.parent.mkdir(parents=True, exist_ok=True)
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    with demo() as address, sync_playwright() as playwright:
        drained(address)
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 1280, "height": 800})
        page.goto(address)
        # as small as it gets with all its colours
        Image.open(io.BytesIO(page.screenshot())).convert("RGB").save(IMAGE, optimize=True)
        browser.close()


if __name__ == "__main__":
    main()

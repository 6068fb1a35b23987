"""Screenshots for README and docs: pages of ``predrain demo`` in Chromium, after it prevented failures.

``make screenshots`` writes docs/images/{fleet,node,ledger}{,-phone}.png.
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
IMAGES = ROOT / "docs" / "images"
SIZES = {"": (1280, 800), "-phone": (390, 844)}
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
        spared = re.search(r"of which (\d+) on", httpx.get(address, timeout=30).text)
        for node in httpx.get(f"{address}v1/nodes", timeout=30).json()["nodes"]:
            page = httpx.get(f"{address}ledger", params={"node": node["node"]}, timeout=30).text
            emptied = "checkpoint" in page and "evict" in page
            if spared and int(spared[1]) >= SPARED and node["tier"] == "high" and emptied:
                return str(node["node"])
        time.sleep(1)
    raise SystemExit("no node was drained in time")


def save(picture: bytes, path: Path) -> None:
    """Write a picture as small as it gets with all its colours."""
    Image.open(io.BytesIO(picture)).convert("RGB").save(path, optimize=True)


def main() -> None:
    """Take the pictures."""
    IMAGES.mkdir(parents=True, exist_ok=True)
    path = shutil.which("chromium") or shutil.which("chromium-browser")
    with demo() as address, sync_playwright() as playwright:
        node = drained(address)
        browser = playwright.chromium.launch(executable_path=path, args=["--no-sandbox"])
        for suffix, (width, height) in SIZES.items():
            page = browser.new_page(viewport={"width": width, "height": height})
            for name, rest in (("fleet", ""), ("node", f"nodes/{node}"), ("ledger", f"ledger?node={node}")):
                page.goto(f"{address}{rest}")
                save(page.screenshot(), IMAGES / f"{name}{suffix}.png")
        browser.close()


if __name__ == "__main__":
    main()

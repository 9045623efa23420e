"""Takes a picture of the page of timelines in Chromium, of a run on two ranks of which the second one is late once.

python docs/pictures/timeline.py build/tools/fsdp docs/pictures/timeline.png
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from selenium import webdriver

ROOT = Path(__file__).resolve().parents[2]
RUN = ROOT / "tests" / "python" / "programs" / "timed_run.py"
WINDOW = "--window-size=1280,860"


def page_of_a_run(command: str, folder: Path) -> Path:
    """Steps 3 to 5 of it."""
    torchrun = (sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2")
    environment = {**os.environ, "FSDP_EVENTS": str(folder / "runs" / "gpt"), "OMP_NUM_THREADS": "1"}
    subprocess.run([*torchrun, str(RUN), str(folder)], env=environment, check=True)
    page = folder / "timeline.html"
    subprocess.run([command, "timeline", "runs/gpt", "--steps", "3-5", "--html", str(page)], cwd=folder, check=True)
    return page


def take(page: Path, out: Path) -> None:
    options = webdriver.ChromeOptions()
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--hide-scrollbars",
        WINDOW,
    ):
        options.add_argument(argument)
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(shutil.which("chromedriver")))
    chrome.get(page.as_uri())
    chrome.execute_script("page.drawNow()")
    chrome.save_screenshot(str(out))
    chrome.quit()


if __name__ == "__main__":
    with tempfile.TemporaryDirectory() as folder:
        take(page_of_a_run(str(Path(sys.argv[1]).resolve()), Path(folder)), Path(sys.argv[2]))

"""`fsdp timeline`: its JSON, its page, and the page in a browser."""

from __future__ import annotations

import base64
import itertools
import json
import os
import re
import shutil
import subprocess
import sys
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from support.ports import reserved_port

PROGRAM = Path(__file__).with_name("timed_run.py")
COMMAND = os.environ.get("FSDP_COMMAND", "")
SIZE = 2
LATE_SECONDS = 2.0  # longer than a busy machine holds up a rank

pytestmark = pytest.mark.skipif(not COMMAND, reason="ctest says where the command is: FSDP_COMMAND")

# What Perfetto wants of each kind of event, beside "ph", "pid", "tid" and "name".
NEEDED: dict[str, dict[str, type | tuple[type, ...]]] = {
    "M": {"args": dict},
    "X": {"ts": (int, float), "dur": (int, float), "cat": str, "args": dict},
    "C": {"ts": (int, float), "args": dict},
    "i": {"ts": (int, float), "s": str},
}
OF_A_WAIT = {
    "unit": str,
    "collective": str,
    "row": str,
    "number": int,
    "bytes": int,
    "in_backward": bool,
    "reasons_ns": dict,
}


def timeline(*arguments: object) -> subprocess.CompletedProcess[str]:
    return subprocess.run([COMMAND, "timeline", *map(str, arguments)], capture_output=True, text=True)


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run that has ended, with its events and the reports of its ranks."""
    folder = tmp_path_factory.mktemp("run")
    with reserved_port() as port:
        settings = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": str(SIZE), "OMP_NUM_THREADS": "1"}
        ranks = [
            subprocess.Popen(
                [sys.executable, str(PROGRAM), str(folder), str(LATE_SECONDS)],
                env={**os.environ, **settings, "FSDP_EVENTS": str(folder / "events"), "RANK": str(rank)},
            )
            for rank in range(SIZE)
        ]
        assert [rank.wait() for rank in ranks] == [0] * SIZE
    return folder


@pytest.fixture(scope="module")
def trace(run: Path) -> list[dict[str, Any]]:
    """Steps 3 to 5, over which the reports go."""
    done = timeline(run / "events", "--json", run / "trace.json", "--steps", "3-5")
    assert done.returncode == 0, done.stderr
    assert "2 ranks, 3 steps (3 to 5)" in done.stdout
    events: list[dict[str, Any]] = json.loads((run / "trace.json").read_text())["traceEvents"]
    return events


def test_the_trace_is_what_perfetto_reads(trace: list[dict[str, Any]]) -> None:
    lanes: dict[int, set[str]] = defaultdict(set)
    for event in trace:
        assert isinstance(event["name"], str)
        assert event["pid"] in range(SIZE), "the rank"
        assert isinstance(event["tid"], int)
        for key, kind in NEEDED[event["ph"]].items():
            assert isinstance(event[key], kind), event
        if event["ph"] == "M" and event["name"] == "thread_name":
            lanes[event["pid"]].add(event["args"]["name"])
        if event["ph"] == "X":
            assert event["ts"] >= 0, event
            assert event["dur"] >= 0, event
        if event.get("cat") == "wait":
            for key, kind in OF_A_WAIT.items():
                assert isinstance(event["args"][key], kind), event
    for rank in range(SIZE):
        assert {"compute", "exposed waits", "gather", "reduce"} <= lanes[rank]
    assert [event["name"] for event in trace if event["ph"] == "i" and event["pid"] == 0] == [
        "step 3",
        "step 4",
        "step 5",
    ]
    names = {event["name"] for event in trace}
    assert {"FSDP::all_gather (blocks.3)", "FSDP::post_backward_reduce (blocks.3)", "forward (blocks.3)"} <= names


def test_slices_of_a_lane_do_not_overlap(trace: list[dict[str, Any]]) -> None:
    lanes: dict[tuple[int, int], list[tuple[float, float]]] = defaultdict(list)
    for event in trace:
        if event["ph"] == "X":
            lanes[event["pid"], event["tid"]].append((event["ts"], event["ts"] + event["dur"]))
    for slices in lanes.values():
        slices.sort()
        for (_, end), (begin, _) in itertools.pairwise(slices):
            assert begin >= end - 1e-3


def test_reasons_add_up_to_those_of_the_step_report(run: Path, trace: list[dict[str, Any]]) -> None:
    """Of each unit, collective and pass; the ranks have one clock, so that both see the same."""
    for rank in range(SIZE):
        report = json.loads((run / f"report-{rank}.json").read_text())
        assert report["steps"] == 3
        sums: dict[tuple[str, str, bool], dict[str, float]] = defaultdict(lambda: defaultdict(float))
        for event in trace:
            if event.get("cat") == "wait" and event["pid"] == rank:
                args = event["args"]
                for reason, ns in args["reasons_ns"].items():
                    sums[args["unit"], args["collective"], args["in_backward"]][reason] += ns / 1e6 / 3
        assert len(report["waits"]) > 10
        for waits in report["waits"]:
            found = sums[waits["unit"], waits["operation"], waits["in_backward"]]
            assert dict(found) == pytest.approx(waits["reasons"], abs=1e-6), waits


def test_the_late_rank_is_named(run: Path, trace: list[dict[str, Any]]) -> None:
    waits = [event for event in trace if event.get("cat") == "wait" and event["pid"] == 0]
    longest = max(waits, key=lambda event: float(event["dur"]))
    assert longest["args"]["late_rank"] == 1
    assert "in forward of 'blocks.2'" in longest["args"]["late_rank_was"]
    assert max(longest["args"]["reasons_ns"], key=longest["args"]["reasons_ns"].get) == "late rank"
    said = timeline(run / "events", "--html", run / "page.html", "--steps", 4).stdout
    assert re.search(r"longest wait: rank 0 waited \d+\.\d+ ms .*: rank 1 was in forward of 'blocks\.2'", said), said


def test_the_page_is_one_file(run: Path) -> None:
    assert timeline(run / "events").returncode == 0
    page = (run / "events" / "timeline.html").read_text()
    assert len(page) < 500_000
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)
    assert data is not None
    ranks = json.loads(data[1])["ranks"]
    assert [rank["rank"] for rank in ranks] == [0, 1]
    # Memory is there where units are entered: more with a gathered unit than between steps.
    memory = ranks[0]["memory"]
    gathered = list(itertools.accumulate(memory[3::7]))
    assert max(gathered) > 0
    assert gathered[-1] < max(gathered)


def plan_of_the_run() -> dict[str, Any]:
    """What `fsdp plan --json` would print, with numbers that are easy to find again."""
    kinds = ("main_parameters", "main_gradients", "gathered_parameters", "unreduced_gradients", "communication")
    return {
        "ranks": SIZE,
        "memory": {kind: {"peak": 1000 + i} for i, kind in enumerate((*kinds, "optimizer_state", "total"))},
        "wire": {
            "all_gather_bytes": 500,
            "reduce_scatter_bytes": 60,
            "control_bytes": 7,
            "shared_memory_bytes": 300,
        },
        "time": {"step_ms": 12.5},
    }


def test_a_plan_stands_beside_what_was_measured(run: Path, tmp_path: Path) -> None:
    (tmp_path / "plan.json").write_text(json.dumps(plan_of_the_run()))
    done = timeline(run / "events", "--plan", tmp_path / "plan.json", "--html", tmp_path / "page.html")
    assert done.returncode == 0, done.stderr
    for name, planned in (("gathered parameters, B", "1002"), ("sent as messages, B", "267"), ("time of a step, ms", "12.5")):
        assert re.search(rf"^{name} +{planned} +\d[\d.]*  [01]$", done.stdout, re.MULTILINE), done.stdout
    assert '"plan":{"peak":1006,' in (tmp_path / "page.html").read_text()
    other = plan_of_the_run() | {"ranks": 8}
    (tmp_path / "plan.json").write_text(json.dumps(other))
    done = timeline(run / "events", "--plan", tmp_path / "plan.json")
    assert done.returncode == 2
    assert "the plan is for 8 ranks, and these events are of a run of 2" in done.stderr


def test_json_for_another_program_stays_alone(run: Path, tmp_path: Path) -> None:
    done = timeline(run / "events", "--json", "/dev/stdout")  # a pipe
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)
    assert "/dev/stdout: " in done.stderr
    target, link = tmp_path / "page.html", tmp_path / "link.html"
    link.symlink_to(target)
    assert timeline(run / "events", "--html", link).returncode == 0
    assert link.is_symlink()
    assert "<html" in target.read_text()


def test_what_is_wrong_is_said(run: Path, tmp_path: Path) -> None:
    for arguments, said in (
        ([tmp_path], "FSDP_EVENTS=FOLDER"),
        ([tmp_path / "missing"], "missing"),
        ([run / "events", "--steps", "5-3"], "no range of steps"),
        ([run / "events", "--steps", "90-91"], "no rank has kept events of these steps"),
        ([run / "events", "--json", tmp_path / "none" / "trace.json"], "cannot write"),
    ):
        done = timeline(*arguments)
        assert done.returncode == 2, arguments
        assert said in done.stderr, done.stderr
    (tmp_path / "rank-7.events").write_bytes(b"something else")
    shutil.copy(run / "events" / "rank-1.events", tmp_path)
    done = timeline(tmp_path, "--html", tmp_path / "page.html")
    assert done.returncode == 0
    assert "Not read:" in done.stdout
    assert '"missing":[0]' in (tmp_path / "page.html").read_text()


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium without a window: `make nightly` installs it, with selenium."""
    webdriver = pytest.importorskip("selenium.webdriver")
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    if chromium is None or driver is None:
        pytest.skip("no chromium and chromedriver: scripts/setup.sh browser")
    options = webdriver.ChromeOptions()
    options.binary_location = chromium
    for argument in (
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--window-size=1440,960",
    ):
        options.add_argument(argument)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    chrome = webdriver.Chrome(options=options, service=webdriver.ChromeService(driver))
    yield chrome
    chrome.quit()


def wait_on_canvas(browser: Any) -> tuple[float, float]:
    """Where the longest wait lies on the canvas, from its middle, when it is in view."""
    place: list[float] = browser.execute_script(
        """const { lanes, groups } = page, wait = groups[0].wait;
        const row = lanes.rows.find((one) => one.rank === wait.rank && one.kind === "compute");
        return [lanes.x((wait.wait + wait.ended) / 2), row.y + row.height / 2 - page.view.scroll, lanes.width, lanes.shown];"""
    )
    return place[0] - place[2] / 2, place[1] - place[3] / 2


@pytest.mark.nightly
def test_the_page_in_a_browser(run: Path, browser: Any) -> None:
    from selenium.webdriver.common.action_chains import ActionChains
    from selenium.webdriver.common.by import By
    from selenium.webdriver.common.keys import Keys

    page = run / "browser.html"
    (run / "plan.json").write_text(json.dumps(plan_of_the_run()))
    assert timeline(run / "events", "--html", page, "--plan", run / "plan.json").returncode == 0
    browser.get(page.as_uri())
    planned = browser.find_element(By.ID, "planned").text
    assert "gathered parameters 1002 B" in planned, planned
    assert "unreduced gradients" in browser.find_element(By.ID, "legend").text
    verdict = browser.find_element(By.ID, "verdict").text
    assert "because rank 1 came late: it was in forward of 'blocks.2'" in verdict, verdict

    lanes = browser.find_element(By.ID, "lanes")

    def shown() -> float:
        browser.execute_script("page.drawNow()")
        return float(lanes.get_attribute("data-end")) - float(lanes.get_attribute("data-begin"))

    def details() -> str:
        return str(browser.find_element(By.ID, "details").text)

    # Nothing is chosen, then a click on the wait tells unit, collective, bytes, the reason, and what the late rank did.
    lanes.send_keys(Keys.ESCAPE)
    assert "Click a wait" in details()
    x, y = wait_on_canvas(browser)
    ActionChains(browser).move_to_element_with_offset(lanes, x, y).click().perform()
    said = (
        "Because rank 1 came late: it was in forward of 'blocks.2'",
        "all-gather",
        "KiB",
        "step\n4, forward",
        "late rank",
    )
    for part in said:
        assert part in details(), details()

    # Keys zoom and move.
    everything = float(browser.execute_script("return page.timeline.length"))
    lanes.send_keys("0")
    assert shown() == pytest.approx(everything, rel=1e-3)
    lanes.send_keys("+", "+")
    assert shown() == pytest.approx(everything * 0.36, rel=1e-2)
    before = float(lanes.get_attribute("data-begin"))
    lanes.send_keys(Keys.ARROW_RIGHT)
    shown()
    assert float(lanes.get_attribute("data-begin")) > before
    lanes.send_keys("-")
    assert shown() == pytest.approx(everything * 0.6, rel=1e-2)
    lanes.send_keys("n")
    assert shown() < everything, "an entry of the list is zoomed to"

    # The wheel, around the pointer.
    lanes.send_keys("0")
    ActionChains(browser).scroll_from_origin(_origin(lanes), 0, -300).perform()
    assert shown() < everything

    # A search finds a unit's collectives, and goes from one to the next.
    search = browser.find_element(By.ID, "search")
    lanes.send_keys("/")
    assert browser.switch_to.active_element == search
    search.send_keys("blocks.3")
    found = int(browser.find_element(By.ID, "found").text)
    assert found >= 2 * 2 * 3, "two ranks gather it twice in each step, and reduce it"
    search.send_keys(Keys.ENTER)
    assert browser.find_element(By.ID, "found").text == f"1/{found}"
    assert "blocks.3" in details()
    assert all("blocks.3" in item.text for item in browser.find_elements(By.CSS_SELECTOR, "#waits button"))
    search.send_keys(Keys.ESCAPE)

    # The list can be used without a pointer.
    first = browser.find_element(By.CSS_SELECTOR, "#waits button")
    first.send_keys(Keys.ENTER)
    assert first.get_attribute("aria-current") == "true"
    assert "rank 1 came late" in details()

    assert browser.get_log("browser") == [], "no error, and nothing that its policy had to refuse"
    requests = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    urls = {
        one["params"]["request"]["url"].partition(":")[0]
        for one in requests
        if one["method"] == "Network.requestWillBeSent"
    }
    assert urls <= {"file", "data"}


def _origin(element: Any) -> Any:
    from selenium.webdriver.common.actions.wheel_input import ScrollOrigin

    return ScrollOrigin.from_element(element)


@pytest.mark.nightly
def test_the_page_prints(run: Path, browser: Any) -> None:
    page = run / "printed.html"
    assert timeline(run / "events", "--html", page, "--steps", "3-5").returncode == 0
    browser.get(page.as_uri())
    printed = browser.execute_cdp_cmd("Page.printToPDF", {"preferCSSPageSize": True, "printBackground": True})
    assert 1 <= len(re.findall(rb"/Type */Page\b", base64.b64decode(printed["data"]))) <= 3
    assert browser.execute_script("return document.documentElement.className") == "", "and is as before"

"""The page as a person has it: a real daemon in Debian's Chromium, at a desk and on a phone, and the daemon gone."""

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.chromium import MISSING, Browser, browser, installed
from tests.e2e.running import Daemon, command, environment, running
from tests.ports import free_port
from tests.waiting import wait_for

pytestmark = [pytest.mark.e2e, pytest.mark.skipif(not installed(), reason=MISSING)]
JOB = "41001"
"""Of the scenario lost_gpu: it ends when its GPU has fallen off the bus."""
ASK = "document.dispatchEvent(new Event('visibilitychange'))"
"""What coming back to the page does: it asks at once."""
STATE = "[location.href, document.readyState, document.hidden, document.scripts.length, window.same]"
PULSE = "document.getElementById('pulse').textContent"
CONTRAST = """
(() => {
  const lit = (c) => { c /= 255; return c <= 0.04045 ? c / 12.92 : ((c + 0.055) / 1.055) ** 2.4; };
  const parse = (text) => text.match(/[\\d.]+/g).map(Number);
  const light = ([r, g, b]) => 0.2126 * lit(r) + 0.7152 * lit(g) + 0.0722 * lit(b);
  const ground = (node) => {
    for (; node; node = node.parentElement) {
      const found = parse(getComputedStyle(node).backgroundColor);
      if (found.length === 3 || found[3] > 0) return found;
    }
    return [255, 255, 255];
  };
  const bad = new Set();
  const walk = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  let seen = 0;
  while (walk.nextNode()) {
    const parent = walk.currentNode.parentElement, style = getComputedStyle(parent);
    if (!walk.currentNode.data.trim() || !parent.checkVisibility() || parent.closest("svg,script,style")) continue;
    seen += 1;
    const pair = [light(parse(style.color)), light(ground(parent))].sort((a, b) => b - a);
    const ratio = (pair[0] + 0.05) / (pair[1] + 0.05);
    if (ratio < 4.5) bad.add(ratio.toFixed(2) + " " + parent.outerHTML.slice(0, 90));
  }
  return [seen, [...bad]];
})()
"""
WIDER = """
[...document.querySelectorAll("body *")]
  .filter((node) => !node.closest(".scroll table, svg, noscript"))
  .filter((node) => node.getBoundingClientRect().right > document.documentElement.clientWidth + 0.5)
  .map((node) => node.outerHTML.slice(0, 80))
"""


@contextmanager
def node(folder: Path, port: int) -> Iterator[Daemon]:
    """A simulated node with a price, one receipt and events; always at the same port."""
    (folder / "node.toml").write_text(
        '[[prices]]\nper_gpu_hour = 2.5\ncurrency = "USD"\n[energy]\nprice_per_kwh = 0.12\n'
    )
    words = command(
        "demo", "lost_gpu", "--preroll", "9000", "--config", f"{folder / 'node.toml'}",
        "--web.listen-address", f"127.0.0.1:{port}",
    )  # fmt: skip
    with running(words, folder / "demo.log", environment()) as program:
        served = Daemon(program, port)
        wait_for(lambda: "serving http" in program.log() and served.ready(), "/readyz")
        yield served
        served.client.close()
        if program.process.poll() is None:
            assert program.end() == 0
        assert "Traceback" not in program.log()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with node(tmp_path_factory.mktemp("node"), free_port()) as daemon:
        yield daemon


@pytest.fixture(scope="module")
def tab(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browser(tmp_path_factory.mktemp("profile")) as opened:
        yield opened


def opened(tab: Browser, address: str, *, width: int = 1280, dark: bool = False) -> None:
    """A page without what an earlier test did to the tab."""
    tab.complaints.clear()
    tab.asked_for.clear()
    tab.open(address, width=width, dark=dark)


def changes(tab: Browser, expression: str, *, ask: bool = True) -> None:
    """Wait until it is no longer what it is."""
    before = tab.value(expression)
    if ask:
        tab.value(ASK)
    wait_for(lambda: tab.value(expression) != before, f"{expression} changes from {before!r}")


def test_it_lives_without_a_reload_and_what_a_person_did_stays(served: Daemon, tab: Browser) -> None:
    opened(tab, served.url)
    tab.value("window.same = true")
    tab.value("document.querySelector('.leak summary').click()")
    tab.value("document.querySelector('.receipt summary').click()")
    wait_for(lambda: tab.value("!!document.querySelector('.receipt .inside article .fall')"), "the receipt comes")
    tab.value("document.querySelector('.receipt .inside .leak summary').click()")
    tab.value("document.querySelector('.scroll').focus({preventScroll: true}); scrollTo(0, 333)")
    tab.value("window.opened = document.querySelectorAll('details[open]').length")
    changes(tab, PULSE, ask=False)  # by itself
    changes(tab, "document.querySelector('tr[data-key=start] td:nth-of-type(6)').textContent")
    assert tab.value("window.same && window.opened === 3")
    assert tab.value("document.querySelectorAll('details[open]').length") == 3
    assert tab.value("document.activeElement.getAttribute('aria-label')") == "The node over time"
    assert tab.value("scrollY") == 333
    assert tab.value(PULSE).startswith("live, as of ")
    assert tab.value("document.querySelector('.receipt').dataset.key") == f"job-{JOB}"
    assert tab.complaints == []
    assert {address.removeprefix(served.url) for address in tab.asked_for} == {"/", f"/jobs/{JOB}"}


def test_nothing_but_its_own_script_runs(served: Daemon, tab: Browser) -> None:
    """Which also shows that the complaints of the other tests would be heard."""
    opened(tab, served.url)
    tab.value("{ const s = document.createElement('script'); s.append('window.ran = 1'); document.body.append(s) }")
    assert tab.value("window.ran") is None
    for markup in ("document.body.innerHTML = '<b>x</b>'", "document.body.setAttribute('onclick', 'window.ran = 1')"):
        assert tab.value(f"try {{ {markup} }} catch (refused) {{ refused.name }}") == "TypeError"
    wait_for(
        lambda: tab.value("1") and "ContentSecurityPolicyIssue" in "".join(tab.complaints), "the violation is told"
    )


def test_a_selection_is_not_lost_and_the_page_says_that_it_waits(served: Daemon, tab: Browser) -> None:
    opened(tab, served.url)
    tab.value("getSelection().selectAllChildren(document.querySelector('h1'))")
    tab.value(ASK)
    wait_for(lambda: tab.value(PULSE).startswith("paused while text is selected"), "it waits")
    assert "gpu-node-00" in tab.value("getSelection().toString()")
    tab.value("getSelection().removeAllRanges()")
    wait_for(lambda: tab.value(PULSE).startswith("live"), "it goes on")


def test_a_page_out_of_sight_asks_nothing(served: Daemon, tab: Browser) -> None:
    opened(tab, served.url)
    tab.value(
        "Object.defineProperty(document, 'hidden', {get: () => window.away, configurable: true}); window.away = true"
    )
    tab.asked_for.clear()
    tab.value("new Promise((done) => setTimeout(done, 1))")
    tab.call("Runtime.evaluate", expression="new Promise((done) => setTimeout(done, 5500))", awaitPromise=True)
    assert tab.asked_for == []
    tab.value(f"window.away = false; {ASK}")
    wait_for(lambda: tab.value("1") and tab.asked_for, "it asks when it is seen again")


def test_after_an_upgrade_of_the_daemon_it_loads_itself_anew(served: Daemon, tab: Browser) -> None:
    opened(tab, served.url)
    tab.value("window.same = true; document.documentElement.dataset.version = 'of before'")
    tab.value(ASK)
    wait_for(lambda: tab.value("window.same === undefined && document.readyState === 'complete'"), "it is another")
    assert tab.value("document.documentElement.dataset.version") != "of before"


@pytest.mark.parametrize("path", ["/", f"/jobs/{JOB}", "/jobs/none"])
@pytest.mark.parametrize("width", [1280, 390, 320])
def test_nothing_but_tables_is_wider_than_the_screen_and_all_can_be_read(
    served: Daemon, tab: Browser, path: str, width: int
) -> None:
    for dark in (False, True):
        opened(tab, served.url + path, width=width, dark=dark)
        tab.value("document.querySelectorAll('.fall details, .gpu details').forEach((one) => { one.open = true })")
        assert tab.value("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
        assert tab.value(WIDER) == []
        seen, unreadable = tab.value(CONTRAST)
        assert unreadable == []
        assert seen > 5
    assert path == "/jobs/none" or tab.complaints == []


def test_a_keyboard_reaches_what_a_mouse_does(served: Daemon, tab: Browser) -> None:
    opened(tab, served.url)
    for _ in range(60):
        for kind in ("keyDown", "keyUp"):
            tab.call("Input.dispatchKeyEvent", type=kind, key="Tab", code="Tab", windowsVirtualKeyCode=9)
        if tab.value("!!document.activeElement.closest('.leak') && document.activeElement.nodeName === 'SUMMARY'"):
            break
    tab.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", code="Enter", windowsVirtualKeyCode=13, text="\r")
    advice = tab.value("document.querySelector('.leak details[open] .advice')?.checkVisibility()")
    assert advice is True
    assert tab.value("getComputedStyle(document.activeElement).outlineStyle") == "solid"


def test_without_a_script_it_is_read_all_the_same(served: Daemon, tab: Browser) -> None:
    tab.call("Emulation.setScriptExecutionDisabled", value=True)
    try:
        opened(tab, served.url)
        assert tab.value("document.querySelector('noscript meta').content") == "4"
        assert tab.value(PULSE).startswith("as of ")
        assert tab.value("document.querySelector('.receipt a').getAttribute('href')") == f"/jobs/{JOB}"
    finally:
        tab.open("about:blank")  # it loads itself anew every four seconds, also while the next test opens another
        tab.call("Emulation.setScriptExecutionDisabled", value=False)


def test_when_the_daemon_is_gone_nothing_looks_live_and_when_it_is_back_all_does(tmp_path: Path, tab: Browser) -> None:
    port = free_port()
    hidden = "document.getElementById('gone').hidden"
    with node(tmp_path, port) as first:
        opened(tab, first.url)
        tab.value("window.same = true")
        assert tab.value(hidden)
        assert first.program.end() == 0
        tab.value(ASK)
        try:
            wait_for(lambda: not tab.value(hidden), "it says so")
        except AssertionError:
            pytest.fail(f"it does not say so: {tab.value(STATE)}, {tab.value(PULSE)}, {tab.complaints}")
    said = tab.value("document.getElementById('gone').textContent")
    assert "The daemon does not answer. Values below are as of " in said
    assert "live" not in tab.value(PULSE)
    shown = "getComputedStyle(document.querySelector('.gpu .now'), '::after').content"
    assert tab.value(shown) == '"no data"'
    assert not tab.value("document.querySelector('.ago').checkVisibility()")
    assert tab.value("getComputedStyle(document.querySelector('.state b'), '::before').content") == '"was "'
    assert "grayscale" in tab.value("getComputedStyle(document.querySelector('main')).filter")
    with node(tmp_path, port):
        wait_for(lambda: tab.value(PULSE).startswith("live, "), "it is back, and its history is played")
        assert tab.value(hidden)
        assert tab.value(shown) == "none"
        assert tab.value("window.same")

"""`top` as a person meets it: on a real terminal, before a real daemon, with keys pressed and the daemon ended."""

import re
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.running import Daemon, Program, command, daemon, environment, running
from tests.ports import free_port
from tests.top.terminal import DOWN, ENTER, ESCAPE, TAB, terminal
from tests.waiting import PATIENCE, wait_for

pytestmark = pytest.mark.e2e
COLOUR = re.compile(rb"\x1b\[(?:[0-9;]*;)?(?:3[0-7]|4[0-7]|9[0-7]|10[0-7]|38|48)(?:;[0-9;]*)?m")


@pytest.fixture(name="demo", scope="module")
def _demo(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with daemon(tmp_path_factory.mktemp("demo"), "demo", "--preroll", "3600") as served:
        yield served


def shown(url: str, *more: str) -> list[str]:
    return command("top", "--url", url, "--interval", "0.5", *more)


def rows(screen: str) -> list[str]:
    """Lines of the list: those that begin with a GPU's index."""
    return [line for line in screen.splitlines() if re.match(r"^[▸> ] +\d+ \S [\w?]+ ", line)]


@pytest.mark.parametrize(("columns", "lines"), [(80, 24), (200, 60)])
def test_it_fills_the_terminal_and_says_all(demo: Daemon, columns: int, lines: int) -> None:
    with terminal(shown(demo.url), columns=columns, lines=lines, env=environment(LANG="C.UTF-8")) as top:
        top.shows("allocated", "SIMULATED", "money leaks", "q quit")
        screen = top.until(lambda text: len(rows(text)) == 8, "all GPUs are there")
        assert max(len(line) for line in screen.splitlines()) <= columns
        screen = top.shows("ada", "memory", "active", "ECTR", "41001")
        assert ("NAME" in screen) is (columns == 200)
        top.press("q")
        assert top.ended() == 0
    assert b"\x1b[?1049l" in top.written, "the terminal is given back as it was"
    assert b"\x1b[?25h" in top.written
    assert b"\x1b[?1000h" not in top.written, "the mouse is the terminal's own"


def test_one_finds_a_job_opens_it_and_comes_back(demo: Daemon) -> None:
    with terminal(shown(demo.url), env=environment(LANG="C.UTF-8")) as top:
        top.shows("[GPUs]", "q quit")
        top.press("/ada")
        top.shows("filter: ada_", "4 of 8")
        top.until(lambda text: len(rows(text)) == 4, "the other rows are gone")
        top.press(ENTER)
        top.shows("filter: ada ", "q quit")
        top.press(ENTER)
        top.shows("job 41001 on", "memory bound")
        top.press(DOWN * 12)
        top.shows("training", "step ")
        top.press(ESCAPE)
        top.shows("filter: ada")
        top.press(ESCAPE)
        top.hides("filter:")
        top.press(TAB)
        top.shows("[jobs]", "41001", "41505")
        top.press("sw")
        top.shows("last 1 h, by product")
        top.press("?")
        top.shows("only rows with all of these words", "Esc back")
        top.press("qq")
        assert top.ended() == 0


def test_the_chosen_row_stays_chosen_when_the_order_changes_and_the_window_its_size(demo: Daemon) -> None:
    with terminal(shown(demo.url), env=environment(LANG="C.UTF-8")) as top:
        top.shows("▸   0", "q quit")
        top.press(DOWN * 3)
        top.shows("▸   3")
        top.press("r")
        top.shows("reversed", "▸   3")
        top.until(lambda text: [row[1:].split()[0] for row in rows(text)] == list("76543210"), "the order is reversed")
        top.resize(120, 40)
        screen = top.shows("▸   3", "SMI", "q quit")
        assert len(screen.splitlines()) == 40
        top.resize(60, 12)
        screen = top.shows("▸   3")
        top.until(lambda text: "SMI" not in text and "▸   3" in text, "it is drawn for the smaller size")
        top.until(lambda text: max(len(line.rstrip()) for line in text.splitlines()) <= 60, "no line is longer")


@pytest.mark.parametrize(("env", "flags"), [({"NO_COLOR": "1"}, ()), ({}, ("--no-color", "--ascii"))])
def test_without_colour_not_one_is_sent_and_states_are_words(
    demo: Daemon, env: dict[str, str], flags: tuple[str, ...]
) -> None:
    with terminal(shown(demo.url, *flags), env=environment(LANG="C.UTF-8", **env)) as top:
        screen = top.shows("active", "q quit")
        top.press("j")
        top.shows("  1 ")
        assert COLOUR.findall(bytes(top.written)) == []
        assert screen.isascii() == ("--ascii" in flags)


def test_with_colour_there_is_some(demo: Daemon) -> None:
    with terminal(shown(demo.url), env=environment(LANG="C.UTF-8")) as top:
        top.shows("● active", "q quit")
        assert COLOUR.findall(bytes(top.written))


def test_a_terminal_that_can_nothing_gets_one_look(demo: Daemon) -> None:
    with terminal(shown(demo.url), env=environment(LANG="C.UTF-8", TERM="dumb")) as top:
        assert top.ended() == 0
        assert b"\x1b" not in top.written
        assert b"as --once gives it" in top.written
        assert b"41001" in top.written


def test_without_textual_it_says_what_to_install_and_one_look_is_still_there(demo: Daemon) -> None:
    start = "import sys; sys.modules['textual'] = None; from exporter.cli import main; sys.exit(main(sys.argv[1:]))"
    words = [sys.executable, "-c", start, "top", "--url", demo.url]
    with terminal(words, env=environment(LANG="C.UTF-8")) as top:
        assert top.ended() == 1
        assert b"pip install 'gpu-efficiency-exporter[top]'" in top.written
        assert top.written.count(b"\n") == 1
    with terminal([*words, "--once"], lines=60, env=environment(LANG="C.UTF-8")) as top:
        assert top.ended() == 0
        assert "41001" in top.text


def test_a_daemon_that_ends_is_said_to_be_gone_its_figures_old_and_it_comes_back(tmp_path: Path) -> None:
    port = free_port()
    words = command("demo", "--preroll", "60", "--web.listen-address", f"127.0.0.1:{port}")

    def up(program: Program) -> bool:
        return program.alive() and f"127.0.0.1:{port}" in program.log()

    with running(words, tmp_path / "first.log", environment()) as first:
        wait_for(lambda: up(first), "it serves")
        with terminal(shown(f"127.0.0.1:{port}"), env=environment(LANG="C.UTF-8")) as top:
            top.shows("● active", "q quit")
            assert first.end() == 0
            top.shows("NOT RESPONDING", "OLD", "values are", "refused", "? was active")
            top.hides("● active")
            with running(words, tmp_path / "second.log", environment()) as second:
                wait_for(lambda: up(second), "it serves again")
                top.until(lambda text: "● active" in text and "NOT RESPONDING" not in text, "it is back by itself")
                top.hides("OLD")


def test_it_goes_when_its_terminal_goes(demo: Daemon) -> None:
    """A connection that is cut leaves no process behind, not even where no shell is there to tell it."""
    with terminal(shown(demo.url), env=environment(LANG="C.UTF-8")) as top:
        top.shows("● active")
        top.hang_up()
        assert top.process.wait(PATIENCE) == -signal.SIGHUP

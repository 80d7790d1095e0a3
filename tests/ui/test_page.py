"""The plan explorer's page: with the library's own simulated user, and in a real browser."""

import asyncio
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from moestro.config import load_config
from tests.ui.browser import Tab, browser, chromium

SMALL = "run=olmoe-1b-7b&hardware=h100-sxm&devices=2&global_batch_size=16&ep=2&dispatch=deduplicated&zero=1"
PINS = "pin=schedule,vpp,cp,tp,zero,recompute,expert_chunks,expert_recompute,overlap_dispatch,context"
NO_BROWSER = pytest.mark.skipif(chromium() is None, reason="there is no Chromium on this machine")


def test_the_page_builds_and_follows_a_pick() -> None:
    from nicegui.testing import user_simulation

    from moestro.ui.offer import offer_of
    from moestro.ui.server import page_of

    async def visit() -> None:
        async with user_simulation(page_of(offer_of())) as user:
            await user.open(f"/?{SMALL}&zero=7")
            await user.should_see("Moestro plan explorer")
            await user.should_see("dp = 2: what pp · cp · tp leave of the devices", retries=300)
            await user.should_see("moestro predict olmoe-1b-7b --hardware h100-sxm --devices 2")

    asyncio.run(visit())


@contextmanager
def served(folder: Path, *args: str) -> Iterator[tuple[subprocess.Popen[str], str]]:
    """`moestro ui` as a user starts it, and its address."""
    command = [sys.executable, "-m", "moestro", "ui", "--port", "0", "--no-show", *args]
    # The library behaves otherwise where it sees a test.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTEST", "NICEGUI"))}
    pipe = subprocess.PIPE
    process = subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True, cwd=folder, env=environment)
    try:
        assert process.stdout is not None
        line = process.stdout.readline()
        found = re.match(r"http://127\.0\.0\.1:\d+/", line)
        assert found, line
        yield process, found[0]
    finally:
        process.kill()
        process.wait()


def shown(tab: Tab, address: str) -> None:
    tab.open(address)
    tab.wait("!['', '–'].includes(document.querySelector('[data-name=\"key-step\"]').innerText)")


def number(text: str) -> float:
    return float(text.split()[0].replace(",", ""))


@NO_BROWSER
@pytest.mark.slow
def test_in_a_browser(tmp_path: Path) -> None:
    with served(tmp_path) as (process, address), browser(tmp_path) as tabs:
        one, two = tabs(), tabs()
        shown(one, f"{address}?{SMALL}")
        shown(two, f"{address}?{SMALL}")
        before = one.text("key-tokens/s")
        one.arrow("micro_batch_size")
        one.wait("document.querySelector('[data-name=\"micro_batch_size-value\"]').innerText == '2'")
        one.wait(
            "document.querySelector('[data-name=\"change\"]').innerText.startsWith('micro_batch_size 1 → 2: step')"
        )
        assert one.text("key-tokens/s") != before
        assert two.text("key-tokens/s") == before  # its own state
        assert two.text("micro_batch_size-value") == "1"
        assert "micro_batch_size=2" in one.js("location.href")

        one.arrow("pp")  # 2 · ep 2 on 2 devices: nothing is left
        one.wait("document.querySelector('[data-name=\"wrong\"]').innerText.includes('does not divide')")
        assert "does not divide" in one.text("pp-problem") + one.text("ep-problem")
        one.click("mend")
        one.wait("document.querySelector('[data-name=\"wrong\"]').offsetParent === null")
        assert one.text("pp-value") == "2"

        shown(one, f"{address}?{SMALL}&{PINS}")
        one.click("find")
        one.wait("document.querySelectorAll('[data-name=\"ranking\"] .row-of-plan').length > 1")
        assert "too big for memory" in one.text("search")
        first = one.js("document.querySelectorAll('[data-name=\"ranking\"] .row-of-plan')[0].innerText.split('\\t')[1]")
        one.wait(f"document.querySelector('[data-name=\"key-step\"]').innerText == '{first.strip()}'")
        one.js("document.querySelectorAll('[data-name=\"ranking\"] .row-of-plan')[1].click()")
        one.click("save")
        saved = tmp_path / "plan.toml"
        end = time.monotonic() + 30
        while not saved.exists() and time.monotonic() < end:
            time.sleep(0.05)
        config = load_config(str(saved)).config
        assert config.train.global_batch_size == 16
        assert config.parallel.zero == 1
        one.wait("document.querySelector('[data-name=\"timeline-note\"]').innerText.includes('simulated pass by pass')")
        assert one.errors == two.errors == []

        process.send_signal(signal.SIGINT)
        assert process.wait(30) in (0, 130)
        assert process.stderr is not None
        assert "Traceback" not in process.stderr.read()


@NO_BROWSER
@pytest.mark.slow
def test_a_search_is_stopped_and_dies_with_its_page(tmp_path: Path) -> None:
    with served(tmp_path) as (process, address), browser(tmp_path) as tabs:
        tab = tabs()
        shown(tab, f"{address}?run=deepseek-v3&hardware=h800-2048&pp=16&ep=64&dispatch=deduplicated&zero=1")
        tab.click("find")
        tab.wait("document.querySelector('[data-name=\"search\"]').innerText.includes('kinds of plans')")
        tab.click("stop")
        tab.wait("document.querySelector('[data-name=\"search\"]').innerText == 'stopped'")
        tab.click("find")
        tab.wait("document.querySelector('[data-name=\"search\"]').innerText.includes('kinds of plans')")
        tab.wait("innerWidth >= document.documentElement.scrollWidth")
        tab.open(f"{address}?{SMALL}", width=420)
        tab.wait("document.querySelector('[data-name=\"key-step\"]').innerText != '–'")
        tab.wait("innerWidth >= document.documentElement.scrollWidth")
        process.send_signal(signal.SIGINT)
        assert process.wait(30) in (0, 130)
    assert not _children(process.pid)


def _children(parent: int) -> list[str]:
    return [name for name in os.listdir("/proc") if name.isdecimal() and _parent(name) == parent]


def _parent(process: str) -> int | None:
    try:
        return int(Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[1])
    except OSError:
        return None

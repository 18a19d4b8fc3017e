"""A real Chromium without a screen, driven by Playwright; tests skip where there is none."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome")
# As root there is no sandbox; the others keep a browser from talking to its makers.
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync",
]  # fmt: skip


def find_browser() -> str:
    """The path of a browser; skips the test if there is none."""
    pytest.importorskip("playwright", reason="the browser tests need playwright")
    found = next((path for name in NAMES if (path := shutil.which(name))), None)
    if found is None:
        pytest.skip("the browser tests need Chromium: apt-get install chromium")
    return found


@contextmanager
def opened_browser() -> Iterator[Any]:
    """A browser for some pages."""
    path = find_browser()
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
        try:
            yield browser
        finally:
            browser.close()


class Page:
    """A report in a browser, with what it complains about and asks for.

    Attributes
    ----------
    page
        Playwright's page.
    complaints : list of str
        Errors and warnings of the console, and exceptions.
    requests : list of str
        Addresses that are not inside of the page itself.
    """

    def __init__(self, browser: Any, file: Path, width: int = 1280, height: int = 800, theme: str = "light"):
        viewport = {"width": width, "height": height}
        self.context = browser.new_context(viewport=viewport, color_scheme=theme, accept_downloads=True)
        self.page = self.context.new_page()
        self.complaints: list[str] = []
        self.requests: list[str] = []
        self.page.on("console", self._heard)
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self._asked(request.url, file))
        self.page.goto(file.as_uri())
        # Not by a function that is polled: the page forbids to evaluate strings.
        self.page.locator("#view-caption:not(:empty)").wait_for(state="attached")

    def _heard(self, message: Any) -> None:
        if message.type in ("error", "warning"):
            self.complaints.append(message.text)

    def _asked(self, url: str, file: Path) -> None:
        if not url.startswith(("data:", "blob:")) and url.partition("#")[0] != file.as_uri():
            self.requests.append(url)

    def picture(self) -> str:
        """What the image view shows, as a data URI."""
        shown: str = self.page.evaluate("document.getElementById('view').toDataURL()")
        return shown

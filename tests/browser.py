"""A real headless Chromium for tests of pages, driven by Playwright: the machine's own, never a downloaded one."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
FOUND = next((path for name in NAMES if (path := shutil.which(name))), None)


class Watched:
    """A page, and what went wrong in it: messages of the console, errors, and requests for anything but the page."""

    def __init__(self, page: Any, path: Path):
        self.page = page
        self.wrong: list[str] = []
        page.on("console", lambda message: self.wrong.append(f"console: {message.text}"))
        page.on("pageerror", lambda error: self.wrong.append(f"error: {error}"))
        page.on("dialog", self.asked_by_script)
        page.on("request", lambda request: self.asked(request.url, path))
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready=yes]")

    def asked(self, url: str, path: Path) -> None:
        if url != path.as_uri() and not url.startswith(("blob:", "data:")):
            self.wrong.append(f"request: {url}")

    def asked_by_script(self, dialog: Any) -> None:
        self.wrong.append(f"dialog: {dialog.message}")
        dialog.dismiss()

    def run(self, script: str) -> Any:
        return self.page.evaluate(script)


@pytest.fixture(scope="module")
def chromium() -> Iterator[Any]:
    """Skips where the machine has no Chromium."""
    if FOUND is None:
        pytest.skip(f"needs one of {', '.join(NAMES)}")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=FOUND, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


@contextmanager
def shown(browser: Any, path: Path, **context: Any) -> Iterator[Watched]:
    """The page in a window of its own (``context`` as Playwright's ``new_context``). Nothing may go wrong in it."""
    with browser.new_context(**({"viewport": {"width": 1400, "height": 900}} | context)) as window:
        watched = Watched(window.new_page(), path)
        yield watched
        assert watched.wrong == []

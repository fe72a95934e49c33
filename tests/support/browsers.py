"""Headless Chromium for tests of pages, where this machine has one."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from playwright.sync_api import Browser, Page, sync_playwright

NAMES = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable")
CHROMIUM = next(filter(None, map(shutil.which, NAMES)), None)

needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="there is no Chromium on this machine: apt-get install chromium"
)


@contextmanager
def chromium() -> Iterator[Browser]:
    """A browser; starting one takes a second or two."""
    assert CHROMIUM is not None
    with sync_playwright() as playwright:
        # A container's processes may not make the namespaces of Chromium's own sandbox.
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


@contextmanager
def opened(
    browser: Browser, *, width: int = 1280, height: int = 1000, dark: bool = False
) -> Iterator[Page]:
    """An empty page; afterwards, nothing may have been said on its console."""
    page = browser.new_page(
        viewport={"width": width, "height": height}, color_scheme="dark" if dark else "light"
    )
    found: list[str] = []
    page.on("pageerror", lambda error: found.append(str(error)))
    page.on("console", lambda message: found.append(message.text))
    yield page
    page.close()
    assert found == []

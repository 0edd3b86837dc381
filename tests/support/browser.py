"""A real browser, Debian's Chromium, driven by selenium; skipped where there is none."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import pytest
from selenium import webdriver
from selenium.webdriver.chrome.service import Service

from celery_pglock.cli import web
from tests.support.requirements import require

WINDOW: Final = (1500, 900)
# It asks nobody outside for anything.
_FLAGS: Final = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--disable-dev-shm-usage",
    "--hide-scrollbars",
    "--force-device-scale-factor=1",
    f"--window-size={WINDOW[0]},{WINDOW[1]}",
)


@contextmanager
def driving(profile: str) -> Iterator[webdriver.Chrome]:
    """Start a browser with an empty profile, and end it."""
    chromium, driver = shutil.which("chromium"), shutil.which("chromedriver")
    require(chromium and driver, "chromium and chromedriver (apt install chromium chromium-driver)")
    options = webdriver.ChromeOptions()
    options.binary_location = str(chromium)
    for flag in (*_FLAGS, f"--user-data-dir={profile}"):
        options.add_argument(flag)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL"})
    browser = webdriver.Chrome(options=options, service=Service(str(driver)))
    try:
        yield browser
    finally:
        browser.quit()


@pytest.fixture(scope="module")
def shared_browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[webdriver.Chrome]:
    """One browser for the tests of a module."""
    with driving(str(tmp_path_factory.mktemp("profile"))) as browser:
        yield browser


@pytest.fixture
def browser(shared_browser: webdriver.Chrome) -> Iterator[webdriver.Chrome]:
    """The browser, in light mode and of the same size; what it complains of fails the test."""
    shared_browser.set_window_size(*WINDOW)
    scheme(shared_browser, "light")
    shared_browser.get_log("browser")  # type: ignore[no-untyped-call]
    yield shared_browser
    complaints = shared_browser.get_log("browser")  # type: ignore[no-untyped-call]
    assert complaints == []


def scheme(browser: webdriver.Chrome, wanted: str) -> None:
    """Prefer light or dark colours."""
    feature = {"name": "prefers-color-scheme", "value": wanted}
    browser.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": [feature]})


class Site:
    """The page, served in this process by the server of `pglock web`.

    Attributes:
        url: where it is.
        requests: how many requests for the page were answered.
    """

    def __init__(self, page: Callable[..., Any]) -> None:
        self._page = page
        self.requests = 0
        self._server = self._bound(0)
        self._port = int(self._server.server_address[1])
        self.url = f"http://127.0.0.1:{self._port}/"
        self.start()

    def start(self) -> None:
        """Serve, at the same port again after `stop`."""
        if self._server is None:
            self._server = self._bound(self._port)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.05,))
        self._thread.start()

    def stop(self) -> None:
        """Serve no more."""
        if self._server is not None:
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()
            self._server = None

    def _bound(self, port: int) -> Any:
        server: Any = web._Server.bound("127.0.0.1", port)  # noqa: SLF001
        server.set_app(self._counted)
        return server

    def _counted(self, environ: Any, start_response: Any) -> Any:
        self.requests += environ["PATH_INFO"] == "/"
        return self._page(environ, start_response)


@contextmanager
def serving(page: Callable[..., Any]) -> Iterator[Site]:
    """Serve a page for the length of a block."""
    site = Site(page)
    try:
        yield site
    finally:
        site.stop()

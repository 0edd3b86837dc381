"""Take the screenshots of the documentation from a shop that runs: `make screenshots`.

Beats, a worker, PostgreSQL and Valkey are real, and so is what befalls them: for some seconds
nobody leads, and a console holds a lock. It takes two minutes.
"""

from __future__ import annotations

import contextlib
import io
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
from PIL import Image
from selenium.webdriver.common.by import By

from celery_pglock import keys, migrating
from celery_pglock.demo.servers import PostgresServer, ValkeyServer, children
from tests.support.browser import driving, scheme

HERE = Path(__file__).parent
PAGES = HERE.parent / "howto"
WIDTH, HEIGHT = 1480, 960
COLOURS = 96
PORT = 8788
LED, NOBODY, LED_AGAIN = 60.0, 14.0, 40.0  # seconds


@contextlib.contextmanager
def started(*arguments: str, log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start a command of the shop; end it with the block."""
    with log.open("ab") as output:
        process = subprocess.Popen(
            [sys.executable, "-m", "celery", "-A", "shop", *arguments],
            cwd=HERE, stdout=output, stderr=output,
        )  # fmt: skip
    try:
        yield process
    finally:
        process.send_signal(signal.SIGTERM)
        process.wait(20)


def main() -> None:
    """Let the shop run, and take both pictures."""
    with contextlib.ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        log = directory / "log"
        postgres = stack.enter_context(PostgresServer())
        valkey = stack.enter_context(ValkeyServer())
        os.environ["SHOP_DATABASE_URL"] = url = postgres.url()
        os.environ["SHOP_BROKER_URL"] = valkey.url()
        migrating.migrate(url)
        psql = stack.enter_context(psycopg.connect(url, autocommit=True, application_name="psql"))
        key = keys.from_name("shop", "task", "shop.send_newsletter")
        stack.enter_context(started("worker", "-P", "threads", "-c", "8", log=log))
        with started("beat", "-S", "pglock", "-s", str(directory / "b1"), log=log):
            time.sleep(LED / 2)
            psql.execute("select pg_advisory_lock(%s::bigint)", [key])
            time.sleep(LED / 2)
        time.sleep(NOBODY)
        for number in (2, 3):
            beat = ("beat", "-S", "pglock", "-s", str(directory / f"b{number}"))
            stack.enter_context(started(*beat, log=log))
        with started("pglock", "pause", "sync-warehouse", log=log):
            time.sleep(LED_AGAIN)
        web = stack.enter_context(started("pglock", "web", "--port", str(PORT), log=log))
        browser = stack.enter_context(driving(str(directory / "profile")))
        browser.set_window_size(WIDTH, HEIGHT)
        children.wait_until_ready(web, answers, log=log)
        for name in ("light", "dark"):
            scheme(browser, name)
            browser.get(f"http://127.0.0.1:{PORT}/")
            cell = browser.find_elements(By.CSS_SELECTOR, "td.c.skipped")[-2]
            browser.execute_script("arguments[0].focus({preventScroll: true})", cell)
            write(PAGES / f"page-{name}.png", browser.get_screenshot_as_png())


def answers() -> bool:
    """Whether the page is served."""
    try:
        socket.create_connection(("127.0.0.1", PORT), timeout=1).close()
    except OSError:
        return False
    return True


def write(file: Path, png: bytes) -> None:
    """Write a picture with few colours, which it has anyhow."""
    image = Image.open(io.BytesIO(png)).convert("RGB").quantize(COLOURS, dither=Image.Dither.NONE)
    image.save(file, optimize=True)
    print(f"{file.name}: {file.stat().st_size / 1000:.0f} kB")  # noqa: T201 - whoever calls it looks


if __name__ == "__main__":
    main()

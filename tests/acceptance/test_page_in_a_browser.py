"""The page in a real browser: cells, hover, keyboard, filter, refresh, dark mode."""

from __future__ import annotations

import html
import signal
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import celery
import psycopg
import pytest
from psycopg import sql
from selenium.webdriver import ActionChains, Chrome, Keys
from selenium.webdriver.common.by import By
from selenium.webdriver.remote.webelement import WebElement

from celery_pglock import keys, page
from celery_pglock.page import grid, rendering
from tests.support.browser import Site, scheme, serving
from tests.support.commands import pglock
from tests.support.databases import Database
from tests.support.history import History
from tests.support.processes import eventually
from tests.support.servers import TestedPostgres
from tests.support.stage import APP, MakeStage

NAMESPACE = "shop"
STATES = ["done", "failed", "skipped", "missed", "retrying", "sent"]


@pytest.fixture
def history(database: Database) -> History:
    """Twelve jobs of six periods, each with another state in the end; the last one is held."""
    history = History(database.url, NAMESPACE)
    for number in range(12):
        name = f"job-{number:02}"
        history.entry(name)
        for period in range(6):
            history.row(name, "done" if period else STATES[number % 6], 30 + 60 * period)
    return history


@pytest.fixture
def app(database: Database) -> celery.Celery:
    app = celery.Celery(NAMESPACE, broker="memory://", set_as_current=False)
    app.conf.update(pglock_database_url=database.url, timezone="Europe/Berlin")
    return app


@pytest.fixture
def site(app: celery.Celery, browser: Chrome, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    """The page, which asks for news five times a second; left by the browser before it ends."""
    monkeypatch.setattr(rendering, "REFRESH_SECONDS", 0.2)
    with serving(page.wsgi(app)) as site:
        yield site
        browser.get("about:blank")


def cells(browser: Chrome, job: str) -> list[WebElement]:
    return browser.find_elements(By.CSS_SELECTOR, f'tr[data-job="{job}"] td.c')


def shown_jobs(browser: Chrome) -> list[str]:
    script = "return [...document.querySelectorAll('#jobs tr')].filter(r => r.offsetParent !== null).map(r => r.dataset.job)"
    found: list[str] = browser.execute_script(script)
    return found


def details(browser: Chrome) -> str:
    """Return the text beside the cell, or nothing."""
    return browser.find_element(By.ID, "details").text


def active(browser: Chrome) -> str:
    """Return what a screen reader says of the element that has the focus."""
    return str(browser.switch_to.active_element.get_attribute("aria-label"))


def state_of(cell: WebElement) -> str:
    return str(cell.get_attribute("class")).split()[1]


def script(browser: Chrome, text: str, *arguments: object) -> Any:
    return browser.execute_script(text, *arguments)


def test_cells_tell_on_hover(browser: Chrome, site: Site, history: History) -> None:
    history.row("job-01", "failed", 5, error="KeyError: 'x'", reason="error")
    browser.get(site.url)
    assert details(browser) == ""
    found = cells(browser, "job-01")
    assert [state_of(cell) for cell in found] == ["done"] * 5 + ["failed", "failed", "next"]
    assert [cell.text for cell in found[-3:]] == ["✕", "✕", ""]
    ActionChains(browser).move_to_element(found[-2]).perform()
    lines = details(browser).splitlines()
    assert lines[0] == "job-01"
    assert lines[2:4] == ["failed in 2 s (KeyError)", "error"]
    ActionChains(browser).move_to_element(found[0]).perform()
    assert "done in 2 s" in details(browser)
    ActionChains(browser).move_to_element(browser.find_element(By.TAG_NAME, "h1")).perform()
    assert details(browser) == ""


def test_every_cell_is_reached_by_the_keyboard(
    browser: Chrome, site: Site, history: History
) -> None:
    browser.get(site.url)
    pause(browser)
    browser.find_element(By.ID, "state").send_keys(Keys.TAB)
    press = browser.switch_to
    due = [label(cell) for cell in cells(browser, "job-00")]
    below = [label(cell) for cell in cells(browser, "job-01")]
    if active(browser) != due[-1]:  # the scrolling area takes the focus first
        browser.switch_to.active_element.send_keys(Keys.TAB)
    assert active(browser) == due[-1]
    assert details(browser).splitlines()[2] == "not due yet"
    moves = [
        (Keys.ARROW_LEFT, due[-2]),
        (Keys.ARROW_DOWN, below[-2]),
        (Keys.HOME, below[0]),
        (Keys.ARROW_LEFT, below[0]),
        (Keys.ARROW_RIGHT, below[1]),
        (Keys.ARROW_UP, due[1]),
        (Keys.END, due[-1]),
    ]
    for key, expected in moves:
        press.active_element.send_keys(key)
        assert active(browser) == expected
        assert details(browser).splitlines()[1] == expected.splitlines()[0]
    press.active_element.send_keys(Keys.ESCAPE)
    assert details(browser) == ""
    press.active_element.send_keys(Keys.TAB)  # one stop for the whole grid
    assert script(browser, "return document.activeElement.closest('#jobs')") is None
    del history


def test_a_screen_reader_finds_a_grid_with_names(
    browser: Chrome, site: Site, history: History
) -> None:
    browser.get(site.url)
    pause(browser)
    tree = browser.execute_cdp_cmd("Accessibility.getFullAXTree", {})["nodes"]
    said: dict[str, list[str]] = {}
    for node in tree:
        if not node.get("ignored"):
            role, name = node["role"]["value"], node.get("name", {}).get("value", "")
            said.setdefault(role, []).append(name)
    assert said["grid"] == ["Jobs and their periods"]
    assert [name for name in said["rowheader"] if name.startswith("job-00")]
    assert any("\ndone in 2 s" in name or " done in 2 s" in name for name in said["gridcell"])
    assert "Job" in said["searchbox"]
    assert "State any" in said.get("combobox", []) or "State" in said["combobox"]
    assert said["button"] == ["Pause updates"]
    unnamed = script(
        browser, "return [...document.querySelectorAll('td.c')].filter(c => !c.ariaLabel).length"
    )
    assert unnamed == 0
    del history


def test_the_filter_by_job_and_by_state(browser: Chrome, site: Site, history: History) -> None:
    browser.get(site.url)
    everything = shown_jobs(browser)
    assert len(everything) == 12
    job, state = browser.find_element(By.ID, "job"), browser.find_element(By.ID, "state")
    job.send_keys("-1")
    assert shown_jobs(browser) == ["job-10", "job-11"]
    assert browser.find_element(By.ID, "shown").text == "2 of 12 jobs"
    job.send_keys(Keys.BACKSPACE, Keys.BACKSPACE)
    assert shown_jobs(browser) == everything
    state.send_keys("failed")
    assert shown_jobs(browser) == ["job-01", "job-07"]
    dimmed = [
        cell for cell in cells(browser, "job-01") if "dim" in str(cell.get_attribute("class"))
    ]
    assert len(dimmed) == 6
    # In the address, so that it outlives a reload and can be sent to somebody.
    assert browser.current_url.endswith("#state=failed")
    browser.refresh()
    assert shown_jobs(browser) == ["job-01", "job-07"]
    del history


def test_news_come_without_a_reload_and_disturb_nobody(
    browser: Chrome, site: Site, history: History
) -> None:
    browser.set_window_size(700, 320)  # so that there is something to scroll
    for period in range(6, 12):  # so that the table grows no columns
        history.row("job-00", "done", 30 + 60 * period)
    browser.get(site.url)
    script(browser, "window.loaded = 'once'")
    browser.find_element(By.ID, "job").send_keys("job-0")
    target = cells(browser, "job-07")[2]
    script(browser, "arguments[0].focus()", target)
    focused, told = active(browser), details(browser)
    untouched = cells(browser, "job-03")[0]
    scrolled = script(browser, "return [scrollY, document.getElementById('grid').scrollLeft]")
    assert scrolled[0] > 0
    history.row("job-07", "failed", 1)
    history.row("brand-new", "skipped", 1, reason="lock is held by psql")
    eventually(lambda: len(cells(browser, "job-07")) == 8, what="the new period is shown")
    assert script(browser, "return window.loaded") == "once"
    assert (active(browser), details(browser)) == (focused, told)
    assert browser.find_element(By.ID, "job").get_attribute("value") == "job-0"
    assert (
        script(browser, "return [scrollY, document.getElementById('grid').scrollLeft]") == scrolled
    )
    assert "brand-new" not in shown_jobs(browser)  # by the filter
    assert untouched.is_enabled()  # not stale: a row without news is left alone
    # The two rows may have come with two looks.
    eventually(lambda: "lock is held by psql" in text(browser, ".skips"), what="the skip is shown")
    browser.find_element(By.ID, "job").clear()
    browser.find_element(By.ID, "job").send_keys(Keys.SPACE)
    assert shown_jobs(browser)[0] == "brand-new"  # in its place


def test_it_says_when_nobody_answers_and_goes_on_when_somebody_does(
    browser: Chrome,
    site: Site,
    history: History,
    database: Database,
    postgres_server: TestedPostgres,
) -> None:
    browser.get(site.url)
    problem = browser.find_element(By.ID, "problem")
    assert not problem.is_displayed()
    site.stop()
    eventually(lambda: "The server does not answer. What is shown is from" in problem.text)
    assert len(cells(browser, "job-00")) == 7  # what was there is still there
    site.start()
    eventually(lambda: not problem.is_displayed(), what="it answers again")
    with psycopg.connect(postgres_server.url(), autocommit=True) as admin:
        query = sql.SQL("alter database {} with allow_connections {}")
        name = sql.Identifier(database.name)
        admin.execute(query.format(name, False))  # noqa: FBT003 - a word of SQL
        eventually(lambda: "is not currently accepting connections" in problem.text)
        browser.refresh()  # somebody who comes only now sees the same, and nothing else
        problem = browser.find_element(By.ID, "problem")
        assert "is not currently accepting connections" in problem.text
        assert shown_jobs(browser) == []
        admin.execute(query.format(name, True))  # noqa: FBT003
    eventually(lambda: len(shown_jobs(browser)) == 12, what="the jobs are there")
    assert not problem.is_displayed()
    # The browser notes that nobody answered, and the 503.
    assert browser.get_log("browser")  # type: ignore[no-untyped-call]
    del history


def test_a_tab_that_nobody_sees_asks_nothing(browser: Chrome, site: Site) -> None:
    browser.get(site.url)
    eventually(lambda: site.requests > 2, what="it asks")
    seen = browser.current_window_handle
    browser.switch_to.new_window("tab")
    try:
        before = settled(lambda: site.requests)
        assert before
        browser.switch_to.window(seen)
        eventually(lambda: site.requests > before, what="it asks again, once it is seen")
        pause(browser)
        assert settled(lambda: site.requests)  # nor does a page that was told not to
    finally:
        browser.switch_to.window(next(each for each in browser.window_handles if each != seen))
        browser.close()
        browser.switch_to.window(seen)


def settled(ask: Callable[[], int]) -> int:
    """Wait until a number has not changed for five times the interval of the page."""
    import time

    found, since = ask(), time.monotonic()

    def unchanged() -> bool:
        nonlocal found, since
        if (now := ask()) != found:
            found, since = now, time.monotonic()
        return time.monotonic() - since > 1.0

    eventually(unchanged, what="the number stays")
    return found


CONTRAST = """
const rgb = (text) => text.match(/[\\d.]+/g).slice(0, 3).map(Number);
const light = (c) => { const [r, g, b] = c.map((v) => (v /= 255) <= .03928 ? v / 12.92
  : ((v + .055) / 1.055) ** 2.4); return .2126 * r + .7152 * g + .0722 * b; };
const ratio = (a, b) => { const [x, y] = [light(a), light(b)].sort((p, q) => q - p);
  return (x + .05) / (y + .05); };
const page = rgb(getComputedStyle(document.body).backgroundColor);
return [...document.querySelectorAll('.legend .c, .legend li, h1, h1 small, dt, dd')].map((e) => {
  const style = getComputedStyle(e), own = rgb(style.backgroundColor);
  const back = /^rgba.*, 0\\)$/.test(style.backgroundColor) ? page : own;
  return [e.className || e.tagName, ratio(rgb(style.color), back)]; });
"""


def test_light_and_dark_are_both_readable(browser: Chrome, site: Site, history: History) -> None:
    browser.get(site.url)
    background = {}
    for wanted in ("light", "dark"):
        scheme(browser, wanted)
        background[wanted] = script(
            browser, "return getComputedStyle(document.body).backgroundColor"
        )
        found = script(browser, CONTRAST)
        assert len(found) > len(grid.STATES)
        assert [pair for pair in found if pair[1] < 4.5 and pair[0] != "c next"] == []
    assert background["light"] == "rgb(255, 255, 255)"
    assert background["dark"] != background["light"]
    del history


def test_nothing_is_asked_of_anybody_else(browser: Chrome, site: Site, history: History) -> None:
    browser.get(site.url)
    eventually(lambda: site.requests > 2)
    names = "return performance.getEntriesByType('resource').map(e => e.name)"
    assert {name.split("?")[0] for name in script(browser, names)} == {site.url}
    del history


def test_a_written_page_works_alone(
    browser: Chrome, app: celery.Celery, history: History, tmp_path: Path
) -> None:
    tmp_path.chmod(0o755)
    file = tmp_path / "page.html"
    assert pglock(app, "web", "-o", str(file)).code == 0
    browser.get(file.as_uri())
    browser.find_element(By.ID, "state").send_keys("skipped")
    assert shown_jobs(browser) == ["job-02", "job-08"]
    script(browser, "arguments[0].focus()", cells(browser, "job-02")[-2])
    assert "skipped" in details(browser)
    assert browser.find_elements(By.ID, "pause") == []
    del history


# How long the page stood still: the gaps between two frames, which come 60 times a second.
FRAMES = """
window.gaps = [];
let last = performance.now();
const frame = (now) => { window.gaps.push(now - last); last = now; requestAnimationFrame(frame); };
requestAnimationFrame(frame);
"""
BUSY = "const until = performance.now() + 400; while (performance.now() < until);"
MANY = """
insert into pglock.job_runs (job, period, due_at, status, attempts, name_key, node, started_at,
 finished_at)
select 'shop:many-' || to_char(job, 'FM000'), to_char(due at time zone 'utc',
 'YYYY-MM-DD"T"HH24:MI:SS.US"+00:00"'), due, 'done', 1, job, 'celery@web1:4711', due, due
from (select job, period, now() - period * interval '1 min' as due
 from generate_series(1, 200) as job, generate_series(1, 60) as period) as t
"""


@pytest.mark.slow
def test_200_jobs_of_60_periods_stay_fluent(
    browser: Chrome, app: celery.Celery, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(rendering, "REFRESH_SECONDS", 1)
    database.rows(MANY)
    history = History(database.url, NAMESPACE)
    with serving(page.wsgi(app)) as site:
        browser.get(site.url)
        assert len(browser.find_elements(By.CSS_SELECTOR, "td.c")) == 12_000
        eventually(lambda: site.requests >= 3, 30)  # the first look takes every row for new
        script(browser, FRAMES)
        script(browser, BUSY)
        eventually(lambda: worst(browser) > 350, what="the control: a page that stands still")
        script(browser, "window.gaps.length = 0")
        for number in range(1, 6):
            job = f"many-00{number}"
            history.row(job, "failed", -number)
            eventually(partial(in_the_end, browser, job, "failed"), 30)
        stood = worst(browser)
        begun = script(browser, "return performance.now()")
        browser.find_element(By.ID, "job").send_keys("many-12")
        assert len(shown_jobs(browser)) == 10
        filtered = script(browser, "return performance.now()") - begun
        browser.get("about:blank")
    print(
        f"\n200 jobs x 60 periods: in 5 refreshes the page stood still for {stood:.0f} ms at most;"
        f" 7 letters typed and filtered in {filtered:.0f} ms"
    )
    # Beside other tests a browser that gets no frame from its compositor makes one each second.
    assert stood < 2000


def worst(browser: Chrome) -> float:
    return float(script(browser, "return Math.max(0, ...window.gaps)"))


def in_the_end(browser: Chrome, job: str, state: str) -> bool:
    cell = f"[...document.querySelectorAll('tr[data-job=\"{job}\"] td.c')].at(-1)"
    return bool(script(browser, f"return {cell}.classList.contains('{state}')"))


def pause(browser: Chrome) -> None:
    browser.find_element(By.ID, "pause").click()


def text(browser: Chrome, selector: str) -> str:
    """Return a text of the page, in one step: found first, its element may be another by then."""
    return str(script(browser, f"return document.querySelector({selector!r}).textContent"))


def label(cell: WebElement) -> str:
    return str(cell.get_attribute("aria-label"))


@pytest.mark.slow
def test_it_follows_beats_and_workers_that_really_run(
    browser: Chrome, make_stage: MakeStage, database: Database
) -> None:
    stage = make_stage({"often": 1.0, "held": 1.0})
    stage.worker()
    beats = [stage.beat(), stage.beat()]
    leader = stage.leader(beats)
    blocker = database.connect(application_name="psql of somebody")
    blocker.execute("select pg_advisory_lock(%s)", [keys.from_name("stage", "task", "stage:held")])
    web = stage.processes.celery(APP, "pglock", "web", "--port", "0", env=stage.env(), name="web")
    url = web.wait_for_line(r"at (http://\S+)")[1]
    browser.get(url)
    assert f":{leader.pid}, term 1" in facts_of(browser)
    standby = next(beat for beat in beats if beat is not leader)
    eventually(lambda: f":{standby.pid}" in facts_of(browser), 20)
    leader.kill()
    eventually(
        lambda: f":{standby.pid}, term 2" in facts_of(browser), 30, "the page tells the new leader"
    )
    stage.wait_for_runs(3)
    eventually(lambda: has(browser, "often", "done"), 30)
    assert "psql of somebody" in text(browser, 'tr[data-job="held"]')
    browser.get("about:blank")
    web.send(signal.SIGTERM)
    assert web.wait() == 0
    assert web.output().splitlines()[-1] == "ended"


def facts_of(browser: Chrome) -> str:
    facts = script(browser, "return document.querySelector('[data-part=beats]').innerText")
    return html.unescape(str(facts))


def has(browser: Chrome, job: str, state: str) -> bool:
    return bool(
        script(browser, f"return !!document.querySelector('tr[data-job=\"{job}\"] td.{state}')")
    )

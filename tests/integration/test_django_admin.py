"""The admin over real rows: what it shows, what it asks the server, what its actions do."""

from __future__ import annotations

import datetime as dt
import itertools
import re
from typing import Any

import celery
import pytest

from celery_pglock import plans
from tests.support.databases import Database
from tests.support.queued import queued

RUNS = "/admin/celery_pglock/jobrun/"
SEPARATOR = "\u241f"
ENTRIES = "/admin/celery_pglock/beatentry/"
pytestmark = pytest.mark.usefixtures("filled")

SECRET = "tops3cret"
_NAMES = itertools.count(1)


@pytest.fixture
def filled(site: celery.Celery, shared_site_database: Database) -> Database:
    """A database with runs and entries of this application, and of another."""
    assert site.main == "site"
    database = shared_site_database
    database.rows("TRUNCATE pglock.job_runs, pglock.beat_entries")
    for number in range(60):
        database.rows(
            "INSERT INTO pglock.job_runs (job, period, status, due_at, started_at, finished_at,"
            " attempts, reason, error, task_id) VALUES (%s, %s, %s, now() - make_interval(mins =>"
            " %s), now(), now() + interval '2.5 s', 1, %s, %s, 'id')",
            f"site:job{number % 3}",
            f"p/{number}",
            "failed" if number % 2 else "done",
            number,
            "error" if number % 2 else None,
            "ValueError: it failed" if number % 2 else None,
        )
    database.rows(
        "INSERT INTO pglock.job_runs (job, period, status) VALUES ('else:job', 'p', 'done')"
    )
    for namespace in ("site", "else"):
        database.rows(
            "INSERT INTO pglock.beat_entries (namespace, entry, task, schedule, definition, anchor)"
            " VALUES (%s, 'hourly', 'books.save', 'every 3600 s', to_jsonb(%s::text), now())",
            namespace,
            SECRET,
        )
    return database


def browse(*permissions: str) -> Any:
    """Return a browser in which a user is logged in: with these permissions, or with all."""
    from django.contrib.auth.models import Permission, User
    from django.test import Client

    user = User.objects.create_user(
        f"user{next(_NAMES)}", is_staff=True, is_superuser=not permissions
    )
    user.user_permissions.set(Permission.objects.filter(codename__in=permissions))
    client = Client()
    client.force_login(user)
    return client


def link_in(page: str, place: str) -> str:
    found = re.search(f'href="{place}([^"]+/change/)', page)
    assert found is not None, page
    return place + found[1]


def text_of(response: Any) -> str:
    assert response.status_code == 200, response
    return str(response.content.decode())


def test_the_runs_are_shown_by_job_and_status() -> None:
    client = browse()
    page = text_of(client.get(RUNS))
    assert page.count("site:job") >= 50
    assert "else:job" not in page
    assert "2.5" in page
    page = text_of(client.get(f"{RUNS}?status__exact=failed&job=site:job1"))
    assert "10 runs" in page
    assert "p/1<" in page
    assert "p/4<" not in page, "of that job, and done"


def test_a_run_is_found_by_its_link_and_nothing_can_be_changed(filled: Database) -> None:
    from celery_pglock.contrib.django.models import JobRun

    client = browse()
    link = link_in(text_of(client.get(f"{RUNS}?q=p/1")), RUNS)
    page = text_of(client.get(link))
    assert "ValueError: it failed" in page
    assert 'name="_save"' not in page
    for path in (f"{RUNS}add/", link.replace("change", "delete")):
        assert client.get(path).status_code == 403
    row = JobRun.objects.get(pk=f"site:job1{SEPARATOR}p/1")
    for change in (row.save, row.delete):
        with pytest.raises(TypeError, match="are read here and not written"):
            change()
    assert filled.rows("SELECT count(*) FROM pglock.job_runs") == [(61,)]


def test_a_run_is_looked_up_by_the_index_of_job_and_period(filled: Database) -> None:
    from celery_pglock.contrib.django.models import JobRun

    filled.rows("ANALYZE pglock.job_runs")
    filled.rows(f"ALTER DATABASE {filled.name} SET enable_seqscan = off")
    try:
        from django.db import connection

        connection.close()
        plan = JobRun.objects.filter(pk=f"site:job1{SEPARATOR}p/1").explain()
    finally:
        filled.rows(f"ALTER DATABASE {filled.name} RESET enable_seqscan")
        connection.close()
    assert "Index Cond: ((job = 'site:job1'::text) AND (period = 'p/1'::text))" in plan


def test_a_page_of_runs_costs_the_same_however_many_there_are(filled: Database) -> None:
    from django.db import connection
    from django.test.utils import CaptureQueriesContext

    client = browse()
    counts = []
    for _ in range(2):
        with CaptureQueriesContext(connection) as captured:
            text_of(client.get(RUNS))
        counts.append(len(captured))
        filled.rows("DELETE FROM pglock.job_runs WHERE period NOT IN ('p/1', 'p/2')")
    assert counts[0] == counts[1] <= 8


def test_no_argument_of_a_message_is_shown() -> None:
    client = browse()
    page = text_of(client.get(ENTRIES))
    assert page.count("books.save") == 1
    for text in (page, text_of(client.get(link_in(page, ENTRIES)))):
        assert "hourly" in text
        assert SECRET not in text


def act(client: Any, action: str) -> str:
    data = {"action": action, "_selected_action": [f"site{SEPARATOR}hourly"]}
    page = text_of(client.post(ENTRIES, data, follow=True))
    (told,) = re.findall(r'<ul class="messagelist">(.*?)</ul>', page, re.DOTALL) or [""]
    return str(told)


def test_an_entry_is_paused_and_resumed(filled: Database) -> None:
    query = "SELECT paused_until, paused_reason FROM pglock.beat_entries WHERE namespace = 'site'"
    client = browse()
    assert "Paused: hourly" in act(client, "pause")
    assert "until resumed; by user" in text_of(client.get(ENTRIES))
    ((until, reason),) = filled.rows(query)
    assert until == plans.FOREVER
    assert reason.endswith(": in the admin")
    assert "Resumed: hourly" in act(client, "resume")
    ((until, reason),) = filled.rows(query)
    assert (until <= dt.datetime.now(dt.UTC), reason) == (True, None)
    logged = filled.rows(
        "SELECT change_message FROM django_admin_log WHERE object_repr = 'hourly' ORDER BY id"
    )
    assert [message for (message,) in logged][-2:] == ["Paused.", "Resumed."]


def test_an_entry_is_triggered(
    filled: Database, site: celery.Celery, fresh_redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # By the name of Django's setting: before Celery 5.7 that wins over the plain one.
    changes: Any = site.conf.changes
    monkeypatch.setitem(changes, "CELERY_BROKER_URL", fresh_redis_url)
    monkeypatch.setattr(site, "_pool", None)
    page = act(browse(), "trigger")
    assert "Triggered: hourly" in page
    ((status, reason, task_id),) = filled.rows(
        "SELECT status, reason, task_id FROM pglock.job_runs WHERE job = 'site:hourly'"
    )
    assert status == "sent"
    assert reason.startswith("triggered by user")
    (message,) = queued(fresh_redis_url, "site")
    assert (message.entry, message.task_id) == ("hourly", task_id)


def test_who_may_only_look_cannot_act(filled: Database) -> None:
    client = browse("view_beatentry", "view_jobrun")
    assert "hourly" in text_of(client.get(ENTRIES))
    assert "Paused: hourly" not in act(client, "pause")
    assert filled.rows("SELECT count(paused_until) FROM pglock.beat_entries") == [(0,)]
    # The control: with the right to change them he can.
    assert "Paused: hourly" in act(browse("view_beatentry", "change_beatentry"), "pause")

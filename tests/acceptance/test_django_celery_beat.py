"""`celery beat -S pglock-django`: django-celery-beat's entries, sent by one beat of many."""

from __future__ import annotations

import datetime as dt
import functools
import random
import time
from collections.abc import Callable, Iterator

import pytest
import redis

from tests.support.databases import _database
from tests.support.django_entries import APP, Entries
from tests.support.processes import Process, Processes, eventually
from tests.support.servers import TestedPostgres
from tests.support.stage import MakeStage, Stage

# How often django-celery-beat's own scheduler looks for changes, in seconds.
REFRESH = 5

ENVIRONMENT = ("APP_BROKER_URL", "APP_NAMESPACE", "APP_QUEUE")
MakeEntries = Callable[..., Entries]


@pytest.fixture(scope="module")
def django_template(
    postgres_server: TestedPostgres,
    template_database: str,
    shared_processes: Processes,
) -> Iterator[str]:
    """The name of a database that has django-celery-beat's tables too."""
    with _database(postgres_server, template=template_database) as template:
        env = {**dict.fromkeys(ENVIRONMENT, "-"), "APP_DATABASE_URL": template.url}
        made = shared_processes.python("-m", APP, env=env, name="migrate")
        assert made.wait(90) == 0, made.output()
        yield template.name


@pytest.fixture
def make_entries(
    postgres_server: TestedPostgres, django_template: str, make_stage: MakeStage
) -> Iterator[MakeEntries]:
    with _database(postgres_server, template=django_template) as database:

        def make(entries: dict[str, float], **given: object) -> Entries:
            made = Entries(make_stage(entries, app=APP, url=database.url, **given))
            for name, seconds in entries.items():
                made.add(name, int(seconds))
            return made

        yield make


def _beat(stage: Stage, refresh: int = 1) -> Process:
    given = [] if refresh == REFRESH else ["--max-interval", str(refresh)]
    beat = stage.beat(*given, scheduler="pglock-django")
    beat.wait_for_line("standby: |leadership gained: ", 60)
    return beat


def _end(stage: Stage, beats: list[Process]) -> int:
    for beat in beats:
        beat.terminate()
        assert beat.wait() == 0
    return stage.expect_each_once()


@pytest.mark.slow
@pytest.mark.parametrize("kills", [2, pytest.param(30, marks=pytest.mark.chaos)])
@pytest.mark.timeout(500)
def test_a_killed_leader_is_replaced_and_each_occurrence_of_an_entry_runs_once(
    make_entries: MakeEntries, kills: int
) -> None:
    entries = make_entries({"one": 1, "two": 1})
    stage = entries.stage
    stage.worker()
    beats = [_beat(stage), _beat(stage)]
    pace = random.Random(7)  # noqa: S311 - not for secrets
    for _ in range(kills):
        leader = stage.leader(beats)
        term = stage.term()
        ran = len(stage.rows("SELECT 1 FROM ran"))
        stage.wait_for_runs(ran + 2)
        time.sleep(pace.uniform(0.0, 1.0))
        leader.kill()
        beats.remove(leader)
        stage.leader(beats, not_before_term=term + 1)
        beats.append(_beat(stage))
    count = _end(stage, beats)
    print(f"\n{kills} kills, {count} occurrences, each once")
    assert count > 2 * kills
    for name in ("one", "two"):
        _, last_run_at, total = entries.row(name)
        ((latest, runs),) = stage.rows("SELECT max(due), count(*) FROM ran WHERE entry = %s", name)
        # What the admin shows is written back when a beat stops; those that were killed did not.
        assert abs(last_run_at - latest) < dt.timedelta(seconds=2)
        assert 0 < total <= runs


def test_without_the_gate_two_beats_send_all_twice(make_entries: MakeEntries) -> None:
    """The control: the same under django-celery-beat's own scheduler, of what is to run once."""
    entries = make_entries({})
    stage = entries.stage
    stage.extra["APP_CONFIGURED"] = '{"configured": 1}'
    stage.worker()
    beats = [stage.beat("--max-interval", "1", scheduler="django") for _ in range(2)]
    for beat in beats:
        beat.wait_for_line("Sending due task configured", 60)
    # Both write as soon as they are started.
    assert "configured" in entries.names()
    entries.add("clocked", at=dt.datetime.now(dt.UTC) + dt.timedelta(seconds=5), one_off=True)
    eventually(
        lambda: len(stage.rows("SELECT 1 FROM ran WHERE entry = 'clocked'")) == 2,
        30,
        "it runs twice",
    )


@pytest.mark.parametrize("refresh", [1, pytest.param(REFRESH, marks=pytest.mark.chaos)])
def test_what_is_edited_in_the_database_is_taken_up_while_it_leads(
    make_entries: MakeEntries, refresh: int
) -> None:
    entries = make_entries({"stays": 1, "goes": 1})
    stage = entries.stage
    stage.worker()
    beats = [_beat(stage, refresh), _beat(stage, refresh)]
    stage.wait_for_runs(4)

    entries.add("comes", 1)
    entries.edit("goes", enabled=False)
    entries.edit("stays", kwargs='{"edited": true}')
    asked = time.monotonic()
    eventually(
        lambda: stage.rows("SELECT 1 FROM ran WHERE entry = 'comes'"),
        refresh + 5,
        "a new entry runs",
    )
    took = time.monotonic() - asked
    print(f"\ntaken up and run after {took:.1f} s")

    # It was taken out by the same look; what was on its way has arrived by now.
    def runs(name: str) -> int:
        return int(stage.rows("SELECT count(*) FROM ran WHERE entry = %s", name)[0][0])

    gone, come = runs("goes"), runs("comes")
    eventually(lambda: runs("comes") >= come + 2, 20, "two more runs of the new one")
    assert runs("goes") <= gone + 1
    entries.set_interval("comes", 60)
    stay = runs("stays")
    eventually(lambda: runs("stays") >= stay + refresh + 2, 20, "it has been looked at")
    come = runs("comes")
    eventually(lambda: runs("stays") >= stay + refresh + 4, 20, "two more runs of another")
    assert runs("comes") == come
    stage.entries = {"stays": 1}
    assert _end(stage, beats) >= 10
    messages = [beat.output() for beat in beats]
    assert not any("Traceback" in output for output in messages)


def test_a_standby_writes_nothing_and_a_leader_writes_what_is_configured(
    make_entries: MakeEntries,
) -> None:
    entries = make_entries({"one": 1})
    stage = entries.stage
    first = _beat(stage)
    stage.leader([first])
    stage.extra["APP_CONFIGURED"] = '{"configured": 60}'

    def state() -> list[object]:
        return stage.rows(
            "SELECT (SELECT max(last_update) FROM django_celery_beat_periodictasks),"
            " (SELECT array_agg(name ORDER BY name) FROM django_celery_beat_periodictask),"
            " (SELECT max(id) FROM django_celery_beat_intervalschedule)"
        )

    before = state()
    second = _beat(stage)
    second.wait_for_line("standby: ")
    polls: set[object] = set()

    def polled_again() -> bool:
        polls.update(
            stage.rows(
                "SELECT pid, query_start FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name LIKE 'pglock:standby:%%'"
            )
        )
        return len(polls) > 3

    eventually(polled_again, 20, "it has polled several times")
    assert state() == before
    first.kill()
    stage.leader([second], not_before_term=2)
    eventually(lambda: "configured" in entries.names(), 10, "the new leader has written it")
    second.terminate()
    assert second.wait() == 0


def test_one_run_entries_start_and_end_times(make_entries: MakeEntries) -> None:
    """`one_off`, clocked, `start_time` and `expires` mean what they mean to its own scheduler."""
    entries = make_entries({})
    stage = entries.stage
    stage.worker()
    second = dt.timedelta(seconds=1)
    # Nobody was there when it was to be.
    entries.add("clocked-before", at=dt.datetime.now(dt.UTC) - 60 * second, one_off=True)
    beats = [_beat(stage), _beat(stage)]
    stage.leader(beats)
    # Taken up within a second, and before any of it is due.
    now = dt.datetime.now(dt.UTC)
    entries.add("once", 1, one_off=True)
    entries.add("clocked", at=now + 6 * second, one_off=True)
    entries.add("from", 2, start_time=now + 6 * second)
    entries.add("until", 1, expires=now + 8 * second)

    def dues(name: str) -> list[dt.datetime]:
        rows = stage.rows("SELECT due FROM ran WHERE entry = %s ORDER BY due", name)
        return [due for (due,) in rows]

    def ended(name: str) -> bool:
        return entries.row(name)[0] is False

    eventually(lambda: len(dues("from")) >= 2, 40, "it has started")
    eventually(lambda: entries.row("until")[0] is False, 20, "what has expired is switched off")
    for name in ("once", "clocked", "clocked-before"):
        assert len(dues(name)) == 1, name
        eventually(functools.partial(ended, name), 10, f"{name} is switched off")
    assert dues("clocked") == [now + 6 * second]
    assert dues("from")[:2] == [now + (6 + 2 * k) * second for k in range(2)]
    assert dues("until")
    assert max(dues("until")) < now + 8 * second

    for beat in beats:
        beat.terminate()
        assert beat.wait() == 0
        assert "Traceback" not in beat.output()


@pytest.mark.chaos
def test_an_only_run_whose_message_is_lost_is_sent_again(make_entries: MakeEntries) -> None:
    """Although its entry has been switched off; and it is the first entry ever."""
    entries = make_entries({})
    stage = entries.stage
    stage.settings = {"pglock_rescue_sent_after": 1.0}
    beat = _beat(stage)
    entries.add("once", 1, one_off=True)
    eventually(lambda: entries.row("once")[0] is False, 20, "it is sent and switched off")
    with redis.Redis.from_url(stage.broker) as broker:
        assert broker.delete(stage.queue) == 1
    stage.worker()
    stage.wait_for_runs(1, timeout=60)
    beat.terminate()
    assert beat.wait() == 0
    ((status,),) = stage.rows("SELECT status FROM pglock.job_runs")
    assert status == "done"


@pytest.mark.chaos
def test_an_only_run_that_is_switched_on_again_runs_once_more(make_entries: MakeEntries) -> None:
    entries = make_entries({"always": 1})
    stage = entries.stage
    stage.worker()
    beat = _beat(stage)
    entries.add("once", 1, one_off=True)

    def runs(name: str) -> int:
        return int(stage.rows("SELECT count(*) FROM ran WHERE entry = %s", name)[0][0])

    for times in (1, 2):
        eventually(lambda: entries.row("once")[0] is False, 20, "it is sent and switched off")
        passed = runs("always")
        eventually(lambda passed=passed: runs("always") > passed + 3, 20, "time passes")  # type: ignore[misc]
        assert runs("once") == times
        entries.edit("once", enabled=True)
    beat.terminate()
    assert beat.wait() == 0

"""The history of the chaos test: what is written is there, in its order, whoever dies or forks."""

from __future__ import annotations

import os
from pathlib import Path

import psycopg
import pytest

from tests.chaos import history
from tests.support.databases import Database


@pytest.fixture
def place(blank_database: Database, tmp_path: Path) -> Path:
    """Where the files are; the tables are in the database."""
    blank_database.rows(history.TABLES.decode())
    return tmp_path


def _rows(database: Database) -> list[history.Event]:
    with psycopg.connect(database.url, autocommit=True) as connection:
        return history.read(connection)


def test_each_event_is_written_twice_and_numbered(blank_database: Database, place: Path) -> None:
    scribes = [history.Scribe(blank_database.url, place, f"worker{number}") for number in (1, 2)]
    told = [
        scribe.tell("begin", run=str(number), job="job", detail={"number": number})
        for number in range(3)
        for scribe in scribes
    ]
    rows = _rows(blank_database)
    assert [event.uid for event in rows] == [event.uid for event in told]
    assert [event.seq for event in rows] == sorted(event.seq for event in rows)
    local = history.read_files(place)
    assert [event.uid for event in local] == [event.uid for event in told]
    assert local[3].detail == rows[3].detail == {"number": 1}
    for scribe in scribes:
        scribe.close()


def test_what_was_not_sent_is_in_the_file_alone(blank_database: Database, place: Path) -> None:
    scribe = history.Scribe(blank_database.url, place, "worker1")
    sent = scribe.tell("begin")
    with pytest.raises(psycopg.Error):
        scribe.execute("effect", {}, b"INSERT INTO there_is_no_such_table VALUES (1)")
    after = scribe.tell("end")
    scribe.close()
    (file,) = place.glob("*.jsonl")
    with file.open("a") as lines:
        lines.write('{"kind": "begin", "who": "wor')  # it was killed here
    rows = _rows(blank_database)
    assert [event.uid for event in rows] == [sent.uid, after.uid]
    assert [event.kind for event in history.unwritten(history.read_files(place), rows)] == [
        "effect"
    ]


def test_an_event_and_what_belongs_to_it_are_written_together(
    blank_database: Database, place: Path
) -> None:
    blank_database.rows("CREATE TABLE effects (what text)")
    scribe = history.Scribe(blank_database.url, place, "worker1")
    scribe.execute("effect", {}, b"INSERT INTO effects VALUES (%(what)s)", {"what": "letter"})
    scribe.close()
    assert blank_database.rows("SELECT what FROM effects") == [("letter",)]
    assert [event.kind for event in _rows(blank_database)] == ["effect"]


# Python 3.12 warns of a fork beside other threads; the child only writes and ends.
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_a_forked_child_writes_over_a_connection_of_its_own(
    blank_database: Database, place: Path
) -> None:
    scribe = history.Scribe(blank_database.url, place, "worker1")
    scribe.tell("begin")
    pid = os.fork()
    if not pid:
        try:
            scribe.tell("effect")
        finally:
            os._exit(0)
    os.waitpid(pid, 0)
    scribe.tell("end")
    scribe.close()
    rows = _rows(blank_database)
    assert [(event.kind, event.pid) for event in rows] == [
        ("begin", os.getpid()),
        ("effect", pid),
        ("end", os.getpid()),
    ]
    assert len(list(place.glob("*.jsonl"))) == 2

"""The code that the README and the documentation show, run as it is shown."""

from __future__ import annotations

import re
import shutil
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.support.databases import Database
from tests.support.processes import REPOSITORY, Processes, eventually


@pytest.mark.parametrize("source", ["README.md", "docs/example/proj.py"])
def test_the_example_writes_its_invoices_once(
    database: Database, processes: Processes, redis_url: str, tmp_path: Path, source: str
) -> None:
    text = (REPOSITORY / source).read_text()
    if source == "README.md":
        block = re.search(r"```python\n(.*?)```", text, re.DOTALL)
        assert block is not None
        text = block[1]
        for shown, here in (
            ("redis://localhost", redis_url),
            ("postgresql://localhost/proj", database.url),
        ):
            assert shown in text
            text = text.replace(shown, here)
    (tmp_path / "proj.py").write_text(text)
    with database.connect() as connection:
        connection.execute("CREATE TABLE customers (id integer)")
        connection.execute("INSERT INTO customers SELECT generate_series(1, 50)")
        if source == "README.md":
            connection.execute("CREATE TABLE invoices (day text, customer integer)")
    env = {
        "BROKER_URL": redis_url,
        "DATABASE_URL": database.url,
        "PYTHONPATH": f"{tmp_path}:{REPOSITORY}",
    }
    queue = ["-Q", "example", "-n", f"{source[:4]}@example"]
    worker = processes.celery("proj", "worker", "-c", "1", "-l", "INFO", *queue, env=env)
    worker.wait_for_line(r"ready\.")
    # Twice in one period, unless a minute passes in between.
    for number in (1, 2):
        call = processes.celery(
            "proj", "call", "proj.write_invoices", "--queue", "example", env=env, name="call"
        )
        assert call.wait() == 0
        worker.wait_for_line(r"write_invoices\[\S+\] (succeeded|ignored)", count=number)
    runs = eventually(
        lambda: database.rows("SELECT status, attempts FROM pglock.job_runs"), 10, "the run's row"
    )
    assert set(runs) == {("done", 1)}
    ((invoices,),) = database.rows("SELECT count(*) FROM invoices")
    assert invoices == 50 * len(runs)


@pytest.mark.timeout(300)
def test_the_django_example_writes_and_sends_its_invoices_once(
    blank_database: Database, processes: Processes, fresh_redis_url: str, tmp_path: Path
) -> None:
    shutil.copytree(REPOSITORY / "docs/examples/django", tmp_path / "site")
    parts = urlsplit(blank_database.url)
    env = {
        "BROKER_URL": fresh_redis_url,
        "PGDATABASE": blank_database.name,
        "PGHOST": parts.hostname or "",
        "PGPORT": str(parts.port or ""),
        "PGUSER": parts.username or "",
        "PGPASSWORD": parts.password or "",
        "PYTHONPATH": f"{tmp_path / 'site'}:{REPOSITORY}",
    }
    manage = str(tmp_path / "site/manage.py")
    for arguments in (["migrate"], ["check", "--database", "default"]):
        done = processes.python(manage, *arguments, env=env, name=arguments[0])
        assert done.wait(100) == 0, done.output()
        assert arguments[0] != "check" or "no issues" in done.output()
    # The other commands find the database by the alias too.
    command = processes.celery("proj", "pglock", "migrate", "--check", env=env, name="migrate")
    assert command.wait(60) == 0, command.output()
    beat = processes.celery("proj", "beat", "-S", "pglock", "--pidfile=", "-l", "INFO", env=env)
    beat.wait_for_line("leadership gained: ")
    blank_database.rows("INSERT INTO invoices_customer (name) SELECT generate_series(1, 50)")
    worker = processes.celery("proj", "worker", "-c", "1", "-l", "INFO", "-n", "site@x", env=env)
    worker.wait_for_line(r"ready\.")
    # Twice in one period, unless midnight passes in between.
    for number in (1, 2):
        call = processes.celery("proj", "call", "invoices.write", env=env, name="call")
        assert call.wait() == 0
        worker.wait_for_line(r"invoices\.write\[\S+\] (succeeded|ignored)", count=number)
    worker.wait_for_line(r"invoices\.send\[\S+\] succeeded in \S+: 50$")
    runs = blank_database.rows(
        "SELECT status, attempts FROM pglock.job_runs WHERE job = 'proj:invoices.write'"
    )
    assert set(runs) == {("done", 1)}
    ((invoices,),) = blank_database.rows("SELECT count(*) FROM invoices_invoice")
    assert invoices == 50 * len(runs)

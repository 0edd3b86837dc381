"""docs/howto/sqlalchemy.md: the ORM in the transaction, a token as the password, Alembic."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from psycopg import sql

from celery_pglock import migrating, schema
from celery_pglock.demo.servers import PostgresServer, ValkeyServer
from tests.acceptance.bench import redis_database
from tests.support.databases import Database
from tests.support.guides import Project, blocks
from tests.support.processes import Processes, eventually
from tests.support.servers import POSTGRES_SETTINGS

PAGE = blocks("sqlalchemy.md", "python")
FILES = {name: "".join(parts) for name, parts in PAGE.items()}
WORK = """
def mail(customer):
    if customer == "nobody":
        raise LookupError(customer)
"""
TOKENS = """
import pathlib

def token():
    return pathlib.Path(__file__).with_name("token.txt").read_text()
"""
# Both have to be quoted in a URL.
FIRST, SECOND = "a/b?c=d&e@f:1", "g%h#i j"


class Tokens:
    """The role `proj`, whose password is the token of the moment."""

    def __init__(self, database: Database, directory: Path) -> None:
        self._database = database
        self._file = directory / "token.txt"

    def rotate(self, token: str) -> None:
        with self._database.connect() as connection:
            role = sql.SQL("ALTER ROLE proj PASSWORD {}").format(sql.Literal(token))
            connection.execute(role)
        self._file.write_text(token)

    def end_sessions(self) -> int:
        """Have the server end the sessions that there are; return how many there were."""
        rows = self._database.rows(
            "SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE usename = 'proj'"
        )
        return len(rows)


@pytest.fixture(scope="module")
def server() -> Iterator[PostgresServer]:
    """A PostgreSQL that asks the role `proj` for its password."""
    with PostgresServer(POSTGRES_SETTINGS) as server:
        database = Database("postgres", server.url())
        database.rows("CREATE ROLE proj LOGIN")
        rules = server.data_dir / "pg_hba.conf"
        rules.write_text(f"host all proj 127.0.0.1/32 scram-sha-256\n{rules.read_text()}")
        database.rows("SELECT pg_reload_conf()")
        yield server


@pytest.fixture(scope="module")
def project(
    server: PostgresServer,
    valkey_server: ValkeyServer,
    shared_processes: Processes,
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Project]:
    database = Database("postgres", server.url())
    migrating.migrate(database.url)
    database.rows("CREATE TABLE invoices (id serial PRIMARY KEY, day text, customer text)")
    database.rows("GRANT ALL ON invoices, invoices_id_seq TO proj")
    database.rows("GRANT USAGE ON SCHEMA pglock TO proj")
    database.rows("GRANT SELECT, INSERT, UPDATE, DELETE ON ALL TABLES IN SCHEMA pglock TO proj")
    directory = tmp_path_factory.mktemp("sqlalchemy")
    broker = valkey_server.url(next(redis_database))
    project = Project(directory, database, broker, shared_processes)
    shown = '"db.example", 5432, "proj"'
    assert shown in FILES["proj.py"]
    proj = FILES["proj.py"].replace(shown, f'"127.0.0.1", {server.port}, "postgres"')
    # So that the page's first part and its second one work in one file.
    project.write("proj.py", proj)
    # What a database that cannot be reached leads to is at once what it is.
    project.write("strict.py", "from proj import app\napp.conf.pglock_lock_unavailable = 'raise'\n")
    for name in ("models.py", "report.py"):
        project.write(name, FILES[name])
    project.write("work.py", WORK)
    project.write("tokens.py", TOKENS)
    yield project
    project.close()
    database.close()


def invoices(project: Project) -> list[Any]:
    return project.database.rows("SELECT customer FROM invoices ORDER BY customer")


def statuses(project: Project) -> list[Any]:
    return project.database.rows("SELECT job, status FROM pglock.job_runs ORDER BY 1")


def test_the_orm_s_writes_and_the_outcome_commit_together_whatever_the_token_is(
    project: Project,
) -> None:
    tokens = Tokens(project.database, project.directory)
    tokens.rotate(FIRST)
    worker = project.processes.celery(
        "strict:app", "worker", "-c", "1", "-P", "solo", "-l", "INFO", "--without-gossip",
        "--without-mingle", env=project.env(), name="worker",
    )  # fmt: skip
    shell = project.shell("from proj import write_invoice", "from report import by_status")
    worker.wait_for_line(r"ready\.")
    shell.do("write_invoice.delay('acme').get(timeout=30)")
    assert shell.ask("write_invoice.delay('nobody').get(timeout=30)") == "LookupError: nobody"
    assert invoices(project) == [("acme",)]
    assert statuses(project) == [
        ('proj:proj.write_invoice{"customer":"acme"}', "done"),
        ('proj:proj.write_invoice{"customer":"nobody"}', "failed"),
    ]
    again = shell.ask("write_invoice.delay('acme').get(timeout=30)")
    assert again.startswith("TaskRevokedError: skipped: ")
    assert invoices(project) == [("acme",)]

    # The session that is open lives on, and one that is opened later has the new token.
    tokens.rotate(SECOND)
    shell.do("write_invoice.delay('bolt').get(timeout=30)")
    assert tokens.end_sessions() > 0
    shell.do("write_invoice.delay('cork').get(timeout=30)")
    assert invoices(project) == [("acme",), ("bolt",), ("cork",)]

    # The control: the first one opens nothing any more.
    (project.directory / "token.txt").write_text(FIRST)
    assert tokens.end_sessions() > 0
    refused = shell.ask("write_invoice.delay('dust').get(timeout=30)")
    assert refused.startswith("DatabaseUnavailable: ")
    assert FIRST not in refused + worker.output()
    (project.directory / "token.txt").write_text(SECOND)
    shell.do("write_invoice.delay('dust').get(timeout=30)")
    eventually(lambda: len(invoices(project)) == 4, 10, "the fourth")

    shell.do("import sqlalchemy")
    shell.do(f"engine = sqlalchemy.create_engine({_sqlalchemy(project.database.url)!r})")
    shell.do("connection = engine.connect()")
    counts = shell.ask("sorted(map(tuple, connection.execute(by_status)))")
    assert counts == [["done", 4], ["failed", 1]]


@pytest.mark.parametrize("mirrored", [True, False], ids=["page", "control"])
def test_alembic_leaves_the_tables_alone(
    blank_database: Database, make_project_in: Any, *, mirrored: bool
) -> None:
    project: Project = make_project_in(blank_database)
    env = FILES["env.py"]
    if not mirrored:
        env = env.replace("tables.mirror(Base.metadata)\n", "")
        assert env != FILES["env.py"]
    migrating.migrate(blank_database.url)
    shell = project.shell(
        "from alembic import command, util",
        "from alembic.config import Config",
        "config = Config('alembic.ini')",
        "command.init(config, 'migrations')",
        "config = Config('alembic.ini')",
        f"config.set_main_option('sqlalchemy.url', {_sqlalchemy(blank_database.url)!r})",
    )
    project.write("migrations/env.py", env)
    shell.do("command.revision(config, 'invoices', autogenerate=True)")
    (revision,) = (project.directory / "migrations/versions").glob("*.py")
    made = revision.read_text()
    assert "create_table('invoices'" in made
    assert ("job_runs" in made) is not mirrored
    if mirrored:
        shell.do("command.upgrade(config, 'head')")
        shell.do("command.check(config)")
        schema.verify(blank_database.url)


@pytest.fixture
def make_project_in(tmp_path: Path, processes: Processes) -> Iterator[Any]:
    made: list[Project] = []

    def make(database: Database) -> Project:
        project = Project(tmp_path, database, "-", processes)
        made.append(project)
        project.write("models.py", FILES["models.py"])
        return project

    yield make
    for project in made:
        project.close()


def _sqlalchemy(url: str) -> str:
    return url.replace("postgresql://", "postgresql+psycopg://", 1)

"""What a worker imports before it forks, so that its children share it and no run waits for it."""

from __future__ import annotations

from tests.acceptance.bench import Bench
from tests.acceptance.conftest import MakeBench


def test_a_worker_has_what_its_first_run_needs_before_it_forks(make_bench: MakeBench) -> None:
    benches = {level: make_bench() for level in ("transaction", "session")}
    for level, bench in benches.items():
        bench.variables["APP_LEVEL"] = level
    bench_of = {
        bench.start_worker(app="tests.apps.preloading", concurrency=1): bench
        for bench in benches.values()
    }
    for worker, bench in bench_of.items():
        bench.expect(worker)
        bench.send("first")
    inherited, since = _imports(benches["transaction"])
    assert {"sqlalchemy", "sqlalchemy.dialects.postgresql.psycopg"} <= inherited
    assert _of_database(since) == set()
    # The control: nobody there needs it, so nobody has it.
    inherited, since = _imports(benches["session"])
    assert "celery_pglock.session_runs" in inherited
    assert "sqlalchemy" not in inherited | since
    assert _of_database(since) == set()


def _imports(bench: Bench) -> tuple[set[str], set[str]]:
    (note,) = bench.wait_for_notes("imported")
    return set(note.detail["inherited"]), set(note.detail["since"])


def _of_database(modules: set[str]) -> set[str]:
    packages = ("celery_pglock", "psycopg", "sqlalchemy")
    return {module for module in modules if module.partition(".")[0] in packages}

"""What a worker refuses before it takes a message, without a database."""

from __future__ import annotations

import celery
import celery.concurrency
import pytest

from celery_pglock import errors, startup


def application(**settings: object) -> celery.Celery:
    app = celery.Celery("app", set_as_current=False)
    app.conf.update(settings)
    return app


def test_eventlet_is_refused_in_one_sentence() -> None:
    pool = celery.concurrency.get_implementation("eventlet")
    with pytest.raises(errors.ConfigurationError, match="eventlet pool is not supported") as caught:
        startup.refuse_eventlet(application(), pool)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["prefork", "threads", "gevent", "solo"])
def test_other_pools_are_not(name: str) -> None:
    startup.refuse_eventlet(application(), celery.concurrency.get_implementation(name))


def test_without_locks_any_pool_will_do() -> None:
    pool = celery.concurrency.get_implementation("eventlet")
    startup.refuse_eventlet(application(pglock_enabled=False), pool)

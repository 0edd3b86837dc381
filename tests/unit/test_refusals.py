"""What becomes of a call that may not run: the whole table, and the sentences."""

from __future__ import annotations

import dataclasses
import datetime as dt
import itertools
from typing import Any

import pytest

from celery_pglock import claims, messages, refusals

NOW = dt.datetime(2026, 11, 3, 3, 0, 0, 5000, tzinfo=dt.UTC)
WORK = claims.Work(
    job="proj:nightly",
    period="2026-11-03",
    name="proj.t",
    name_key=5,
    run_key=6,
    task="proj.t",
    task_id="mine",
)
FRESH = messages.Delivery(task_id="mine", direct=False)
DIRECT = messages.Delivery(task_id=None, direct=True)
REPEATS = {
    "redelivered": dataclasses.replace(FRESH, redelivered=True),
    "retry": dataclasses.replace(FRESH, retries=1),
    "postponed": dataclasses.replace(FRESH, postponed=2),
}
CONFLICTS: list[refusals.Conflict] = ["skip", "postpone", "raise"]


def row(status: str, task_id: str | None = "other", **fields: Any) -> claims.Row:
    values = {
        "reason": None, "attempts": 1, "lost_attempts": 0, "postponements": 0, "node": "w1:7",
        "backend_pid": 99, "started_at": NOW, "finished_at": NOW, "claim": None, **fields,
    }  # fmt: skip
    return claims.Row(status=status, task_id=task_id, **values)


def refused(
    kind: claims.Refusal, before: claims.Row | None = None, **fields: Any
) -> claims.Refused:
    return claims.Refused(kind, before, **fields)


OTHER_JOB = claims.Holder(99, "pglock:proj.t@w1:7", job="proj:weekly", period="2026-W45")
SAME_JOB = dataclasses.replace(OTHER_JOB, job="proj:nightly", period="2026-11-02")
FOREIGN = claims.Holder(99, "psql")


@pytest.mark.parametrize("conflict", CONFLICTS)
@pytest.mark.parametrize("delivery", [FRESH, DIRECT, *REPEATS.values()])
def test_an_exhausted_period_is_given_up_whoever_asks(
    delivery: messages.Delivery, conflict: refusals.Conflict
) -> None:
    answer = refusals.decide(
        delivery, WORK, refused("exhausted", row("running", "mine"), lost_attempts=4), conflict
    )
    assert answer == "give up"


@pytest.mark.parametrize("conflict", CONFLICTS)
@pytest.mark.parametrize(
    ("before", "fresh", "direct"),
    [
        (row("done", "mine"), "drop", "skip"),
        (row("done"), "skip", "skip"),
        (row("skipped", "mine"), "skip", "skip"),
        # Two direct calls have the same id, none, and are not the same call.
        (row("done", None), "skip", "skip"),
        (row("missed", None), "skip", "skip"),
        (row("failed", reason="exhausted"), "skip", "skip"),
        (None, "skip", "skip"),
    ],
)
def test_a_settled_period_is_skipped_and_a_copy_of_what_settled_it_dropped(
    before: claims.Row | None, fresh: str, direct: str, conflict: refusals.Conflict
) -> None:
    closed = refused("closed", before)
    for delivery in (FRESH, *REPEATS.values()):
        assert refusals.decide(delivery, WORK, closed, conflict) == fresh
    assert refusals.decide(DIRECT, WORK, closed, conflict) == direct


@pytest.mark.parametrize("conflict", CONFLICTS)
@pytest.mark.parametrize("kind", ["running", "held"])
@pytest.mark.parametrize("delivery", REPEATS.values(), ids=REPEATS)
def test_what_may_be_the_same_message_again_is_never_skipped(
    delivery: messages.Delivery, kind: claims.Refusal, conflict: refusals.Conflict
) -> None:
    """To skip it is to acknowledge it: if the run that goes on now dies, nothing is left."""
    answer = refusals.decide(delivery, WORK, refused(kind, row("running")), conflict)
    assert answer == "postpone"


@pytest.mark.parametrize("status", ["running", "retrying", "failed"])
def test_a_row_under_the_messages_own_id_makes_it_the_same_message(status: str) -> None:
    assert refusals.decide(FRESH, WORK, refused("running", row(status, "mine")), "skip") == (
        "postpone"
    )


def test_the_row_that_a_beat_wrote_for_a_fresh_message_does_not() -> None:
    held = refused("held", row("sent", "mine"), holder=SAME_JOB)
    assert refusals.decide(FRESH, WORK, held, "skip") == "skip"


@pytest.mark.parametrize("conflict", CONFLICTS)
@pytest.mark.parametrize("before", [None, row("sent", "mine"), row("failed", "mine")])
def test_a_claim_that_cannot_be_seen_yet_may_be_the_same_messages(
    before: claims.Row | None, conflict: refusals.Conflict
) -> None:
    beginning = refused("running", before)
    assert refusals.claim_in_progress(beginning)
    assert refusals.decide(FRESH, WORK, beginning, conflict) == "postpone"
    assert refusals.decide(DIRECT, WORK, beginning, conflict) in ("skip", "raise")


def test_a_claim_that_can_be_seen_or_is_another_messages_is_not_waited_for() -> None:
    assert not refusals.claim_in_progress(refused("running", row("running")))
    assert not refusals.claim_in_progress(refused("held", row("sent", "mine")))
    assert refusals.decide(FRESH, WORK, refused("running", row("retrying")), "skip") == "skip"


@pytest.mark.parametrize("kind", ["running", "held"])
def test_a_copy_that_a_later_one_has_replaced_is_dropped(kind: claims.Refusal) -> None:
    before = row("sent", "mine", postponements=3)
    for number, answer in [(2, "drop"), (3, "postpone"), (4, "postpone")]:
        delivery = dataclasses.replace(FRESH, postponed=number)
        assert refusals.decide(delivery, WORK, refused(kind, before), "skip") == answer
    # The number belongs to that message alone.
    others = refused(kind, row("sent", "other", postponements=3))
    assert refusals.decide(REPEATS["postponed"], WORK, others, "skip") == "postpone"


@pytest.mark.parametrize("delivery", [FRESH, DIRECT])
@pytest.mark.parametrize(
    ("conflict", "answer"), [("skip", "skip"), ("postpone", "skip"), ("raise", "raise")]
)
def test_a_period_in_good_hands_is_not_waited_for(
    delivery: messages.Delivery, conflict: refusals.Conflict, answer: str
) -> None:
    running = refused("running", row("running"))
    assert refusals.decide(delivery, WORK, running, conflict) == answer


@pytest.mark.parametrize("conflict", CONFLICTS)
@pytest.mark.parametrize("holder", [SAME_JOB, FOREIGN, None])
@pytest.mark.parametrize("delivery", [FRESH, DIRECT])
def test_a_taken_lock_name_is_a_matter_of_lock_conflict(
    delivery: messages.Delivery, holder: claims.Holder | None, conflict: refusals.Conflict
) -> None:
    held = refused("held", row("sent", "mine"), holder=holder)
    assert refusals.decide(delivery, WORK, held, conflict) == conflict


def test_an_occurrence_is_never_dropped_because_of_another_job() -> None:
    held = refused("held", None, holder=OTHER_JOB)
    assert refusals.decide(FRESH, WORK, held, "skip") == "postpone"
    assert refusals.decide(FRESH, WORK, held, "postpone") == "postpone"
    assert refusals.decide(FRESH, WORK, held, "raise") == "raise"
    assert refusals.decide(DIRECT, WORK, held, "skip") == "skip"
    lock_only = dataclasses.replace(WORK, period=None, run_key=None)
    assert refusals.decide(FRESH, lock_only, held, "skip") == "skip"


def test_one_of_several_that_are_made_up_for_waits_for_the_one_before_it() -> None:
    late = dataclasses.replace(FRESH, late=True)
    held = refused("held", row("sent", "mine"), holder=SAME_JOB)
    assert refusals.decide(late, WORK, held, "skip") == "postpone"
    assert refusals.decide(late, WORK, held, "raise") == "raise"
    assert refusals.decide(FRESH, WORK, held, "skip") == "skip"
    # Its own period that is being run needs no second message.
    assert refusals.decide(late, WORK, refused("running", row("running")), "skip") == "skip"


def test_a_direct_call_is_never_dropped_nor_sent_again_by_itself() -> None:
    """Nobody would hear of it, and it has no message."""
    rows = [None, *(row(status, task) for status in ("sent", "running", "failed")
                    for task in ("mine", None))]  # fmt: skip
    kinds: list[claims.Refusal] = ["closed", "running", "held"]
    for kind, before, holder in itertools.product(kinds, rows, (SAME_JOB, OTHER_JOB, None)):
        for conflict in CONFLICTS[::2]:
            answer = refusals.decide(DIRECT, WORK, refused(kind, before, holder=holder), conflict)
            assert answer in ("skip", "raise")


@pytest.mark.parametrize(
    ("refusal", "sentence"),
    [
        (
            refused("closed", row("done", "abc")),
            "already ran in this period (task abc, done 2026-11-03T03:00:00.005+00:00)",
        ),
        (
            refused("closed", row("failed", reason="exhausted")),
            "this period is settled as failed: exhausted",
        ),
        (refused("closed", row("missed")), "this period is settled as missed: no reason given"),
        (
            refused("running", row("running", "abc", attempts=2)),
            ("this period is being run (task abc on w1:7, attempt 2, since "
            "2026-11-03T03:00:00.005+00:00, backend 99)"),
        ),
        (refused("running", row("sent")), "this period is being run"),
        (refused("running", None), "this period is being run"),
        (refused("held", None), 'lock "proj.t" is held by another run'),
        (
            refused("held", None, holder=dataclasses.replace(
                OTHER_JOB, task_id="abc", node="w1:7", started_at=NOW)),
            ('lock "proj.t" is held by job "proj:weekly", period "2026-W45" (task abc on w1:7, '
            "since 2026-11-03T03:00:00.005+00:00, backend 99)"),
        ),
        (
            refused("held", None, holder=claims.Holder(99, "pglock:proj.t@w1:7")),
            'lock "proj.t" is held by pglock:proj.t@w1:7 (backend 99)',
        ),
        (
            refused("held", None, holder=FOREIGN),
            ('lock "proj.t" (key 5) is held by a session that is not of celery-pglock: '
            "application 'psql', backend 99"),
        ),
    ],
)  # fmt: skip
def test_the_reason_says_who_holds_what_and_since_when(
    refusal: claims.Refused, sentence: str
) -> None:
    assert refusals.reason(WORK, refusal) == sentence

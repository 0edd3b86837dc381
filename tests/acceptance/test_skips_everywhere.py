"""A skip in every shape of work that Celery knows: it ends each wait, and nothing goes on."""

from __future__ import annotations

import contextlib
import functools
import itertools
import json
import pickle
import statistics
import threading
import uuid
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, Self

import celery
import celery.events.state
import pytest

from celery_pglock import outcomes
from tests.acceptance.bench import Bench
from tests.acceptance.conftest import MakeBench
from tests.support.processes import eventually
from tests.support.versions import MESSAGE_OUTWEIGHS_TASK

APP = "tests.apps.skipping"
# How soon a wait ends after the skip, or after get() if that came later: most of them within the
# first bound, and even on a machine that has much else to do each within the second.
USUALLY = 2.0
AT_ONCE = 10.0
TIMES: list[float] = []
PATIENCE = 20.0


@pytest.fixture(scope="module", params=["redis", pytest.param("rabbitmq", marks=pytest.mark.chaos)])
def bench(request: pytest.FixtureRequest, make_shared_bench: MakeBench) -> Bench:
    bench = make_shared_bench(broker=request.param, backend="redis")
    bench.worker("-E", app=APP, concurrency=3, task_track_started=True)
    return bench


@pytest.fixture(scope="module", autouse=True)
def _usually_soon() -> Iterator[None]:
    """Look in the end at how long all the waits of this module took."""
    yield
    if TIMES:
        median = statistics.median(TIMES)
        print(f"\nn = {len(TIMES)} waits, median {median:.3f} s, max {max(TIMES):.3f} s")
        assert median < USUALLY


def named(step: Any) -> tuple[Any, str]:
    """Give a step an id of its own beforehand."""
    task_id = str(uuid.uuid4())
    return step.set(task_id=task_id), task_id


def state(bench: Bench, task_id: str) -> str:
    return str(bench.app.AsyncResult(task_id).state)


def expect_told_once(bench: Bench, task_id: str) -> Any:
    """Wait for the skip; fail unless one record and one signal tell of it."""
    (skip,) = bench.wait_for_notes("signal", name="run_skipped", task_id=task_id, timeout=PATIENCE)
    assert len(bench.skips(task_id=task_id)) == 1
    assert len(bench.notes("log", event="run_skipped", task_id=task_id)) == 1
    return skip


def expect_end(bench: Bench, result: Any, skipped: str) -> Exception:
    """Return what `get()` raised, soon after the skip."""
    called = bench.now()
    with pytest.raises(Exception, match="skipped: ") as caught:
        result.get(timeout=PATIENCE)
    ended = bench.now()
    seconds = (ended - max(expect_told_once(bench, skipped).at, called)).total_seconds()
    TIMES.append(seconds)
    assert seconds < AT_ONCE
    return caught.value


def expect_nothing_more(bench: Bench, task: str, text: str) -> None:
    """Fail if a task has been sent in the meantime: it would run before one that is sent now."""
    bench.send("plain", text, "last").get(timeout=PATIENCE)
    assert not [note for note in bench.notes(task) if note.detail.get("args") == [text]]


# --- Shapes ---------------------------------------------------------------------------------

# Each gets the bench, the step that is skipped and a text; it sends, and no plain task of just
# that text may run.
Shape = Callable[[Bench, Any, str], Any]
SHAPES: dict[str, Shape] = {
    "the body of a chord": lambda bench, skipped, text: bench.chord(
        bench.step("plain", "a"), bench.step("plain", "b"), body=skipped | bench.step("plain", text)
    ),
    "the step after a group": lambda bench, skipped, text: bench.chain(
        celery.group(bench.step("plain", "a"), bench.step("plain", "b")),
        skipped,
        bench.step("plain", text),
    ),
    "first of a chain in a group": lambda bench, skipped, text: bench.group(
        celery.chain(skipped, bench.step("plain", text)), bench.step("plain", "other")
    ),
    "second of a chain in a group": lambda bench, skipped, text: bench.group(
        celery.chain(bench.step("plain", "a"), skipped, bench.step("plain", text)),
        bench.step("plain", "other"),
    ),
    "in a chain in the header of a chord": lambda bench, skipped, text: bench.chord(
        celery.chain(skipped, bench.step("plain", text)),
        bench.step("plain", "other"),
        body=bench.step("plain", text),
    ),
    "in a group within a chain": lambda bench, skipped, text: bench.chain(
        bench.step("plain", "a"),
        celery.group(skipped, bench.step("plain", "b")),
        bench.step("plain", text),
    ),
    "in a group in a group": lambda bench, skipped, text: bench.chain(
        celery.group(celery.group(skipped, bench.step("plain", "b")), bench.step("plain", "c")),
        bench.step("plain", text),
    ),
    "in a chord in a chord": lambda bench, skipped, text: bench.chord(
        celery.chord([skipped, bench.step("plain", "a")], bench.step("plain", text)),
        bench.step("plain", "b"),
        body=bench.step("plain", text),
    ),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_a_wait_ends_and_no_next_step_runs(bench: Bench, taken: str, shape: Shape) -> None:
    skipped, task_id = named(bench.step("job", taken))
    result = shape(bench, skipped, taken)
    expect_end(bench, result, task_id)
    expect_nothing_more(bench, "plain", taken)
    assert state(bench, task_id) == "REVOKED"
    assert bench.run(task_id=task_id).status == "skipped"
    assert not bench.notes("start", task_id=task_id)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_control_without_a_skip_the_next_step_of_each_shape_runs(
    bench: Bench, key: str, shape: Shape
) -> None:
    step, task_id = named(bench.step("job", key))
    result = shape(bench, step, key)
    result.get(timeout=PATIENCE)
    bench.wait_for_notes("plain", args=[key], timeout=PATIENCE)
    assert len(bench.notes("start", task_id=task_id)) == 1


# --- Callbacks ------------------------------------------------------------------------------


def test_the_error_handler_of_a_chord_is_called_for_a_skipped_part(
    bench: Bench, taken: str
) -> None:
    """Not that of the part itself, which has not failed; but the chord as a whole has."""
    part, task_id = named(bench.step("job", taken))
    part.link_error(bench.step("plain", taken, "of the part"))
    body = bench.step("plain", taken)
    body.link_error(bench.step("plain", taken, "of the chord"))
    result = bench.chord(part, bench.step("plain", "other"), body=body)
    expect_end(bench, result, task_id)
    bench.wait_for_notes("plain", args=[taken, "of the chord"], timeout=PATIENCE)
    expect_nothing_more(bench, "plain", taken)
    called = Counter(
        note.detail["args"][1]
        for note in bench.notes("plain")
        if note.detail["args"][0] == taken and len(note.detail["args"]) == 2
    )
    assert called == {"of the chord": 1, "last": 1}


@pytest.mark.parametrize(("task", "option"), [("plain", "link"), ("failing", "link_error")])
def test_a_callback_that_is_skipped_ends_too(
    bench: Bench, taken: str, task: str, option: str
) -> None:
    """And with it what would follow it; the task that calls it back is none the wiser."""
    callback, task_id = named(bench.step("job", taken))
    callback.link(bench.step("plain", taken))
    result = bench.send(task, "a", **{option: callback})
    result.get(timeout=PATIENCE, propagate=False)
    assert result.state == ("SUCCESS" if task == "plain" else "FAILURE")
    expect_end(bench, bench.app.AsyncResult(task_id), task_id)
    expect_nothing_more(bench, "plain", taken)


# --- replace() ------------------------------------------------------------------------------


@pytest.mark.parametrize("within", ["alone", "chain", "group", "chord"])
@pytest.mark.parametrize("task", ["replacing", "locked_replacing"])
def test_what_a_task_is_replaced_by_may_be_skipped(
    bench: Bench, taken: str, task: str, within: str
) -> None:
    step, task_id = named(bench.step(task, taken))
    after = bench.step("plain", taken)
    match within:
        case "alone":
            result = step.apply_async(link=after, link_error=after)
        case "chain":
            result = bench.chain(step, after)
        case "group":
            result = bench.group(step, bench.step("plain", "other"))
        case _:
            result = bench.chord(step, bench.step("plain", "other"), body=after)
    expect_end(bench, result, task_id)
    expect_nothing_more(bench, "plain", taken)
    assert state(bench, task_id) == "REVOKED"
    assert bench.run(task_id=task_id, job="acceptance:job").status == "skipped"
    if task == "locked_replacing":
        # It has done what it was to do: it handed over.
        assert bench.run(task_id=task_id, job="acceptance:locked_replacing").status == "done"


def test_what_ends_a_body_passes_between_the_processes_of_a_pool() -> None:
    """A pool's process sends it to its parent, which ends when it cannot read it."""
    replaced, skipped = pickle.loads(  # noqa: S301 - our own
        pickle.dumps((outcomes.Replaced("why", status="retrying"), outcomes.Skipped("why")))
    )
    assert (replaced.args, replaced.status) == (("why",), "retrying")
    assert (skipped.reason, str(skipped)) == ("why", "skipped: why")


def test_a_task_that_is_skipped_does_not_hand_over(bench: Bench, key: str) -> None:
    with bench.held(key, task="locked_replacing"):
        step, task_id = named(bench.step("locked_replacing", key))
        result = bench.chain(step, bench.step("plain", key))
        expect_end(bench, result, task_id)
        expect_nothing_more(bench, "plain", key)
    assert not bench.runs(task_id=task_id, job="acceptance:job")
    assert not bench.notes("start", task_id=task_id)


# --- skip_state="SUCCESS" -------------------------------------------------------------------


def expect_typed(value: Any, task_id: str) -> None:
    assert isinstance(value, dict), value
    assert (value["skipped"], value["job"]) == (True, "acceptance:polite")
    assert value["period"] == f"id:{task_id}"


def handed_on(bench: Bench, shape: str, key: str) -> list[Any]:
    """Return what the next steps got as their first argument."""
    notes = [note.detail["args"] for note in bench.notes("plain")]
    return [args[0] for args in notes if args[1:] == [shape, key]]


def test_a_skip_that_is_a_success_hands_on_what_it_is(bench: Bench, key: str) -> None:
    """Who asks for it gets its next steps; never a bare None as if the work had been done."""
    with bench.held(key, task="polite"):
        for shape in ("chain", "link", "chord", "group"):
            step, task_id = named(bench.step("polite", key))
            after = bench.app.signature("plain", args=(shape, key))
            match shape:
                case "chain":
                    assert bench.chain(step, after).get(timeout=PATIENCE) == "plain"
                case "link":
                    expect_typed(step.apply_async(link=after).get(timeout=PATIENCE), task_id)
                case "chord":
                    chord = bench.chord(step, bench.step("plain", "other"), body=after)
                    assert chord.get(timeout=PATIENCE) == "plain"
                case _:
                    parts = bench.group(step, bench.step("plain", "other"))
                    value, other = parts.get(timeout=PATIENCE)
                    expect_typed(value, task_id)
                    assert other == "plain"
            expect_told_once(bench, task_id)
            assert state(bench, task_id) == "SUCCESS"
            if shape == "group":
                continue
            handed = eventually(
                functools.partial(handed_on, bench, shape, key), PATIENCE, "the next step"
            )
            assert len(handed) == 1
            expect_typed(handed[0][0] if shape == "chord" else handed[0], task_id)


# --- Results that nobody keeps --------------------------------------------------------------


@pytest.mark.parametrize("how", ["by the task", "by the message"])
@pytest.mark.parametrize(
    "within", ["chain", "chain, last step only", "chain with a chord", "group", "chord"]
)
def test_a_result_that_is_ignored_holds_nothing_up(
    bench: Bench, key: str, how: str, within: str
) -> None:
    task = "quiet" if how == "by the task" else "job"
    with bench.held(key, task=task):
        step, task_id = named(bench.step(task, key))
        if how == "by the message":
            step.set(ignore_result=True)
        after = bench.step("plain", key)
        match within:
            case "chain":
                expect_end(bench, bench.chain(step, after), task_id)
            case "chain, last step only":
                chain = bench.chain(step, bench.step("plain", key), after)
                expect_end(bench, bench.app.AsyncResult(chain.id), task_id)
            case "chain with a chord":
                parts = celery.group(bench.step("plain", key), bench.step("plain", key))
                expect_end(bench, bench.chain(step, parts, after), task_id)
            case "group":
                # Nobody can wait for a part whose result is ignored: the others come.
                result = bench.group(step, bench.step("plain", "other"))
                assert result[1].get(timeout=PATIENCE) == "plain"
                expect_told_once(bench, task_id)
            case _:
                chord = bench.chord(step, bench.step("plain", "other"), body=after)
                expect_end(bench, chord, task_id)
        expect_nothing_more(bench, "plain", key)
    # STARTED, if that was noted, or nothing: never a success.
    unwritten = ("PENDING", "STARTED")
    wanted = MESSAGE_OUTWEIGHS_TASK and how == "by the task"
    assert state(bench, task_id) in (("REVOKED",) if wanted else unwritten)


@pytest.mark.slow
@pytest.mark.parametrize("broker", ["redis", pytest.param("rabbitmq", marks=pytest.mark.chaos)])
def test_without_a_result_backend_no_shape_goes_on(
    make_bench: MakeBench, key: str, broker: str
) -> None:
    bench = make_bench(broker, backend=None)
    bench.worker("-E", app=APP, concurrency=3, task_track_started=True)
    ids: list[str] = []

    def skipped(task: str = "job") -> Any:
        step, task_id = named(bench.step(task, key))
        ids.append(task_id)
        return step

    after = bench.step("plain", key)
    with bench.held(key), bench.held(key, task="polite"):
        bench.group(celery.chain(skipped(), after), bench.step("plain", "other"))
        bench.chain(bench.step("plain", "a"), skipped(), after)
        bench.chain(skipped("replacing"), after)
        bench.chain(skipped("locked_replacing"), after)
        bench.send("plain", "a", link=skipped())
        bench.send("failing", "a", link_error=skipped())
        polite = skipped("polite")
        bench.chain(polite, bench.app.signature("plain", args=("after", key)))
        for task_id in ids:
            expect_told_once(bench, task_id)
        bench.send("plain", "last")
        bench.wait_for_notes("plain", args=["last"], timeout=PATIENCE)
        (handed,) = eventually(lambda: handed_on(bench, "after", key))
        expect_typed(handed, polite.id)
    assert not [note for note in bench.notes("plain") if note.detail["args"] == [key]]
    assert not bench.notes("log", level="ERROR")


# --- What monitors see ----------------------------------------------------------------------


class Monitor:
    """What Flower is: a receiver of all events, and the state that they add up to."""

    def __init__(self, bench: Bench) -> None:
        self.events: list[dict[str, Any]] = []
        self.state: Any = bench.app.events.State()
        self._bench = bench
        self._end = threading.Event()
        self._ready = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="monitor")

    def _watch(self) -> None:
        app = self._bench.app
        with app.connection_for_read() as connection:
            receiver = app.events.Receiver(connection, handlers={"*": self._note})
            with receiver.consumer_context(wakeup=False) as (consuming, _, _):
                self._ready.set()
                while not self._end.is_set():
                    with contextlib.suppress(TimeoutError):
                        consuming.drain_events(timeout=0.2)

    def _note(self, event: dict[str, Any]) -> None:
        self.events.append(dict(event))
        self.state.event(event)

    def of(self, task_id: str) -> list[dict[str, Any]]:
        """Return the events of a task."""
        return [event for event in list(self.events) if event.get("uuid") == task_id]

    def shows(self, task_id: str) -> str | None:
        """Return the state that is shown of a task."""
        task = self.state.tasks.get(task_id)
        return None if task is None else str(task.state)

    def is_revoked(self, task_id: str) -> bool:
        """Whether it is shown as revoked, and all the events of a skip have come."""
        expected = {"task-received", "task-started", "task-revoked"}
        came = {event["type"] for event in self.of(task_id)}
        return self.shows(task_id) == "REVOKED" and expected <= came

    def __enter__(self) -> Self:
        self._thread.start()
        assert self._ready.wait(PATIENCE)
        try:
            eventually(self._listens, PATIENCE, "the monitor receives events", interval=0.3)
        except BaseException:
            self.__exit__()
            raise
        return self

    def _listens(self) -> bool:
        # Redis forgets what is published before the receiver's first look.
        self._bench.send("plain", "seen by the monitor")
        return bool(self.events)

    def __exit__(self, *_: object) -> None:
        self._end.set()
        self._thread.join(PATIENCE)
        assert not self._thread.is_alive()


def test_monitors_show_a_skipped_task_as_revoked(bench: Bench, taken: str) -> None:
    with Monitor(bench) as monitor:
        alone, alone_id = named(bench.step("job", taken))
        first, first_id = named(bench.step("job", taken))
        part, part_id = named(bench.step("job", taken))
        replaced, replaced_id = named(bench.step("replacing", taken))
        quiet, quiet_id = named(bench.step("job", taken).set(ignore_result=True))
        alone.apply_async()
        quiet.apply_async()
        replaced.apply_async()
        bench.chain(first, bench.step("plain", taken))
        bench.group(part, bench.step("plain", "other"))
        ids = [alone_id, first_id, part_id, replaced_id, quiet_id]
        for task_id in ids:
            eventually(
                functools.partial(monitor.is_revoked, task_id), PATIENCE, f"{task_id} is revoked"
            )
        # The control: another task is shown as what it is; by then the others have not changed.
        control = bench.send("job", f"free-{taken}")
        eventually(lambda: monitor.shows(control.id) == "SUCCESS", PATIENCE, "the control")
        seen = {task_id: monitor.of(task_id) for task_id in ids}
        assert {monitor.shows(task_id) for task_id in ids} == {"REVOKED"}
    for task_id, events in seen.items():
        kinds = Counter(event["type"] for event in events)
        assert kinds["task-revoked"] == 1
        assert not kinds.keys() & {"task-succeeded", "task-failed", "task-rejected"}
        expect_told_once(bench, task_id)
    # Whatever order they come in, the last word is the same.
    for order in itertools.permutations(seen[alone_id]):
        shown: Any = celery.events.state.State()
        for event in order:
            shown.event(dict(event))
        assert shown.tasks[alone_id].state == "REVOKED"


def test_monitors_show_a_skip_that_is_a_success_as_one(bench: Bench, key: str) -> None:
    with bench.held(key, task="polite"), Monitor(bench) as monitor:
        result = bench.send("polite", key)
        eventually(lambda: monitor.shows(result.id) == "SUCCESS", PATIENCE)
        assert not [event for event in monitor.of(result.id) if event["type"] == "task-revoked"]
    expect_told_once(bench, result.id)


@pytest.mark.parametrize("pool", ["prefork", "solo", "threads"])
def test_a_skip_is_told_while_a_monitor_wants_events(
    make_bench: MakeBench, key: str, pool: str
) -> None:
    bench = make_bench("redis", backend="redis")
    bench.worker(app=APP, pool=pool, concurrency=1, heartbeat=True)
    control = bench.app.control

    def is_known(task_id: str) -> bool:
        """Whether the worker has still something to do with a message."""
        active = control.inspect().active()
        assert active
        return any(request["id"] == task_id for each in active.values() for request in each)

    # A run would keep a worker with one process from anything else, so the lock is a stranger's.
    run = bench.send("job", key)
    run.get(timeout=PATIENCE)
    query = "select name_key from pglock.job_runs where task_id = %s"
    ((name_key,),) = bench.database.rows(query, run.id)
    control.enable_events(reply=True)
    with bench.database.connect() as stranger, Monitor(bench) as monitor:
        stranger.execute("select pg_advisory_lock(%s)", [name_key])
        control.disable_events(reply=True)
        before, before_id = named(bench.step("job", key))
        before.apply_async()
        expect_told_once(bench, before_id)
        eventually(lambda: not is_known(before_id), PATIENCE, "it has ended")
        control.enable_events(reply=True)
        after, after_id = named(bench.step("job", key))
        after.apply_async()
        eventually(lambda: monitor.shows(after_id) == "REVOKED", PATIENCE, "it is told")
        # What came later has come, so this never will.
        assert not [event for event in monitor.of(before_id) if event["type"] == "task-revoked"]


# --- In the caller's own process ------------------------------------------------------------

IN_THIS_PROCESS = """
import json
import logging
import sys

import celery
from celery.exceptions import TaskRevokedError

import celery_pglock
from tests.apps.skipping import app

logging.getLogger("celery_pglock").setLevel(logging.INFO)
key, eager = sys.argv[1], sys.argv[2] == "eager"
app.conf.task_always_eager = eager
app.conf.task_track_started = True
app.set_current()
job, plain, polite = (app.tasks[name] for name in ("job", "plain", "polite"))
replacing, locked = app.tasks["replacing"], app.tasks["locked_replacing"]
sent = []

def step(task, *args, **options):
    signature = task.si(*args)
    sent.append(f"{key}-{len(sent)}")
    return signature.set(task_id=sent[-1], **options)

def start(signature):
    return signature.apply_async() if eager else signature.apply()

def expect_skip(what):
    try:
        result = what()
        value = result.get()
    except TaskRevokedError as error:
        assert str(error).startswith("skipped: "), error
    else:
        raise AssertionError(value)

after = plain.si(key)
expect_skip(lambda: start(step(job, key)))
expect_skip(lambda: start(step(job, key, ignore_result=True)))
expect_skip(lambda: start(step(job, key, link=after, link_error=after)))
expect_skip(lambda: start(celery.chain(step(job, key), after)))
expect_skip(lambda: start(celery.chain(plain.si("a"), step(job, key), after)))
expect_skip(lambda: start(celery.group(step(job, key), plain.si("other"))))
expect_skip(lambda: start(celery.group(celery.chain(step(job, key), after), plain.si("b"))))
expect_skip(lambda: start(celery.chord([step(job, key), plain.si("a")], after)))
expect_skip(lambda: start(celery.chord([plain.si("a"), plain.si("b")], step(job, key))))
if not eager:
    # In eager mode Celery itself cannot replace a task: it refuses to wait inside a task.
    expect_skip(lambda: start(step(replacing, key)))
    expect_skip(lambda: start(step(locked, key)))

value = start(celery.chain(step(polite, key), plain.s("after", key))).get()
assert value == "plain", value
for task in (job, polite):
    try:
        task(key)
    except celery_pglock.JobSkipped as error:
        assert error.period.startswith("id:"), error.period
    else:
        raise AssertionError("a direct call ran")
assert polite(key + "-free") is None
print("ids", json.dumps(sent))
"""


@pytest.mark.slow
@pytest.mark.parametrize("how", ["eager", pytest.param("apply", marks=pytest.mark.chaos)])
def test_in_the_callers_process_a_skip_ends_each_shape_too(
    make_bench: MakeBench, key: str, how: str
) -> None:
    bench = make_bench()
    bench.worker(app=APP, concurrency=2)
    with bench.held(key), bench.held(key, task="polite"):
        printed = bench.script(IN_THIS_PROCESS, key, how)
    (line,) = [line for line in printed.splitlines() if line.startswith("ids ")]
    for task_id in json.loads(line.removeprefix("ids ")):
        expect_told_once(bench, task_id)
    assert not [note for note in bench.notes("plain") if note.detail["args"] == [key]]
    (handed,) = handed_on(bench, "after", key)
    assert handed["skipped"] is True
    assert len(bench.notes("start", key=key, job="acceptance:job")) == 1, "only the holder ran"

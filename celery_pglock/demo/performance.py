"""The performance: start everybody, let the story happen, wait for the books, judge."""

from __future__ import annotations

import contextlib
import datetime as dt
import time
from collections.abc import Iterator
from typing import Final

import redis

from celery_pglock.demo import books, cast, feed, observer, outcome, plot, screen, story, verdict
from celery_pglock.demo.servers import ServerError

_STEP: Final = 0.04
_SCENE_EVERY: Final = 0.25
_READY_WITHIN: Final = 30.0
_STOP_WITHIN: Final = 5.0
# Long enough for what a worker took with it: that is missed once, sent again, and run. A machine
# that does much else needs more of it than one that does not.
_SETTLE_WITHIN: Final = 45.0
# Half a second after an occurrence is due it has been sent, and the next one is far away: so
# the end of the play cannot fall between the two.
_STOP_AFTER_DUE: Final = (0.4, 1.0)


class Performance:
    """One play on a cast that has been started.

    Args:
        company: the cast.
        faults: the plot.
        seconds: how long the cast plays.
        show: where it is seen.
    """

    def __init__(
        self,
        company: cast.Cast,
        faults: list[plot.Fault],
        seconds: float,
        show: screen.Screen,
    ) -> None:
        self._company = company
        self._faults = faults
        self._seconds = seconds
        self._show = show
        self._began = time.monotonic()
        self._told = feed.Reader(company.feed)
        self._conditions: dict[int, str] = {}
        self._next_scene = 0.0
        self._attempts = 0
        self._begun: set[dt.datetime] = set()

    def play(self) -> outcome.Result:
        """Play it.

        Raises:
            ServerError: somebody does not start.
        """
        company = self._company
        if company.guarded:
            company.migrate()
            self._say("celery -A celery_pglock.demo.app pglock migrate: the tables are there")
        eyes = observer.Observer(company.database_url, guarded=company.guarded)
        with contextlib.closing(eyes):
            self._eyes = eyes
            self._start()
            with contextlib.closing(
                story.Story(self._faults, company, eyes, self._confess)
            ) as told:
                while told.elapsed < self._seconds:
                    told.step()
                    self._look()
                told.end()
            self._outlast()
            until = self._stop_beats()
            judge = verdict.Judge(eyes, guarded=company.guarded, until=until)
            settled = self._settle(judge)
            final = judge.judge(told.deeds.leader_kills)
            (company.place / "job_runs.txt").write_text("\n".join(judge.ledger()) + "\n")
            notes = {wrong.period: judge.ledger(wrong.period) for wrong in final.count.wrong}
            return outcome.Result(final, told.deeds, settled=settled, notes=notes)

    def _start(self) -> None:
        for actor in self._company.actors:
            actor.start()
        kind = "celery beat -S pglock" if self._company.guarded else "celery beat"
        self._say(f"two '{kind}' and two 'celery worker' start")
        for _ in self._patiently(_READY_WITHIN):
            self._company.expect_alive()
            ready = all(worker.pid in self._conditions for worker in self._company.workers)
            if ready and (self._eyes.leader() or not self._company.guarded):
                return
        raise ServerError("The beats and workers were not ready in time.")

    def _outlast(self) -> None:
        """Let a beat lead until what was due while there were kills has an end.

        What a killed worker has taken with it is missed and sent again by the leader, so the last
        one must not go before. What is sent from here on nobody is killed with.
        """
        judge = verdict.Judge(self._eyes, guarded=self._company.guarded, until=self._eyes.now())
        for _ in self._patiently(_SETTLE_WITHIN):
            if judge.settled():
                break

    def _stop_beats(self) -> dt.datetime:
        """Stop the standby, then the leader, in the middle between two due instants."""
        company = self._company
        scheduled = None
        if company.guarded:
            for _ in self._patiently(_STOP_WITHIN):
                if any(beat.alive and beat.pid == self._leader_pid() for beat in company.beats):
                    break
            scheduled = self._eyes.scheduled()
            leading = self._leader_pid()
            for beat in company.beats:
                if beat.pid != leading:
                    self._terminate(beat)
        if scheduled is not None:
            for _ in self._patiently(2 * books.EVERY):
                since_due = (self._eyes.now() - scheduled.anchor).total_seconds() % books.EVERY
                if _STOP_AFTER_DUE[0] <= since_due <= _STOP_AFTER_DUE[1]:
                    break
        until = self._eyes.now()
        for beat in company.beats:
            self._terminate(beat)
        self._say("the beats are stopped with SIGTERM; what is left is worked off")
        return until

    def _terminate(self, beat: cast.Actor) -> None:
        if not beat.terminate(_STOP_WITHIN):
            self._say(f"{beat.name} did not stop in {_STOP_WITHIN:g} s and is killed")
            beat.kill()

    def _settle(self, judge: verdict.Judge) -> bool:
        """Wait until every period has an end and no message is left that could double one."""
        with contextlib.closing(redis.Redis.from_url(self._company.broker_url)) as broker:
            for _ in self._patiently(_SETTLE_WITHIN):
                left = int(broker.llen("celery")) + int(broker.hlen("unacked"))
                if not left and judge.settled():
                    return True
        return False

    def _patiently(self, seconds: float) -> Iterator[None]:
        """Look again and again, for so long at most."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            yield
            self._look()

    def _look(self) -> None:
        """Show what is new, then wait for a moment."""
        for told in self._told.read():
            self._conditions[told.pid] = _condition(told, self._conditions.get(told.pid, ""))
            self._show.say(self._elapsed, told.sentence)
        if not self._company.guarded:
            self._tell_attempts()
        if time.monotonic() >= self._next_scene:
            self._next_scene = time.monotonic() + _SCENE_EVERY
            self._show.show(self._scene())
        time.sleep(_STEP)

    def _tell_attempts(self) -> None:
        """Say what nobody else says where there is no guard: who writes what has been begun."""
        for attempt in self._eyes.attempts(self._attempts):
            self._attempts = attempt.id
            again = attempt.period in self._begun
            self._begun.add(attempt.period)
            already = ", which was begun already" if again else ""
            sentence = f"{attempt.worker} writes {attempt.period:%H:%M:%S}{already}"
            self._show.say(self._elapsed, sentence)

    def _scene(self) -> screen.Scene:
        leader = self._eyes.leader()
        people = []
        for actor in self._company.actors:
            condition = self._conditions.get(actor.pid, "starts")
            if not actor.alive:
                condition = "dead"
            elif leader is not None and actor.pid == leader.pid:
                condition = f"leads since {leader.since:%H:%M:%S}, term {leader.term}"
            elif actor.role == "beat" and not self._company.guarded:
                condition = "sends"
            people.append((actor.name, f"{condition} (pid {actor.pid})"))
        return screen.Scene(
            elapsed=self._elapsed,
            people=people,
            holders=self._eyes.holders(),
            tally=self._eyes.tally(),
            now=self._eyes.now(),
        )

    @property
    def _elapsed(self) -> float:
        return time.monotonic() - self._began

    def _leader_pid(self) -> int:
        leader = self._eyes.leader()
        return leader.pid if leader else 0

    def _say(self, sentence: str) -> None:
        self._show.say(self._elapsed, sentence, "stage")

    def _confess(self, sentence: str) -> None:
        self._show.say(self._elapsed, sentence, "deed")


def _condition(told: feed.Told, before: str) -> str:
    match told.event:
        case "standby":
            return "stands by"
        case "worker_ready":
            return "works"
        case _:
            return before

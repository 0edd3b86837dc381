"""``celery beat -S pglock``: any number of beats, of which one sends.

The scheduler keeps nothing in memory or in a file that another beat would need: what was
sent, and what is due next, is in PostgreSQL. ``tick`` never blocks for long: a standby waits
at most a poll, a leader at most a quarter of its lease, so ``celery inspect ping`` is
answered by both.
"""

from __future__ import annotations

from collections.abc import Mapping

import celery.beat
from typing_extensions import override

from celery_pglock import mixin


class LeaderScheduler(mixin.LeaderMixin, celery.beat.Scheduler):
    """A scheduler that sends only while it leads.

    Start as many as you like, on as many machines as you like: ``celery beat -S pglock``, or
    ``celery worker -B --scheduler pglock``. One of them leads. When it dies another leads
    within a poll (``pglock_standby_poll``, 0.5 s); when it is stopped, at once; when it is
    frozen or cut off, within the lease (``pglock_leader_lease``, 10 s) and a poll.

    Every occurrence carries the instant at which it was due, which is the period under which
    a ``LockedTask`` is recorded. When the broker does not take a message it is kept and sent
    later; when the database is gone nothing is sent, and the process stays.
    """

    @override
    def _configured(self) -> Mapping[str, celery.beat.ScheduleEntry]:
        # In this order: Celery's own drops backend_cleanup again when there are other entries.
        self.merge_inplace(self.app.conf.beat_schedule)
        self.install_default_entries(self.schedule)
        return self.schedule

    @override
    def _set_up(self) -> None:
        """Do nothing: the configuration is all there is."""

    @override
    def _notes_runs(self) -> bool:
        # Celery's own would put a new entry into this process' memory, where nobody looks for it,
        # for each message.
        return type(self).reserve is not celery.beat.Scheduler.reserve

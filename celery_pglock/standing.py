"""What a beat does while it does not lead: stand by, and say so once."""

from __future__ import annotations

from celery_pglock import beat_events, complaints, elections, errors, heartbeats, leadership


class Standing:
    """One beat's candidacy.

    Args:
        candidate: the leadership.
        heartbeat: shows that it stands by; not while the database cannot be used.
    """

    def __init__(self, candidate: leadership.Leadership, heartbeat: heartbeats.Heartbeat) -> None:
        self._candidate = candidate
        self._heartbeat = heartbeat
        self._told = self._differs = False
        self._unusable = complaints.Complaint(beat_events.unusable)

    def stand(self) -> elections.Elected | None:
        """Try once to be elected, at most a poll from now; say what changes by it."""
        candidate = self._candidate
        try:
            elected = candidate.stand()
        except errors.PGLockError as error:
            self._unusable.of(error)
            return None
        self._unusable.settled()
        self._heartbeat.beat()
        if elected is not None:
            self._told = self._differs = False
            beat_events.gained(candidate, elected)
            return elected
        if not self._told:
            self._told = True
            beat_events.standing_by(candidate)
        if candidate.differs is not self._differs:
            self._differs = candidate.differs
            if self._differs:
                beat_events.differs(candidate)
        return None

"""An application whose tasks want locks only, so that no tables are needed."""

from __future__ import annotations

from celery_pglock import LockedTask
from tests.apps import configured, recording

app = configured.application()


@app.task(base=LockedTask, bind=True, name="lock_only", once_per=None, lock_by=("key",))
def lock_only(self: LockedTask, key: str, gate: str) -> None:
    """Hold the lock until the gate is open."""
    recording.note_run("start", self.request.id, key=key)
    recording.wait_for_gate(gate)
    recording.note_run("end", self.request.id, key=key)

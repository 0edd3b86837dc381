"""``beat_entries.definition``: written by anybody, read by whoever leads.

Each edit is one statement over one row, which gives it the next ``revision`` and tells of it by
NOTIFY, together with the change or not at all. The leader plans an entry by a revision and claims
nothing of it once the row has another. So an edit applies from its commit on, also when the
notification is late; and of two edits at once each is told from the other.

A row stays when its definition is removed: it knows what was claimed last.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection
from typing import Final

from celery_pglock import namespaced

# The schedule is stored by the leader, which reads it from the definition. The clock is asked
# once the row is locked: of two edits that wait for each other the later one has the later time.
_SAVE: Final = """
with n as materialized (
 select pg_catalog.clock_timestamp() as now
), u as (
 insert into {entries} as e (namespace, entry, task, schedule, definition, anchor, revision,
  edited_at, added, registered)
 select %(namespace)s::text, %(entry)s::text, %(task)s::text, '', %(definition)s::jsonb, n.now,
  1, n.now, 1, 0 from n
 on conflict (namespace, entry) do update set definition = excluded.definition,
  revision = case when e.definition is not distinct from excluded.definition then e.revision
   else e.revision + 1 end,
  edited_at = case when e.definition is not distinct from excluded.definition then e.edited_at
   else pg_catalog.clock_timestamp() end,
  added = case when e.definition is null then e.revision + 1 else e.added end
 where e.definition is null or not %(only_new)s::boolean
 returning entry, revision
)
select revision, pg_catalog.pg_notify(%(channel)s::text, %(edited)s::text || entry) from u
"""
_EDIT: Final = """
with u as (
 update {entries} set definition = %(definition)s::jsonb, revision = revision + 1,
  edited_at = pg_catalog.clock_timestamp()
 where namespace = %(namespace)s::text and entry = %(entry)s::text
  and revision = %(revision)s::bigint and definition is not null
 returning entry, revision
)
select revision, pg_catalog.pg_notify(%(channel)s::text, %(edited)s::text || entry) from u
"""
_DELETE: Final = """
with u as (
 update {entries} set definition = null, revision = revision + 1,
  edited_at = pg_catalog.clock_timestamp()
 where namespace = %(namespace)s::text and entry = %(entry)s::text and definition is not null
 returning entry, revision
)
select revision, pg_catalog.pg_notify(%(channel)s::text, %(edited)s::text || entry) from u
"""
_READ: Final = """
select entry, definition::text as definition, revision from {entries}
where namespace = %(namespace)s::text and definition is not null
 and (%(names)s::text[] is null or entry = any (%(names)s::text[]))
order by entry
"""


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A definition as it is stored.

    Attributes:
        entry: the entry's name.
        definition: JSON text; perhaps somebody has written into it by hand.
        revision: which edit it is.
    """

    entry: str
    definition: str
    revision: int


class EntryRows(namespaced.Namespaced):
    """The definitions of one namespace."""

    def save(
        self,
        entry: str,
        task: str,
        definition: str,
        *,
        revision: int | None = None,
        only_new: bool = False,
    ) -> int | None:
        """Write a definition over any other; return its revision.

        Args:
            entry: the entry's name.
            task: the task's name, for a row that is new.
            definition: JSON text.
            revision: only over this revision.
            only_new: only if there is none.

        Returns:
            None if what was there forbids it, and then nothing was written.
        """
        rows = self.run(
            _SAVE if revision is None else _EDIT,
            entry=entry,
            task=task,
            definition=definition,
            revision=revision,
            only_new=only_new,
        )
        return rows[0].revision if rows else None

    def delete(self, entry: str) -> bool:
        """Remove a definition; return whether there was one."""
        return bool(self.run(_DELETE, entry=entry))

    def read(self, names: Collection[str] | None = None) -> list[Row]:
        """Return the definitions by their names; of all entries, or of these."""
        found = self.run(_READ, names=None if names is None else [*names])
        return [Row(row.entry, row.definition, row.revision) for row in found]

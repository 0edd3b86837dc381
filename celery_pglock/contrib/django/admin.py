"""The admin: runs to look at; entries to pause, resume and trigger.

Nothing of a message is shown, whose arguments may be anybody's secret. What an action does is
done as the command of that name does it, over a connection of its own, and is logged for the user.
"""

from __future__ import annotations

import datetime as dt
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import click
from django.contrib import admin, messages
from django.db.models import QuerySet
from django.http import HttpRequest
from django.utils import timezone
from typing_extensions import override

from celery_pglock import entries, errors, plans
from celery_pglock.cli import session, trigger
from celery_pglock.contrib.django import models, project

if TYPE_CHECKING:
    _ModelAdmin = admin.ModelAdmin[Any]
else:
    _ModelAdmin = admin.ModelAdmin  # generic for type checkers alone


class _Shown(_ModelAdmin):
    """Rows of this application that nobody changes here."""

    # Counting all rows would read all of the history.
    show_full_result_count = False
    list_per_page = 50

    @override
    def has_add_permission(self, request: HttpRequest) -> bool:
        return False

    @override
    def has_change_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False

    @override
    def has_delete_permission(self, request: HttpRequest, obj: Any = None) -> bool:
        return False


@admin.register(models.JobRun)
class JobRunAdmin(_Shown):
    """What ran, what did not, and why."""

    list_display = (
        "job", "period", "status", "attempts", "started_at", "seconds", "node", "reason",
    )  # fmt: skip
    list_filter = ("status", "job")
    search_fields = ("job", "period", "task_id")
    fields = (
        "job", "period", "status", "reason", "error", "due_at", "sent_at", "started_at",
        "finished_at", "retry_at", "attempts", "lost_attempts", "postponements", "rescues",
        "task", "task_id", "entry", "node", "term",
    )  # fmt: skip

    @override
    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the runs of this application: others may share the tables."""
        prefix = f"{project.config().namespace}:"
        return super().get_queryset(request).filter(job__startswith=prefix)

    @admin.display(description="seconds")
    def seconds(self, run: models.JobRun) -> str:
        """Return how long a run took that has ended."""
        if run.started_at is None or run.finished_at is None:
            return ""
        return f"{(run.finished_at - run.started_at).total_seconds():.1f}"


@admin.register(models.BeatEntry)
class BeatEntryAdmin(_Shown):
    """The schedule, as the leader sees it. Who may change entries may pause and trigger them."""

    list_display = ("entry", "task", "schedule", "next_due_at", "paused", "total_run_count")
    search_fields = ("entry", "task")
    fields = (
        "entry", "task", "schedule", "next_due_at", "paused_until", "paused_reason", "due_at",
        "published_at", "total_run_count", "seen_at",
    )  # fmt: skip
    actions = ("pause", "resume", "trigger")

    @override
    def get_queryset(self, request: HttpRequest) -> QuerySet[Any]:
        """Return the entries of this application, which alone its commands can reach."""
        return super().get_queryset(request).filter(namespace=project.config().namespace)

    def has_operate_permission(self, request: HttpRequest) -> bool:
        """Whether this user may pause, resume and trigger."""
        user: Any = request.user  # whatever model the project has for it
        return bool(user.has_perm("celery_pglock.change_beatentry"))

    @admin.display(description="paused")
    def paused(self, entry: models.BeatEntry) -> str:
        """Return until when an entry is paused, and why."""
        until = entry.paused_until
        if until is None or until <= dt.datetime.now(until.tzinfo):
            return ""
        when = "resumed" if until >= plans.FOREVER else timezone.localtime(until).isoformat(" ")
        return f"until {when}; {entry.paused_reason or ''}"

    @admin.action(description="Pause until resumed", permissions=["operate"])
    def pause(self, request: HttpRequest, queryset: QuerySet[models.BeatEntry]) -> None:
        """Send no occurrence of these entries until they are resumed."""
        reason = f"by {request.user.get_username()}: in the admin"
        self._each(request, queryset, "paused", lambda known, name: known.pause(name, None, reason))

    @admin.action(description="Resume", permissions=["operate"])
    def resume(self, request: HttpRequest, queryset: QuerySet[models.BeatEntry]) -> None:
        """Send these entries again, from their next occurrence on."""
        self._each(request, queryset, "resumed", lambda known, name: known.resume(name))

    @admin.action(description="Trigger: send the message now", permissions=["operate"])
    def trigger(self, request: HttpRequest, queryset: QuerySet[models.BeatEntry]) -> None:
        """Send the messages of these entries now, each as an occurrence of its own."""
        app, config = project.celery_app(), project.config()
        who = request.user.get_username()
        self._each(
            request,
            queryset,
            "triggered",
            lambda _, name: trigger.send(app, config, name, who),
        )

    def _each(
        self,
        request: HttpRequest,
        queryset: QuerySet[models.BeatEntry],
        done: str,
        act: Callable[[entries.Entries, str], object],
    ) -> None:
        config = project.config()
        chosen = list(queryset)
        try:
            with session.connected(config, "admin") as connection:
                known = entries.Entries(connection, config.schema, config.namespace)
                for entry in chosen:
                    act(known, entry.entry)
                    self.log_change(request, entry, f"{done.capitalize()}.")
        except (errors.PGLockError, click.ClickException) as error:
            self.message_user(request, str(error), messages.ERROR)
        else:
            names = ", ".join(entry.entry for entry in chosen)
            self.message_user(request, f"{done.capitalize()}: {names}", messages.SUCCESS)

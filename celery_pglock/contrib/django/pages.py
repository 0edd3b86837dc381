"""The page in a Django project, behind the login of its admin."""

from __future__ import annotations

from typing import Any

from django.contrib.admin.views.decorators import staff_member_required
from django.core.exceptions import PermissionDenied
from django.http import HttpRequest, HttpResponse

from celery_pglock import page as pages
from celery_pglock.contrib.django import project

# What of a request the page asks for; under ASGI there is no environment to hand on.
_ASKED = ("HTTP_ACCEPT_ENCODING", "QUERY_STRING")


@staff_member_required
def page(request: HttpRequest, path: str = "") -> HttpResponse:
    """Show the page to staff who may see runs in the admin, and nobody else.

    Raises:
        PermissionDenied: the user may not see runs.
        ConfigurationError: the project has no Celery application.
    """
    user: Any = request.user  # whatever model the project has for it
    if not user.has_perm("celery_pglock.view_jobrun"):
        raise PermissionDenied
    project.config()
    app = project.celery_app()
    answer = HttpResponse()
    environ = {
        "REQUEST_METHOD": request.method or "GET",
        "SCRIPT_NAME": request.path.removesuffix(path).rstrip("/"),
        "PATH_INFO": f"/{path}",
        **{name: request.META[name] for name in _ASKED if name in request.META},
    }

    def start(status: str, headers: list[tuple[str, str]], *_: object) -> Any:
        answer.status_code = int(status.partition(" ")[0])
        for name, value in headers:
            answer[name] = value

    answer.content = b"".join(pages.wsgi(app)(environ, start)) if app is not None else b""
    return answer

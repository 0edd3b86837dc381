"""A Django app: ``"celery_pglock.contrib.django"`` in ``INSTALLED_APPS``.

With ``pglock_django_alias`` the locks are in a database of ``DATABASES``, and a task at
transaction level works on Django's own connection, so that its models' writes commit together with
the ``done`` of its period. The tables come by ``manage.py migrate``; ``manage.py check`` finds what
is set wrongly; the admin shows the runs, and pauses, resumes and triggers entries.
"""

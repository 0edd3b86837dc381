"""Celery applications that the tests start workers and beats for."""

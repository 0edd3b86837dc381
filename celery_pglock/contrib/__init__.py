"""What fits celery-pglock into other people's frameworks; nothing else imports it."""

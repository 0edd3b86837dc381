"""Fixtures as plugins, one concern each."""

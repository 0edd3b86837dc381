"""Code as users write it: checked by mypy, never run."""

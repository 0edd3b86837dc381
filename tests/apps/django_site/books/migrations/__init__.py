"""Django's migrations of the books."""

"""One process against a real PostgreSQL."""

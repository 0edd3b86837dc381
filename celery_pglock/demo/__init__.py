"""A demonstration that needs no infrastructure: PostgreSQL and a broker from wheels, started here."""

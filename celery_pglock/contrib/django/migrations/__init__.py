"""Django's migrations: one for each release whose SQL files have new steps."""

"""Pure code: no database, no process, milliseconds."""

"""Real workers and beats against a real broker and a real PostgreSQL."""

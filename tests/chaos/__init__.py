"""Real processes, killed, frozen and cut off for a long time."""

"""Command-line scripts, one per task; each also runs by path."""

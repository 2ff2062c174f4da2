"""Numbers that must not move."""

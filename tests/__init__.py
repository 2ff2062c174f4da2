"""A regular package, so that no `tests` folder of an installed distribution can shadow it."""

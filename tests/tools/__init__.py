"""Programs that tests and developers run with `python -m`, and plugins for pytest."""

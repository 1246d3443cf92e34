"""Experiments: runs as data, their results in SQLite, grids of runs on all cores."""

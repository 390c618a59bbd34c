"""Schedules: one function each, one file for each family, all in one table (`table.py`)."""

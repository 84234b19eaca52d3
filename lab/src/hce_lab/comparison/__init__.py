"""Rival systems, run alike and put into one table."""

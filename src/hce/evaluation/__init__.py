"""Measure rankings, read and write run files, and test for significance."""

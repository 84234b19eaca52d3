"""Measure rankings, read and write run files, and test differences for significance."""

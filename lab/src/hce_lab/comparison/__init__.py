"""Rival systems, run under the same conditions and compared in one table."""

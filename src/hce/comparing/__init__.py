"""Several systems in one table."""

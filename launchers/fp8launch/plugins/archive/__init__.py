"""A run in one file, for a bug report."""

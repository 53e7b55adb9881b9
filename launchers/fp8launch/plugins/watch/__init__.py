"""A full-screen view of runs and their logs."""

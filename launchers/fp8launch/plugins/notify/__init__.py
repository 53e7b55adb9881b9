"""Notifications about the end of a run."""

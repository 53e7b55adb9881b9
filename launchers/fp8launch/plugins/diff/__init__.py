"""The differences between two recipes."""

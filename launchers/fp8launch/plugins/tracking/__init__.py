"""Export of runs to experiment trackers."""

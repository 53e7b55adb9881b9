"""Validation losses in `compare`: over seeds, and relative to the baseline."""

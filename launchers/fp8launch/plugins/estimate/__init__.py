"""Estimates of a run that has not been submitted: parameters, memory by term, and cost."""

"""The first cluster profile and the first recipe."""

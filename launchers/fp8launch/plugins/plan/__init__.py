"""The speed model, and the search for layouts with it."""

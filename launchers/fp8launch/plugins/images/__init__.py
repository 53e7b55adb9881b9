"""Container images as files."""

"""Evidence that a layout trains what one rank would train, and that a run resumes as itself."""

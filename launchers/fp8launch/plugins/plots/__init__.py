"""Pictures, and the HTML report of a comparison."""

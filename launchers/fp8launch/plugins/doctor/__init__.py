"""What this machine and its cluster provide."""

"""What would stop or spoil a run, found on the login node: no GPU, no torch, nothing submitted."""

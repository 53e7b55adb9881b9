"""Find what would stop or spoil a run on the login node, without a GPU, torch or a submission."""

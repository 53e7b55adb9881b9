"""Find on the login node what would stop or spoil a run, without a GPU, without torch, and without submitting."""

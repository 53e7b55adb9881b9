"""Programs that `worker.py` runs, with torch and Megatron."""

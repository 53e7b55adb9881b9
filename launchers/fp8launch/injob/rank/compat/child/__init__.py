"""On PYTHONPATH of a CPU training process's child processes. It is a package only so that it is shipped."""

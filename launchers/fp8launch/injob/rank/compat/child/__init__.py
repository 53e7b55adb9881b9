"""On PYTHONPATH of the processes below a CPU training process. A package only so that it is shipped with the rest."""

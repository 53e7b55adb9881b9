"""Evaluation of models and checkpoints with lm-evaluation-harness."""

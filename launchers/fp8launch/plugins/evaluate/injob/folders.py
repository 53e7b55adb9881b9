"""Where results are in a run folder, for the job and for reports."""

EVALUATIONS = "evaluations"

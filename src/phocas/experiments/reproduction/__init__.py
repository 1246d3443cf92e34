"""The paper's experiments as data: tasks, figures, claims and verdicts."""

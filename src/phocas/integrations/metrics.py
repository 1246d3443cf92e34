"""Numbers of a guard for trackers (TensorBoard, Weights & Biases, MLflow)."""

from __future__ import annotations

from phocas.integrations.reports import Report


def metrics(report: Report) -> dict[str, float]:
    """Return the numbers of a report by name.

    The names are ``phocas/steps``, ``phocas/flagged`` (how many ranks are), ``phocas/unusual``,
    ``phocas/expected`` and, for each rank, ``phocas/dropped/rank3`` (the share of its values that
    was dropped) and ``phocas/flagged/rank3`` (1 if it is flagged).
    """
    flagged = {one["rank"] for one in report["suspects"]}
    found = {
        "phocas/steps": float(report["steps"]),
        "phocas/flagged": float(len(flagged)),
        "phocas/unusual": float(len(report["unusual"])),
        "phocas/expected": report["expected"],
    }
    for rank, share in zip(report["members"], report["dropped"], strict=True):
        found[f"phocas/dropped/rank{rank}"] = share
        found[f"phocas/flagged/rank{rank}"] = float(rank in flagged)
    return found

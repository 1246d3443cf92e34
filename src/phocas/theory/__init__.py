"""The paper's bounds and conditions as functions, counterexamples, and survival probabilities."""

from phocas.theory.bounds import (
    Bound,
    adaptive_heraclius,
    adaptive_krum,
    adaptive_phocas,
    adaptive_trimmed_mean,
    delta_heraclius,
    delta_krum,
    delta_phocas,
    delta_trimmed_mean,
    largest_b,
    largest_krum,
    table,
)
from phocas.theory.convergence import (
    contraction,
    distance_bound,
    error_floor,
    gradient_bound,
    largest_step_convex,
    largest_step_smooth,
    printed_error_floor,
)
from phocas.theory.counterexamples import against_krum, against_mean, against_selection
from phocas.theory.participation import Participation
from phocas.theory.survival import Chance, Exposure, Survival

__all__ = [
    "Bound",
    "Chance",
    "Exposure",
    "Participation",
    "Survival",
    "adaptive_heraclius",
    "adaptive_krum",
    "adaptive_phocas",
    "adaptive_trimmed_mean",
    "against_krum",
    "against_mean",
    "against_selection",
    "contraction",
    "delta_heraclius",
    "delta_krum",
    "delta_phocas",
    "delta_trimmed_mean",
    "distance_bound",
    "error_floor",
    "gradient_bound",
    "largest_b",
    "largest_krum",
    "largest_step_convex",
    "largest_step_smooth",
    "printed_error_floor",
    "table",
]

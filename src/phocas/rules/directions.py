"""Rules that compare the directions of rows: FLAME and FoolsGold."""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
from numpy.typing import NDArray

from phocas.rules.algebra import (
    Distances,
    Floats,
    Planning,
    Request,
    lost,
    measured_norms,
    weighing,
)
from phocas.rules.centres import WeighingRule
from phocas.rules.signguard import clipped_mean
from phocas.specs import normalise, positive

ALIKE = 1e-12  # a squared distance of directions that may be rounding: an angle of a millionth


def _directions() -> Generator[Request, Floats, tuple[Floats, Floats]]:
    """Measure the squared norms of the rows, and the squared distances between their directions.

    The direction of a row is the row divided by its norm. The cosine of a row of zeros with others
    is 0. A row with NaN or inf is at infinite distance from all others.
    """
    squared, request = yield from measured_norms(lambda each: float(np.median(each)))
    lengths = np.sqrt(squared)
    present = np.isfinite(lengths)
    used = present & (lengths > 0)
    inverse = np.zeros(len(lengths))
    inverse[used] = request.scale / lengths[used]
    wide = bool(np.any((inverse[used] < 1e-30) | (inverse[used] > 1e30)))
    apart = np.array((yield Distances(np.diag(inverse), wide=wide)))
    apart[apart <= ALIKE] = 0.0
    apart[used[:, None] != used] = 2.0
    apart[~present] = apart[:, ~present] = np.inf
    np.fill_diagonal(apart, 0.0)
    return squared, apart


@dataclass(frozen=True)
class FLAME(WeighingRule):
    """Average the densest majority of rows by their angles, clipped to the median length.

        S = the first set of more than m/2 rows that single linkage by 1 - cos(x_i, x_j) joins
        FLAME = mean over S of x_i min(1, M / |x_i|),  M the median of |x_1| ... |x_m|

    Single linkage joins the two nearest sets of rows, again and again. This is what HDBSCAN finds
    with the parameters of the paper: one cluster of more than half of the rows, and one neighbour.
    Angles of less than a millionth count as zero.

    Breakdown: no guarantee. The result is no longer than M, and honest rows are in S if most rows
    are honest. But a Byzantine row whose angle to an honest row is small is in S too. A row with
    NaN or inf is dropped.

    Reference: Nguyen et al., "FLAME: taming backdoors in federated learning" (2022). The paper
    compares models; the rows are compared here, which are gradients or updates of the model. The
    paper then adds Gaussian noise with the deviation 0.001 M to the result; nothing is added here.

    >>> import numpy as np
    >>> rows = np.array([[3.0, 4.0], [4.0, 3.0], [6.0, 9.0], [-5.0, 0.0]])
    >>> FLAME()(rows).round(2)
    array([3.26, 3.72])
    """

    name: ClassVar[str] = "flame"

    def error_bound(self, m: int, q: int) -> float | None:
        """Return None: there is no guarantee."""
        del m, q
        return None

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Choose the rows by the distances between their directions."""
        del rng
        squared, apart = yield from _directions()
        members = _densest_majority(apart)
        return clipped_mean(squared, members) if len(members) else lost(m)


def _densest_majority(apart: Floats) -> NDArray[np.intp]:
    """Return the first set of more than half of the rows that single linkage joins.

    The set is empty if half of the rows or more are at infinite distance.
    """
    joined = apart.copy()  # the distance at which single linkage joins two rows
    for i in range(len(apart)):
        np.minimum(joined, np.maximum(joined[:, i, None], joined[i]), out=joined)
    needed = np.sort(joined, axis=1)[:, len(apart) // 2]
    first = int(needed.argmin())
    if np.isinf(needed[first]):
        return np.array([], np.intp)
    return np.flatnonzero(joined[first] <= needed[first])


@dataclass(frozen=True)
class FoolsGold(WeighingRule):
    """Lower the weights of rows that are similar to one another, as those of sybils are.

        c_ij = max(0, cos(x_i, x_j)),  v_i = max_j c_ij,  c_ij <- c_ij v_i / v_j where v_j > v_i
        a_i = 1 - max_j c_ij,  a_i <- a_i / max a
        w_i = confidence (ln(a_i / (1 - a_i)) + 1/2), at least 0 and at most 1
        FoolsGold = sum of w_i x_i / sum of w_i

    If all rows are equal, so are their weights.

    Breakdown: no guarantee. The rule is for workers whose data differ, against sybils that send
    similar rows. One Byzantine row that is like no other has full weight at any length, and honest
    workers whose data are alike lose theirs. A row with NaN or inf has weight zero.

    Reference: Fung, Yoon, Beschastnikh, "The limitations of federated learning in sybil settings"
    (2020). The paper compares the sums of all that each worker has sent; the rule has no memory of
    single workers, and compares the rows. With momentum at the workers, the rows are such sums. The
    paper may also weight the features, and adds the weighted rows; their mean is taken here.

    Args:
        confidence: the factor that makes weights more extreme.

    >>> import numpy as np
    >>> rows = np.array([[3.0, 0.0], [0.0, 4.0], [-5.0, 1.0], [-5.0, 1.0]])
    >>> FoolsGold()(rows)  # the last two are sybils
    array([1.5, 2. ])
    """

    confidence: float = 1.0
    name: ClassVar[str] = "foolsgold"

    def __post_init__(self) -> None:
        """Check that the confidence is positive."""
        normalise(self, confidence=positive("FoolsGold", "confidence", self.confidence))

    def error_bound(self, m: int, q: int) -> float | None:
        """Return None: there is no guarantee."""
        del m, q
        return None

    def planning(self, m: int, rng: np.random.Generator | None) -> Planning:
        """Compute the weights of the rows from the cosines between them."""
        del rng
        squared, apart = yield from _directions()
        present = np.flatnonzero(np.isfinite(squared))
        if not len(present):
            return lost(m)
        pairs = np.ix_(present, present)
        cosines = np.clip(1 - apart[pairs] / 2, 0.0, 1.0)
        zero = squared[present] == 0
        cosines[zero] = cosines[:, zero] = 0.0
        weights = np.zeros(m)
        weights[present] = self._weights(cosines)
        return weighing(weights / weights.sum())

    def _weights(self, cosines: Floats) -> Floats:
        """Return the weights of rows from 0 to 1; one of them is 1."""
        np.fill_diagonal(cosines, 0.0)
        most = cosines.max(axis=1)
        with np.errstate(divide="ignore", invalid="ignore"):
            pardoned = np.where(most > most[:, None], cosines * (most[:, None] / most), cosines)
        different = 1 - pardoned.max(axis=1)
        largest = different.max()
        if largest <= ALIKE:
            return np.ones(len(cosines))
        share = different / largest
        with np.errstate(divide="ignore"):
            logits = np.log(share) - np.log1p(-share)
        return np.asarray(np.clip(self.confidence * (logits + 0.5), 0.0, 1.0))

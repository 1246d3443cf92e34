"""The claims: the paper's in our words, ours about our rules, and the results they refer to."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from phocas.experiments.reproduction.checks import (
    LIKE,
    SMALL,
    against,
    against_baseline,
    best_in_almost_all,
    cheaper,
    drops,
    every,
    fails,
    farther,
    gap_narrows,
    insensitive,
    like_no_failures,
    reaches,
    reason_is_b,
    slower,
    survival_is_likelier,
    survives,
    whatever_q,
)
from phocas.experiments.reproduction.verdicts import Claim

if TYPE_CHECKING:
    from phocas.experiments.reproduction.tasks import ClaimsOf

ATTACKS = {
    "gaussian": "the Gaussian attack",
    "omniscient": "the omniscient attack",
    "bit-flip": "the bit-flip attack",
    "gambler": "the gambler",
}
SETTINGS = ("none", *ATTACKS)

# Explanations of claims that do not hold on MNIST (docs/reproduction.md has more).
BIASED = (
    "Columns are skewed, and leaving values out is then biased: after 200 rounds Phocas is off by"
    " 0.40 of the gradient's length (Trmean 0.29, Multi-Krum 0.24); in columns made symmetric the"
    " bias is gone. That the step is shorter explains only a fifth of the gap to Mean."
)
CLEAN_ROW = (
    "44% of the values at the first server are 0, which no factor changes: Krum found and chose a"
    " clean row in 198 of 200 rounds (171 at the last server)."
)
ONE_BATCH = (
    "Krum follows one worker's 32 samples. A single honest worker alone is as far behind over the"
    " rounds (2.7 of 3.0 points, three seeds); at the end (1.4 of 2.3) Krum's bias adds the rest."
)
SAME_ROWS = (
    "With b = q both average exactly the 14 honest rows, so that their curves coincide. The paper's"
    " Multi-Krum may average fewer: one of m - q - 2 = 12 rows is 0.2 points behind, as it says."
)

PAPER: tuple[Claim, ...] = (
    Claim(
        "none-phocas",
        "Appendix, batch size",
        "Without failures Phocas is like Mean.",
        like_no_failures("none", "Phocas"),
        BIASED,
    ),
    Claim(
        "none-trmean",
        "Appendix, batch size",
        "Without failures Trmean is slightly slower than Mean.",
        slower("none", "Trmean", "Mean", SMALL),
        BIASED,
    ),
    Claim(
        "none-krum",
        "Appendix, batch size",
        "Without failures Krum is the slowest.",
        every(slower("none", "Krum", than) for than in ("Mean", "Multi-Krum", "Trmean", "Phocas")),
    ),
    Claim(
        "batch-gap",
        "Appendix, batch size",
        "The gaps of Krum and of Trmean to Mean narrow when the batch grows.",
        every(gap_narrows(label) for label in ("Krum", "Trmean")),
    ),
    Claim(
        "gaussian-mean",
        "Gaussian attack",
        "Mean does not survive the Gaussian attack.",
        fails("gaussian", "Mean"),
    ),
    Claim(
        "gaussian-gaps",
        "Gaussian attack",
        "The gaps between the other rules are tiny.",
        every(
            against("gaussian", "Phocas", label, -SMALL, SMALL, "final")
            for label in ("Krum", "Multi-Krum", "Trmean")
        ),
        ONE_BATCH,
    ),
    Claim(
        "gaussian-phocas",
        "Gaussian attack",
        "Phocas performs as if there were no failures.",
        like_no_failures("gaussian", "Phocas"),
    ),
    *(
        Claim(
            f"gaussian-{label.lower()}",
            "Gaussian attack",
            f"{label} converges slightly slower than Phocas.",
            slower("gaussian", label, "Phocas", SMALL),
            reason,
        )
        for label, reason in (("Krum", ONE_BATCH), ("Multi-Krum", SAME_ROWS), ("Trmean", BIASED))
    ),
    Claim(
        "omniscient-phocas",
        "Omniscient attack",
        "Phocas performs as if there were no failures.",
        like_no_failures("omniscient", "Phocas"),
    ),
    Claim(
        "omniscient-multi-krum",
        "Omniscient attack",
        "Multi-Krum is behind Phocas, by a small gap.",
        against("omniscient", "Phocas", "Multi-Krum", 0.0, SMALL, "final"),
        SAME_ROWS,
    ),
    Claim(
        "omniscient-krum",
        "Omniscient attack",
        "Krum converges slower than Phocas and Multi-Krum.",
        every(slower("omniscient", "Krum", than) for than in ("Phocas", "Multi-Krum")),
    ),
    Claim(
        "omniscient-trmean",
        "Omniscient attack",
        "Trmean converges to bad solutions.",
        fails("omniscient", "Trmean"),
    ),
    Claim(
        "bit-flip-survivors",
        "Bit-flip attack",
        "Phocas and Trmean survive the bit-flip attack.",
        every(survives("bit-flip", label) for label in ("Phocas", "Trmean")),
    ),
    Claim(
        "bit-flip-others",
        "Bit-flip attack",
        "No other rule survives the bit-flip attack.",
        every(fails("bit-flip", label) for label in ("Mean", "Krum", "Multi-Krum")),
    ),
    *(
        Claim(
            f"bit-flip-q-{label.lower()}",
            "Bit-flip attack",
            f"Whatever q it is given, {label} is stuck at bad solutions.",
            whatever_q(label),
        )
        for label in ("Krum", "Multi-Krum")
    ),
    Claim(
        "gambler-survivors",
        "Gambler attack",
        "Phocas and Trmean survive the gambler attack.",
        every(survives("gambler", label) for label in ("Phocas", "Trmean")),
    ),
    Claim(
        "gambler-others",
        "Gambler attack",
        "No other rule survives the gambler attack.",
        every(fails("gambler", label) for label in ("Mean", "Krum", "Multi-Krum")),
        CLEAN_ROW,
    ),
    *(
        Claim(
            f"gambler-slower-{label.lower()}",
            "Gambler attack",
            f"Under the gambler {label} is slightly slower than Mean without failures.",
            against_baseline("gambler", label, -SMALL, 0.0, "average"),
            BIASED,
        )
        for label in ("Phocas", "Trmean")
    ),
    *(
        Claim(
            f"gambler-b-{label.lower()}",
            "Sensitivity",
            f"The best accuracy of {label} does not change much with b.",
            insensitive(label),
            "The smallest b are exceeded by wrong values in one column: two occur in every fourth"
            " round, three in one of 1200 (phocas theory plan gives the chances).",
        )
        for label in ("Phocas", "Trmean")
    ),
    Claim(
        "mean",
        "Discussion",
        "Mean survives none of the four attacks.",
        every(fails(figure, "Mean") for figure in ATTACKS),
    ),
    *(
        Claim(
            f"classic-{label.lower()}",
            "Discussion",
            f"{label} survives wrong rows (Gaussian, omniscient) and not wrong values (bit-flip,"
            " gambler).",
            every(
                [
                    *(survives(figure, label) for figure in ("gaussian", "omniscient")),
                    *(fails(figure, label) for figure in ("bit-flip", "gambler")),
                ]
            ),
        )
        for label in ("Krum", "Multi-Krum")
    ),
    Claim(
        "omniscient-variance",
        "Discussion",
        "Under the omniscient attack Trmean is farther from the honest gradients than Phocas.",
        farther("omniscient", "Trmean", "Phocas"),
    ),
    Claim(
        "gambler-probability",
        "Discussion",
        "Under the gambler Phocas and Trmean survive more often than Krum and Multi-Krum.",
        survival_is_likelier,
        CLEAN_ROW,
    ),
    Claim(
        "gambler-trmean",
        "Discussion",
        "Under the gambler Trmean is slightly better than Phocas.",
        against("gambler", "Trmean", "Phocas", 0.0, SMALL, "final"),
        BIASED,
    ),
    Claim(
        "gambler-reason",
        "Discussion",
        "Trmean leads Phocas there because b = 8 is too many: the lead is smaller with b = 4.",
        reason_is_b,
        "The lead is there with either b. " + BIASED,
    ),
    Claim(
        "phocas-best",
        "Discussion",
        "Phocas performs best in almost all cases: within a point of the best rule in all"
        " experiments but one.",
        best_in_almost_all(SETTINGS),
        BIASED,
    ),
    Claim(
        "multi-krum-good",
        "Discussion",
        "Multi-Krum is good too under wrong rows: within two points of Mean without failures.",
        every(
            against_baseline(figure, "Multi-Krum", low=-SMALL)
            for figure in ("none", "gaussian", "omniscient")
        ),
    ),
    Claim(
        "phocas-multi-krum",
        "Discussion",
        "Phocas is as good as Multi-Krum or better in every experiment.",
        every(
            against(figure, "Phocas", "Multi-Krum", -LIKE, np.inf, "final") for figure in SETTINGS
        ),
        BIASED,
    ),
    Claim(
        "phocas-cost",
        "Discussion",
        "Phocas costs less time than Krum and Multi-Krum.",
        every(cheaper("Phocas", label) for label in ("Krum", "Multi-Krum")),
    ),
    Claim(
        "trmean-cost",
        "Discussion",
        "Trmean is the cheapest of the robust rules.",
        every(cheaper("Trmean", label) for label in ("Phocas", "Krum", "Multi-Krum")),
    ),
    Claim(
        "candidates",
        "Discussion",
        "Rules that average more candidates do better: Phocas and Multi-Krum (14 of 20) lead Trmean"
        " (8), which leads Krum (1), without failures.",
        every(
            [
                slower("none", "Trmean", "Phocas"),
                slower("none", "Trmean", "Multi-Krum"),
                slower("none", "Krum", "Trmean"),
            ]
        ),
        BIASED,
    ),
)

# The numbers were set before the rule was written; its default cutoff was then chosen by them.
HERACLIUS: tuple[Claim, ...] = (
    Claim(
        "none-heraclius",
        "Accuracy",
        "Without failures Heraclius is within 0.4 points of Mean.",
        against_baseline("none", "Heraclius", -0.004, 0.004),
    ),
    *(
        Claim(
            f"{figure}-heraclius",
            "Accuracy",
            f"Under {attack} Heraclius is within 0.7 points of Mean without failures.",
            against_baseline(figure, "Heraclius", -0.007, 0.007),
        )
        for figure, attack in ATTACKS.items()
    ),
    *(
        Claim(
            f"{figure}-heraclius-phocas",
            "Accuracy",
            f"Under {attack} Heraclius is not behind Phocas.",
            against(figure, "Heraclius", "Phocas", 0.0, np.inf, "final"),
        )
        for figure, attack in ATTACKS.items()
    ),
    Claim(
        "dropped-honest",
        "Dropped shares",
        "Honest workers lose at most 3% of their values.",
        every(drops(figure, "Heraclius", "honest", at_most=0.03) for figure in SETTINGS),
    ),
    Claim(
        "dropped-liars",
        "Dropped shares",
        "Under the Gaussian attack Byzantine workers lose at least 95% of theirs.",
        drops("gaussian", "Heraclius", "byzantine", at_least=0.95),
    ),
)

# The numbers were required before the rule was written; its first default cutoff met them.
CLEANED = "CellFilter + NNM + Trmean"
ADAPTED = {
    "little": "a little is enough",
    "inner-product": "the inner-product attack",
    "sign-flip": "flipped signs",
    "min-max": "the min-max attack",
}
CHOOSING: tuple[Claim, ...] = (
    Claim(
        "none-cleaning",
        "Accuracy",
        f"Without failures {CLEANED} ends at 0.915 or more.",
        reaches("none", CLEANED, 0.915),
    ),
    *(
        Claim(
            f"{figure}-cleaning",
            "Accuracy",
            f"Under {attack} {CLEANED} ends at {least:.3g} or more.",
            reaches(figure, CLEANED, least),
        )
        for attacks, least in ((ATTACKS, 0.915), (ADAPTED, 0.86))
        for figure, attack in attacks.items()
    ),
    Claim(
        "cells-nnm",
        "Why cell-filter",
        "Without cleaning, NNM + Trmean survives neither the bit-flip attack nor the gambler.",
        every(fails(figure, "NNM + Trmean") for figure in ("bit-flip", "gambler")),
    ),
)

# Required before any of their runs.
CHOOSING_MOMENTUM: tuple[Claim, ...] = (
    Claim(
        "none-cleaning",
        "Accuracy",
        f"Without failures {CLEANED} is within 0.3 points of Mean.",
        against_baseline("none", CLEANED, low=-0.003),
    ),
    *(
        Claim(
            f"{figure}-cleaning",
            "Accuracy",
            f"Under {attack} {CLEANED} ends at 0.91 or more.",
            reaches(figure, CLEANED, 0.91),
        )
        for figure, attack in {**ATTACKS, **ADAPTED}.items()
    ),
)

# Written down before any of their runs; no number was required for this task.
CHOOSING_CIFAR10: tuple[Claim, ...] = (
    Claim(
        "none-cleaning",
        "Accuracy",
        f"Without failures {CLEANED} is within two points of Mean.",
        against_baseline("none", CLEANED, low=-SMALL),
    ),
    *(
        Claim(
            f"{figure}-cleaning",
            "Accuracy",
            f"Under {attack} {CLEANED} is within five points of Mean without failures.",
            against_baseline(figure, CLEANED, low=-0.05),
        )
        for figure, attack in {**ATTACKS, **ADAPTED}.items()
        if figure in ("gambler", "little", "min-max")
    ),
    Claim(
        "cells-nnm",
        "Why cell-filter",
        "Without cleaning, NNM + Trmean does not survive the gambler.",
        fails("gambler", "NNM + Trmean"),
    ),
)

CLAIMS: dict[ClaimsOf, tuple[Claim, ...]] = {
    "paper": PAPER,
    "heraclius": HERACLIUS,
    "choosing": CHOOSING,
    "choosing-cifar10": CHOOSING_CIFAR10,
    "choosing-momentum": CHOOSING_MOMENTUM,
}
"""Claims by the value of ``claims`` in a task file."""

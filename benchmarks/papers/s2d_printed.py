"""The figures printed in the S2D paper (Kavehzadeh et al. 2024)."""

from __future__ import annotations

from benchmarks.papers.s2d_runs import FIRST, LAST, MIDDLE, SFT, SMALL, SORTED

# Table 1, Llama-2-13B on GSM8K: speed-up and the percentage of right answers.
TABLE_1 = {"plain": (1.0, 48.97), "sorted target": (1.21, 33.51), "sorted draft": (1.53, 48.97)}
# The paper's targets, the smallest first; the draft has 12 layers with exits 6, 9 and 12.
TARGETS = ("Vicuna-7B", "Vicuna-13B", "LLaMA-Chat-70B")
# Table 2, by draft and target: speed-up and mean accepted tokens at T = 0, then at T = 1.
TABLE_2 = {
    SFT: ((1.19, 3.19, 1.16, 3.44), (1.21, 3.05, 1.10, 3.16), (1.94, 2.46, 1.94, 2.54)),
    FIRST: ((1.38, 2.43, 1.30, 2.53), (1.38, 2.40, 1.35, 2.87), (1.83, 2.05, 1.87, 2.14)),
    MIDDLE: ((1.24, 2.80, 1.26, 3.05), (1.31, 2.78, 1.32, 2.87), (1.92, 2.27, 1.94, 2.34)),
    LAST: ((1.17, 3.11, 1.07, 3.22), (1.23, 3.01, 1.20, 3.17), (1.91, 2.39, 1.96, 2.53)),
    SORTED: ((1.34, 2.86, 1.27, 3.01), (1.38, 2.76, 1.38, 2.89), (1.95, 2.36, 1.98, 2.44)),
}
# Table 4, the same at T = 0 for a small sorted model (Vicuna-160m).
TABLE_4 = {
    SMALL + FIRST: ((1.20, 2.10), (1.26, 2.06), (1.68, 1.76)),
    SMALL + MIDDLE: ((1.10, 2.33), (1.21, 2.29), (1.79, 1.96)),
    SMALL + LAST: ((1.00, 2.67), (1.07, 2.58), (1.90, 2.19)),
    SMALL + SORTED: ((1.17, 2.54), (1.28, 2.44), (1.91, 2.16)),
}
# Table 5, Llama-2-13B with the same sorted draft on GSM8K: speed-up of S2D and percentage of right answers, for the
# target trained on the task and for the one that was not.
TABLE_5 = ((1.53, 48.97), (1.38, 28.7))
# Table 2, the average of all six speed-ups.
AVERAGE = {SFT: 1.42, FIRST: 1.51, MIDDLE: 1.49, LAST: 1.42, SORTED: 1.55}


def printed(role: str | None, number: int) -> tuple[float | None, ...]:
    """Returns the paper's figures of a draft's role on its target with that number, from 0.

    Returns:
      speed-up and mean accepted tokens at T = 0, then at T = 1; None if the paper has none.

    Examples:
      >>> printed("S2D", 2), printed("small S2D", 0), printed("S2D", 3)
      ((1.95, 2.36, 1.98, 2.44), (1.17, 2.54, None, None), (None, None, None, None))
    """
    targets: tuple[tuple[float, ...], ...] = TABLE_2.get(role or "") or TABLE_4.get(role or "") or ()
    found = targets[number] if number < len(targets) else ()
    return (*found, *(None,) * (4 - len(found)))

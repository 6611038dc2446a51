"""ASD's Tables 3 and 5, greedy (Metel et al. 2024): masks by cosine similarity, beside Draft & Verify's search."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence

import jax
import numpy as np

from benchmarks.papers.counts import FREE, Bench, Case, Claim, Counting, Counts, Paper, Table, choose
from jaxspec.drafting.draft_verify_drafter import DraftVerifyDrafter
from jaxspec.io.methods.asd_numbers import ASDNumbers
from jaxspec.measuring.tuning import asd_sweep
from jaxspec.measuring.tuning.mask_search import search
from jaxspec.measuring.tuning.round_costs import Costs
from jaxspec.measuring.tuning.texts import prepare_texts
from jaxspec.measuring.tuning.tuning_options import SearchOptions
from jaxspec.model.llama import floor_bytes
from jaxspec.model.plan import LayerPlan
from jaxspec.requests.results import Result

SEARCHED, PRINTED, TUNED = "Draft & Verify", "ASD, the paper's numbers", "ASD, tuned"
# Milliseconds of an attention and an MLP sublayer of Llama-2-13B on a V100 (the paper's Table 1), and its head's share
# of the bytes.
MODEL, MODEL_MS, MODEL_HEAD = "Llama-2-13B", (1.339, 0.768), 0.013
TABLE_5 = {"all rules": 1.443, "cosine and rule 2": 1.340, "cosine alone": 1.307, "rules 1 and 2": 1.179}
# The longest draft; masks that a search tries, by Bayesian optimisation and as many at random, and its prompts.
K, TRIALS, SEARCHED_PROMPTS = 12, 40, 8
# The numbers of ASD to try: α as quantiles of the model's similarities, m and n.
EVERYS, KEEP_LASTS = (0, 3, 5), (0, 2)
PARTS = "attention, MLP, head"
PAPER = Paper(
    "Draft on the Fly: Adaptive Self-Speculative Decoding using Cosine Similarity (Metel et al. 2024)",
    (
        Table("Table 3 from counts: × plain", None, (SEARCHED, PRINTED, TUNED)),
        Table(f"Table 3 by task type, from counts: {TUNED} ÷ {SEARCHED}", SEARCHED, (TUNED,), True),
        Table("Table 5 from counts: which rules make the draft, × plain", None, tuple(TABLE_5)),
    ),
    (
        *(Claim(f"{run}, is faster than plain decoding.", run) for run in (PRINTED, TUNED)),
        *(
            Claim(f"{run}, is as fast as {SEARCHED} within 5 %, without its search.", run, SEARCHED, 0.95)
            for run in (PRINTED, TUNED)
        ),
        Claim("All rules are faster than the cosine and rule 2.", "all rules", "cosine and rule 2"),
        Claim("The cosine and rule 2 are faster than the cosine alone.", "cosine and rule 2", "cosine alone"),
        Claim("The cosine alone is faster than rules 1 and 2.", "cosine alone", "rules 1 and 2"),
    ),
    {row: {MODEL: figure} for row, figure in {SEARCHED: 1.495, PRINTED: 1.443, **TABLE_5}.items()},
)


def measure(bench: Bench) -> Counts:
    """Counts ASD with the paper's numbers and with tuned ones, its ablation, and Draft & Verify's searched masks."""
    masks, columns = Masks(bench), _columns(bench)
    tuning = [tokens for _, tokens in bench.prompts("tuning")][:SEARCHED_PROMPTS]
    numbers = ASDNumbers()
    cases: dict[Case, Counting] = {}
    similarities = np.stack([masks.similarities(tuple(prompt)) for prompt in tuning])
    settings = asd_sweep.grid(asd_sweep.default_alphas(similarities), EVERYS, KEEP_LASTS)
    for group in asd_sweep.grouped(similarities, settings):
        one = group.settings[0]
        words = f"α {one.alpha:g}, m {one.every}, n {one.keep_last}"
        cases[Case(TUNED, words)] = functools.partial(masks.count, one)
    chosen = choose(bench.count("tuning", cases, PARTS), [*cases], columns)
    rows = {
        "all rules": numbers,
        "cosine and rule 2": dataclasses.replace(numbers, every=0),
        "cosine alone": dataclasses.replace(numbers, every=0, keep_last=0),
        "rules 1 and 2": dataclasses.replace(numbers, alpha=1.0),
    }
    cases |= {Case(row): functools.partial(masks.count, one) for row, one in rows.items()}
    chosen |= {row: dict.fromkeys(columns, Case(row)) for row in rows}
    chosen[PRINTED] = chosen["all rules"]
    chosen[SEARCHED] = {name: Case(SEARCHED, f"searched for {name}") for name in columns}
    for name, case in chosen[SEARCHED].items():
        cases[case] = functools.partial(masks.count, _search(bench, name, columns[name], tuning))
    return bench.counts("asd", columns, chosen, cases, PARTS)


def _columns(bench: Bench) -> dict[str, Sequence[float]]:
    """Returns the prices of all attention sublayers, all MLP sublayers and the head."""
    lm = bench.lm
    whole, layers = floor_bytes(lm.config, lm.params), lm.params["layers"]
    free = [
        sum(leaf.nbytes for layer in layers for leaf in jax.tree.leaves(layer[name])) / whole
        for name in ("attention", "mlp")
    ]
    model = [(1 - MODEL_HEAD) * ms / sum(MODEL_MS) for ms in MODEL_MS]
    return {FREE: (*free, 1 - sum(free)), MODEL: (*model, MODEL_HEAD)}


def _search(bench: Bench, name: str, prices: Sequence[float], prompts: Sequence[Sequence[int]]) -> LayerPlan:
    """Searches Draft & Verify's mask by agreement with the model's own texts, at the costs of a column."""
    depth = bench.lm.config.num_layers
    attention, mlp, head = prices
    found = search(
        bench.lm,
        prompts,
        SearchOptions(
            trials=TRIALS,
            keep_first_last=depth > 2,
            max_new_tokens=min(SearchOptions().tokens, bench.max_new_tokens),
        ),
        bench.directory / f"{name.replace(' ', '-')}.trials.jsonl",
        resume=bench.resume,
        costs=Costs(attention / depth, mlp / depth, head, ((1, 1.0), (K + 1, 1.0))),
        on_progress=bench.on_progress,
    )
    if found.interrupted:
        raise KeyboardInterrupt
    return found.best.plan


class Masks:
    """Counts texts under masks. Many settings give the same mask on a prompt, so each is counted once."""

    def __init__(self, bench: Bench) -> None:
        self._bench = bench
        self.similarities = functools.cache(self._similarities)
        self._known = functools.cache(self._count)

    def count(self, draft: ASDNumbers | LayerPlan, prompt: Sequence[int]) -> tuple[Result, Sequence[float]]:
        """Counts a text with ASD's numbers, limited to the model's layers, or with one mask for all prompts."""
        ids = tuple(prompt)
        if isinstance(draft, ASDNumbers):
            most = min(draft.keep_last, self._bench.lm.config.num_layers)
            draft = dataclasses.replace(draft, keep_last=most)
            found = asd_sweep.masks_of(self.similarities(ids)[None], [draft])[0, 0]
            draft = LayerPlan(tuple((bool(attention), bool(mlp)) for attention, mlp in found))
        return self._known(ids, draft)

    def _similarities(self, prompt: tuple[int, ...]) -> np.ndarray:
        """Returns the similarities of the attention sublayers on a prompt, float[L]."""
        bench = self._bench
        _, found, _ = prepare_texts(bench.lm, [prompt], [[0] * bench.max_new_tokens])
        return np.asarray(found)[0, :, 0]

    def _count(self, prompt: tuple[int, ...], plan: LayerPlan) -> tuple[Result, Sequence[float]]:
        """Counts a text; each draft pass runs the shares of the attention and MLP sublayers that the mask keeps."""
        result = self._bench.generate(
            prompt, DraftVerifyDrafter(self._bench.lm.config, plan.traced(), num_draft_tokens=K)
        )
        drafted = result.statistics.num_draft_tokens
        return result, [drafted * float(share) for share in (*np.mean(plan.run, axis=0), 1.0)]

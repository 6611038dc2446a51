"""What the rounds of early-exit drafts cost: the parts of a round, timed in turns with plain decoding."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Sequence
from typing import Any

import jax

from jaxspec.bench.steps import SubmodelSteps
from jaxspec.bench.timing import OnProgress, interleaved
from jaxspec.engine.buckets import bucket
from jaxspec.engine.language_model import LanguageModel
from jaxspec.model.plan import LayerPlan
from jaxspec.protocol import rising_widths


@dataclasses.dataclass(frozen=True)
class ExitCosts:
    """Measured times for one text, in milliseconds.

    Attributes:
      plain: a step of plain decoding.
      draft: a draft token by the first E layers, by E.
      last: those layers once more, without the head, by E.
      verify: the other layers and the head over some rows, by (E, rows).
    """

    plain: float
    draft: dict[int, float]
    last: dict[int, float]
    verify: dict[tuple[int, int], float]

    def price(self, exit_layer: int, widths: Sequence[int], free_rows: bool = False) -> dict[int, float]:
        """The milliseconds of a round, by the number of tokens that it drafts.

        Args:
          exit_layer: E.
          widths: of the drafter's verification, see `protocol.Drafter.verify_widths`.
          free_rows: whether several rows cost what one does, as on an accelerator.
        """

        def rows(drafted: int) -> int:
            return 1 if free_rows else min(width for width in widths if width > drafted)

        return {
            drafted: drafted * self.draft[exit_layer]
            + self.last[exit_layer]
            + self.verify[exit_layer, rows(drafted)]
            for drafted in range(max(widths))
        }


def measure(
    lm: LanguageModel,
    exit_layers: Sequence[int],
    constants: Sequence[int],
    num_draft_tokens: int,
    live: int = 33,
    repeats: int = 9,
    on_progress: OnProgress = lambda what: None,
) -> ExitCosts:
    """Times every part that a replay of these exits asks for.

    Args:
      lm: the model.
      exit_layers: E's.
      constants: K's of constant drafts, which are always verified over K + 1 rows.
      num_draft_tokens: K of the other rules.
      live: tokens in the cache while parts are timed.
      repeats: turns.
      on_progress: is called with what goes on.
    """
    depth = lm.config.num_layers
    rows = sorted({1, *rising_widths(num_draft_tokens), *(constant + 1 for constant in constants)})
    with jax.default_device(lm.device):
        steps = functools.partial(SubmodelSteps, lm, live=live, capacity=max(256, bucket(live)))
        # Plain decoding is timed as its parts are, without the loop around both.
        parts: dict[Any, Any] = {"plain": steps(only_layers(depth, range(depth)))}
        for layer in exit_layers:
            first, rest = (only_layers(depth, part) for part in (range(layer), range(layer, depth)))
            parts["draft", layer] = steps(first)
            parts["last", layer] = steps(first, head=False)
            parts |= {(layer, width): steps(rest, width) for width in rows}
        for number, part in enumerate(parts.values()):
            on_progress(f"compiling part {number + 1} of {len(parts)}")
            part()
        times = interleaved(parts, repeats, lambda turn: on_progress(f"measuring the parts, {turn}"))
    cost = {what: statistics.median(times[what]) / part.rounds for what, part in parts.items()}
    return ExitCosts(
        plain=cost["plain"],
        draft={layer: cost["draft", layer] for layer in exit_layers},
        last={layer: cost["last", layer] for layer in exit_layers},
        verify={(layer, width): cost[layer, width] for layer in exit_layers for width in rows},
    )


def only_layers(num_layers: int, layers: Sequence[int]) -> LayerPlan:
    """The plan that runs these layers, whole."""
    others = [layer for layer in range(num_layers) if layer not in layers]
    return LayerPlan.skipping(num_layers, others, others)

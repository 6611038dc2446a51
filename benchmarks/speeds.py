"""How fast is a model, with what, and does it fit? The answer as a table, which `python -m benchmarks.results` writes.

The rows are shapes on devices, in 16 bits where they fit and in int8 where only that fits. The speeds of accelerators
follow from published figures, as those of `jaxspec profile --device-model`; those of a CPU from the steps of one shape
that were measured there. docs/measurements/speeds.json has these steps, and the cells that were measured themselves.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from jaxspec.costs.rounds import DraftCost, StepCosts, kinds, predicted_speedup
from jaxspec.drafting.autoregressive_drafter import AutoregressiveDrafter
from jaxspec.heads.eagle.network import usual_eagle3
from jaxspec.host.files import read_json
from jaxspec.measuring.accelerators import Topology, parse_topology
from jaxspec.measuring.aot import model_shape
from jaxspec.measuring.bench.device_profile import SHAPES
from jaxspec.measuring.roofline import needed_gb, remedies, roofline, weights
from jaxspec.methods import Eagle3
from jaxspec.model.llama import is_shape

ROOT = Path(__file__).parents[1]
MADE = "<!-- Made by `python -m benchmarks.results` from docs/measurements/speeds.json; do not edit. -->"
DEVICES = {
    "cpu": "2-core CPU",
    "t4:1": "T4",
    "l4:1": "L4",
    "h100:1": "H100",
    "v5e:1x1": "v5e",
    "v5e:2x4": "v5e-8",
}
COLUMNS = ("lookup", "EAGLE-3", "sorted draft", "early exit")
# The assumed acceptance of a draft token, and EAGLE-3's tokens a round with so many draft tokens, as users of vLLM
# report them (docs/choose_a_method.md).
ACCEPTED, EAGLE3 = 0.8, (3.5, 7)
# The shape of the sorted draft for a target, with exits after a quarter, half and all of its layers.
SORTED = {"8b": "1.2b", "70b": "1b"}


@dataclasses.dataclass(frozen=True)
class Row:
    """A shape on a device.

    Attributes:
      shape: a name in `SHAPES`.
      device: a name in `DEVICES`.
      bits: the bits of quantised weights; None if they are not quantised.
      remedies: the options with which the shape would fit more of these devices; [] if it fits.
    """

    shape: str
    device: str
    bits: int | None = None
    remedies: tuple[str, ...] = ()

    @property
    def topology(self) -> Topology | None:
        """The devices; None for the CPU."""
        return None if self.device == "cpu" else parse_topology(self.device)

    @property
    def gigabytes(self) -> float:
        """The gigabytes of each device for the weights and a text's cache; the CPU computes in float32."""
        if self.topology is None:
            return 2 * needed_gb(SHAPES[self.shape])
        return needed_gb(SHAPES[self.shape], self.topology.num_devices, self.bits)


def row(shape: str, device: str) -> Row:
    """Returns the row of a shape on a device: in 16 bits, else in int8, else with what would fit.

    Examples:
      >>> row("8b", "t4:1").bits, row("70b", "l4:1").remedies
      (8, ('--mesh model=8', '--weights int8 --mesh model=4'))
    """
    found = Row(shape, device)
    if found.topology is None:
        return found
    given = found.topology.accelerator, SHAPES[shape], found.topology.num_devices
    for bits in (None, 8):
        if remedies(*given, bits) == [""]:
            return dataclasses.replace(found, bits=bits)
    return dataclasses.replace(found, remedies=tuple(remedies(*given)))


def costs(at: Row, shape: str, measured: Mapping[str, Any]) -> StepCosts:
    """Returns the costs of the steps of a shape where a row runs, such as those of the row's draft model."""
    config, topology = SHAPES[shape], at.topology
    if topology is not None:
        return roofline(topology.accelerator, config, shape, chips=topology.num_devices, bits=at.bits)
    # Steps take as long, for a byte of the weights, as those of the measured shape.
    known = StepCosts(**measured)
    layer, head = weights(config)
    of_layer, of_head = weights(SHAPES[known.model])
    ratio = (config.num_layers * layer + head) / (known.num_layers * of_layer + of_head)
    cut = config.num_layers // 4
    whole = ratio * known.step_ms()
    return dataclasses.replace(
        known,
        model=shape,
        num_layers=config.num_layers,
        full_ms=tuple((rows, batch, ratio * ms) for rows, batch, ms in known.full_ms),
        cut_layers=cut,
        cut_ms=whole * (cut * layer + head) / (config.num_layers * layer + head),
        live_token_ms=ratio * known.live_token_ms,
    )


def speeds(at: Row, measured: Mapping[str, Any]) -> dict[str, float]:
    """Returns plain decoding's tokens per second, and the speed-up of each of `COLUMNS` that the shape can have."""
    steps = costs(at, at.shape, measured)
    plain = DraftCost().round_ms(steps, 0)
    layer_ms = steps.step_ms(layers=1) - steps.step_ms(layers=0)
    drafts = {"lookup": kinds(steps.num_layers)["lookup"]}
    if at.shape in SORTED:
        draft = costs(at, SORTED[at.shape], measured)
        exits = model_shape(None, SORTED[at.shape]).trained_for.exits
        mean, heads = sum(exits) / len(exits), (1 + len(exits)) / 2
        drafts["sorted draft"] = DraftCost(draft.step_ms(layers=mean, heads=heads) / layer_ms, heads=0)
    drafts["early exit"] = kinds(steps.num_layers)["early exit"]
    tokens, length = EAGLE3
    head = eagle3(at.shape)
    if at.bits is not None:  # the head has 16 bits
        head = dataclasses.replace(head, layers=head.layers * 16 / at.bits)
    found = {"plain": 1e3 / plain, "EAGLE-3": tokens * plain / head.round_ms(steps, length)}
    for name, cost in drafts.items():
        round_ms = functools.partial(cost.round_ms, steps)
        found[name] = predicted_speedup(ACCEPTED, plain, round_ms).speedup
    return found


@functools.cache
def eagle3(shape: str) -> DraftCost:
    """Returns the cost of the drafts of a typical head of a shape, as `auto` computes it."""
    found = []

    def make() -> int:
        head = jax.tree.map(jnp.zeros, usual_eagle3(SHAPES[shape]).shapes, is_leaf=is_shape)
        found.append(
            Eagle3().cost(model_shape(None, shape).loaded(jnp.bfloat16), AutoregressiveDrafter(), head)
        )
        return 0

    jax.eval_shape(make)
    return found[0]


def table(shapes: Sequence[str], devices: Sequence[str] = tuple(DEVICES)) -> str:
    """Returns the table in Markdown; a measured cell is bold and links to its page.

    Args:
      shapes: names in `SHAPES`.
      devices: names in `DEVICES`.
    """
    return "\n".join(_lines(shapes, devices))


def _lines(shapes: Sequence[str], devices: Sequence[str]) -> Iterator[str]:
    stored = read_json(ROOT / "docs" / "measurements" / "speeds.json")
    cells = {(one["shape"], one["device"], one["column"]): one for one in stored["measured"]}
    made = (f"{one}, ×" for one in COLUMNS)
    headings = ("model", "device", "weights", "GB a device", "plain, tokens/s", *made)
    yield f"| {' | '.join(headings)} |"
    yield "|---|---|---|" + "--:|" * (2 + len(COLUMNS))
    for shape in shapes:
        for device in devices:
            at = row(shape, device)
            found = {} if at.remedies else speeds(at, stored["cpu"])

            def cell(column: str, found: Mapping[str, float] = found, at: Row = at) -> str:
                shown = "–"
                if (speed := found.get(column)) is not None:
                    one = cells.get((at.shape, at.device, column))
                    if one is not None:  # of plain decoding, the time of a step
                        speed = 1e3 / float(one["value"]) if column == "plain" else float(one["value"])
                    shown = f"{speed:,.{0 if speed > 10 else 1}f}"
                    shown = f"[**{shown}**]({one['page']})" if one is not None else shown
                return shown

            kind = "int8" if at.bits else "16 bits" if at.topology else "float32"
            if at.remedies:
                kind = f"no: {' or '.join(f'`{one}`' for one in at.remedies)}"
            parts = [shape, DEVICES[device], kind, f"{at.gigabytes:.1f}"]
            yield f"| {' | '.join([*parts, *map(cell, ('plain', *COLUMNS))])} |"


def replaced(text: str, mark: str, made: str) -> str:
    """Returns the text of a page with this table in place of the one after the mark."""
    return re.sub(rf"({re.escape(mark)}\n\n)(?:\|.*\n)*", lambda found: found[1] + made + "\n", text)

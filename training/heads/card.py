"""The card of a trained head: what it is, what it cost, and how much of what it drafts is accepted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from jaxspec.measuring.bench.speed import Taken, acceptance, acceptance_by_position, speed_ratio
from training.reports.card import command, made_by, used_by


class Decoded(NamedTuple):
    """The decoder's counts after held-out prompts of one kind, by prompt and turn.

    Attributes:
      drafted: with the head and its usual draft length.
      plain: without it.
      by_length: with other draft lengths.
    """

    drafted: Taken
    plain: Taken
    by_length: Mapping[int, Taken] = {}


def write(
    output: Path,
    kind: str,
    target: str,
    fingerprint: str,
    size: int,
    record: Mapping[str, Any],
    metrics: Sequence[Mapping[str, float]],
    step: int,
    measured: Mapping[str, float],
    decoded: Mapping[str, Decoded],
    unit: str = "nats per token",
) -> str:
    """Writes the card of a head as Markdown.

    Args:
      output: the head's directory.
      kind: of the head, which is its method.
      target: how its model was named.
      fingerprint: of that model.
      size: of the weights, bytes.
      record: what the training command wrote into run.json.
      metrics: the records of metrics.jsonl.
      step: of the exported checkpoint.
      measured: what was measured there.
      decoded: by kind of work.
      unit: of the loss.
    """
    until = [entry for entry in metrics if entry["step"] <= step]
    seconds = sum(entry["step_seconds"] for entry in until)
    seen = int(sum(entry["tokens"] for entry in until))
    tokens = record["draft_vocab"]
    lines = [
        f"# {output.name}",
        "",
        f"A head of `--method {kind}` for `{target}` (fingerprint {fingerprint}), by this project's own trainer.",
        "",
        "| | |",
        "|---|---|",
        f"| size | {record['parameters']:,} parameters, {size / 1e6:.2f} MB |",
        f"| vocabulary | {'the whole one' if tokens is None else f'{tokens:,} tokens'} |",
        f"| training | {step:,} steps, {seen:,} tokens predicted, {seconds / 60:.1f} minutes |",
        f"| held-out loss | {measured['held_out_loss']:.4f} {unit} |",
        *(
            f"| data, {kind} | {documents:,} documents, {record['tokens']['training'][kind]:,} tokens, "
            f"{record['tokens']['held_out'][kind]:,} held out |"
            for kind, documents in record["documents"].items()
        ),
        "",
        *made_by(record["commands"]),
        "",
    ]
    speed = ""
    if decoded:
        decoded = {**decoded, "all": _together(decoded)}
        ratio, _ = speed_ratio(decoded["all"].drafted, decoded["all"].plain)
        speed = f"Expected: {_figure(ratio)} × plain decoding, as after the held-out prompts above on that machine."
    return "\n".join([*lines, *_decoding(decoded), "", *used_by(command(target, kind, output), speed)])


def _together(decoded: Mapping[str, Decoded]) -> Decoded:
    """Returns the counts of all kinds of work."""
    return Decoded(
        [texts for one in decoded.values() for texts in one.drafted],
        [texts for one in decoded.values() for texts in one.plain],
        {
            length: [texts for one in decoded.values() for texts in one.by_length[length]]
            for length in next(iter(decoded.values())).by_length
        },
    )


def _decoding(rows: Mapping[str, Decoded]) -> list[str]:
    """How the head drafts, a row for each kind of work and one for all."""
    if not rows:
        return []
    lengths = rows["all"].by_length
    shares = {name: acceptance_by_position(one.drafted) for name, one in rows.items()}
    longest = max(map(len, shares.values()))
    heads = ["held-out prompts", "texts", "tokens per round", "speed-up"]
    heads += [f"token {number}" for number in range(1, longest + 1)]
    lines = [
        "## What it drafts",
        "",
        f"Greedy, each draft a chain of {longest} tokens, after held-out prompts: tokens per round, speed over plain "
        "decoding on the machine of the training, and the share of the rounds that accept the first, second, … token.",
        "",
        "| " + " | ".join(heads) + " |",
        "|" + "---|" * len(heads),
    ]
    for name, one in rows.items():
        length = acceptance(one.drafted)["mean_acceptance_length"]
        speed, _ = speed_ratio(one.drafted, one.plain)
        figures = [_figure(length), _figure(speed), *map(_figure, shares[name])]
        cells = [name, f"{len(one.drafted)}", *figures, *["-"] * (longest - len(shares[name]))]
        lines.append("| " + " | ".join(cells) + " |")
    if lengths:
        lines += ["", "Tokens per round by the length of the draft:", ""]
        lines += [
            "| held-out prompts | " + " | ".join(map(str, lengths)) + " |",
            "|---" * (1 + len(lengths)) + "|",
        ]
        for name, one in rows.items():
            shown = [_figure(acceptance(taken)["mean_acceptance_length"]) for taken in one.by_length.values()]
            lines.append(f"| {name} | " + " | ".join(shown) + " |")
    return lines


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"

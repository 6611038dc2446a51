"""The fitness test: checks whether a model can show speed-ups of early exits and skipped layers.

If the upper layers of a model have no effect, every draft of its lower layers is accepted, and a measured speed-up
means nothing. The test measures the loss after each layer, the size of each layer's output, and whether a draft's
confidence predicts acceptance. `by_exit` is the forward pass; the other functions process its results.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from jaxspec.model import llama
from jaxspec.model.config import LlamaConfig
from jaxspec.model.llama import Params
from jaxspec.model.quantisation import Quantised

BINS = 10
GRAM = 8
# Prompt length in tokens of a text without question and answer ("open text").
OPENING = 16


class Exits(NamedTuple):
    """The predictions of the exits after each layer. Position t contains the prediction of token t + 1.

    Attributes:
      loss: float32[L, B, T], −log probability of the text's next token, in nats.
      chosen: int32[L, B, T], the most likely token.
      confidence: float32[L, B, T], its probability.
    """

    loss: Any
    chosen: Any
    confidence: Any


def by_exit(
    config: LlamaConfig, params: Params, tokens: jax.Array, segments: jax.Array, positions: jax.Array
) -> Exits:
    """Runs the texts once and applies the final norm and head after every layer, one layer at a time.

    Args:
      config: the model.
      params: its parameters.
      tokens: int32[B, T].
      segments: int32[B, T], 1, 2, … for the texts packed into a row (attention stays within a text); 0 is padding.
      positions: int32[B, T], from the start of each text.

    Returns:
      See `Exits`; entry l is the exit after l + 1 layers.
    """
    hidden = llama.embed(config, params, tokens)
    states = []
    for layer, p in enumerate(params["layers"]):
        hidden = llama.run_block(config, config.layer_type(layer), p, hidden, positions, segments)
        states.append(hidden)
    following = jnp.roll(tokens, -1, axis=1)

    def read(state: jax.Array) -> Exits:
        logits = llama.logits(config, params, state)
        total = jax.nn.logsumexp(logits, axis=-1)
        target = jnp.take_along_axis(logits, following[..., None], axis=-1)[..., 0]
        return Exits(total - target, jnp.argmax(logits, -1), jnp.exp(jnp.max(logits, -1) - total))

    exits: Exits = jax.lax.map(read, jnp.stack(states))
    return exits


@dataclasses.dataclass(frozen=True)
class Texts:
    """Texts of one kind of work, packed into rows.

    Attributes:
      tokens, segments, positions: int[N, T]; see `by_exit`.
      learn: bool[N, T], True for tokens of an answer, and for all tokens of a text without question and answer.
    """

    tokens: np.ndarray
    segments: np.ndarray
    positions: np.ndarray
    learn: np.ndarray

    @property
    def judged(self) -> np.ndarray:
        """Positions whose next token is judged, bool[N, T]: it belongs to the same text and to an answer."""
        following = np.roll(self.segments, -1, axis=1)
        following[:, -1] = 0
        counted: np.ndarray = (
            (self.segments > 0) & (following == self.segments) & np.roll(self.learn, -1, axis=1)
        )
        return counted

    @property
    def has_answers(self) -> bool:
        """Whether the texts have questions and answers, that is, some tokens do not belong to an answer."""
        return bool((~self.learn & (self.segments > 0) & (self.positions > 0)).any())

    def openings(self, limit: int, opening: int = OPENING) -> list[list[int]]:
        """Returns the prompts of at most `limit` evenly spaced texts. A prompt contains the tokens before the answer.

        The prompt of an open text is its first `opening` tokens. Texts without a token after the prompt are left out,
        as are pieces of longer texts that begin within an answer.
        """
        found, has_answers = [], self.has_answers
        for row in range(len(self.tokens)):
            for segment in range(1, int(self.segments[row].max()) + 1):
                (places,) = np.nonzero(self.segments[row] == segment)
                learned = self.learn[row, places]
                first = int(learned.argmax()) if has_answers and learned.any() else opening
                if 1 <= first < len(places):
                    found.append(self.tokens[row, places[:first]].tolist())
        return [found[index * len(found) // limit] for index in range(limit)] if len(found) > limit else found

    @classmethod
    def rows(cls, texts: Sequence[tuple[Sequence[int], int]]) -> Texts:
        """Makes rows of one text each. A text is given as its tokens and the number of tokens before its answer."""
        width = max(len(tokens) for tokens, _ in texts)
        made = cls(*(np.zeros((len(texts), width), kind) for kind in (np.int32, np.int32, np.int32, bool)))
        for row, (tokens, read) in enumerate(texts):
            count = len(tokens)
            made.tokens[row, :count] = tokens
            made.segments[row, :count] = 1
            made.positions[row, :count] = np.arange(count)
            made.learn[row, read:count] = True
        return made


def summary(texts: Texts, exits: Exits) -> dict[str, Any]:
    """Returns the figures of one kind of work. Lists have one entry for each exit, after 1 … L layers.

    Returns:
      A dictionary:

      - `tokens`: the number of judged tokens, see `Texts.judged`.
      - `loss`: a list, in nats per token.
      - `agreement`: a list, the share of positions where this exit and the last layer predict the same most likely
        token.
      - `confidence`: a list, the mean probability of the most likely token.
      - `auroc`, `calibration_error`: lists, how well the confidence predicts agreement.
      - `accuracy`: a list, the share of answers that greedy decoding would write exactly; None without answers.
      - `answers`: the number of answers; None without answers.
    """
    judged = texts.judged
    count = max(int(judged.sum()), 1)
    last = exits.chosen[-1]
    agrees = [(chosen == last)[judged] for chosen in exits.chosen]
    confidence = [one[judged] for one in exits.confidence]
    right = [chosen == np.roll(texts.tokens, -1, axis=1) for chosen in exits.chosen]
    answers = [_all_right(texts, judged, one) for one in right] if texts.has_answers else None
    return {
        "tokens": count,
        "loss": [float(loss[judged].sum()) / count for loss in exits.loss],
        "agreement": [float(one.sum()) / count for one in agrees],
        "confidence": [float(one.sum()) / count for one in confidence],
        "auroc": [auroc(c, a) for c, a in zip(confidence, agrees, strict=True)],
        "calibration_error": [calibration_error(c, a) for c, a in zip(confidence, agrees, strict=True)],
        "accuracy": None if answers is None else [float(one.mean()) for one in answers],
        "answers": None if answers is None else len(answers[-1]),
    }


def _all_right(texts: Texts, judged: np.ndarray, right: np.ndarray) -> np.ndarray:
    """Returns whether all judged tokens of a text are right, bool[number of texts]."""
    rows = np.broadcast_to(np.arange(len(judged))[:, None], judged.shape)
    names, index = np.unique(np.stack([rows[judged], texts.segments[judged]]), axis=1, return_inverse=True)
    wrong = np.bincount(index.ravel(), weights=~right[judged], minlength=names.shape[1])
    return np.asarray(wrong == 0)


def auroc(score: np.ndarray, label: np.ndarray) -> float | None:
    """Returns the area under the ROC curve: the probability that a positive has a larger score than a negative.

    Equal scores count half.

    Args:
      score: float[N].
      label: bool[N], or float[N] from 0 to 1. With floats, the pair (i, j) has weight label[i] · (1 − label[j]).

    Returns:
      A number from 0 to 1, 0.5 for an uninformative score; None if all labels are 0 or all are 1.

    Examples:
      >>> auroc(np.array([0.1, 0.4, 0.35, 0.8]), np.array([False, False, True, True]))
      0.75
    """
    _, group = np.unique(score, return_inverse=True)
    positive = np.bincount(group.ravel(), label.astype(np.float64))
    negative = np.bincount(group.ravel(), 1 - label.astype(np.float64))
    pairs = positive.sum() * negative.sum()
    below = np.cumsum(negative) - negative
    return float((positive * (below + negative / 2)).sum() / pairs) if pairs else None


def calibration_error(probability: np.ndarray, label: np.ndarray) -> float:
    """Returns the expected calibration error over ten bins of equal width (Guo et al. 2017, equation 3).

    Args:
      probability: float[N], 0 to 1.
      label: bool[N], or float[N] from 0 to 1.

    Examples:
      >>> calibration_error(np.array([0.75, 0.75, 0.75, 0.75]), np.array([True, True, True, False]))
      0.0
    """
    place = np.minimum((probability * BINS).astype(int), BINS - 1)
    gaps = np.bincount(place, weights=probability - label, minlength=BINS)
    return float(np.abs(gaps).sum() / max(len(label), 1))


def pooled(kinds: Sequence[Mapping[str, Any]], name: str) -> list[float]:
    """Returns the mean of a figure over kinds of work, weighted by judged tokens, for each exit."""
    weights = [kind["tokens"] for kind in kinds]
    means: list[float] = np.average([kind[name] for kind in kinds], axis=0, weights=weights).tolist()
    return means


def write_rms(params: Params) -> dict[str, list[float]]:
    """Returns the root mean square of the matrices that write into the residual stream: a list over layers for
    `attention` and one for `mlp`.
    """

    def rms(matrix: jax.Array | Quantised) -> float:
        matrix = matrix.whole() if isinstance(matrix, Quantised) else matrix
        return float(jnp.sqrt(jnp.mean(jnp.square(matrix.astype(jnp.float32)))))

    return {
        "attention": [rms(layer["attention"]["out"]) for layer in params["layers"]],
        "mlp": [rms(layer["mlp"]["down"]) for layer in params["layers"]],
    }


def repeated(tokens: Sequence[int], length: int = GRAM) -> float:
    """Returns the share of a text's n-grams that occurred earlier in it. It is near 1 for a text that loops.

    Examples:
      >>> repeated([1, 2, 3, 1, 2, 3], length=2)
      0.4
    """
    grams = [tuple(tokens[at : at + length]) for at in range(len(tokens) - length + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0


@dataclasses.dataclass(frozen=True)
class Gate:
    """Conditions that a model must meet before speed-ups of early exits and skipped layers are measured on it.

    Attributes:
      answers_from_quarter, answers_from_three_quarters: minimum decrease of the loss on answers, in nats per token,
        from the exit after a quarter (three quarters) of the layers to the last layer.
      text_from_quarter, text_from_three_quarters: the same for open text.
      quarter_agreement: range of the agreement between the exit after a quarter of the layers and the last layer.
      auroc: minimum AUROC of this exit's confidence as a predictor of agreement.
      calibration_error: maximum calibration error of this exit's confidence.
      confidence: minimum mean confidence of the last layer on answers.
      write_ratio: maximum ratio between the mean RMS (see `write_rms`) of the first and of the last third of the
        layers, the larger divided by the smaller.
      repeated: maximum share of repeated 8-grams in greedy texts.
      accuracy: minimum share of right answers, by kind of work.
    """

    answers_from_quarter: float = 0.15
    answers_from_three_quarters: float = 0.02
    text_from_quarter: float = 0.08
    text_from_three_quarters: float = 0.01
    quarter_agreement: tuple[float, float] = (0.65, 0.9)
    auroc: float = 0.85
    calibration_error: float = 0.1
    confidence: float = 0.85
    write_ratio: float = 2.0
    repeated: float = 0.1
    # Three fifths of the code tasks are idioms, two fifths are traces: 0.6 · 0.9 (idioms) + 0.4 · 0.7 (traces) = 0.82.
    accuracy: Mapping[str, float] = dataclasses.field(
        default_factory=lambda: {"sums": 0.8, "code": 0.82, "edits": 0.9, "facts": 0.9}
    )


@dataclasses.dataclass(frozen=True)
class Check:
    """One condition of the gate.

    Attributes:
      name: the measured quantity.
      value: the measured value; None if it could not be measured, which fails the check.
      wanted: the condition in words.
      passed: whether the condition is met.
    """

    name: str
    value: float | None
    wanted: str
    passed: bool


def checks(report: Mapping[str, Any], gate: Gate | None = None) -> list[Check]:
    """Checks a report of `training.reports.fitness_report.measure` against the gate.

    Args:
      report: with `kinds` (see `summary`), `write_rms` and `repeated`.
      gate: by default the project's own.
    """
    gate = Gate() if gate is None else gate
    kinds = report["kinds"]
    every = list(kinds.values())
    answers = [kind for kind in every if kind["accuracy"] is not None]
    text = [kind for kind in every if kind["accuracy"] is None]
    depth = len(report["write_rms"]["mlp"])
    quarter, three_quarters = quarter_exit(depth), max(1, round(3 * depth / 4))
    # Name, value, lower and upper bound.
    rows: list[tuple[str, float | None, float | None, float | None]] = []
    for name, some, bounds in (
        ("answers", answers, (gate.answers_from_quarter, gate.answers_from_three_quarters)),
        ("open text", text, (gate.text_from_quarter, gate.text_from_three_quarters)),
    ):
        loss = pooled(some, "loss") if some else []
        for layers, bound in zip((quarter, three_quarters), bounds, strict=True) if some else ():
            falls = f"loss on {name} falls from {layers} to {depth} layers"
            rows.append((falls, loss[layers - 1] - loss[-1], bound, None))
    agreement = pooled(every, "agreement")[quarter - 1]
    rows.append((f"agreement of exit {quarter}", agreement, *gate.quarter_agreement))
    ranked = [
        (kind["auroc"][quarter - 1], kind["tokens"])
        for kind in every
        if kind["auroc"][quarter - 1] is not None
    ]
    area = sum(a * count for a, count in ranked) / sum(count for _, count in ranked) if ranked else None
    rows.append((f"AUROC of confidence at exit {quarter}", area, gate.auroc, None))
    error = pooled(every, "calibration_error")[quarter - 1]
    rows.append((f"calibration error at exit {quarter}", error, None, gate.calibration_error))
    if answers:
        rows.append(("mean confidence on answers", pooled(answers, "confidence")[-1], gate.confidence, None))
    writes = np.mean([report["write_rms"]["attention"], report["write_rms"]["mlp"]], axis=0)
    third = max(1, depth // 3)
    bottom, top = float(writes[:third].mean()), float(writes[-third:].mean())
    ratio = max(bottom, top) / max(min(bottom, top), 1e-12)
    rows.append(("write RMS, first and last third", ratio, None, gate.write_ratio))
    rows.append((f"repeated {GRAM}-grams", report["repeated"], None, gate.repeated))
    for kind, bound in gate.accuracy.items():
        if kind in kinds and kinds[kind]["accuracy"] is not None:
            rows.append((f"accuracy on {kind}", kinds[kind]["accuracy"][-1], bound, None))
    return [_check(*row) for row in rows]


def _check(name: str, value: float | None, least: float | None, most: float | None) -> Check:
    wanted = f"at least {least:g}" if most is None else f"at most {most:g}"
    if least is not None and most is not None:
        wanted = f"from {least:g} to {most:g}"
    low, high = -np.inf if least is None else least, np.inf if most is None else most
    return Check(name, value, wanted, value is not None and low <= value <= high)


def quarter_exit(depth: int) -> int:
    """Returns the exit after a quarter of the layers, at least 1."""
    return max(1, round(depth / 4))

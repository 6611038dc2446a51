"""Published counts of one cell of each paper, counted again without the library's model, cache, loop and rules."""

from __future__ import annotations

import functools
import json
import math
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest

from benchmarks import results
from benchmarks.papers import adaspeed as adaspeed_paper
from benchmarks.papers import asd as asd_paper
from benchmarks.papers import s2d as s2d_paper
from benchmarks.papers.counts import Bench, read_counts
from jaxspec.engine.language_model import load
from jaxspec.io.methods.asd_numbers import ASDNumbers
from jaxspec.measuring.tuning.s2d_sweep import sorted_draft
from jaxspec.methods import AdaSPEED

CHECKPOINTS = Path(results.DOCS).parent / "checkpoints"
NEW, EOS = 128, 1
# The first of the 40 reporting prompts, which the library counts again too.
STORED = 1
Ran = tuple[np.ndarray, np.ndarray]


class Llama:
    """A Llama in float64 from the tensors of a checkpoint; `past` are the keys and values of tokens before."""

    def __init__(self, name: str) -> None:
        path = CHECKPOINTS / name
        self.config = json.loads((path / "config.json").read_text())
        self.depth, self.tensors = self.config["num_hidden_layers"], tensors(path / "model.safetensors")

    def __getitem__(self, name: str) -> np.ndarray:
        return self.tensors[name if name.startswith("lm_") else f"model.{name}"]

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.config["rms_norm_eps"]) * self[name]

    def layer(
        self, x: np.ndarray, number: int, past: Ran | None, skip: Sequence[bool]
    ) -> tuple[np.ndarray, Ran, float]:
        """Returns the stream after a layer, the keys and values, and the mean cosine of the stream around attention."""
        name, before = f"layers.{number}.", x
        start = 0 if past is None else len(past[0])
        seen = self.norm(x, name + "input_layernorm.weight")
        size = self.config["head_dim"]
        query, key, value = (
            (seen @ self[f"{name}self_attn.{part}_proj.weight"].T).reshape(len(x), -1, size) for part in "qkv"
        )
        angles = np.arange(start, start + len(x))[:, None] * 1e4 ** (-np.arange(0, size, 2) / size)
        cos, sin = np.cos(angles)[:, None], np.sin(angles)[:, None]

        def turned(a: np.ndarray) -> np.ndarray:
            left, right = np.split(a, 2, axis=-1)
            return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1)

        query, key = turned(query), turned(key)
        if past is not None:
            key, value = (np.concatenate(pair) for pair in zip(past, (key, value), strict=True))
        scores = np.einsum("qhd,khd->hqk", query, key) / math.sqrt(size)
        scores[:, np.arange(len(key)) > np.arange(start, start + len(x))[:, None]] = -np.inf
        weights = np.exp(scores - scores.max(-1, keepdims=True))
        weights /= weights.sum(-1, keepdims=True)
        if not skip[0]:
            out = np.einsum("hqk,khd->qhd", weights, value).reshape(len(x), -1)
            x = x + out @ self[name + "self_attn.o_proj.weight"].T
        sizes = np.linalg.norm(before, axis=-1) * np.linalg.norm(x, axis=-1)
        cosine = float(((before * x).sum(-1) / sizes).mean())
        if not skip[1]:
            seen = self.norm(x, name + "post_attention_layernorm.weight")
            gate, up = (seen @ self[f"{name}mlp.{part}_proj.weight"].T for part in ("gate", "up"))
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self[name + "mlp.down_proj.weight"].T
        return x, (key, value), cosine

    def streams(
        self,
        tokens: Sequence[int],
        past: Sequence[Ran] | None = None,
        skip: Sequence[Sequence[bool]] = ((False, False),) * 99,
        depth: int | None = None,
    ) -> tuple[list[np.ndarray], list[Ran], list[float]]:
        """Returns what `layer` does, for each layer."""
        x = self["embed_tokens.weight"][list(tokens)]
        found: tuple[list[np.ndarray], list[Ran], list[float]] = ([], [], [])
        for number in range(self.depth if depth is None else depth):
            ran = self.layer(x, number, None if past is None else past[number], skip[number])
            x = ran[0]
            for kept, one in zip(found, ran, strict=True):
                kept.append(one)
        return found

    def probabilities(self, x: np.ndarray) -> np.ndarray:
        logits = self.norm(x, "norm.weight") @ self["lm_head.weight"].T
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        return weights / weights.sum(-1, keepdims=True)


def tensors(path: Path) -> dict[str, np.ndarray]:
    """Returns the bfloat16 tensors of a safetensors file: the upper halves of float32 numbers."""
    raw = path.read_bytes()
    begin = 8 + int.from_bytes(raw[:8], "little")
    found = {}
    for name, of in json.loads(raw[8:begin]).items():
        if name != "__metadata__":
            assert of["dtype"] == "BF16"
            halves = np.frombuffer(
                raw[begin + of["data_offsets"][0] : begin + of["data_offsets"][1]], np.uint16
            )
            wide = (halves.astype(np.uint32) << 16).view(np.float32)
            found[name] = wide.reshape(of["shape"]).astype(np.float64)
    return found


class Gamma:
    """The threshold of Draft & Verify, with its update."""

    def __init__(self, first: float) -> None:
        self.value, self.rate = first, 0.0

    def observe(self, drafted: int, accepted: int) -> None:
        self.rate = (self.rate + accepted / drafted) / 2
        self.value += 0.001 if self.rate <= 0.9 else -0.001


class Length:
    """The draft length of the S2D paper's harness."""

    def __init__(self) -> None:
        self.value = 5

    def observe(self, drafted: int, accepted: int) -> None:
        self.value = min(12, self.value + 2) if drafted == accepted else max(1, self.value - 1)


class Counted(NamedTuple):
    """The tokens of a text after the first, and the draft tokens of each round, with and without those past its end."""

    tokens: int
    drafted: list[int]
    within: list[int]

    def work(self, passes: Sequence[float]) -> list[float]:
        """Returns the tokens, the rounds, and the draft passes by part."""
        return [self.tokens, len(self.drafted), *passes]


# Drafts a token after a text and a draft: its distribution.
Draft = Callable[[Sequence[int], Sequence[int]], np.ndarray]


def rounds(
    target: Llama,
    prompt: Sequence[int],
    draft: Draft,
    stops: Callable[[Sequence[float]], bool],
    longest: int,
    number: Gamma | Length,
) -> Counted:
    """Generates a greedy text, with one pass of the target over all its tokens a round."""

    def best(tokens: Sequence[int], count: int) -> list[int]:
        return [int(one) for one in target.probabilities(target.streams(tokens)[0][-1][-count:]).argmax(-1)]

    text, found = best(prompt, 1), Counted(0, [], [])
    while text[-1] != EOS and len(text) < NEW:
        drafted: list[int] = []
        sure: list[float] = []
        while len(drafted) < min(longest, NEW - len(text) - 1) and not (sure and stops(sure)):
            distribution = draft([*prompt, *text], drafted)
            drafted.append(int(distribution.argmax()))
            sure.append(float(distribution.max()))
        true = best([*prompt, *text, *drafted], len(drafted) + 1)
        good = [one == other for one, other in zip([*drafted, -1], true, strict=True)].index(False)
        kept = true[: good + 1]
        kept = kept[: kept.index(EOS) + 1] if EOS in kept else kept
        found.drafted.append(len(drafted))
        found.within.append(len(kept) if len(kept) <= good else len(drafted))
        if found.within[-1]:
            number.observe(found.within[-1], min(good, len(kept)))
        text += kept
    return found._replace(tokens=len(text) - 1)


def asd(target: Llama, case: str, prompt: Sequence[int]) -> list[float]:
    """ASD with the paper's numbers, α .985, m 3 and n 2: it skips sublayers and reads the target's keys and values."""
    cosines = target.streams(prompt)[2]
    skip = [
        (
            layer <= target.depth - 2 and (layer % 3 == 0 or cosine >= 0.985),
            layer <= target.depth - 2 and layer % 3 == 0,
        )
        for layer, cosine in enumerate(cosines, 1)
    ]
    past = functools.lru_cache(1)(lambda text: target.streams(text)[1])

    def draft(text: Sequence[int], drafted: Sequence[int]) -> np.ndarray:
        stream = target.streams([text[-1], *drafted], past(tuple(text[:-1])), skip)[0][-1]
        return target.probabilities(stream[-1])

    gamma = Gamma(0.6)
    found = rounds(target, prompt, draft, lambda sure: sure[-1] < gamma.value, 12, gamma)
    shares = [1 - np.mean([one[part] for one in skip]) for part in (0, 1)]
    return found.work([sum(found.within) * share for share in (*shares, 1.0)])


def adaspeed(target: Llama, case: str, prompt: Sequence[int]) -> list[float]:
    """AdaSPEED: the product of the probabilities of an exit's tokens."""
    exit_layer, first = (float(one) for one in re.findall(r"[\d.]+", case))

    def draft(text: Sequence[int], drafted: Sequence[int]) -> np.ndarray:
        return target.probabilities(target.streams([*text, *drafted], depth=int(exit_layer))[0][-1][-1])

    gamma = Gamma(first)
    found = rounds(target, prompt, draft, lambda sure: math.prod(sure) < gamma.value, 16, gamma)
    return found.work([sum(found.drafted) * exit_layer, sum(found.drafted)])


def s2d(target: Llama, case: str, prompt: Sequence[int]) -> list[float]:
    """S2D: the first sure exit of `sorted`. Tokens wait before the layers that they have not needed, at most eight."""
    sorted_draft, exits = Llama("sorted"), (2, 4, 6)
    thresholds = [*(float(one) for one in re.findall(r"\d\.\d+", case)), 0.0]
    passed, depths, heads = [len(prompt)] * 3, [0] * 3, 0

    def draft(text: Sequence[int], drafted: Sequence[int]) -> np.ndarray:
        nonlocal heads
        position = len(text) + len(drafted) - 1
        if not drafted:
            passed[:] = [min(one, position) for one in passed]
        full = position + 2 >= passed[-1] + 8
        streams = sorted_draft.streams([*text, *drafted])[0]
        found = None
        for number, (layers, threshold) in enumerate(zip(exits, thresholds, strict=True)):
            if found is None:
                heads += threshold < 1
                distribution = sorted_draft.probabilities(streams[layers - 1][-1])
                found, deeper = (distribution, True) if distribution.max() >= threshold else (None, True)
            else:
                deeper = full
            passed[number] = position + 1 if deeper else passed[number]
        depths[sum(one > position for one in passed) - 1] += 1
        return found

    length = Length()
    found = rounds(target, prompt, draft, lambda sure: len(sure) >= length.value, 12, length)
    return found.work([*depths, heads])


def again(paper: str, bench: Bench, case: str, prompt: Sequence[int]) -> list[float]:
    """The same by the code that measures the papers."""
    if paper == "adaspeed":
        exit_layer, gamma = (float(one) for one in re.findall(r"[\d.]+", case))
        method = AdaSPEED(exit_layer=int(exit_layer), gamma=gamma, num_draft_tokens=adaspeed_paper.LONGEST)
        result, passes = adaspeed_paper._count(bench, method, prompt)
    elif paper == "asd":
        result, passes = asd_paper.Masks(bench).count(ASDNumbers(), prompt)
    else:
        thresholds = tuple(float(one) for one in re.findall(r"\d\.\d+", case))
        made = sorted_draft(bench.lm, "sorted")
        result, passes = s2d_paper.count(
            bench, made.drafter, s2d_paper.Setting(made.params, thresholds), prompt
        )
    return [result.statistics.num_tokens - 1, result.statistics.num_rounds, *passes]


@pytest.mark.full
@pytest.mark.parametrize(
    ("paper", "own", "case"),
    [
        ("asd", asd, "all rules"),
        ("adaspeed", adaspeed, "AdaSPEED, exit 3, γ 0.5"),
        ("s2d", s2d, "S2D, τ 0.9, 0.7, schedule"),
    ],
    ids=["asd", "adaspeed", "s2d"],
)
def test_published_counts_are_counted_again(paper, own, case, tmp_path):
    target = Llama("small")
    stored = read_counts(results.DOCS / "results" / f"{paper}-small.json").cases[case]
    bench = Bench(load("small"), tmp_path, max_new_tokens=NEW)
    prompts = [tokens for _, tokens in bench.prompts("reporting")]
    mine = [own(target, case, prompt) for prompt in prompts[:STORED]]
    assert again(paper, bench, case, prompts[0]) == pytest.approx(mine[0])
    for own_counts, tokens, count, passes in zip(mine, *stored, strict=False):
        assert own_counts == pytest.approx([tokens, count, *passes])

"""The errors in the core that matter most: does a test fail on each? `python -m tests.mutants_that_matter` answers.

Each mutant replaces one piece of the source in a copy of the checkout. The ordinary tests of the files that it names
run there until one fails; where none fails, the full tests of these files run. The command ends with status 1 if a
mutant survives the ordinary tests. With arguments, only mutants whose files or names contain one of them run.
"""

from __future__ import annotations

import dataclasses
import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COPIED = ("jaxspec", "tests", "training", "benchmarks", "checkpoints", "pyproject.toml", "README.md")
TIERS = ("ordinary", "full")


@dataclasses.dataclass(frozen=True)
class Mutant:
    """One replacement.

    Attributes:
      name: the error in words.
      file: path from `jaxspec/`.
      old: occurs in the file exactly once.
      new: what replaces it.
      tests: names of test files without `test_`, those that fail soonest first.
    """

    name: str
    file: str
    old: str
    new: str
    tests: str


MUTANTS = (
    Mutant(
        "rejection compares with p in place of p ÷ q",
        "acceptance.py",
        "_uniforms(keys, p.shape[1]) * q < p",
        "_uniforms(keys, p.shape[1]) < p",
        "acceptance",
    ),
    Mutant(
        "the token after a rejection is drawn from p, not from the residual",
        "acceptance.py",
        "jnp.where(cut[:, None], jnp.maximum(p - q, 0.0), p)",
        "p",
        "acceptance",
    ),
    Mutant(
        "a draft that was accepted whole has a residual too",
        "acceptance.py",
        "count = _leading(_uniforms(keys, p.shape[1]) * q < p, proposal.count)\n"
        "        return _redraw(keys, target, draft, count, count < proposal.count)",
        "count = _leading(_uniforms(keys, p.shape[1]) * q < p, proposal.count)\n"
        "        return _redraw(keys, target, draft, count, count <= proposal.count)",
        "acceptance",
    ),
    Mutant(
        "acceptance and redraw share their random numbers",
        "acceptance.py",
        "jax.random.fold_in(key, 0), jnp.arange(count)",
        "key, jnp.arange(count)",
        "acceptance",
    ),
    Mutant(
        "no bonus token is committed after a whole draft",
        "decoding/rounds.py",
        "jnp.where(ended, column + 1, acceptance.count[:, None] + 1)",
        "jnp.where(ended, column + 1, jnp.maximum(acceptance.count[:, None], 1))",
        "decoding conformance",
    ),
    Mutant(
        "tokens after the first end-of-text are committed",
        "decoding/rounds.py",
        "jnp.where(ended, column + 1, acceptance.count[:, None] + 1)",
        "jnp.where(ended, acceptance.count[:, None] + 1, acceptance.count[:, None] + 1)",
        "decoding conformance",
    ),
    Mutant(
        "a draft gets the whole budget, one token too many",
        "decoding/rounds.py",
        "state.limit - state.length - 1, 0)",
        "state.limit - state.length, 0)",
        "decoding conformance generate",
    ),
    Mutant(
        "a text is one token longer than its limit",
        "decoding/rounds.py",
        "(length >= state.limit)",
        "(length > state.limit)",
        "decoding conformance",
    ),
    Mutant(
        "every round of a row draws with the same key",
        "decoding/rounds.py",
        "keys = fold_in(state.keys, state.length)",
        "keys = fold_in(state.keys, jnp.zeros_like(state.length))",
        "decoding conformance penalties",
    ),
    Mutant(
        "all rows of a batch draw with the key of the first",
        "session/feeding.py",
        "jax.random.fold_in(seed_key(request.seed), request.stream)",
        "jax.random.fold_in(seed_key(requests[0].seed), requests[0].stream)",
        "session generate settings",
    ),
    Mutant(
        "a draft model forgets the last token that it was fed",
        "drafting/draft_model_drafter.py",
        "jnp.minimum(outcome.accepted + 1, outcome.drafted), 0)",
        "jnp.minimum(outcome.accepted, outcome.drafted), 0)",
        "drafting conformance",
    ),
    Mutant(
        "a draft model keeps a token that was rejected",
        "drafting/draft_model_drafter.py",
        "jnp.minimum(outcome.accepted + 1, outcome.drafted), 0)",
        "outcome.drafted, 0)",
        "drafting conformance",
    ),
    Mutant(
        "a draft is rotated by positions one too large",
        "drafting/chain_drafter.py",
        "llama.run_layers(config, params, hidden, start + i, cache, plan=plan)",
        "llama.run_layers(config, params, hidden, start + i + 1, cache, plan=plan)",
        "drafting conformance",
    ),
    Mutant(
        "RoPE turns the other way in one half",
        "model/rope.py",
        "second * cos + first * sin",
        "second * cos - first * sin",
        "model huggingface",
    ),
    Mutant(
        "a token does not see itself",
        "model/cache.py",
        "mask = slots <= positions[..., None]",
        "mask = slots < positions[..., None]",
        "model",
    ),
    Mutant(
        "a sliding window is one token too wide",
        "model/cache.py",
        "mask & (slots > positions[..., None] - window)",
        "mask & (slots >= positions[..., None] - window)",
        "model",
    ),
    Mutant(
        "nodes of a tree see the branches beside theirs",
        "model/tree.py",
        'on_path = jnp.take_along_axis(behind, of_row[:, None], axis=2, mode="clip") & within[:, None]',
        "on_path = within[:, None] & (of_row[:, None] <= jnp.arange(depth.shape[1])[None, :, None])",
        "trees model",
    ),
    Mutant(
        "an accepted path is not moved to its slots",
        "model/cache.py",
        'taken = jnp.take_along_axis(split, within + start[:, None, None, None], axis=2, mode="clip")',
        "taken = jnp.take_along_axis(\n"
        "                split, jnp.arange(path.shape[1])[None, None, :, None] + start[:, None, None, None],"
        ' axis=2, mode="clip"\n            )',
        "trees model conformance",
    ),
    Mutant(
        "a stop rule with a threshold never stops",
        "stopping.py",
        "jnp.exp(seen) < self.gamma.value(state[0])",
        "jnp.exp(seen) < 0 * self.gamma.value(state[0])",
        "stopping conformance",
    ),
    Mutant(
        "a product of estimates runs on into the next draft",
        "stopping.py",
        "self.gamma.observe(state[0], outcome), jnp.zeros_like(state[1])",
        "self.gamma.observe(state[0], outcome), state[1]",
        "stopping conformance",
    ),
    Mutant(
        "γ moves the wrong way",
        "stopping.py",
        "jnp.where(moved <= self.alpha, gamma + self.epsilon, gamma - self.epsilon)",
        "jnp.where(moved <= self.alpha, gamma - self.epsilon, gamma + self.epsilon)",
        "stopping",
    ),
    Mutant(
        "top-p keeps one token too many at its boundary",
        "sampling.py",
        "jnp.where(nearer < most, farther, farthest)",
        "jnp.where(nearer <= most, farther, farthest)",
        "sampling",
    ),
    Mutant(
        "a draft token does not see the penalties of the drafts before it",
        "penalties.py",
        "logits = self._penalised(logits, tokens, length, drafts, on_path)",
        "logits = self._penalised(logits, tokens, length, drafts, jnp.zeros_like(on_path))",
        "penalties settings",
    ),
    Mutant(
        "the history of penalties ends one token too early",
        "penalties.py",
        "(place >= begin) & (place < length[:, None])",
        "(place >= begin) & (place < length[:, None] - 1)",
        "penalties settings",
    ),
    Mutant(
        "int8 weights are rounded down",
        "model/quantisation.py",
        "jnp.round(wide / scale[..., None])",
        "jnp.floor(wide / scale[..., None])",
        "int8",
    ),
    Mutant(
        "the scale of int8 weights is half",
        "model/quantisation.py",
        "return Quantised(packed, scale.astype(weight.dtype), bits=bits)",
        "return Quantised(packed, (scale / 2).astype(weight.dtype), bits=bits)",
        "int8",
    ),
    Mutant(
        "queries and keys of a GGUF file stay interleaved",
        "io/gguf/gguf.py",
        'Architecture("llama", interleaved=True, windowed="mistral")',
        'Architecture("llama", windowed="mistral")',
        "gguf",
    ),
    Mutant(
        "an EAGLE head's pairs are one position off",
        "heads/eagle/drafter.py",
        "aux_hidden_state[:, None], start + i - 1, own.cache",
        "aux_hidden_state[:, None], start + i, own.cache",
        "eagle conformance",
    ),
    Mutant(
        "S2D leaves at the first exit that is not sure",
        "drafting/s2d_drafter.py",
        "(largest >= threshold) & (threshold < 1)",
        "(largest < threshold) & (threshold < 1)",
        "s2d conformance",
    ),
    Mutant(
        "an n-gram's continuation begins with its own last token",
        "drafting/ngram_drafter.py",
        "end[:, None] + 1 + jnp.arange(self.num_draft_tokens)[None]",
        "end[:, None] + jnp.arange(self.num_draft_tokens)[None]",
        "drafting",
    ),
    Mutant(
        "a stop string that arrives in pieces is not found",
        "texts/text.py",
        "range(min(len(text), len(stop) - 1), 0, -1)",
        "range(min(len(text), len(stop) - 1), 1, -1)",
        "generate row session settings hf_keys",
    ),
    Mutant(
        "of several stop strings the last in the text cuts it",
        "texts/text.py",
        "self._held[: min(found)[1]]",
        "self._held[: max(found)[1]]",
        "generate row session settings",
    ),
    Mutant(
        "a draft loop ignores the budget of a row",
        "drafting/chain_drafter.py",
        "active & ~stopped & (i + 1 < budget)",
        "active & ~stopped",
        "drafting conformance decoding",
    ),
    Mutant(
        "a ban of repeated n-grams looks at one token too few",
        "penalties.py",
        "match &= (back >= size - 1) | (shifted",
        "match &= (back >= size - 2) | (shifted",
        "penalties settings",
    ),
    Mutant(
        "a banned token becomes possible one token too early",
        "penalties.py",
        "at[..., None] < self.until[:, None]",
        "at[..., None] + 1 < self.until[:, None]",
        "penalties settings",
    ),
    Mutant(
        "the presence penalty counts the prompt",
        "penalties.py",
        "occurrences = counts(self.begin[:, None])",
        "occurrences = counts(0)",
        "penalties settings",
    ),
    Mutant(
        "without turns the smallest group runs",
        "engine/scheduler.py",
        "else max(keys, key=lambda one: len(self._groups[one].ids))",
        "else min(keys, key=lambda one: len(self._groups[one].ids))",
        "scheduler",
    ),
    Mutant(
        "caches that a call has used up are used again",
        "session/prefix.py",
        "if any(leaf.is_deleted() for leaf in jax.tree.leaves(self.caches)):",
        "if False:",
        "prefix",
    ),
    Mutant(
        "texts of any length are kept",
        "session/prefix.py",
        "len(tokens) - 1 - max(kept, default=0) >= self.min_tokens",
        "len(tokens) - 1 - max(kept, default=0) >= 0",
        "prefix",
    ),
    Mutant(
        "a text exceeds the context by a token",
        "texts/requests.py",
        "if length + asked > context:",
        "if length + asked > context + 1:",
        "api",
    ),
    Mutant(
        "the server takes a prompt that fills the context",
        "serving/translation.py",
        "if len(ids) + (not request.only_echo) > context:",
        "if len(ids) > context:",
        "app faults",
    ),
    Mutant(
        "any scheme with the right key is let in",
        "serving/server/app.py",
        'if not (is_right and scheme.lower() == b"bearer"):',
        "if not is_right:",
        "app faults",
    ),
    Mutant(
        "the server keeps one request fewer than it may",
        "serving/server/engine_thread.py",
        "if self.num_open + len(rows) > self.max_open:",
        "if self.num_open + len(rows) >= self.max_open:",
        "app faults",
    ),
    Mutant(
        "a restricted method takes any options",
        "serving/server/answers.py",
        "if one.name == request.method and {**one.given, **request.method_options} == one.given:",
        "if one.name == request.method:",
        "app faults",
    ),
    Mutant(
        "a long body is read to its end",
        "serving/server/app.py",
        "if length.isdecimal() and int(length) > MAX_BODY_BYTES:",
        "if False:",
        "connections",
    ),
    Mutant(
        "a resumed batch answers its lines again",
        "serving/batch.py",
        "if line.digest in results.done:",
        "if False:",
        "batch",
    ),
    Mutant(
        "a system prompt comes before the one of the conversation",
        "serving/batch.py",
        'first.get("role") == "system"',
        'first.get("role") == "developer"',
        "batch",
    ),
    Mutant(
        "refilled rows keep the randomness of the row before",
        "session/feeding.py",
        "keys = [jax.random.fold_in(seed_key(request.seed), request.stream) for request in requests]",
        "keys = [jax.random.fold_in(seed_key(requests[0].seed), request.stream) for request in requests]",
        "session scheduler settings",
    ),
)


def applied(mutant: Mutant, root: Path) -> str:
    """Writes a mutant's file in the copy at `root`, and returns what the file was."""
    path = root / "jaxspec" / mutant.file
    source = path.read_text("utf-8")
    if source.count(mutant.old) != 1:
        raise ValueError(f"{mutant.file} has {source.count(mutant.old)} times, not once: {mutant.old}")
    path.write_text(source.replace(mutant.old, mutant.new), "utf-8")
    return source


def dies(mutant: Mutant, root: Path, tier: str) -> str | None:
    """Returns the first test of a tier that fails in the copy at `root`, None if none does."""
    files = [
        str(path)
        for name in mutant.tests.split()
        for path in sorted((root / "tests").rglob(f"test_{name}.py"), reverse=True)
    ]
    options = ["-x", "-q", "-n", "0", "-p", "no:warnings", *(["-m", "full"] if tier == "full" else [])]
    for file in files:  # one after the other: the first is the likeliest to fail
        ran = subprocess.run(
            [sys.executable, "-m", "pytest", *options, file],
            cwd=root,
            env={**os.environ, "PYTHONPATH": str(root)},
            capture_output=True,
            text=True,
            check=False,
        )
        if ran.returncode not in (0, 5):  # 5: no test of the tier
            failed = [line for line in ran.stdout.splitlines() if line.startswith(("FAILED", "ERROR"))]
            return failed[0].split(" - ")[0].split("::", 1)[-1] if failed else f"status {ran.returncode}"
    return None


def survivors(words: list[str]) -> list[str]:
    """The mutants that survive the ordinary tests; prints each with the tier and the test in which it dies."""
    alive = []
    with tempfile.TemporaryDirectory() as directory:
        root = Path(directory) / "checkout"
        for name in COPIED:
            copy = shutil.copytree if (ROOT / name).is_dir() else shutil.copy
            root.mkdir(exist_ok=True)
            copy(ROOT / name, root / name)
        for mutant in MUTANTS:
            if words and not any(word in mutant.name or word in mutant.file for word in words):
                continue
            source = applied(mutant, root)
            killed = next(((tier, test) for tier in TIERS if (test := dies(mutant, root, tier))), None)
            (root / "jaxspec" / mutant.file).write_text(source, "utf-8")
            if killed is None or killed[0] != "ordinary":
                alive.append(mutant.name)
            print(
                f"{mutant.file}: {mutant.name}\n    {': '.join(killed) if killed else 'SURVIVES'}", flush=True
            )
    return alive


def main() -> None:
    """Ends with status 1 if a mutant survives the ordinary tests."""
    alive = survivors(sys.argv[1:])
    print(f"{len(alive)} of {len(MUTANTS)} survive the ordinary tests")
    sys.exit(bool(alive))


if __name__ == "__main__":
    main()

"""How fast is jaxspec beside transformers? `python -m tests.peers.speed` prints JSON.

Same weights, same prompts, same K, float32, both on all cores, in turns: plain decoding, prompt lookup
against `ngram`, assisted generation with a constant schedule against `draft-model`, the same with an early exit
of the model itself against `layerskip`. Random weights of a named shape, on the dial of
`benchmarks.synthetic_acceptance`, so nothing has to be downloaded.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from pathlib import Path

import jax
import torch
import transformers

from benchmarks.synthetic_acceptance import dial_model, walk_model
from jaxspec.drafting.draft_model_drafter import DraftModel
from jaxspec.drafting.layerskip_drafter import LayerSkip
from jaxspec.drafting.ngram_drafter import NGram
from jaxspec.engine.language_model import LanguageModel
from jaxspec.io.hf import huggingface
from jaxspec.measuring.bench.device_profile import SHAPES
from jaxspec.measuring.bench.timing import interleaved
from jaxspec.model import llama


def peer_of(config, params):
    """The same model in transformers, by way of a saved directory."""
    with tempfile.TemporaryDirectory() as directory:
        huggingface.save(Path(directory), config, params)
        return transformers.AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32).eval()


def main() -> None:
    """Prints the report as JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shape", default="134m", choices=sorted(SHAPES))
    parser.add_argument("--num-draft-tokens", type=int, default=5)
    parser.add_argument("--scale", type=float, default=0.01)
    parser.add_argument("--max-new-tokens", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=5)
    options = parser.parse_args()
    shape, budget, drafts = SHAPES[options.shape], options.max_new_tokens, options.num_draft_tokens
    depth = max(1, shape.num_layers // 4)
    config, params = dial_model(shape, options.scale, depth, jax.random.key(0))
    _, walk = walk_model(shape, jax.random.key(0))
    draft_config, draft_params = config.truncated(depth), llama.truncate(params, depth)
    lm, walker = LanguageModel(config, params), LanguageModel(config, walk)
    peer, peer_walk = peer_of(config, params), peer_of(config, walk)
    peer_draft = peer_of(draft_config, draft_params)
    for assistant in (peer_draft, peer):
        assistant.generation_config.num_assistant_tokens = drafts
        assistant.generation_config.num_assistant_tokens_schedule = "constant"
        assistant.generation_config.assistant_confidence_threshold = 0.0

    start = list(range(3, 35))
    seen = walker.generate([3], max_new_tokens=budget, ignore_eos=True).tokens
    walked = [3, *seen, 3]
    drafter = (DraftModel(draft_config, num_draft_tokens=drafts), draft_params)
    early = LayerSkip(config, depth, num_draft_tokens=drafts)
    lookup = NGram(match="earliest", ngram_max=2, num_draft_tokens=drafts)

    def ours(model, prompt, method):
        return model.generate(prompt, method=method, max_new_tokens=budget, ignore_eos=True).tokens

    def theirs(model, prompt, **extra):
        ids = torch.tensor([prompt])
        with torch.inference_mode():
            out = model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=budget,
                min_new_tokens=budget,
                do_sample=False,
                pad_token_id=0,
                **extra,
            )
        return out[0, len(prompt) :].tolist()

    pairs = {
        "plain": (lambda: ours(lm, start, "autoregressive"), lambda: theirs(peer, start)),
        "ngram": (
            lambda: ours(walker, walked, lookup),
            lambda: theirs(peer_walk, walked, prompt_lookup_num_tokens=drafts),
        ),
        "draft-model": (
            lambda: ours(lm, start, drafter),
            lambda: theirs(peer, start, assistant_model=peer_draft),
        ),
        "layerskip": (
            lambda: ours(lm, start, early),
            lambda: theirs(peer, start, assistant_early_exit=depth),
        ),
    }
    timed = {}
    for name, (mine, peers) in pairs.items():
        if mine() != peers():  # also warms both up
            print(json.dumps({"warning": f"{name}: the two texts differ"}))
        timed |= {name: mine, f"{name} transformers": peers}
    began = time.perf_counter()
    taken = interleaved(timed, options.repeats)
    report = {"shape": options.shape, "num_draft_tokens": drafts, "torch_threads": torch.get_num_threads()}
    report["seconds"] = time.perf_counter() - began
    for name in pairs:
        mine, peers = taken[name], taken[f"{name} transformers"]
        report[name] = {
            "jaxspec_tokens_per_second": 1e3 * budget / statistics.median(mine),
            "transformers_tokens_per_second": 1e3 * budget / statistics.median(peers),
            "ratio": statistics.median(p / m for m, p in zip(mine, peers, strict=True)),
        }
    print(json.dumps(report, indent=2))


if __name__ == "__main__":
    main()

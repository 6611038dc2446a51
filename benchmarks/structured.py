"""Structured output, counted and timed: `python -m benchmarks.structured --model smollm2` prints JSON.

Texts under JSON schemas, with several methods, at temperatures 0 and 1, in batches whose rows have different grammars
or none: an independent validator counts those that are valid. Then a task of extraction: each method's speed over plain
decoding's under the same grammar, and the tokens of a round.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import statistics
import sys
import time
from typing import Any

import jax
import numpy as np

from benchmarks import command
from benchmarks.schemas import REAL, random_schema
from jaxspec.engine.keywords import MethodName
from jaxspec.engine.language_model import LanguageModel, load
from jaxspec.grammar import Grammar, GrammarError, TokenTable, compile_grammar
from jaxspec.host.extras import require
from jaxspec.host.progress import OnProgress
from jaxspec.measuring.bench.speed import ratio_of_counts
from jaxspec.model.config import LlamaConfig
from jaxspec.testing.reference import random_params
from jaxspec.texts.requests import Messages

# With these options a method needs no files.
METHODS: dict[MethodName, dict[str, Any]] = {
    "autoregressive": {},
    "grammar": {},
    "ngram": {},
    "token-recycling": {},
    "layerskip": {"exit_layer": 1},
    "hybrid": {"exit_layer": 1},
}
# The share of the texts with a schema of an application.
_REAL = 0.4
# Makes a random model end its strings.
_QUOTE_BIAS = 10.0
_NAMES = ("Ada Lund", "Bo Chen", "Carla Ruiz", "Dev Patel", "Eva Novak", "Femi Ade", "Gil Roth", "Hana Sato")
_GOODS = ("desk lamps", "notebooks", "coffee mugs", "garden chairs", "bicycle bells", "wool scarves")
_CITIES = ("Oslo", "Lima", "Kyoto", "Porto", "Tallinn")
ORDER = {
    "type": "object",
    "properties": {
        "customer_name": {"type": "string", "maxLength": 30},
        "product_name": {"type": "string", "maxLength": 30},
        "number_of_pieces": {"type": "integer", "minimum": 1, "maximum": 99},
        "price_per_piece_in_euros": {"type": "number"},
        "delivery_city": {"type": "string", "maxLength": 20},
        "express_delivery": {"type": "boolean"},
    },
    "required": [
        *("customer_name", "product_name", "number_of_pieces"),
        *("price_per_piece_in_euros", "delivery_city", "express_delivery"),
    ],
    "additionalProperties": False,
}


@dataclasses.dataclass(frozen=True)
class Options:
    """Counts valid texts under grammars, and times a task of extraction.

    Attributes:
      model: a directory, a .gguf file, a hub id or the name of an embedded model.
      tiny: count with a random model of two layers that has the vocabulary of `model`.
      texts: the texts to count, of all methods together; 0 for none.
      methods: the methods of these texts.
      new: the most tokens of a text.
      rows: of a batch.
      extraction: the prompts of the task of extraction; 0 for none.
      timed: the methods of the task of extraction, beside plain decoding.
    """

    model: str = "smollm2"
    tiny: bool = False
    texts: int = 1000
    methods: tuple[MethodName, ...] = tuple(METHODS)
    new: int = 160
    rows: int = 8
    extraction: int = 40
    timed: tuple[MethodName, ...] = ("grammar", "ngram")


def small(lm: LanguageModel) -> LanguageModel:
    """Returns a random model with the vocabulary of another one."""
    config = LlamaConfig(
        vocab_size=lm.config.vocab_size,
        hidden_size=16,
        intermediate_size=32,
        num_layers=2,
        num_heads=2,
        num_kv_heads=1,
        head_dim=8,
        max_position_embeddings=1024,
        bos_token_id=0,
        eos_token_ids=lm.config.eos_token_ids,
    )
    return LanguageModel(config, jax.device_put(random_params(config, 0)), lm.tokenizer, name="random")


def count(lm: LanguageModel, options: Options, on_progress: OnProgress) -> dict[str, Any]:
    """Returns the numbers of valid and invalid texts, and of those that ended by their length, by method."""
    import jsonschema

    validator = jsonschema.Draft202012Validator
    assert lm.tokenizer is not None
    rng, refused = random.Random(0), set()
    real = itertools.cycle(rng.sample(list(REAL.values()), len(REAL)))
    found: dict[str, Any] = {}
    compiled: list[float] = []
    quote = {lm.tokenizer.encode('"', begins=False)[0]: _QUOTE_BIAS} if options.tiny else None
    each = options.texts / len(options.methods) / 2
    for at, name in enumerate(options.methods):
        for temperature in (0.0, 1.0):
            counts = dict.fromkeys(("valid", "length", "invalid"), 0)
            wanted = round(each * (2 * at + temperature + 1)) - round(each * (2 * at + temperature))
            while (missing := wanted - sum(counts.values())) > 0:
                on_progress(f"{name} at {temperature:g}: {missing} texts left")
                schemas: list[Any] = []
                tables: list[TokenTable | None] = []
                for row in range(options.rows):
                    schema = None
                    if row < missing and row % 5 != 4:
                        schema = next(real) if rng.random() < _REAL else random_schema(rng)
                        began = time.perf_counter()
                        try:
                            grammar = Grammar.json_schema(schema)
                            tables.append(compile_grammar(grammar, lm.tokenizer, lm.config.vocab_size))
                            compiled.append(time.perf_counter() - began)
                        except GrammarError as error:
                            refused.add(str(error))
                            schema = None
                    schemas.append(schema)
                    tables += [None] * (schema is None)
                prompts = [
                    f"JSON of the schema {json.dumps(one)[:400]}:\n" if one else "Once" for one in schemas
                ]
                texts = lm.generate(
                    prompts,
                    grammar=tables,
                    method=name,
                    max_new_tokens=options.new,
                    temperature=temperature,
                    seed=rng.randrange(2**31),
                    logit_bias=quote,
                    **METHODS.get(name, {}),
                )
                for schema, result in zip(schemas, texts, strict=True):
                    if schema is None:
                        continue
                    kind = "length" if result.finish_reason == "length" else "valid"
                    if kind == "valid":
                        try:
                            validator(schema, format_checker=validator.FORMAT_CHECKER).validate(
                                json.loads(str(result))
                            )
                        except (ValueError, jsonschema.ValidationError) as error:
                            kind = "invalid"
                            found.setdefault(
                                "first_invalid", f"{result.text!r}: {str(error).splitlines()[0]}"
                            )
                    counts[kind] += 1
            found[f"{name}, temperature {temperature:g}"] = counts
    kinds = [one for one in found.values() if isinstance(one, dict)]
    total = {kind: sum(one[kind] for one in kinds) for kind in ("valid", "length", "invalid")}
    seconds = {"median": round(statistics.median(compiled), 3), "largest": round(max(compiled), 3)}
    return {"total": total, "by_method": found, "refused_schemas": sorted(refused), "table_seconds": seconds}


def prompts_of(count: int) -> list[Messages]:
    """Returns the conversations of the task of extraction."""
    rng = random.Random(0)
    found: list[Messages] = []
    for _ in range(count):
        text = (
            f"Dear shop, I order {rng.randint(2, 60)} {rng.choice(_GOODS)} at {rng.randint(3, 90)}.50 euros "
            f"each. Please send them {rng.choice(['by express ', ''])}to {rng.choice(_CITIES)}. "
            f"Kind regards, {rng.choice(_NAMES)}"
        )
        found.append([{"role": "user", "content": f"Write this order as JSON.\n\n{text}"}])
    return found


def extract(lm: LanguageModel, options: Options, on_progress: OnProgress) -> dict[str, Any]:
    """Returns each method's speed over plain decoding's and its tokens per round, with 95 % intervals, and its counts.

    Tokens per round are the speed-up where rows and drafts are free.
    """
    methods: tuple[MethodName, ...] = ("autoregressive", *options.timed)
    counts: dict[str, list[list[float]]] = {name: [] for name in methods}
    same: dict[str, int] = dict.fromkeys(methods, 0)
    prompts = prompts_of(options.extraction)
    grammar = Grammar.json_schema(ORDER)
    for at, prompt in enumerate([prompts[0], *prompts]):
        texts = {}
        for name in methods if at % 2 else reversed(methods):
            on_progress(f"extraction {at} of {len(prompts)}: {name}")
            result = lm.generate(
                messages=prompt, grammar=grammar, method=name, max_new_tokens=options.new, temperature=0.0
            )
            lm.executables.wait()
            one, texts[name] = result.statistics, result.tokens
            if at:  # the first turn compiles
                ms = one.decode_ms - one.decode_compile_ms
                counts[name].append([one.num_tokens - 1, ms, one.num_rounds, one.num_accepted_tokens])
        if at:
            for name in methods:
                same[name] += texts[name] == texts["autoregressive"]
    found = {str(name): np.array(rows, float)[:, None] for name, rows in counts.items()}  # [prompts, 1, 4]
    plain = found["autoregressive"]
    report: dict[str, Any] = {}
    for run, mine in found.items():
        rounds = mine[..., [0, 2]]
        tokens, _, total, accepted = mine.sum(axis=(0, 1)).astype(int).tolist()
        report[run] = {
            "speedup": ratio_of_counts(mine[..., :2], plain[..., :2]),
            "tokens_per_round": ratio_of_counts(rounds, np.ones_like(rounds)),
            "tokens": tokens,
            "rounds": total,
            "accepted": accepted,
            "texts_equal_to_plain": same[run],
        }
    return report


def measure(options: Options, on_progress: OnProgress = lambda what: None) -> dict[str, Any]:
    """Returns the counts of both parts."""
    require("test", "jsonschema")
    lm = load(options.model)
    report: dict[str, Any] = {"options": dataclasses.asdict(options), "model": lm.name}
    if options.texts:
        report["texts"] = count(small(lm) if options.tiny else lm, options, on_progress)
    if options.extraction:
        report["extraction"] = extract(lm, options, on_progress)
    return report


if __name__ == "__main__":
    sys.exit(command.run("benchmarks.structured", Options, measure))

"""Texts under schemas of applications and random ones are valid JSON of their schemas."""

from __future__ import annotations

import random

import jsonschema
import pytest

from benchmarks.schemas import REAL, random_schema
from benchmarks.structured import METHODS, Options, measure
from jaxspec.grammar import Grammar, compile_grammar
from tests.files.test_tokenizer import tokenizer


def test_all_schemas_are_valid_and_have_tables():
    rng, used = random.Random(0), tokenizer("byte_level")
    assert len(REAL) == 30
    for schema in [*REAL.values(), *(random_schema(rng) for _ in range(10))]:
        jsonschema.Draft202012Validator.check_schema(schema)
        table = compile_grammar(Grammar.json_schema(schema), used, used.vocab_size)
        assert table.final.any()


@pytest.mark.slow
def test_texts_of_all_methods_are_valid(model):
    options = Options(str(model), tiny=True, texts=10 * len(METHODS), rows=4, extraction=0)
    report = measure(options)["texts"]
    assert report["refused_schemas"] == []
    assert report["total"]["invalid"] == 0, report["by_method"]
    assert report["total"]["valid"] > 5 * len(METHODS)
    assert sum(report["total"].values()) == options.texts

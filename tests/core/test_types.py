"""What a type checker tells a user of the package; mypy reads JAX's types too, which takes a while."""

from __future__ import annotations

import dataclasses
import os
import re
import typing

import pytest

from jaxspec.engine.keywords import Keywords, MethodName
from jaxspec.methods import registry
from jaxspec.requests.generation_options import GenerationOptions
from tests import ROOT, python

# Each line is a call and what mypy should say of it.
CALLS = {
    'lm.generate("a", method="layerskip", exit_layer=3, max_new_tokens=5)': "jaxspec.requests.results.Result",
    "lm.generate([1, 2], stop_rule='confidence')": "jaxspec.requests.results.Result",
    'lm.generate(["a", "b"], max_new_tokens=[1, 2])': "list[jaxspec.requests.results.Result]",
    "lm.generate([[1, 2], [3]])": "list[jaxspec.requests.results.Result]",
    "lm.generate(messages=talk)": "jaxspec.requests.results.Result",
    "lm.generate(messages=[talk, talk])": "list[jaxspec.requests.results.Result]",
    'lm.stream("a")': "typing.Iterator[jaxspec.requests.results.Piece]",
    'lm.stream(["a"], max_batch=1)': "typing.Iterator[jaxspec.requests.results.Piece]",
    'lm.generate("a").text': "str | None",
    'lm.generate("a", jaxspec.GenerationOptions(seed=3), top_k=2)': "jaxspec.requests.results.Result",
    'lm.generate("a", method="auto", among=["ngram", "suffix"])': "jaxspec.requests.results.Result",
    'lm.generate("a", method=jaxspec.methods.LayerSkip(exit_layer=3))': "jaxspec.requests.results.Result",
}
WRONG = {
    'lm.generate("a", max_new_tokens="x")': "max_new_tokens",
    'lm.stream("a", chat=3)': "chat",
    'lm.generate("a", tempature=1)': "tempature",
    'lm.stream("a", tempature=1)': "tempature",
    'lm.generate("a", method="layerskip", exit_layer="six")': "No overload variant of generate",
    'lm.generate("a", method="foo")': "No overload variant of generate",
    'lm.stream("a", method="layerskip", exit_layer="six")': "exit_layer",
    'lm.stream("a", method="foo")': "method",
    "jaxspec.GenerationOptions(tempature=1)": "tempature",
    'jaxspec.methods.LayerSkip(exit_layer="six")': "exit_layer",
}


def test_the_types_of_keyword_arguments_are_current():
    """The slow test has examples of the types of methods' options."""
    methods = registry.built_in()
    assert typing.get_args(MethodName) == tuple(methods)
    types = {name: hint.__forward_arg__ for name, hint in Keywords.__annotations__.items()}
    for field in dataclasses.fields(GenerationOptions):
        assert types.pop(field.name) == field.type
    assert types.keys() == {field.name for method in methods.values() for field in dataclasses.fields(method)}


def test_the_package_says_that_it_has_types():
    assert (ROOT / "jaxspec" / "py.typed").is_file()


@pytest.mark.slow
def test_a_type_checker_knows_what_a_call_returns(tmp_path):
    lines = ["import jaxspec", 'lm = jaxspec.load("small")', 'talk = [{"role": "user", "content": "a"}]']
    first = len(lines) + 1
    lines += [f"reveal_type({call})" for call in CALLS] + list(WRONG)
    (tmp_path / "user.py").write_text("\n".join(lines) + "\n")
    # As if installed: a package found there counts only if it says that it has types.
    words = ("-m", "mypy", "--ignore-missing-imports", "--cache-dir", tmp_path / "cache", "user.py")
    done = python(*words, cwd=tmp_path, env=os.environ | {"MYPYPATH": str(ROOT)})
    for number, (call, expected) in enumerate((CALLS | WRONG).items(), first):
        pattern = rf"^user\.py:{number}: (?:note: Revealed type is|error:) (.*)$"
        said = [line.replace('"', "") for line in re.findall(pattern, done.stdout, re.MULTILINE)]
        if call in CALLS:
            assert said == [expected], call
        else:
            assert any(expected in line for line in said), (call, said)

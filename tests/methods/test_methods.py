"""The methods by name: found by their files and by entry points, their options declared once."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import re
from importlib.metadata import EntryPoint
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

import jaxspec
from jaxspec import methods
from jaxspec.cli.methods import parse_method, parse_run, usual_methods
from jaxspec.console.docs import attribute_docs
from jaxspec.drafting.ngram_drafter import NGramDrafter
from jaxspec.heads.kinds import KINDS
from jaxspec.methods import registry
from jaxspec.methods.base import DraftingMethod, Method, option
from tests import ROOT, refused, tiny


@dataclasses.dataclass(frozen=True, kw_only=True)
class Repeat(DraftingMethod):
    """Proposes the last tokens again.

    Attributes:
      period: after how many tokens the text repeats.
      careful: whether to look twice.
    """

    name: ClassVar[str] = "twice-told"

    period: int | None = option(None, metavar="P")
    careful: bool | None = None


@dataclasses.dataclass(frozen=True, kw_only=True)
class Named(Repeat):
    """A method with its own representation."""

    name: ClassVar[str] = "named"

    def __repr__(self) -> str:
        return "of its own"


@pytest.fixture
def plugged(monkeypatch):
    """Entry points like those of other packages."""

    def plug(value: str) -> None:
        found = {"twice-told": EntryPoint("twice-told", value, registry.GROUP)}
        monkeypatch.setattr(registry, "_entry_points", lambda: found)

    return plug


# Names


def test_every_file_is_found_and_every_name_has_one_place():
    classes = registry.built_in()
    assert list(classes) == sorted(classes)
    homes = {name: method.__module__ for name, method in classes.items()}
    of_heads = {name: f"jaxspec.heads.{name.removesuffix('3')}.method" for name in KINDS}
    others = classes.keys() - KINDS.keys()
    assert homes == of_heads | {
        name: f"jaxspec.methods.{name.replace('-', '_').removesuffix('_probe')}" for name in others
    }
    assert jaxspec.METHODS[: len(classes)] == tuple(classes)


def test_the_package_has_every_class():
    for method in registry.built_in().values():
        assert getattr(methods, method.__name__) is method
    for name in methods.__all__:
        assert hasattr(methods, name)
    with pytest.raises(AttributeError, match="no attribute 'Guess'"):
        methods.Guess  # noqa: B018


@pytest.mark.parametrize("name", registry.built_in())
def test_a_method_says_what_it_is(name):
    method = registry.find(name)
    assert 20 < len(method.summary()) < 110
    documented = attribute_docs(method)
    for one in method.options():
        assert documented[one], one


def test_the_table_of_methods_has_every_method():
    text = (ROOT / "docs" / "choose_a_method.md").read_text("utf-8")
    rows = re.findall(r"^\| `([\w-]+)` \|", text, re.MULTILINE)
    assert [name for name in registry.built_in() if name not in rows] == []


def test_every_method_is_in_the_conformance_suite():
    """A missing name would not be tested."""
    tried = {name for case in tiny.DRAFTERS.values() for name in case.methods}
    assert tried == set(registry.built_in())


# Options


def test_options_are_taken_as_their_types_say():
    method = registry.make(
        "layerskip", {"exit_layer": np.int64(3), "stop_rule": "product", "gamma": 1, "probe": None}
    )
    assert method == methods.LayerSkip(exit_layer=3, stop_rule=("product",), gamma=1.0)
    assert [type(method.exit_layer), type(method.gamma)] == [int, float]
    assert method.given == {"stop_rule": ("product",), "gamma": 1.0, "exit_layer": 3}
    assert repr(method) == "LayerSkip(stop_rule=('product',), gamma=1.0, exit_layer=3)"
    assert repr(Named()) == "of its own"
    assert str(method) == "layerskip stop_rule=('product',) gamma=1.0 exit_layer=3"
    assert methods.NGram(reference=Path("a")).reference == ("a",)
    assert methods.NGram(reference=["a", "b"]).reference == ("a", "b")
    assert methods.DraftModel(draft=tiny.small_model()).draft is tiny.small_model()


@pytest.mark.parametrize(
    ("name", "options", "line"),
    [
        ("guess", {}, "unknown method 'guess'; the methods are adaspeed, adaspeed-probe, asd,"),
        ("layerskip", {"exit_layr": 3}, "unknown option exit_layr; perhaps you meant exit_layer"),
        ("layerskip", {"frobnicate": 3}, "unknown option frobnicate; "),
        ("layerskip", {"max_tokens": 3}, "unknown option max_tokens; perhaps you meant max_new_tokens"),
        ("layerskip", {"plan": "x"}, "layerskip has no option `plan`; it is an option of draft-verify"),
        (
            "kangaroo",
            {"tree": "8x4"},
            "no option `tree`; it is an option of dflash, dspark, eagle, eagle3, hydra",
        ),
        ("ngram", {"gamma": 0.5, "draft": "x"}, "ngram has no option `gamma`; it is an option of adaspeed, "),
        ("layerskip", {"gamma": 0.5}, "layerskip with stop_rule=constant has no option `gamma`"),
        ("adaspeed", {"probe": "x"}, "adaspeed with stop_rule=product has no option `probe`"),
        ("layerskip", {"exit_layer": "3"}, "exit_layer is '3'; give a whole number"),
        ("layerskip", {"exit_layer": 2.5}, "exit_layer is 2.5; give a whole number"),
        ("asd", {"alpha": "x"}, "alpha is 'x'; give a number"),
        ("asd", {"shared_mask": "no"}, "shared_mask is 'no'; give True or False"),
        ("asd", {"static": 1}, "static is 1; give True or False"),
        ("quantised", {"draft_bits": 3}, "unknown draft_bits 3; give one of 8, 4"),
        ("quantised", {"draft_bits": np.array([8, 4])}, "unknown draft_bits array([8, 4])"),
        ("layerskip", {"max_new_tokens": 3}, "unknown option max_new_tokens; see help("),
        ("ngram", {"reference": 3}, "reference is 3; give a text or several"),
        ("ngram", {"reference": [3]}, "reference[0] is 3; give a text"),
        ("asd", {"stop_rule": ("product", "never")}, "unknown stop_rule 'never'; give one of constant,"),
        ("draft-model", {"draft": 3}, "draft is 3; give a text"),
        ("layerskip", {"draft_window": 4}, "draft_window is 4; give a list of whole numbers"),
        ("layerskip", {"draft_window": [4]}, "draft_window is [4]; give two numbers, the first tokens of a"),
        ("asd", {"draft_window": (4, 0)}, "draft_window is [4, 0]; give two numbers"),
        ("s2d", {"draft_window": (-1, 8)}, "draft_window is [-1, 8]; give two numbers"),
        ("quantised", {"draft_window": ["4", 8]}, "draft_window[0] is '4'; give a whole number"),
        (
            "eagle",
            {"draft_window": (4, 8)},
            "method eagle has no option `draft_window`; it is an option of ada",
        ),
        ("suffix", {"ngram_min": 2}, "method suffix has no option `ngram_min`; it is an option of ngram"),
        ("ngram", {"num_draft_tokens": 0}, "num_draft_tokens is 0; a drafting method needs at least 1"),
        ("ngram", {"num_draft_tokens": 129}, "num_draft_tokens is 129; give at most 128"),
        ("auto", {"among": 3}, "among is 3; give a text or several"),
        ("auto", {"among": [None]}, "among[0] is None; give a text"),
        ("auto", {"among": [["ngram"]]}, "among[0] is ['ngram']; give a text"),
        ("auto", {"among": ["ngram", {}], "ngram_max": 3}, "among[1] is {}; give a text"),
        ("auto", {"among": ["hybrid"], "first": 3}, "`among` is hybrid; give a method that drafts"),
        ("auto", {"among": ["auto"]}, "`among` is auto; give a method that drafts"),
        ("auto", {"among": ["autoregressive"]}, "`among` is autoregressive; give a method that drafts"),
        ("auto", {"among": ["nothing"]}, "`among`: unknown method 'nothing'; the methods are"),
        ("auto", {"among": ["ngram"] * 33}, "among names 33 methods; give at most 32"),
        ("auto", {"among": ["hybrid"] * 1001}, "among has 1001 values; give at most 1000"),
        ("ngram", {"reference": ["a"] * 1001}, "reference has 1001 values; give at most 1000"),
        ("x" * 10**6, {}, "unknown method 'xxx"),
        ("hybrid", {"first": 0}, "first is 0; give a text"),
        ("hybrid", {"second": [], "exit_layer": 1}, "second is []; give a text"),
        ("hybrid", {"first": "guess"}, "`first`: unknown method 'guess'; the methods are"),
        ("hybrid", {"second": "hybrid"}, "`second` is hybrid; give a method that drafts"),
        ("hybrid", {"second": methods.Hybrid()}, "`second` is auto; give a method that drafts"),
        ("hybrid", {"second": "autoregressive"}, "`second` is autoregressive; give a method that drafts"),
        ("hybrid", {"draft_exit": 1}, "hybrid has no option `draft_exit`; it is an option of draft-model"),
        (
            "hybrid",
            {"second": "asd", "exit_layer": 1},
            "hybrid has no option `exit_layer`; it is an option of",
        ),
        ("hybrid", {"gamma": 0.5}, "method layerskip with stop_rule=constant has no option `gamma`"),
    ],
)
def test_wrong_options_are_one_line(name, options, line):
    with refused(re.escape(line)):
        registry.make(name, options, ["max_new_tokens"])


@pytest.mark.parametrize("one", [methods.Auto(), methods.Autoregressive()], ids=lambda one: one.name)
def test_among_refuses_what_does_not_draft_by_itself(one):
    """Also as an object of the class, which the registry does not see."""
    with refused(f"`among` is {one.name}; give a method that drafts"):
        methods.Auto(among=(methods.NGram(), one))


@pytest.mark.parametrize("name", registry.built_in())
def test_no_value_of_an_option_has_another_error(name):
    """A file of prompts or a client may give any JSON value, to options of the parts too."""
    values: list[object] = [3, -1, 1.5, True, "", "x", "auto", "hybrid", 2**70, float("nan"), "\ud800"]
    values += [[], {}, [3], [None], [["ngram"]], [{}], {"name": "ngram"}, ["ngram", 3], ["auto", "hybrid"]]
    method = registry.find(name)
    options = {*method.options(), *(("first", "exit_layer", "ngram_max") if method.composite else ())}
    parts = [{}, {"among": ["ngram", "hybrid"]}] if name == "auto" else [{}]
    for given, value, others in itertools.product(options, values, parts):
        with contextlib.suppress(ValueError):
            registry.make(name, others | {given: value})


def test_an_option_that_is_repeated_names_all_parts():
    among = methods.LayerSkip(exit_layer=3), methods.NGram()
    assert parse_run("auto --among layerskip --among ngram --exit-layer 3") == methods.Auto(among=among)


def test_what_compare_runs_by_itself():
    nothing_needed = {"autoregressive", "ngram", "suffix", "token-recycling", "asd"}
    assert set(usual_methods(4)) == nothing_needed | {"layerskip", "adaspeed"}
    assert set(usual_methods(1)) == nothing_needed


def test_a_command_line_has_each_option_once(capsys, plugged):
    words = "--first ngram --second=layerskip --exit-layer 3"
    assert parse_run(f"hybrid {words}") == methods.Hybrid(
        first=methods.NGram(), second=methods.LayerSkip(exit_layer=3)
    )
    with pytest.raises(SystemExit):
        parse_run(f"hybrid {words} --help")
    names = re.findall(r"^  --([\w-]+)", capsys.readouterr().out, re.MULTILINE)
    assert len(names) == len(set(names))
    assert {"first", "ngram-max", "exit-layer", "num-draft-tokens"} <= set(names)
    assert "draft" not in names
    with pytest.raises(SystemExit):
        parse_run("layerskip --help")
    assert "Default: 5, or 12 with a stop rule." in " ".join(capsys.readouterr().out.split())
    # An option keeps the type that its method gives it, whatever other methods call by its name.
    plugged("tests.methods.test_methods:Clashing")
    assert parse_method("twice-told --exit-layer last") == Clashing(exit_layer="last")
    plugged("tests.methods.test_methods:Repeat")
    for words, careful in {"": None, "--careful": True, "--no-careful": False}.items():
        assert parse_method(f"twice-told {words}") == Repeat(careful=careful)


def test_masks_are_compiled_where_asked_for_and_on_a_gpu():
    def static(method, platform):
        return method.is_static(dataclasses.replace(resources, platform=platform))

    resources = methods.Resources(lambda name: None, list)
    assert [static(methods.ASD(), platform) for platform in ("cpu", "gpu", "tpu")] == [False, True, False]
    assert static(methods.DraftVerify(static=True), "cpu")
    assert not static(methods.DraftVerify(static=False), "gpu")
    lm = tiny.language_model()
    assert lm.drafter(methods.ASD(static=True))[0].static
    assert not lm.drafter("asd")[0].static


@dataclasses.dataclass(frozen=True, kw_only=True)
class Clashing(Method):
    """Uses the name of an existing option with another meaning."""

    name: ClassVar[str] = "twice-told"
    exit_layer: str | None = None


def test_a_drafter_that_verifies_too_few_rows_is_refused():
    """Otherwise its tokens would be cut from the proposal, and the text would be wrong."""

    class Narrow(NGramDrafter):
        verify_widths = (1, 2)

    with refused(r"Narrow proposes up to 3 tokens .* let verify_widths end with 4"):
        tiny.language_model().generate([3, 4], method=Narrow(num_draft_tokens=3))


# Other packages


def test_another_package_adds_a_method(plugged):
    plugged("tests.methods.test_methods:Repeat")
    assert registry.find("twice-told") is Repeat
    assert registry.names()[-1] == "twice-told"
    assert registry.make("twice-told", {"period": 2}) == Repeat(period=2)
    found, problems = registry.available()
    assert (found["twice-told"], problems) == (Repeat, [])


@pytest.mark.parametrize(
    ("value", "line"),
    [
        ("tests.nowhere:Repeat", "method 'twice-told' of the entry point tests.nowhere:Repeat cannot be"),
        ("tests.methods.test_methods:dataclasses", "is not a subclass of jaxspec.methods.Method"),
        ("tests.methods.test_methods:DraftingMethod", "has the name None; give both the same name"),
    ],
)
def test_a_package_that_is_broken_is_one_line(plugged, value, line):
    plugged(value)
    with refused(re.escape(line)):
        registry.find("twice-told")
    found, problems = registry.available()
    assert set(found) == set(registry.built_in())
    assert len(problems) == 1
    assert line in problems[0]


@pytest.mark.parametrize(("platform", "pairs"), [("cpu", False), ("gpu", True), ("tpu", True)])
def test_a_draft_model_feeds_two_tokens_where_rows_are_free(platform, pairs):
    resources = methods.Resources(load_draft=lambda model: model.loaded, encode=list, platform=platform)
    drafter, _ = methods.DraftModel(draft_exit=1).build(tiny.language_model().loaded, resources)
    assert drafter.pairs == pairs
    assert not drafter.taking_turns().pairs

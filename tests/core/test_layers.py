"""Imports point down only, and only the upper layers touch the world outside."""

from __future__ import annotations

import ast
import fnmatch
from collections.abc import Iterator

import pytest

from tests import ROOT

# From the bottom up; a module may import what is listed above its own line, and the `SHARED` ones among themselves. `*`
# is the folder of a head type.
LAYERS = (
    "jaxspec.model.config",
    "jaxspec.model.quantisation",
    "jaxspec.model.lora",
    "jaxspec.model.control",
    "jaxspec.model.plan jaxspec.model.numerics jaxspec.model.vocabulary jaxspec.model.tree",
    "jaxspec.model.rope",
    "jaxspec.model.cache",
    "jaxspec.model.llama",
    "jaxspec.model.prefill jaxspec.model.calibration",
    "jaxspec.model.sharding jaxspec.model.head",
    "jaxspec.heads.*.network",
    "jaxspec.heads.hydra.network jaxspec.heads.dspark.network",
    "jaxspec.sampling jaxspec.allowed_tokens",
    "jaxspec.penalties",
    "jaxspec.protocol",
    "jaxspec.tree_acceptance",
    "jaxspec.stopping jaxspec.acceptance jaxspec.lossy",
    "jaxspec.verification",
    "jaxspec.costs",
    "jaxspec.decoding.records",
    "jaxspec.decoding.prefilling jaxspec.decoding.rounds jaxspec.decoding.scoring",
    "jaxspec.drafting.chain_drafter jaxspec.drafting.lookup jaxspec.drafting.tree_drafter jaxspec.decoding",
    "jaxspec.drafting.aux_drafter jaxspec.drafting.exit_drafter jaxspec.drafting.masked_drafter "
    "jaxspec.drafting.choice_rule",
    "jaxspec.drafting.knapsack_drafter",
    "jaxspec.drafting jaxspec.heads.*.drafter",
    "jaxspec.heads.dspark.drafter",
    "jaxspec.host",
    "jaxspec.io",
    "jaxspec.grammar",
    "jaxspec.heads.torch_file jaxspec.heads.tensors",
    "jaxspec.heads.*.files",
    "jaxspec.heads.dspark.files",
    "jaxspec.heads.kinds",
    "jaxspec.heads.padding",
    "jaxspec.heads.files",
    "jaxspec.heads.writer",
    "jaxspec.console",
    "jaxspec.methods",
    "jaxspec.heads.method",
    "jaxspec.heads.tree_method",
    "jaxspec.heads.*.method",
    "jaxspec.heads.dspark.method",
    "jaxspec.heads",
    "jaxspec.programs",
    "jaxspec.requests jaxspec.loading",
    "jaxspec.session",
    "jaxspec.engine",
    "jaxspec",
    "jaxspec.testing",
    "jaxspec.cli",
    "jaxspec.__main__",
    "jaxspec.measuring.accelerators jaxspec.measuring.charts jaxspec.measuring.line_log jaxspec.measuring.output",
    "jaxspec.measuring.bench",
    "jaxspec.measuring.tuning",
    "jaxspec.measuring.aot jaxspec.measuring.roofline",
    "jaxspec.measuring.commands jaxspec.measuring",
    "jaxspec.serving.tools",
    "jaxspec.serving.openai jaxspec.serving.batch_files",
    "jaxspec.serving.translation",
    "jaxspec.serving.batch",
    "jaxspec.serving.server",
    "jaxspec.serving.commands jaxspec.serving",
    "training.data",
    "training.losses",
    "training.reports",
    "training.loop",
    "training.probes",
    "training.run_options",
    "training.option_files",
    "training.command training.start training.prompt_options training.outputs",
    "training.run",
    "training.export",
    "training.job",
    "training.heads training.layerskip",
    "training",
    "benchmarks",
)
SHARED = (
    *(
        "jaxspec.costs",
        "jaxspec.host",
        "jaxspec.io",
        "jaxspec.grammar",
        "jaxspec.console",
        "jaxspec.methods",
        *("jaxspec.programs", "jaxspec.requests", "jaxspec.loading", "jaxspec.session", "jaxspec.engine"),
    ),
    *("jaxspec.testing", "jaxspec.cli", "jaxspec.measuring.bench", "jaxspec.measuring.tuning"),
    *(
        "jaxspec.serving.server",
        "training.data",
        "training.losses",
        "training.reports",
    ),
    *("training.loop", "training.probes", "training.heads", "benchmarks"),
)
# Nothing else of `jaxspec` imports them, nor does one of them import the other.
WINGS = ("jaxspec.measuring", "jaxspec.serving")
# What a module may not import although it stands below.
NEVER = {
    "jaxspec.drafting": ("jaxspec.decoding",),
    "jaxspec.decoding": ("jaxspec.drafting", "jaxspec.stopping", "jaxspec.acceptance", "jaxspec.lossy"),
    "jaxspec.acceptance": ("jaxspec.stopping",),
    "jaxspec.host": ("jaxspec.drafting", "jaxspec.decoding", "jaxspec.stopping", "jaxspec.acceptance"),
    "jaxspec.io": ("jaxspec.drafting", "jaxspec.decoding", "jaxspec.stopping", "jaxspec.acceptance"),
    "jaxspec.grammar": ("jax",),
    "jaxspec.heads.*.files": ("jaxspec.drafting", "jaxspec.heads.*.drafter", "jaxspec.decoding"),
    "jaxspec": ("training", "benchmarks", "torch"),
    "training": ("benchmarks", "torch"),
    "benchmarks": ("training", "torch"),
}
# What these may import all the same, inside functions: other programs to be measured beside.
PEERS = {"benchmarks.peers": ("torch",)}
# Their imports under TYPE_CHECKING are the names that they re-export when asked.
REEXPORTS = ("jaxspec.methods",)
# These talk to the host; everything else is pure functions over pytrees.
HOST = (
    *(
        "jaxspec.host",
        "jaxspec.io",
        "jaxspec.grammar",
        "jaxspec.console",
        "jaxspec.methods",
        *("jaxspec.programs", "jaxspec.requests", "jaxspec.loading", "jaxspec.session", "jaxspec.engine"),
        "jaxspec.testing",
    ),
    *(f"jaxspec.heads.{one}" for one in ("files", "padding", "tensors", "torch_file", "writer", "kinds")),
    *("jaxspec.heads.*.files", "jaxspec.heads.*.method", "jaxspec.heads.method", "jaxspec.heads.tree_method"),
    *("jaxspec.cli", "jaxspec.__main__", "jaxspec.serving"),
    *(f"jaxspec.measuring.{one}" for one in ("bench", "charts", "commands", "line_log", "output")),
    "jaxspec.measuring.tuning.mask_search",
    "jaxspec.measuring.aot",
)
HOST_MODULES = {
    *("os", "sys", "io", "pathlib", "shutil", "tempfile", "time", "logging", "json", "pickle", "random"),
    *("subprocess", "threading", "socket", "rich", "transformers", "huggingface_hub", "safetensors"),
}
HOST_CALLS = {"open", "print", "input", "exec", "eval"}


def modules() -> dict[str, ast.Module]:
    found = {}
    for package in ("jaxspec", "training", "benchmarks"):
        for path in (ROOT / package).rglob("*.py"):
            parts = path.relative_to(ROOT).with_suffix("").parts
            name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
            found[name] = ast.parse(path.read_text("utf-8"))
    return found


MODULES = modules()


def imports(tree: ast.AST) -> Iterator[str]:
    """Full names of what is imported, inside functions too; of a package's name that is a module, the module."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, "imports are absolute"
            for alias in node.names:
                full = f"{node.module}.{alias.name}"
                yield full if full in MODULES else str(node.module)


def within(name: str, package: str) -> bool:
    if "*" in package:
        return fnmatch.fnmatchcase(name, package)
    return name == package or name.startswith(package + ".")


def layer(name: str) -> int:
    """The line that names a module, or else its package; the longest name decides."""
    if name == "jaxspec":
        return LAYERS.index(name)
    lines = [(one, number) for number, line in enumerate(LAYERS) for one in line.split() if one != "jaxspec"]
    named = [(len(one), number) for one, number in lines if within(name, one)]
    assert named, f"{name} has no layer; add it to LAYERS"
    return max(named)[1]


def violations(name: str, tree: ast.Module) -> list[str]:
    """What a module imports or calls that it should not."""
    wrong = []
    for other in imports(at_run_time(tree) if name in REEXPORTS else tree):
        if any(within(other, package) for package in ("jaxspec", "training", "benchmarks")):
            together = any(within(name, package) and within(other, package) for package in SHARED)
            initialiser = within(name, other) and other != "jaxspec"  # a package's own, empty or at the top
            if not together and not initialiser and layer(other) >= layer(name):
                wrong.append(f"{name} imports {other}, which is not below it")
        wing = next((one for one in WINGS if within(other, one)), None)
        if wing and within(name, "jaxspec") and not within(name, wing):
            wrong.append(f"{name} must not import {other}, which is in a wing")
        for upper, forbidden in NEVER.items():
            allowed = other in PEERS.get(name, ()) and other not in imports_at_the_top(tree)
            if within(name, upper) and any(within(other, one) for one in forbidden) and not allowed:
                wrong.append(f"{name} must not import {other}")
        pure = within(name, "jaxspec") and name != "jaxspec" and not any(within(name, host) for host in HOST)
        if pure and other.split(".")[0] in HOST_MODULES:
            wrong.append(f"{name} is pure and must not import {other}")
        if pure:
            wrong += [f"{name} is pure and must not call {call}" for call in host_calls(tree)]
    return wrong


def at_run_time(tree: ast.Module) -> ast.Module:
    """A module without what only a type checker reads."""
    checked = [
        node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    ]
    return ast.Module([node for node in tree.body if node not in checked], [])


def imports_at_the_top(tree: ast.AST) -> set[str]:
    assert isinstance(tree, ast.Module)
    lines = [node for node in tree.body if isinstance(node, (ast.Import, ast.ImportFrom))]
    return set(imports(ast.Module(lines, [])))


def host_calls(tree: ast.AST) -> set[str]:
    called = (node.func for node in ast.walk(tree) if isinstance(node, ast.Call))
    return {function.id for function in called if isinstance(function, ast.Name)} & HOST_CALLS


@pytest.mark.parametrize("name", MODULES)
def test_imports_point_down(name):
    assert violations(name, MODULES[name]) == []


def test_only_the_table_of_commands_names_a_module_of_a_wing():
    """A wing cannot be imported by its name either, except for a command that was called."""
    named = {
        name
        for name, tree in MODULES.items()
        for node in ast.walk(tree)
        if within(name, "jaxspec") and not any(within(name, wing) for wing in WINGS)
        if isinstance(node, ast.Constant) and any(wing in str(node.value) for wing in WINGS)
    }
    assert named == {"jaxspec.cli"}


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("jaxspec.drafting.ngram_drafter", "from jaxspec.decoding import Parts"),
        ("jaxspec.model.llama", "def f():\n    import time"),
        ("jaxspec.sampling", "import jax\nprint(1)"),
        ("jaxspec.host.files", "import torch"),
        ("jaxspec.heads.eagle.files", "from jaxspec.heads.medusa.files import read"),
        ("jaxspec.requests.text", "import jaxspec"),
        ("jaxspec.session.session", "from jaxspec.measuring.bench import timing"),
        ("training.soft", "from benchmarks import results"),
        ("benchmarks.peers", "import torch"),
        ("jaxspec.methods", "from jaxspec.heads.eagle.method import Eagle"),
    ],
)
def test_a_wrong_import_is_noticed(name, line):
    assert violations(name, ast.parse(line)) != []


def test_siblings_share_only_what_is_made_for_it():
    places = ("jaxspec.drafting", "jaxspec.heads.*.drafter")
    drafters = [name for name in MODULES if any(within(name, one) for one in places)]
    assert len(drafters) > 3
    for name in drafters:
        siblings = {other for other in imports(MODULES[name]) if any(within(other, one) for one in places)}
        names = "chain_drafter lookup tree_drafter aux_drafter exit_drafter masked_drafter knapsack_drafter choice_rule"
        shared = {f"jaxspec.drafting.{one}" for one in names.split()}
        # DSpark has only its differences from DFlash.
        base = {"jaxspec.heads.dflash.drafter"} if within(name, "jaxspec.heads.dspark") else set()
        assert siblings <= shared | base, name

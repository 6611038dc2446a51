"""The compiled programs: they copy no cache, contain no weight, and can be lowered for TPU and GPU."""

from __future__ import annotations

import collections
import dataclasses
import functools
import itertools
import math
import re
import types
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import export
from jax.extend.core import Var

from jaxspec import decoding, verification
from jaxspec.acceptance import GreedyAcceptor
from jaxspec.decoding import Parts, Request
from jaxspec.drafting.asd_drafter import ASDDrafter
from jaxspec.drafting.autoregressive_drafter import AutoregressiveDrafter
from jaxspec.drafting.choosing_drafter import ChoosingDrafter
from jaxspec.drafting.draft_model_drafter import DraftModelDrafter
from jaxspec.drafting.draft_verify_drafter import DraftVerifyDrafter
from jaxspec.drafting.layerskip_drafter import LayerSkipDrafter
from jaxspec.drafting.lookup import LookupDrafter
from jaxspec.drafting.ngram_drafter import NGramDrafter
from jaxspec.drafting.s2d_drafter import S2DDrafter
from jaxspec.drafting.token_recycling_drafter import TokenRecyclingDrafter
from jaxspec.heads.dflash.drafter import DFlashDrafter
from jaxspec.heads.eagle.drafter import EagleDrafter
from jaxspec.heads.hydra.drafter import HydraDrafter
from jaxspec.heads.kangaroo.drafter import KangarooDrafter
from jaxspec.model import cache as kv
from jaxspec.model import llama, prefill
from jaxspec.model.cache import KVCache
from jaxspec.model.plan import LayerPlan
from jaxspec.model.quantisation import Quantised
from jaxspec.model.tree import Shape, Tree
from jaxspec.programs import compiled, executables
from jaxspec.programs.compiler_options import compiler_options, tracing
from jaxspec.protocol import Weights
from jaxspec.sampling import Greedy
from jaxspec.stopping import Constant
from tests import tiny

PROMPTS = ([5], [7, 1, 7, 1, 7, 1, 7, 2])
DRAFT_WINDOWS = ("draft-window-asd", "draft-window-pairs", "draft-window-layerskip")
METHODS = (*tiny.METHODS, "draft-verify-static", "eagle-tree", *DRAFT_WINDOWS)
each_method = pytest.mark.parametrize("method", METHODS)
each_batch = pytest.mark.parametrize("batch", [1, 2])
# The most instructions that a layer adds to an optimised program on a CPU.
MOST_ADDED = {"prefill": 170, "rounds": 150}
# The operations that may produce an array of a cache's shape.
IN_PLACE = {"parameter", "get-tuple-element", "dynamic-update-slice", "fusion", "bitcast"}

# The operations that read an array elsewhere than they write.
READS = {"slice", "dynamic-slice", "gather", "pad", "concatenate", "reverse", "transpose"}


class Call:
    """A call of a compiled function: the shapes of its arguments, and the executable."""

    def __init__(self, function: Callable, args: Any, static: dict[str, Any], future: Any) -> None:
        self.function, self.static, self._future = function, static, future
        self.args = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), args)

    def text(self) -> str:
        return self._future.result().as_text()


def calls(lm, method: str, batch: int, **options: Any) -> dict[Callable, Call]:
    """Returns the engine's calls for a method; they are compiled once for all tests."""
    seen = {}
    claim = lm.executables._claim

    def spy(function, args, static, at_once):
        key, future, mine = claim(function, args, static, at_once)
        seen.setdefault(function, Call(function, args, static, future))
        return key, future, mine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(lm.executables, "_claim", spy)
        prompts = PROMPTS[:batch]
        lm.generate(prompts, **tiny.options(method), max_new_tokens=14, ignore_eos=True, **options)
    return seen


def cache_shapes(call: Call) -> set[tuple[int, ...]]:
    """Returns the shape of every cache in the loop's state; caches end in capacity and head size."""
    state = call.args[2]
    caches = [node for node in jax.tree.leaves(state, is_leaf=is_cache) if is_cache(node)]
    drafter = call.args[1].drafter
    drafters = drafter.candidates if isinstance(drafter, ChoosingDrafter) else [drafter]
    own = [
        isinstance(
            one, (DFlashDrafter, DraftModelDrafter, EagleDrafter, HydraDrafter, KangarooDrafter, S2DDrafter)
        )
        for one in drafters
    ]
    assert len(caches) == 1 + sum(own)
    return {leaf.shape for cache in caches for leaf in jax.tree.leaves(cache.layers)}


def is_cache(node: object) -> bool:
    return isinstance(node, KVCache)


def on_caches(text: str, shapes: set[tuple[int, ...]]) -> set[str]:
    """Returns the operations of optimised HLO that produce an array of a cache's shape, anywhere in the program.

    Fusions that end in sums are left out, because nothing inside of them is written.
    """
    text = re.sub(
        r"^%?\S*fused\S* \([^\n]*\{\n(?:(?!^}).)*ROOT \S+ = [^\n]*? reduce\((?:(?!^}).)*^}",
        "",
        text,
        flags=re.M | re.S,
    )

    def squeezed(dims: Iterable[int]) -> tuple[int, ...]:
        return tuple(dim for dim in dims if dim != 1)

    wanted = {squeezed(shape) for shape in shapes}
    made = re.findall(r"= f32\[([\d,]+)\]\S* ([\w-]+)\(", text)
    return {operation for dims, operation in made if squeezed(map(int, dims.split(","))) in wanted}


def overwritten_reads(text: str) -> list[str]:
    """Returns the instructions in fusions that read another part of the buffer that the fusion updates in place.

    XLA's CPU gives wrong values there (openxla/xla #49176), in jax 0.10 and 0.12.
    """
    found = []
    for fusion in re.findall(r"^%?\S*fused\S* .*?^}", text, re.MULTILINE | re.DOTALL):
        lines = re.findall(r"%([\w.-]+) = \S+ ([\w-]+)\((.*?)\)(.*)", fusion)
        made = {name: (operation, re.findall(r"%([\w.-]+)", inside)) for name, operation, inside, _ in lines}
        # The constants, and the first row of each static slice.
        known = {name: inside for name, operation, inside, _ in lines if operation == "constant"}
        begins = {name: re.findall(r"\[(\d+):", rest.partition("}")[0]) for name, _, _, rest in lines}

        def origin(name, made=made):
            operation, operands = made[name]
            return origin(operands[0]) if operation in ("bitcast", "reshape", "copy") else name

        def places(names, known=known):
            # Without zeros, because a bitcast adds and removes dimensions of size 1.
            return {known.get(name, name) for name in map(origin, names)} - {"0"}

        updates = [operands for operation, operands in made.values() if operation == "dynamic-update-slice"]
        for buffer, _, *at in updates:
            for name, (operation, operands) in made.items():
                reads = operation in READS and origin(buffer) in map(origin, operands)
                if reads and places(at) not in (places(operands[1:]), {*begins[name]} - {"0"}):
                    found.append(f"{operation} {name}")
    return found


@pytest.mark.representatives(
    *("autoregressive-1", "choosing-2", "draft-model-1", "asd-2", "s2d-1", "eagle-2", "eagle-tree-2"),
    "draft-window-layerskip-1",
)
@each_batch
@each_method
def test_no_cache_is_copied(lm, method, batch):
    """Caches are passed and updated in place, in the loops and around them."""
    rounds = calls(lm, method, batch)[compiled.run_rounds]
    used = on_caches(rounds.text(), cache_shapes(rounds))
    assert "dynamic-update-slice" in used
    assert used <= IN_PLACE
    assert not overwritten_reads(rounds.text())


def test_a_copied_cache_is_noticed():
    """A loop reads all of the old buffer after it has written one row of the new one."""

    def loop(buffer):
        def body(carry):
            i, b, total = carry
            new = jax.lax.dynamic_update_slice(b, jnp.full((2, 1, 4), total), (0, i, 0))
            return i + 1, new, jnp.sum(b * new)

        return jax.lax.while_loop(lambda carry: carry[0] < 5, body, (0, buffer, 0.0))

    text = jax.jit(loop, donate_argnums=0).lower(jnp.zeros((2, 32, 4))).compile().as_text()
    assert "copy" in on_caches(text, {(2, 32, 4)})


@pytest.mark.parametrize(("first", "noticed"), [(0, True), (1, False)])
def test_a_read_of_what_is_overwritten_is_noticed(first, noticed):
    """A buffer is moved by one row, or a row is changed where it is."""

    def move(x, at):
        base = x + 1
        row = jax.lax.dynamic_slice(base, (at, 0, 0), (1, 1, 1)) * 2 if first else base[:3]
        return jax.lax.dynamic_update_slice(base, row, (at if first else 1, 0, 0)).reshape((1, 4, 1))

    text = jax.jit(move).lower(jnp.zeros((4, 1, 1), jnp.int32), jnp.int32(1)).compile().as_text()
    assert bool(overwritten_reads(text)) == noticed


@pytest.mark.representatives("draft-model", "s2d", "eagle")
@each_method
def test_no_weight_is_in_the_program(lm, method):
    """Parameters are arguments of every compiled function."""
    few = 192 if method == "choosing" else 64  # a choice has tables of its options
    for function, call in calls(lm, method, 1).items():
        closed = function.trace(*call.args, **call.static).jaxpr
        assert sum(const.size for const in all_constants(closed)) < few


def all_constants(closed: Any) -> list[Any]:
    """Returns the constants of a jaxpr and of all jaxprs in it."""
    found = [const for const in closed.consts if hasattr(const, "size")]
    for equation in closed.jaxpr.eqns:
        inner = jax.tree.leaves(equation.params, is_leaf=lambda leaf: hasattr(leaf, "consts"))
        found += [const for one in inner if hasattr(one, "consts") for const in all_constants(one)]
    return found


@pytest.mark.representatives("autoregressive", "choosing", "draft-model", "eagle")
@each_method
def test_the_widths_of_verification(lm, method):
    """From one row to K + 1 rows, for drafts that may be short."""
    call = calls(lm, method, 1)[compiled.run_rounds]
    text = call.function.trace(*call.args, **call.static).lower().as_text()
    vocabulary = tiny.TARGET.vocab_size
    heads = re.findall(rf"-> tensor<1x(\d+)x{vocabulary}xf32>", text)
    drafter = call.args[1].drafter
    widths = drafter.verify_widths
    assert {int(width) for width in heads} >= set(widths)
    expected = {
        "autoregressive": (1,),
        "choosing": (1, 2, 4, 5),
        "draft-model": (4,),
        "token-recycling": (1, 6),
        "eagle-tree": (8,),
    }
    usual = (1, 2, 4) if isinstance(drafter, LookupDrafter | ChoosingDrafter) else (1, 4)
    assert widths == expected.get(method, usual)


@pytest.mark.representatives(*("choosing-cuda", "s2d-cuda", "eagle-tree-tpu"))
@pytest.mark.parametrize("platform", ["tpu", "cuda"])
@each_method
def test_every_loop_lowers_for_accelerators(lm, method, platform):
    """On a machine without accelerators, in bfloat16 as on accelerators."""
    used = calls(lm, method, 1)
    assert {compiled.prefill, compiled.run_rounds} <= set(used)
    for function, call in used.items():
        args = jax.tree.map(as_bfloat16, call.args)
        lowered = export.export(jax.jit(functools.partial(function, **call.static)), platforms=[platform])(
            *args
        )
        assert lowered.platforms == (platform,)


@pytest.mark.full
@pytest.mark.representatives("kangaroo")
@pytest.mark.parametrize(
    "method", ["dflash", "dspark", "hydra", "hydra-tree", "kangaroo", "eagle-tree-drawn", "uno"]
)
def test_other_heads_copy_no_cache_and_lower_for_accelerators(lm, method):
    """A block that attends to itself, a choice among matrices in the loop, and a separate cache with early exits."""
    used = calls(lm, method, 1)
    rounds = used[compiled.run_rounds]
    assert on_caches(rounds.text(), cache_shapes(rounds)) <= IN_PLACE
    args = jax.tree.map(as_bfloat16, rounds.args)
    loop = jax.jit(functools.partial(rounds.function, **rounds.static))
    assert export.export(loop, platforms=["tpu", "cuda"])(*args).platforms == ("tpu", "cuda")


def as_bfloat16(shape: jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    # Not the numbers of four rows, nor counts of two candidates.
    large = shape.dtype == jnp.float32 and shape.size > 4 and shape.shape[-1:] != (2,)
    return jax.ShapeDtypeStruct(shape.shape, jnp.bfloat16 if large else shape.dtype)


# Early exits: the number of rows of each product.

FIVE = dataclasses.replace(tiny.TARGET, num_layers=5)
MATRICES = ("['attention']['qkv']", "['attention']['out']", "['mlp']['gate_up']", "['mlp']['down']")


def products(closed: Any, names: list[str]) -> list[tuple[str, int]]:
    """Yields, for each product of a traced program with a named argument, its name and the other operand's rows."""
    found = []

    def walk(jaxpr: Any, known: list[str]) -> None:
        labels = {var: name for var, name in zip(jaxpr.invars, known, strict=True) if name}
        for equation in jaxpr.eqns:
            given = [labels.get(var, "") if isinstance(var, Var) else "" for var in equation.invars]
            numbers = equation.params
            if equation.primitive.name == "dot_general" and given[1]:
                (contracted, _), _ = numbers["dimension_numbers"]
                shape = equation.invars[0].aval.shape
                rows = [size for axis, size in enumerate(shape) if axis not in contracted]
                found.append((given[1], math.prod(rows)))
            elif equation.primitive.name == "while":
                held = numbers["cond_nconsts"]
                walk(numbers["body_jaxpr"].jaxpr, given[held:])
            elif equation.primitive.name == "jit":
                walk(numbers["jaxpr"].jaxpr, given)
            else:
                # Nothing in it multiplies by a named argument if it gets none.
                assert equation.primitive.name == "gather" or not any(given), equation.primitive

    walk(closed.jaxpr, names)
    return found


def products_of_a_round(drafter: Any, monkeypatch) -> dict[str, list[int]]:
    """Returns, for each matrix of the target, the rows per sequence of its products in a loop of three rows."""
    # One product for each call of `linear`, for any number of rows and platform.
    monkeypatch.setattr(jax.lax, "platform_dependent", lambda *args, default, **others: default(*args))
    weights = Weights(jax.eval_shape(lambda: llama.init_params(FIVE, jax.random.key(0))))
    parts = Parts(drafter, GreedyAcceptor(), Greedy())
    zeros = jnp.zeros(3, jnp.int32)
    request = Request(
        jnp.zeros((3, 32), jnp.int32),
        zeros + 1,
        zeros + 9,
        zeros[:, None],
        jax.random.split(jax.random.key(0), 3),
    )

    def run(weights, parts, request):
        state, _ = decoding.prefill(FIVE, weights, parts, request, chunk_size=8)
        return state

    state = jax.eval_shape(run, weights, parts, request)
    arguments = weights, parts, state, jnp.int32(9), jnp.zeros(3, bool)
    closed = jax.make_jaxpr(lambda *args: decoding.run_rounds(FIVE, *args, window=32))(*arguments)
    leaves = jax.tree.leaves_with_path(weights)
    names = [jax.tree_util.keystr(path) if leaf.ndim > 1 else "" for path, leaf in leaves]
    names += [""] * (len(closed.jaxpr.invars) - len(names))
    made: dict[str, list[int]] = {}
    for name, rows in products(closed, names):
        made.setdefault(name, []).append(rows // 3)
    return {name: sorted(rows) for name, rows in made.items()}


def test_verification_after_an_early_exit_runs_the_other_layers(monkeypatch):
    """The other layers run over K + 1 rows; the first E over one row per draft step, and for the last draft token."""
    made = products_of_a_round(LayerSkipDrafter(FIVE, 2, Constant(), 4), monkeypatch)
    for layer, matrix in itertools.product(range(5), MATRICES):
        assert made.pop(f".target['layers'][{layer}]{matrix}") == ([1, 1] if layer < 2 else [5])
    assert made == {".target['head']": [1, 5]}


def test_verification_runs_every_layer_after_a_draft_of_the_whole_model(monkeypatch):
    """The counts of the test above without sharing; sublayers that a static mask skips are absent."""
    plan = LayerPlan.skipping(5, attention=[1], mlp=[3])
    made = products_of_a_round(DraftVerifyDrafter(FIVE, plan, Constant(), 4), monkeypatch)
    for layer, matrix in itertools.product(range(5), MATRICES):
        skipped = (layer, matrix[2:5]) in ((1, "att"), (3, "mlp"))
        assert made.pop(f".target['layers'][{layer}]{matrix}") == ([5] if skipped else [1, 5])
    assert made == {".target['head']": [1, 5]}


# The cost of the similarities


def prefill_program(config, drafter, capacity: int, chunk_size: int, own: Any = None) -> Any:
    """Returns the prefill of one row, compiled from shapes; `own` are the drafter's parameters."""
    run, *arguments = prefill_call(config, drafter, capacity, chunk_size, own)
    return jax.jit(run).lower(*arguments).compile()


def prefill_call(config, drafter, capacity: int, chunk_size: int, own: Any = None) -> tuple[Any, ...]:
    """Returns the prefill of one row as a function, and the shapes of its arguments."""
    weights = Weights(jax.eval_shape(lambda: llama.init_params(config, jax.random.key(0))), own)
    one = jax.ShapeDtypeStruct((1,), jnp.int32)
    tokens, ends = (jax.ShapeDtypeStruct((1, n), jnp.int32) for n in (capacity, 1))
    keys = jax.eval_shape(lambda: jax.random.split(jax.random.key(0), 1))
    request = Request(tokens, one, one, ends, keys)
    parts = Parts(drafter, GreedyAcceptor(), Greedy())

    def run(weights, parts, request):
        return decoding.prefill(config, weights, parts, request, chunk_size=chunk_size)[0]

    return run, weights, parts, request


def operations(program: Any) -> collections.Counter:
    """Counts the operations of an optimised program by name and shape."""
    return collections.Counter(re.findall(r"= (\S+) ([\w-]+)\(", program.as_text()))


@pytest.mark.full
def test_who_needs_no_similarities_does_not_pay_for_them(monkeypatch):
    """The optimised prefill of plain decoding equals that of a model without similarities."""

    program = prefill_program(FIVE, AutoregressiveDrafter(), 32, 8)
    used = prefill_program(FIVE, ASDDrafter(FIVE), 32, 8)
    monkeypatch.setattr(prefill, "cosine", lambda x, y: jnp.zeros(x.shape[:-1]))
    unaware = prefill_program(FIVE, AutoregressiveDrafter(), 32, 8)
    assert operations(program) == operations(unaware)
    for name in ("flops", "bytes accessed"):
        assert program.cost_analysis()[name] == unaware.cost_analysis()[name]
    assert operations(used) != operations(unaware)
    assert used.cost_analysis()["flops"] > program.cost_analysis()["flops"]


def test_a_layer_adds_few_instructions_on_a_cpu():
    """The time to compile and to load a program follows its instructions, most of which are those of layers."""

    def instructions(num_layers: int) -> dict[str, int]:
        config = dataclasses.replace(tiny.TARGET, num_layers=num_layers, max_position_embeddings=1024)
        run, weights, parts, request = prefill_call(config, AutoregressiveDrafter(), 512, 64)
        with tracing(weights):
            state = jax.eval_shape(run, weights, parts, request)
            programs = {
                "prefill": jax.jit(run).lower(weights, parts, request),
                "rounds": rounds_program(config, weights, parts, state),
            }
        return {name: len(re.findall(r" = ", one.compile().as_text())) for name, one in programs.items()}

    few, many = instructions(4), instructions(6)
    added = {name: (many[name] - few[name]) / 2 for name in few}
    # 501 and 525 where each layer has instructions of its own.
    assert {name: added[name] <= most for name, most in MOST_ADDED.items()} == dict.fromkeys(added, True), (
        added
    )


def rounds_program(config, weights, parts, state) -> Any:
    """Returns the rounds, lowered from shapes."""

    def run(weights, parts, state):
        return decoding.run_rounds(config, weights, parts, state, jnp.int32(9), jnp.zeros(1, bool), window=64)

    return jax.jit(run, donate_argnums=2).lower(weights, parts, state)


def loop_programs(config, drafter, own: Any = None) -> list[str]:
    """Returns the input of the compiler for prefill and rounds, as text."""
    run, weights, parts, request = prefill_call(config, drafter, 32, 8, own)
    state = jax.eval_shape(run, weights, parts, request)

    def rounds(weights, parts, state):
        return decoding.run_rounds(config, weights, parts, state, jnp.int32(9), jnp.zeros(1, bool), window=32)

    return [
        jax.jit(run).lower(weights, parts, request).as_text(),
        jax.jit(rounds).lower(weights, parts, state).as_text(),
    ]


@pytest.mark.full
def test_who_aux_layers_nothing_does_not_pay_for_aux_layers(monkeypatch):
    """The text of prefill and rounds equals that of a model without auxiliary layers."""

    real = llama.run_with_aux

    def unaware(config, params, hidden, start, cache, aux_layers, **options):
        return real(config, params, hidden, start, cache, (), **options)

    head = tiny.eagle_head(tiny.TARGET)
    drafters = (AutoregressiveDrafter(), NGramDrafter(num_draft_tokens=4))
    programs = [loop_programs(tiny.TARGET, drafter) for drafter in drafters]
    aux_drafter = loop_programs(tiny.TARGET, EagleDrafter(tiny.TARGET, head), tiny.head_params(head))
    monkeypatch.setattr(llama, "run_with_aux", unaware)
    assert programs == [loop_programs(tiny.TARGET, drafter) for drafter in drafters]
    assert all(one not in aux_drafter for pair in programs for one in pair)


@pytest.mark.full
def test_who_drafts_a_chain_does_not_pay_for_trees(monkeypatch):
    """The programs of a chain contain no operation for trees; those of a tree contain all of them."""
    used = set()

    def spied(place: Any, name: str) -> None:
        function = getattr(place, name)
        monkeypatch.setattr(
            place, name, lambda *args, **options: used.add(name) or function(*args, **options)
        )

    for place, name in (
        (Tree, "of"),
        (Tree, "visible"),
        (verification, "walk"),
        (kv, "move"),
        (jax.lax, "top_k"),
    ):
        spied(place, name)
    loop_programs(tiny.TARGET, NGramDrafter(num_draft_tokens=4))
    loop_programs(FIVE, LayerSkipDrafter(FIVE, 2, Constant(), 4))
    assert used == set()
    loop_programs(tiny.TARGET, TokenRecyclingDrafter(Shape((-1, -1, 0), (0, 1, 0))))
    assert used == {"of", "visible", "walk", "move", "top_k"}


# Options of the compiler


@pytest.mark.parametrize(
    ("kind", "quantised", "told"),
    [
        ("TPU v5 lite", True, {"xla_tpu_scoped_vmem_limit_kib": "65536"}),
        ("TPU v5p", True, {"xla_tpu_scoped_vmem_limit_kib": "65536"}),
        ("TPU v5 lite", False, None),  # the compiler estimates more cycles for bfloat16 with it
        ("TPU v6 lite", True, None),  # the compiler estimates more cycles for int8 with it
        ("cpu", True, None),  # its compiler has no such option
    ],
)
def test_what_a_compiler_is_told(kind, quantised, told):
    sharding = types.SimpleNamespace(
        device_set=[types.SimpleNamespace(device_kind=kind, platform=kind[:3].lower())]
    )
    leaf = types.SimpleNamespace(sharding=sharding)
    weights = {"norm": leaf, "out": Quantised(leaf, leaf) if quantised else leaf}
    assert compiler_options((weights, 0)) == told


def test_a_gpu_starts_loops_and_branches_without_the_host():
    """The compiler of this machine parses the option too, and refuses a part that it does not know."""
    gpu = types.SimpleNamespace(device_kind="NVIDIA H100", platform="gpu")
    leaf = types.SimpleNamespace(sharding=types.SimpleNamespace(device_set=[gpu]))
    (option,) = (told := compiler_options(leaf) or {})
    assert {"WHILE", "CONDITIONAL"} < set(told[option].split(","))
    lowered = jax.jit(jnp.sin).lower(1.0)
    lowered.compile(compiler_options=told)
    with pytest.raises(jax.errors.JaxRuntimeError, match="is not a valid enum value"):
        lowered.compile(compiler_options={option: f"{told[option]},NO_SUCH_PART"})


def test_a_compiler_is_told_by_generation(monkeypatch):
    monkeypatch.setattr(executables, "compiler_options", lambda args: {"no_such_option": str(len(args))})
    with pytest.raises(jax.errors.JaxRuntimeError, match="no_such_option"):
        executables.Executables().call(jax.jit(jnp.add), jnp.ones(1), jnp.ones(1))

"""Compiled functions by shape, with counters and compilation in the background."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import logging
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import jax

from jaxspec.host.progress import Progress, duration
from jaxspec.programs import background, compilation_cache, jax_settings, memory
from jaxspec.programs.background import Worker
from jaxspec.programs.compiler_options import compiler_options, tracing
from jaxspec.programs.stored_programs import Key

_LOG = logging.getLogger(__name__)
# Programs that a process keeps, of all its models; the least recently used one is dropped. Clients of a server may ask
# for any number of them, by options of methods, and the large ones take 10 MB or more. A server compiles 20 to 50 for
# each capacity, most of them small.
MAX_PROGRAMS = 512
# The share of the memory mappings that the system allows, above which programs are dropped too. On a CPU a program has
# 100 to 1,000, Linux allows 65,530, and the compiler ends the process if it gets no more. The rest is for the programs
# that the threads compile at the same time.
MAX_MAPPINGS = 0.9
# Programs that are kept above that share too. Without them, a process with many mappings of another kind would compile
# the programs of a text again for each text.
MIN_PROGRAMS = 10
# Specialised executables that a model keeps; the least recently used one is dropped.
MAX_VARIANTS = 16
# The programs of all models in the process, by their executables and key; those that were used last come last.
_USED: OrderedDict[tuple[weakref.ref[Executables], Any], None] = OrderedDict()
# Guards the programs of all models, because a new program of one may drop those of another.
_LOCK = threading.Lock()
# A jitted function, its traced arguments and its static ones.
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]


@dataclasses.dataclass(frozen=True)
class VariantCounts:
    """Counts of calls that could use a specialised executable.

    Attributes:
      hits: calls that found one.
      misses: calls that found none, and used the general executable.
      compile_ms: milliseconds spent on compiling them, in the background.
    """

    hits: int = 0
    misses: int = 0
    compile_ms: float = 0.0

    def __sub__(self, other: VariantCounts) -> VariantCounts:
        return VariantCounts(
            self.hits - other.hits, self.misses - other.misses, self.compile_ms - other.compile_ms
        )


class Executables:
    """Compiles a jitted function once per combination of shapes and static arguments.

    Unlike a plain call, another executable can be compiled in the background (`prepare`) while this one runs, and
    compilations are counted.

    Attributes:
      num_compilations: the number of executables compiled, including those in the background, without those that an
        earlier process had stored.
      compile_ms: their total compile time, milliseconds.
      blocked_ms: the total time that callers waited for compilation or loading, milliseconds.
      variants: counts of the specialised executables.
      failed: whether a program could not be compiled.
      num_dropped: the number of programs that were dropped, see `MAX_PROGRAMS` and `MAX_MAPPINGS`.
    """

    def __init__(self) -> None:
        self.num_compilations = 0
        self.compile_ms = 0.0
        self.blocked_ms = 0.0
        self.variants = VariantCounts()
        self.failed = False
        self.num_dropped = 0
        # The specialised ones have a `_Variant` as key. Those that were used last come last.
        self._futures: OrderedDict[Any, Future[Any]] = OrderedDict()
        self._lock = _LOCK
        self._shapes: OrderedDict[Any, Any] = OrderedDict()

    @functools.cached_property
    def _worker(self) -> Worker:
        return Worker("jaxspec-compile")

    def call(self, function: Callable[..., Any], *args: Any, **static: Any) -> Any:
        """Returns `function(*args, **static)`; positional arguments are traced, keyword arguments are static."""
        return self.compiled(function, *args, **static)(*args)

    def compiled(self, function: Callable[..., Any], *args: Any, **static: Any) -> Callable[..., Any]:
        """Returns the executable for such arguments, compiled if necessary; arrays may be `jax.ShapeDtypeStruct`s."""
        key, future, mine = self._claim(function, args, static, at_once=True)
        if mine or not future.done():
            began = time.perf_counter()
            with Progress(_activity(function, Key(function, args, static))):
                if mine:
                    self._compile(key, future, function, args, static)
                future.exception()
            self.blocked_ms += 1e3 * (time.perf_counter() - began)
        program: Callable[..., Any] = future.result()
        return program

    def prepare(self, function: Callable[..., Any], *args: Any, **static: Any) -> None:
        """Compiles for such arguments in the background; arrays may be `jax.ShapeDtypeStruct`s."""
        key, future, mine = self._claim(function, args, static, at_once=False)
        if mine:
            compile_it = _with_callers_precision(self._compile_queued)
            self._worker.submit(compile_it, key, future, function, args, static)

    @staticmethod
    def key(function: Callable[..., Any], *args: Any, **static: Any) -> Any:
        """Returns the key for `ready`; arrays may be `jax.ShapeDtypeStruct`s."""
        return _key(function, args, static)

    def ready(self, key: Any) -> bool:
        """Whether `call` with arguments of this key returns without waiting for compilation."""
        with self._lock:
            future = self._futures.get(key)
        return future is not None and future.done() and future.exception() is None

    def at_hand(self, function: Callable[..., Any], *args: Any, **static: Any) -> bool:
        """Whether the executable for such arguments is compiled, or an earlier process has stored it."""
        key = _key(function, args, static)
        with self._lock:
            known = key in self._futures
        return self.ready(key) if known else Key(function, args, static).is_stored

    def shapes(self, function: Callable[..., Any], *args: Any, **static: Any) -> Any:
        """Returns `function.eval_shape(*args, **static)`, without a trace if the program is stored."""
        key = _key(function, args, static)
        found = self._shapes.get(key)
        if found is None:
            found = Key(function, args, static).shapes()
            found = function.eval_shape(*args, **static) if found is None else found  # type: ignore[attr-defined]
            with self._lock:
                self._shapes[key] = found
                if len(self._shapes) > MAX_PROGRAMS:
                    self._shapes.popitem(last=False)
        return found

    def variant(self, function: Callable[..., Any], *args: Any, **static: Any) -> Callable[..., Any] | None:
        """Returns the executable for such arguments if it is compiled; else None, and compiles it in the background.

        For executables that a general one can replace: at most `MAX_VARIANTS` of them are kept, one is compiled at a
        time, and one that fails to compile is not tried again.
        """
        key = _Variant(_key(function, args, static))
        with self._lock:
            future = self._futures.get(key)
            known = [one for one in self._futures if isinstance(one, _Variant)]
            if future is not None:
                self._use(key)
            elif all(self._futures[other].done() for other in known):
                if len(known) == MAX_VARIANTS:
                    self._drop(known[0])
                future = self._add(key)
                compile_variant = _with_callers_precision(self._compile_queued)
                self._worker.submit(compile_variant, key, future, function, args, static)
            ready = future is not None and future.done() and future.exception() is None
            counted = {"hits": self.variants.hits + 1} if ready else {"misses": self.variants.misses + 1}
            self.variants = dataclasses.replace(self.variants, **counted)
        return future.result() if ready and future is not None else None

    def wait(self) -> None:
        """Waits until all background compilation has finished. Call it before a measurement."""
        with self._lock:
            futures = [*self._futures.values()]
        with Progress("compiling programs"):
            concurrent.futures.wait(futures)

    def _claim(
        self, function: Callable[..., Any], args: Any, static: dict[str, Any], at_once: bool
    ) -> tuple[Any, Future[Any], bool]:
        """Returns the key and future of an executable, and whether the caller must compile it.

        `at_once`: the caller waits for it; it takes over a compilation that is queued and has not begun.
        """
        key = _key(function, args, static)
        with self._lock:
            known = self._futures.get(key)
            future = self._add(key) if known is None else known
            self._use(key)
            return key, future, (_begin(future) if at_once else known is None)

    def _use(self, key: Any) -> None:
        """Makes a program the one that was used last. Needs the lock, as do `_add` and `_drop`."""
        self._futures.move_to_end(key)
        used = weakref.ref(self), key
        _USED[used] = None
        _USED.move_to_end(used)

    def _add(self, key: Any) -> Future[Any]:
        """Adds a program, which the caller must compile."""
        future: Future[Any] = Future()
        self._futures[key] = future
        self._use(key)
        return future

    def _drop(self, key: Any) -> None:
        del self._futures[key], _USED[weakref.ref(self), key]
        self.num_dropped += 1

    @staticmethod
    def _make_room() -> None:
        """Drops the programs that were used least recently; called before each compilation, as many may be queued."""
        with _LOCK:
            for used in [
                (owner, key) for owner, key in _USED if not (one := owner()) or key not in one._futures
            ]:
                del _USED[used]  # the model was deleted, or the program was not compiled
            done = [
                (one, key)
                for owner, key in _USED
                if (one := owner()) is not None and one._futures[key].done()
            ]
            for number, (one, key) in enumerate(done):
                few = len(done) - number <= MIN_PROGRAMS
                if len(_USED) <= MAX_PROGRAMS and (few or memory.used_mappings() <= MAX_MAPPINGS):
                    break
                one._drop(key)

    def _compile_queued(self, key: Any, future: Future[Any], *call: Any) -> None:
        """Compiles what the worker's queue holds, unless a caller has begun with it."""
        with self._lock:
            mine = _begin(future)
        if mine:
            self._compile(key, future, *call)

    def _compile(
        self, key: Any, future: Future[Any], function: Any, args: Any, static: dict[str, Any]
    ) -> None:
        began = time.perf_counter()
        try:
            self._make_room()
            made = _compiled(function, args, static)
        except BaseException as error:
            # The entry is removed, so that the next call tries again: this may have been an interruption.
            if not isinstance(key, _Variant):
                with self._lock:
                    self._futures.pop(key, None)
                self.failed |= isinstance(error, Exception)
            future.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        spent_ms = 1e3 * (time.perf_counter() - began)
        with self._lock:
            if not made.loaded:
                self.num_compilations += 1
                self.compile_ms += spent_ms
            if isinstance(key, _Variant):
                spent_ms += self.variants.compile_ms
                self.variants = dataclasses.replace(self.variants, compile_ms=spent_ms)
        future.set_result(made.program)


@dataclasses.dataclass(frozen=True)
class _Variant:
    """The key of a specialised executable."""

    key: Any


@dataclasses.dataclass(frozen=True)
class _Made:
    """An executable, and how it was made.

    Attributes:
      program: the executable.
      loaded: whether an earlier process had stored it.
    """

    program: Any
    loaded: bool


def _begin(future: Future[Any]) -> bool:
    """Marks a compilation as begun; returns whether it had not begun. Needs the lock."""
    return not (future.running() or future.done()) and future.set_running_or_notify_cancel()


def _described(function: Any, key: Key) -> str:
    """Returns the name of a program, and whether it is compiled once for its model."""
    kept = key.path is not None or bool(jax.config.values["jax_compilation_cache_dir"])
    name = _named(function)
    return f"{name}, once for this model, kept on disk" if kept else name


def _named(function: Any) -> str:
    name: str = function.__name__.strip("_").replace("_", " ")
    return name


def _activity(function: Any, key: Key) -> str:
    """Describes the wait for a program, which an earlier process has stored or which is compiled."""
    if key.is_stored:
        return f"loading {_named(function)}"
    return f"compiling {_described(function, key)}"


@jax_settings.needed()
def _compiled(function: Any, args: Any, static: dict[str, Any]) -> _Made:
    """Returns the executable for these arguments, stored by an earlier process or else compiled."""
    key = Key(function, args, static)
    stored = key.read()
    if stored is not None:
        return _Made(stored, loaded=True)
    began = time.perf_counter()
    with tracing(args):
        lowered = function.lower(*args, **static)
    background.go_on()
    with contextlib.nullcontext() if key.path is None else compilation_cache.bypassed():
        program = lowered.compile(compiler_options=compiler_options(args))
    _LOG.info("compiled %s: %s", _described(function, key), duration(time.perf_counter() - began))
    function.clear_cache()  # JAX's, with the traces of all calls; each keeps its program in memory
    key.write(program, lowered.out_info)
    return _Made(program, loaded=False)


def _with_callers_precision(function: Callable[..., Any]) -> Callable[..., Any]:
    """Returns the function for use in another thread, with the caller's precision of matrix products.

    A context such as `jax.default_matmul_precision` applies to the caller's thread only.
    """
    precision: str | None = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]

    def run(*args: Any) -> Any:
        with jax.default_matmul_precision(precision), jax_settings.needed():
            return function(*args)

    return run


def _key(function: Callable[..., Any], args: Any, static: dict[str, Any]) -> Any:
    """Returns the key of an executable: the function, shapes and dtypes of its arguments, and the static arguments."""
    leaves, tree = jax.tree.flatten(args)
    shapes = tuple((leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)) for leaf in leaves)
    return function, tree, shapes, tuple(sorted(static.items()))

"""Compiled functions by shape, with counters and compilation in the background."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import logging
import os
import sys
import threading
import time
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax

from jaxspec.host.progress import Progress, duration
from jaxspec.programs import background, compilation_cache, jax_settings, memory, stored_programs
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
# The name of the thread that compiles programs for which no caller waits, and its `nice` value.
_LATER, _NICE = "jaxspec-later", 10


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
        self._pools: dict[str, Worker] = {}
        self._described: list[Future[None]] = []
        self._whats: weakref.WeakKeyDictionary[Future[Any], str] = weakref.WeakKeyDictionary()
        self._keeping: list[Future[None]] = []
        self._shapes: OrderedDict[Any, Any] = OrderedDict()

    def call(self, function: Callable[..., Any], *args: Any, **static: Any) -> Any:
        """Returns `function(*args, **static)`; positional arguments are traced, keyword arguments are static."""
        return self.compiled(function, *args, **static)(*args)

    def compiled(self, function: Callable[..., Any], *args: Any, **static: Any) -> Callable[..., Any]:
        """Returns the executable for such arguments, compiled if necessary; arrays may be `jax.ShapeDtypeStruct`s."""
        key, future, mine = self._claim(function, args, static)
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
        self._prepare("jaxspec-compile", function, args, static)

    def later(self, describe: Callable[[], Sequence[Call]], what: str = "programs") -> None:
        """Compiles programs in the background that no caller waits for, on Linux with a low priority.

        Args:
          describe: returns the functions with their traced and static arguments, as `prepare` takes them. It is also
            called in the background.
          what: the programs, for the progress of `wait`.
        """

        def prepare() -> None:
            for function, args, static in describe():
                background.go_on()
                self._prepare(_LATER, function, args, static, what)
            with self._lock:  # ends after the programs
                self._keeping.append(self._pool(_LATER).submit(lambda: None))

        with self._lock:
            future = self._pool(_LATER).submit(_with_callers_precision(prepare))
            self._described = [*(one for one in self._described if not one.done()), future]
            self._whats[future] = what
            self._keeping = [*(one for one in self._keeping if not one.done()), future]

    def _prepare(
        self, name: str, function: Any, args: Any, static: dict[str, Any], what: str = "programs"
    ) -> None:
        key, future, mine = self._claim(function, args, static)
        if mine:
            self._whats[future] = what
            with self._lock:
                pool = self._pool(name)
            pool.submit(_with_callers_precision(self._compile), key, future, function, args, static)

    def _pool(self, name: str) -> Worker:
        if name not in self._pools:
            self._pools[name] = Worker(name, _yield if name == _LATER else None)
        return self._pools[name]

    @staticmethod
    def key(function: Callable[..., Any], *args: Any, **static: Any) -> Any:
        """Returns the key for `ready`; arrays may be `jax.ShapeDtypeStruct`s."""
        return _key(function, args, static)

    def ready(self, key: Any) -> bool:
        """Whether `call` with arguments of this key returns without waiting for compilation."""
        with self._lock:
            future = self._futures.get(key)
        return future is not None and future.done() and future.exception() is None

    def is_stored(self, function: Callable[..., Any], *args: Any, **static: Any) -> bool:
        """Whether an earlier process has stored the executable for such arguments."""
        path = Key(function, args, static).path
        return path is not None and path.is_file()

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

    @property
    def keeps(self) -> bool:
        """Whether a program is being compiled that the next process will load."""
        with self._lock:
            unfinished = any(not future.done() for future in self._keeping)
        return unfinished and bool(stored_programs.version())

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
                compile_variant = _with_callers_precision(self._compile)
                self._pool("jaxspec-variant").submit(compile_variant, key, future, function, args, static)
            ready = future is not None and future.done() and future.exception() is None
            counted = {"hits": self.variants.hits + 1} if ready else {"misses": self.variants.misses + 1}
            self.variants = dataclasses.replace(self.variants, **counted)
        return future.result() if ready and future is not None else None

    def wait(self) -> None:
        """Waits until all background compilation has finished. Call it before a measurement."""
        with Progress() as progress:
            for list_of in (
                lambda: self._described,
                lambda: [*self._futures.values()],
                lambda: self._described,  # including what follows a compilation
            ):
                with self._lock:
                    futures: list[Future[Any]] = [one for one in list_of() if not one.done()]
                for future in futures:
                    progress(f"compiling {self._whats.get(future, 'programs')}")
                    concurrent.futures.wait([future])

    def _claim(
        self, function: Callable[..., Any], args: Any, static: dict[str, Any]
    ) -> tuple[Any, Future[Any], bool]:
        """Returns the key and future of an executable, and whether the caller must compile it."""
        key = _key(function, args, static)
        with self._lock:
            known = self._futures.get(key)
            if known is not None:
                self._use(key)
                return key, known, False
            return key, self._add(key), True

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


def _yield() -> None:
    """Lowers the priority of this thread on systems with a priority per thread."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


@dataclasses.dataclass(frozen=True)
class _Made:
    """An executable, and how it was made.

    Attributes:
      program: the executable.
      loaded: whether an earlier process had stored it.
    """

    program: Any
    loaded: bool


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
    if key.path is not None and key.path.is_file():
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

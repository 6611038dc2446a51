"""Compiled functions by shape, with counters, and compilation ahead of need."""

from __future__ import annotations

import contextlib
import dataclasses
import os
import sys
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import jax

from jaxspec.engine import background, jax_settings
from jaxspec.engine.background import Worker
from jaxspec.engine.compiler_options import compiler_options

# Specialised executables kept; the least recently used one goes.
MAX_VARIANTS = 16
# A compiled function, its arguments, and what is static.
Call = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
# Work for which nobody waits, and its priority, as of `nice`.
_LATER, _NICE = "jaxspec-later", 10


@dataclasses.dataclass(frozen=True)
class VariantCounts:
    """How specialised executables fared.

    Attributes:
      hits: calls that found one.
      misses: calls that did not, and went to the general one.
      compile_ms: spent on building them, in the background, milliseconds.
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

    The same as calling the function, but another executable can be `prepare`d in the background while
    this one runs, and compilations are counted.

    Attributes:
      num_compilations: how many executables were built, background ones included.
      compile_ms: how long that took in all, milliseconds.
      longest_ms: how long the slowest of them took, milliseconds.
      blocked_ms: how long callers had to wait for it, milliseconds.
      variants: how specialised ones fared.
    """

    def __init__(self) -> None:
        self.num_compilations = 0
        self.compile_ms = 0.0
        self.longest_ms = 0.0
        self.blocked_ms = 0.0
        self.variants = VariantCounts()
        self._variants: OrderedDict[Any, Future[Any]] = OrderedDict()
        self._variant_pool: Worker | None = None
        self._futures: dict[Any, Future[Any]] = {}
        self._lock = threading.Lock()
        self._pools: dict[str, Worker] = {}
        self._described: list[Future[None]] = []

    def call(self, function: Callable[..., Any], *args: Any, **static: Any) -> Any:
        """`function(*args, **static)`; every positional argument is traced, every keyword is static."""
        return self.compiled(function, *args, **static)(*args)

    def compiled(self, function: Callable[..., Any], *args: Any, **static: Any) -> Callable[..., Any]:
        """The executable for such arguments, once it is there; arrays may be `jax.ShapeDtypeStruct`s."""
        key, future, mine = self._claim(function, args, static)
        if mine or not future.done():
            began = time.perf_counter()
            if mine:
                self._compile(key, future, function, args, static)
            future.exception()  # waits
            self.blocked_ms += 1e3 * (time.perf_counter() - began)
        program: Callable[..., Any] = future.result()
        return program

    def prepare(self, function: Callable[..., Any], *args: Any, **static: Any) -> None:
        """Compiles for such arguments in the background; arrays may be `jax.ShapeDtypeStruct`s."""
        self._prepare("jaxspec-compile", function, args, static)

    def later(self, describe: Callable[[], Sequence[Call]]) -> None:
        """Finds out what is to be compiled, and compiles it, all in the background where nobody waits for it.

        On Linux the work yields to whatever else the machine has to do.

        Args:
          describe: returns functions, arguments and what is static, as `prepare` takes them.
        """

        def prepare() -> None:
            for function, args, static in describe():
                background.go_on()
                self._prepare(_LATER, function, args, static)

        with self._lock:
            self._described.append(self._pool(_LATER).submit(_as_here(prepare)))

    def _prepare(self, name: str, function: Any, args: Any, static: dict[str, Any]) -> None:
        key, future, mine = self._claim(function, args, static)
        if mine:
            with self._lock:
                pool = self._pool(name)
            pool.submit(_as_here(self._compile), key, future, function, args, static)

    def _pool(self, name: str) -> Worker:
        if name not in self._pools:
            self._pools[name] = Worker(name, _yield if name == _LATER else None)
        return self._pools[name]

    @staticmethod
    def key(function: Callable[..., Any], *args: Any, **static: Any) -> Any:
        """What `ready` takes, so that it is made once; arrays may be `jax.ShapeDtypeStruct`s."""
        return _key(function, args, static)

    def ready(self, key: Any) -> bool:
        """Whether `call` with arguments of this key would have to wait for nothing."""
        with self._lock:
            future = self._futures.get(key)
        return future is not None and future.done() and future.exception() is None

    @property
    def busy(self) -> bool:
        """Whether something is being compiled, or waits for it."""
        with self._lock:
            self._described = [future for future in self._described if not future.done()]
            futures = *self._described, *self._futures.values(), *self._variants.values()
            return any(not future.done() for future in futures)

    def variant(self, function: Callable[..., Any], *args: Any, **static: Any) -> Callable[..., Any] | None:
        """The executable for such arguments if it is there; else it is compiled in the background.

        For executables that a general one can stand in for: only `MAX_VARIANTS` of them are kept, one is
        compiled at a time, and one that fails to compile is not tried again.
        """
        key = _key(function, args, static)
        with self._lock:
            future = self._variants.get(key)
            if future is None and all(other.done() for other in self._variants.values()):
                future = self._variants[key] = Future()
                if self._variant_pool is None:
                    self._variant_pool = Worker("jaxspec-variant")
                compile_variant = _as_here(self._compile_variant)
                self._variant_pool.submit(compile_variant, future, function, args, static)
                if len(self._variants) > MAX_VARIANTS:
                    self._variants.popitem(last=False)
            elif future is not None:
                self._variants.move_to_end(key)
            ready = future is not None and future.done() and future.exception() is None
            counted = {"hits": self.variants.hits + 1} if ready else {"misses": self.variants.misses + 1}
            self.variants = dataclasses.replace(self.variants, **counted)
        return future.result() if ready and future is not None else None

    def wait(self) -> None:
        """Returns once nothing is compiling in the background any more: before times are taken."""
        for described in list(self._described):
            described.exception()
        with self._lock:
            futures = [*self._futures.values(), *self._variants.values()]
        for future in futures:
            future.exception()

    def _claim(
        self, function: Callable[..., Any], args: Any, static: dict[str, Any]
    ) -> tuple[Any, Future[Any], bool]:
        """Key and future of this executable, and whether the caller is the one to build it."""
        key = _key(function, args, static)
        with self._lock:
            known = self._futures.get(key)
            if known is not None:
                return key, known, False
            future: Future[Any] = Future()
            self._futures[key] = future
            return key, future, True

    def _compile_variant(self, future: Future[Any], function: Any, args: Any, static: dict[str, Any]) -> None:
        began = time.perf_counter()
        try:
            compiled = _built(function, args, static)
        except Exception as error:
            future.set_exception(error)
            return
        spent_ms = 1e3 * (time.perf_counter() - began)
        with self._lock:
            self.num_compilations += 1
            self.compile_ms += spent_ms
            self.variants = dataclasses.replace(self.variants, compile_ms=self.variants.compile_ms + spent_ms)
        future.set_result(compiled)

    def _compile(
        self, key: Any, future: Future[Any], function: Any, args: Any, static: dict[str, Any]
    ) -> None:
        began = time.perf_counter()
        try:
            compiled = _built(function, args, static)
        except BaseException as error:
            # Forgotten, so that the next call tries again: it may have been an interruption.
            with self._lock:
                del self._futures[key]
            future.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        spent_ms = 1e3 * (time.perf_counter() - began)
        with self._lock:
            self.num_compilations += 1
            self.compile_ms += spent_ms
            self.longest_ms = max(self.longest_ms, spent_ms)
        future.set_result(compiled)


def _yield() -> None:
    """Gives this thread a lower priority than the others have, where threads have one of their own."""
    if sys.platform == "linux":
        with contextlib.suppress(OSError):
            os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)


@jax_settings.needed()
def _built(function: Any, args: Any, static: dict[str, Any]) -> Any:
    """Compiles the function for these arguments and returns the executable."""
    lowered = function.lower(*args, **static)
    background.go_on()
    return lowered.compile(compiler_options=compiler_options(args))


def _as_here(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function, with the precision of matrix products that holds here for another thread too: a context of the
    caller, such as `jax.default_matmul_precision`, is one of its thread alone."""
    precision: str | None = jax.config.jax_default_matmul_precision  # type: ignore[attr-defined]

    def run(*args: Any) -> Any:
        with jax.default_matmul_precision(precision), jax_settings.needed():
            return function(*args)

    return run


def _key(function: Callable[..., Any], args: Any, static: dict[str, Any]) -> Any:
    """What tells executables apart: the function, shapes and dtypes of its arguments, and what is static."""
    leaves, tree = jax.tree.flatten(args)
    shapes = tuple((leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)) for leaf in leaves)
    return function, tree, shapes, tuple(sorted(static.items()))

"""Compiled functions by shape, with counters, and compilation ahead of need."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax

# Specialised executables kept; the least recently used one goes.
MAX_VARIANTS = 16


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
      blocked_ms: how long callers had to wait for it, milliseconds.
      variants: how specialised ones fared.
    """

    def __init__(self) -> None:
        self.num_compilations = 0
        self.compile_ms = 0.0
        self.blocked_ms = 0.0
        self.variants = VariantCounts()
        self._variants: OrderedDict[Any, None] = OrderedDict()
        self._futures: dict[Any, Future] = {}
        self._lock = threading.Lock()
        self._pool: ThreadPoolExecutor | None = None

    def call(self, function: Callable, *args: Any, **static: Any) -> Any:
        """`function(*args, **static)`; every positional argument is traced, every keyword is static."""
        key, future, mine = self._claim(function, args, static)
        if mine or not future.done():
            began = time.perf_counter()
            if mine:
                self._compile(key, future, function, args, static)
            future.exception()  # waits
            self.blocked_ms += 1e3 * (time.perf_counter() - began)
        return future.result()(*args)

    def prepare(self, function: Callable, *args: Any, **static: Any) -> None:
        """Compiles for such arguments in the background; arrays may be `jax.ShapeDtypeStruct`s."""
        key, future, mine = self._claim(function, args, static)
        if mine:
            self._submit(self._compile, key, future, function, args, static)

    def has_variant(self, function: Callable, *args: Any, **static: Any) -> bool:
        """Whether the executable for such arguments is there; else it is compiled in the background.

        For executables that a general one can stand in for: only `MAX_VARIANTS` of them are kept.
        """
        key, future, mine = self._claim(function, args, static)
        if mine:
            self._submit(self._compile_variant, key, future, function, args, static)
        ready = future.done() and future.exception() is None
        with self._lock:
            self._variants[key] = None
            self._variants.move_to_end(key)
            while len(self._variants) > MAX_VARIANTS:
                oldest, _ = self._variants.popitem(last=False)
                self._futures.pop(oldest, None)
            counted = {"hits": self.variants.hits + 1} if ready else {"misses": self.variants.misses + 1}
            self.variants = dataclasses.replace(self.variants, **counted)
        return ready

    def wait(self) -> None:
        """Returns once nothing is compiling in the background any more: before times are taken."""
        with self._lock:
            futures = list(self._futures.values())
        for future in futures:
            future.exception()

    def _claim(self, function: Callable, args: Any, static: dict[str, Any]) -> tuple[Any, Future, bool]:
        """Key and future of this executable, and whether the caller is the one to build it."""
        leaves, tree = jax.tree.flatten(args)
        shapes = tuple((leaf.shape, leaf.dtype, getattr(leaf, "weak_type", False)) for leaf in leaves)
        key = (function, tree, shapes, tuple(sorted(static.items())))
        with self._lock:
            known = self._futures.get(key)
            if known is not None:
                return key, known, False
            future: Future = Future()
            self._futures[key] = future
            return key, future, True

    def _submit(self, work: Callable, *args: Any) -> None:
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="jaxspec-compile")
        self._pool.submit(work, *args)

    def _compile_variant(self, *args: Any) -> None:
        began = time.perf_counter()
        self._compile(*args)
        spent = self.variants.compile_ms + 1e3 * (time.perf_counter() - began)
        with self._lock:
            self.variants = dataclasses.replace(self.variants, compile_ms=spent)

    def _compile(self, key: Any, future: Future, function: Any, args: Any, static: dict[str, Any]) -> None:
        began = time.perf_counter()
        try:
            compiled = function.lower(*args, **static).compile()
        except BaseException as error:
            # Forgotten, so that the next call tries again: it may have been an interruption.
            with self._lock:
                self._futures.pop(key, None)
            future.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        with self._lock:
            self.num_compilations += 1
            self.compile_ms += 1e3 * (time.perf_counter() - began)
        future.set_result(compiled)

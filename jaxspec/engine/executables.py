"""Compiled functions by shape, with counters, and compilation ahead of need."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import jax


class Executables:
    """Compiles a jitted function once per combination of shapes and static arguments.

    The same as calling the function, but another executable can be `prepare`d in the background while
    this one runs, and compilations are counted.

    Attributes:
      num_compilations: how many executables were built, background ones included.
      compile_ms: how long that took in all, milliseconds.
      blocked_ms: how long callers had to wait for it, milliseconds.
    """

    def __init__(self) -> None:
        self.num_compilations = 0
        self.compile_ms = 0.0
        self.blocked_ms = 0.0
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
        if not mine:
            return
        with self._lock:
            if self._pool is None:
                self._pool = ThreadPoolExecutor(1, thread_name_prefix="jaxspec-compile")
        self._pool.submit(self._compile, key, future, function, args, static)

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

    def _compile(self, key: Any, future: Future, function: Any, args: Any, static: dict[str, Any]) -> None:
        began = time.perf_counter()
        try:
            compiled = function.lower(*args, **static).compile()
        except BaseException as error:
            # Forgotten, so that the next call tries again: it may have been an interruption.
            with self._lock:
                del self._futures[key]
            future.set_exception(error)
            if not isinstance(error, Exception):
                raise
            return
        with self._lock:
            self.num_compilations += 1
            self.compile_ms += 1e3 * (time.perf_counter() - began)
        future.set_result(compiled)

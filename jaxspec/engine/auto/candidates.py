"""The candidates of method `auto` for one model, made once for all texts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import jax

from jaxspec.choosing.beliefs import Expectation
from jaxspec.choosing.costs import StepCosts
from jaxspec.drafting.autoregressive_drafter import Autoregressive
from jaxspec.engine import stored_programs
from jaxspec.engine.auto.turns import Known, Plan, Switching
from jaxspec.engine.compiled import Loop
from jaxspec.engine.executables import MAX_PROGRAMS
from jaxspec.engine.requests import RowRequest, needs_sampling
from jaxspec.engine.strategies import Strategy, for_drafter
from jaxspec.io.methods import auto_file
from jaxspec.io.methods.choice_file import ChoiceFile, belongs_to
from jaxspec.methods import LoadedModel, Resources
from jaxspec.methods.auto import Auto
from jaxspec.methods.base import Candidate
from jaxspec.protocol import Drafter

# The least number of seconds between two times that what was learnt is kept.
_PAUSE = 5.0


class Alternatives:
    """The candidates of one model, the expectations of them, and the facts that its texts have measured.

    Args:
      model: the target.
      resources: returns the resources of methods for texts with these sampling distributions, by name.
      device: the device of the drafters; None on a mesh, which places them itself.
      key: returns what the costs of steps depend on, see `io.methods.cost_files.key`.
    """

    def __init__(
        self,
        model: LoadedModel,
        resources: Callable[[tuple[str, ...]], Resources],
        device: jax.Device | None,
        key: Callable[[], dict[str, Any]],
    ) -> None:
        self._model, self._resources, self._device, self._key = model, resources, device, key
        self._made: OrderedDict[Any, tuple[Candidate, ...]] = OrderedDict()
        self._kept_at = -math.inf

    @functools.cached_property
    def known(self) -> Known:
        """The facts that all texts share; those that an earlier process kept come first."""
        kept = None if self._path is None else auto_file.read(self._path, self._file_key)
        return Known() if kept is None else Known(*kept)

    @functools.cached_property
    def _file_key(self) -> dict[str, Any]:
        return self._key() | {
            "model": self._model.fingerprint,
            "jaxspec": import_module("jaxspec").__version__,
        }

    @functools.cached_property
    def _path(self) -> Path | None:
        """The file of what was learnt; None if nothing is kept."""
        kept = bool(stored_programs.version()) and self._device is not None
        return auto_file.path_of(self._file_key) if kept else None

    def _keep(self, now: bool = False) -> None:
        """Keeps what was learnt for the next process, at most every `_PAUSE` seconds unless `now`."""
        if self._path is None or (not now and time.monotonic() - self._kept_at < _PAUSE):
            return
        self._kept_at = time.monotonic()
        auto_file.write(self._path, self._file_key, self.known.times, self.known.counts)

    @functools.cached_property
    def expected(self) -> dict[str, Expectation]:
        """The expectations of candidates before a text begins, by name; {} with a warning if their file is damaged."""
        try:
            return Auto.expected(self._model, self._resources(("greedy",)))
        except (ValueError, OSError) as error:
            # A warning and no error, because the user did not name the file: it is found in the model's directory.
            warnings.warn(f"auto has no measured acceptances: {error}", RuntimeWarning, stacklevel=2)
            return {}

    def candidates(self, method: Auto, distributions: tuple[str, ...]) -> tuple[Candidate, ...]:
        """Returns the candidates of `method` for texts with these sampling distributions, by name.

        Raises:
          ValueError, FileNotFoundError: as `LanguageModel.generate`.
        """
        # Batches of any size share the candidates, and thus the facts about the programs of each candidate.
        distributions = tuple(sorted(set(distributions)))
        key = dataclasses.replace(method, choices=None, explain=False), distributions
        with contextlib.suppress(TypeError):  # an option that cannot be a key
            if key in self._made:
                self._made.move_to_end(key)
                return self._made[key]
        made = method.candidates(self._model, self._resources(distributions))
        if self._device is not None:
            # Otherwise each call of the loop would transfer the drafter's arrays again.
            put = functools.partial(jax.device_put, device=self._device)
            made = tuple(dataclasses.replace(one, drafter=put(one.drafter)) for one in made)
        with contextlib.suppress(TypeError):
            self._made[key] = made
            if len(self._made) > MAX_PROGRAMS:  # each set has programs of its own
                self._made.popitem(last=False)
        return made

    def strategy(
        self,
        method: Auto,
        loop: Loop,
        drafter: Drafter,
        distributions: tuple[str, ...],
        costs: StepCosts | None,
        requests: Sequence[RowRequest],
        max_batch: int,
    ) -> Strategy:
        """Returns the strategy of a batch: `Switching`, or plain decoding on a mesh and if there are no candidates.

        Args:
          method: with its options.
          loop: the compiled loop.
          drafter: the drafter of `method`: plain decoding.
          distributions: the names of the texts' sampling distributions.
          costs: the costs of steps; None if they were not measured.
          requests: one for each text.
          max_batch: the most rows at a time.

        Raises:
          ValueError, FileNotFoundError: as `candidates`; or the file of choices belongs to other texts.
        """
        if loop.mesh is not None:
            return _plain(loop, drafter, "nothing is chosen on a mesh")
        candidates = self.candidates(method, distributions)
        if not candidates:
            return _plain(loop, drafter, "no method is offered")
        file = None
        if method.choices is not None:
            names = ["off", *(candidate.name for candidate in candidates)]
            of = belongs_to(self._model.fingerprint, [request.prompt for request in requests], max_batch)
            file = ChoiceFile(Path(method.choices), names, drafter.num_draft_tokens, of)
        plan = Plan(
            candidates,
            self.expected,
            costs,
            known=self.known,
            file=file,
            explain=method.explain,
            sampled=needs_sampling(requests),
            keep=None if self._path is None else self._keep,
        )
        # No round begins without space for what it may write, at the end of a context either.
        reach = max(candidate.drafter.reach for candidate in candidates)
        return Switching(loop, Autoregressive(drafter.num_draft_tokens, reach), plan)

    @contextlib.contextmanager
    def compiled_early(self) -> Iterator[None]:
        """Within this context, programs are compiled before they are known to pay."""
        before, self.known.eager = self.known.eager, True
        try:
            yield
        finally:
            self.known.eager = before


def _plain(loop: Loop, drafter: Drafter, reason: str) -> Strategy:
    """Returns plain decoding, and the reason for it as its name."""
    strategy = for_drafter(loop, drafter)
    strategy.name = f"auto: plain decoding, {reason}"
    return strategy

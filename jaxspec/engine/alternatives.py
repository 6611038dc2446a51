"""What method `auto` may change between on one model: found and made once, for all texts."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import jax

from jaxspec.choosing.acceptance import Expectation
from jaxspec.choosing.costs import StepCosts
from jaxspec.engine.known import Known
from jaxspec.engine.requests import RowRequest
from jaxspec.engine.switching import Plan
from jaxspec.io.choice_file import ChoiceFile, belongs_to
from jaxspec.methods import LoadedModel, Resources
from jaxspec.methods.auto import Auto
from jaxspec.methods.base import Candidate


class Alternatives:
    """The candidates of one model, what is expected of them, and what its texts have found out about them.

    Args:
      model: whose texts these are.
      resources: by the laws of the texts, what methods are made with.
      device: where drafters are put; None on a mesh, which places what it is given.
    """

    def __init__(
        self,
        model: LoadedModel,
        resources: Callable[[tuple[str, ...]], Resources],
        device: jax.Device | None,
    ) -> None:
        self._model, self._resources, self._device = model, resources, device
        self._made: dict[Any, tuple[Candidate, ...]] = {}
        self.known = Known()

    @functools.cached_property
    def expected(self) -> dict[str, Expectation]:
        """What is known of candidates before a text begins, by name; a warning, and {}, where its file is damaged."""
        try:
            return Auto.expected(self._model, self._resources(("greedy",)))
        except (ValueError, OSError) as error:
            # Nobody asked for the file: it lies beside the model.
            warnings.warn(f"auto knows nothing of its candidates yet: {error}", RuntimeWarning, stacklevel=2)
            return {}

    def candidates(self, method: Auto, laws: tuple[str, ...]) -> tuple[Candidate, ...]:
        """What `method` chooses among in texts of these laws.

        Raises:
          ValueError, FileNotFoundError: as `LanguageModel.generate`.
        """
        # Of batches of any size, so that what is known of a candidate's programs is known for all of them.
        laws = tuple(sorted(set(laws)))
        key = dataclasses.replace(method, choices=None, explain=False), laws
        try:
            made = self._made.get(key)
        except TypeError:  # an option that cannot be a key
            return self._make(method, laws)
        if made is None:
            made = self._made[key] = self._make(method, laws)
        return made

    def _make(self, method: Auto, laws: tuple[str, ...]) -> tuple[Candidate, ...]:
        made = method.candidates(self._model, self._resources(laws))
        if self._device is None:
            return made
        # Else each call of the loop would bring a drafter's numbers, and texts that it refers to, here from elsewhere.
        return tuple(
            dataclasses.replace(one, drafter=jax.device_put(one.drafter, self._device)) for one in made
        )

    def plan(
        self,
        method: Auto,
        laws: tuple[str, ...],
        costs: StepCosts | None,
        longest: int,
        requests: Sequence[RowRequest],
        max_batch: int,
    ) -> Plan | None:
        """What the texts of a batch may change between; None where nothing can draft.

        Args:
          method: with its options.
          laws: of the texts.
          costs: of steps; None where they were not measured.
          longest: K of the longest drafts.
          requests: the texts.
          max_batch: most rows at once.

        Raises:
          ValueError, FileNotFoundError: as `candidates`; or the file of choices is of other texts.
        """
        candidates = self.candidates(method, laws)
        if not candidates:
            return None
        file = None
        if method.choices is not None:
            names = ["off", *(candidate.name for candidate in candidates)]
            of = belongs_to(self._model.fingerprint, [request.prompt for request in requests], max_batch)
            file = ChoiceFile(Path(method.choices), names, longest, of)
        return Plan(candidates, self.expected, costs, known=self.known, file=file, explain=method.explain)

    @contextlib.contextmanager
    def compiled_early(self) -> Iterator[None]:
        """Within it, programs are compiled before it is known that they pay."""
        before, self.known.eager = self.known.eager, True
        try:
            yield
        finally:
            self.known.eager = before

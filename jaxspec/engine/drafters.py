"""Makes the drafters of a model: of a method, of `auto` with its candidates, or given as such."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax

from jaxspec.engine.keywords import MethodName
from jaxspec.engine.model import Model
from jaxspec.host import processes
from jaxspec.host.messages import shown
from jaxspec.methods import LoadedModel, Method, Resources, registry
from jaxspec.methods.auto import Auto
from jaxspec.methods.base import Candidate
from jaxspec.methods.files import files_of
from jaxspec.programs.executables import MAX_PROGRAMS
from jaxspec.protocol import Drafter, Weights
from jaxspec.session.auto import Auto as AutoDrafter
from jaxspec.texts.generation_options import NAMES

# A name, a method, or a drafter, alone or with its parameters.
AnyMethod = MethodName | Method | Drafter | tuple[Drafter, Any]
# The arguments of `generate` that are not options of a method; suggestions for misspelt options include them.
ARGUMENTS = ("prompts", "options", "messages", "attention_mask", "method", *NAMES)


class Drafters:
    """Makes the drafters of a model."""

    def __init__(self, model: Model) -> None:
        self._model = model

    def made(self, method: AnyMethod | str, options: Mapping[str, Any]) -> AnyMethod:
        """Returns the method; if it is given by name, it is made with these options."""
        if isinstance(method, str):
            return registry.make(method, options, ARGUMENTS)
        if options:
            registry.check_known(options, ARGUMENTS)
            raise ValueError(
                f"{min(options)} belongs to a method's name; {type(method).__name__} carries its own options"
            )
        return method

    def parts(
        self,
        method: AnyMethod,
        distributions: tuple[str, ...],
        directory: Path | None,
        target: LoadedModel,
    ) -> tuple[Drafter, Weights]:
        """Returns the drafter of a method for a target, or the drafter given, and the parameters of the loop."""
        drafter: Any
        if isinstance(method, Method):
            drafter, params = method.build(target, self._resources(distributions, directory, target))
        else:
            drafter, params = method if isinstance(method, tuple) and len(method) == 2 else (method, None)
            if target.config.exact and getattr(drafter, "config", None) == self._model.config:
                raise ValueError(
                    f"the drafter {type(drafter).__name__} runs the model with a config that is not exact; make it "
                    "with lm.loaded.exact.config, or give a method by name"
                )
        if not isinstance(drafter, Drafter):
            raise ValueError(
                f"method is {shown(method)}; give a name ({', '.join(registry.names())}), an instance of one of "
                "jaxspec.methods, or a subclass of jaxspec.protocol.Drafter"
            )
        needed = drafter.num_nodes + 1
        if drafter.verify_widths[-1] != needed or drafter.reach < needed:
            raise ValueError(
                f"the drafter {type(drafter).__name__} proposes up to {needed - 1} tokens and has "
                f"verify_widths={drafter.verify_widths} and reach={drafter.reach}; let verify_widths end with "
                f"{needed}, and reach be at least {needed}"
            )
        return drafter, Weights(self._model.params, params)

    def auto(self, method: Auto, distributions: tuple[str, ...], target: LoadedModel) -> AutoDrafter:
        """Returns the drafter of `auto`, made once for all texts with these sampling distributions and these files."""
        model, names = self._model, tuple(sorted(set(distributions)))
        key = dataclasses.replace(method, explain=False), names, target is model.loaded
        files = self.files(method)
        with contextlib.suppress(TypeError):  # an option that cannot be a key
            if key in model.autos and model.autos[key][0] == files:
                return model.autos[key][1]
        resources = self._resources(names, model.directory, target)
        candidates = method.candidates(target, resources)
        drafter, params = method.built(candidates, target, resources)
        if model.mesh is None:  # otherwise each call of the loop would transfer the drafter's arrays again
            drafter = jax.device_put(drafter, model.device)
        made = AutoDrafter(drafter, params, tuple(one.name for one in candidates))
        with contextlib.suppress(TypeError):
            while len(model.autos) >= MAX_PROGRAMS:
                del model.autos[next(iter(model.autos))]
            model.autos[key] = files, made
        return made

    def files(self, method: AnyMethod) -> tuple[Any, ...]:
        """Returns the identity of the files that a method may read; () for a drafter, and with several processes."""
        if not isinstance(method, Method) or processes.several():
            return ()
        model = self._model
        return files_of(method, model.loaded, self._resources((), model.directory, model.loaded))

    def _resources(
        self, distributions: tuple[str, ...], directory: Path | None, target: LoadedModel
    ) -> Resources:
        model = self._model
        return Resources(
            model.drafts.load,
            model.encode,
            directory,
            distributions,
            model.platform,
            model.drafts.load_head,
            model.drafts.quantised,
            model.step_costs,
        )

    def candidates(self, method: Auto, distributions: tuple[str, ...]) -> tuple[Candidate, ...]:
        """Returns the candidates of method `auto`, which the caller measures itself."""
        model = self._model
        resources = self._resources(distributions, model.directory, model.loaded)
        return method.candidates(model.loaded, resources)

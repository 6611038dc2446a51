"""What the methods share that draft with a head: small layers that read what the target computes anyway."""

from __future__ import annotations

import dataclasses
import warnings
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from jaxspec.methods.base import Method, layers_of, option
from jaxspec.methods.chain import ChainMethod
from jaxspec.methods.files import found
from jaxspec.methods.resources import FilePath, LoadedHead, LoadedModel, Resources

if TYPE_CHECKING:
    from jaxspec.costs.rounds import DraftCost
    from jaxspec.model.llama import Params
    from jaxspec.protocol import Drafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadMethod(ChainMethod):
    """The base of methods that draft with a head, whose kind has the method's name; a subclass adds `drafter`.

    Attributes:
      draft: the head: a directory or a hub id. Default: the one in `heads` beside the model, under the method's name,
        else one that comes with jaxspec for this model.

    Examples:
      >>> from jaxspec.methods import Eagle3
      >>> Eagle3(draft="head", num_draft_tokens=7)
      Eagle3(num_draft_tokens=7, draft='head')
    """

    # Whether `auto` may offer the method by itself.
    may_pay: ClassVar[bool] = False

    draft: FilePath | None = option(None, metavar="DIR|ID")

    def drafter(self, target: LoadedModel, head: Any) -> Drafter:
        """Makes the drafter of a head of this method's kind.

        Args:
          target: the model that verifies.
          head: what the head is made of, such as a `jaxspec.heads.eagle.network.EagleConfig`.

        Raises:
          ValueError: an option does not fit the head; one line.
        """
        raise NotImplementedError

    def build(self, target: LoadedModel, resources: Resources) -> tuple[Drafter, Any]:
        """Makes the drafter; its parameters are the head's."""
        head = self._head(target, resources)
        drafter = self.drafter(target, head.config)
        params = self._params(head, target, resources)
        if head.target not in (None, target.fingerprint):
            warnings.warn(
                f"{self._path(target, resources)} is a head of another model or quantisation ({head.target}, this one "
                f"is {target.fingerprint}); fewer of its tokens may be accepted; the text is the same",
                RuntimeWarning,
                stacklevel=2,
            )
        return drafter, params

    def cost(self, target: LoadedModel, drafter: Drafter, params: Any) -> DraftCost:
        """Returns the cost of as many layers as have the head's size; the target runs over a text once more."""
        from jaxspec.costs.rounds import DraftCost

        # A pass reads one row of an embedding for each token.
        read = {name: leaf for name, leaf in params.items() if name != "embed"}
        layers = layers_of(read, target)
        own = "vocabulary" in params or _has_rows(params)
        return DraftCost(layers=layers, heads=not own, absorb_layers=target.config.num_layers + layers)

    @classmethod
    def offered(cls, target: LoadedModel, resources: Resources) -> tuple[Method, ...]:
        """Returns the method if drafting by it may pay and there is a head for the model; else nothing."""
        method = cls()
        return (method,) if cls.may_pay and method._path(target, resources) is not None else ()

    def expectation(self, target: LoadedModel, resources: Resources) -> tuple[float, ...] | None:
        """Returns the acceptance on held-out prompts, which its training wrote beside the head."""
        from jaxspec.heads.files import trained_for
        from jaxspec.io.methods import acceptance_file

        head = Path(self._path(target, resources) or "")
        file = head / acceptance_file.NAME
        if not file.is_file():
            return None
        found = acceptance_file.Acceptances.read(file, trained_for(head) or target.fingerprint).candidates
        return found[self.name].accept if self.name in found else None

    def _path(self, target: LoadedModel, resources: Resources) -> FilePath | None:
        """Returns where the head is: as named, else beside the model, else with jaxspec; None if nowhere."""
        from jaxspec.heads.files import embedded_head, head_name

        if self.draft is not None:
            return self.draft
        beside = found(None, target, resources, head_name(self.name))
        if beside is not None:
            return beside.parent
        return embedded_head(self.name, target.fingerprint, target.config)

    def _head(self, target: LoadedModel, resources: Resources) -> LoadedHead:
        """Returns the head that was named, else the one beside the model, checked to be this method's and target's."""
        path = self._path(target, resources)
        if path is None:
            from jaxspec.heads.files import head_name
            from jaxspec.heads.kinds import known

            kind, remedy = known().get(self.name), ""
            if kind and kind.training:
                remedy = f", or train one with `python -m training.heads --kind {self.name}`"
            raise ValueError(
                f"method {self.name} needs a head, and there is no {head_name(self.name)} beside the model; "
                f"give draft=DIR{remedy}"
            )
        head = resources.load_head(path, target)
        if head.config.kind != self.name:
            raise ValueError(f"{path} holds a head of {head.config.kind}; choose method={head.config.kind!r}")
        return head

    def _params(self, head: LoadedHead, target: LoadedModel, resources: Resources) -> Params:
        """Returns the head's parameters, reduced to the tokens of `draft_vocab` for which the head has rows."""
        import jax.numpy as jnp
        import numpy as np

        from jaxspec.model.vocabulary import Vocabulary

        ids, own = self.vocabulary_ids(target, resources), dict(head.params)
        if head.rows is not None and head.rows < target.config.vocab_size and _has_rows(own):
            ids = np.arange(head.rows, dtype=np.int32) if ids is None else ids[ids < head.rows]
        if ids is None:
            return head.params
        rows, kept = ids, jnp.asarray(ids)
        few = own.get("vocabulary")
        if few is not None:
            rows = np.flatnonzero(np.isin(np.asarray(few.ids), ids))
            if not len(rows):
                raise ValueError(
                    f"draft_vocab leaves none of the head's {len(few.ids)} tokens; give more tokens, or leave it out"
                )
            # The list of another head of this shape, whose rows would be other tokens.
            if len(ids) == len(few.ids) > len(rows):
                raise ValueError(
                    f"draft_vocab has {len(ids)} tokens, as many as the head, and {len(ids) - len(rows)} of them have "
                    "no row in it; give the head's list or another number of tokens, or leave it out"
                )
            kept = few.ids[rows]
        matrix = None
        if any("head" in one for one in own.get("heads", ())):
            of_tokens = ("head", "head_bias")
            own["heads"] = [
                {name: leaf[rows] if name in of_tokens else leaf for name, leaf in one.items()}
                for one in own["heads"]
            ]
        elif few is not None:
            matrix = few.head[rows]
        elif "head" in own:
            matrix = own.pop("head")[rows]
        else:
            matrix = target.vocabulary(ids).head
        own["vocabulary"] = Vocabulary(matrix, kept, target.config.vocab_size)
        return own


def _has_rows(params: Params) -> bool:
    """Returns whether a head has output rows of its own."""
    return any("head" in one for one in (params, *params.get("heads", ())))

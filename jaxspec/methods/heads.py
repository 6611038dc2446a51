"""What the methods share that draft with a head: small layers that read what the target computes anyway."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

from jaxspec.methods.base import Method, layers_of, option
from jaxspec.methods.chain import ChainMethod
from jaxspec.methods.files import found
from jaxspec.methods.resources import FilePath, LoadedHead, LoadedModel, Resources

if TYPE_CHECKING:
    from jaxspec.choosing.acceptance import Expectation
    from jaxspec.choosing.costs import DraftCost
    from jaxspec.model.llama import Params
    from jaxspec.protocol import Drafter


@dataclasses.dataclass(frozen=True, kw_only=True)
class HeadMethod(ChainMethod):
    """The base of methods that draft with a head, whose kind has the method's name; a subclass adds `drafter`.

    Attributes:
      draft: the head: a directory or a hub id. Default: the one in `heads` beside the model, under the method's name,
        else one that comes with jaxspec for this model.

    Class attributes:
      trainable: whether `python -m training.heads` makes such heads.

    Examples:
      >>> from jaxspec.methods import Eagle3
      >>> Eagle3(draft="head", num_draft_tokens=7)
      Eagle3(num_draft_tokens=7, draft='head')
    """

    trainable: ClassVar[bool] = False

    draft: FilePath | None = option(None, metavar="DIR|ID")

    def drafter(self, target: LoadedModel, head: Any) -> Drafter:
        """Makes the drafter of a head of this method's kind.

        Args:
          target: the model that verifies.
          head: what the head is made of, such as a `jaxspec.model.eagle.HeadConfig`.

        Raises:
          ValueError: an option does not fit the head; one line.
        """
        raise NotImplementedError

    def build(self, target: LoadedModel, resources: Resources) -> tuple[Drafter, Any]:
        """Makes the drafter; its parameters are the head's."""
        head = self._head(target, resources)
        drafter = self.drafter(target, head.config)
        return drafter, self._params(head, target, resources)

    def cost(self, target: LoadedModel, drafter: Drafter, params: Any) -> DraftCost:
        """Returns the cost of as many layers as have the head's size; the target runs over a text once more."""
        from jaxspec.choosing.costs import DraftCost

        layers = layers_of(params, target)
        own = "vocabulary" in params or any("head" in one for one in (params, *params.get("heads", ())))
        return DraftCost(layers=layers, head=not own, absorb_layers=target.config.num_layers + layers)

    @classmethod
    def beside(cls, target: LoadedModel, resources: Resources) -> tuple[Method, ...]:
        """Returns the method, where there is a head of its kind for the model without naming it; else nothing."""
        from jaxspec.io.heads import embedded_heads, head_name

        found_beside = found(None, target, resources, head_name(cls.name)) is not None
        return (cls(),) if found_beside or cls.name in embedded_heads(target.fingerprint) else ()

    def expectation(self, target: LoadedModel, resources: Resources) -> Expectation | None:
        """Returns what its training found on held-out prompts, which lies beside the head."""
        from jaxspec.io import acceptance_file

        path = Path(self._path(target, resources) or "") / acceptance_file.NAME
        known = acceptance_file.read_acceptance(path, target.fingerprint) if path.is_file() else {}
        return known.get(self.name)

    def _path(self, target: LoadedModel, resources: Resources) -> FilePath | None:
        """Returns where the head is: as named, else beside the model, else with jaxspec; None if nowhere."""
        from jaxspec.io.heads import embedded_heads, head_name

        if self.draft is not None:
            return self.draft
        beside = found(None, target, resources, head_name(self.name))
        return embedded_heads(target.fingerprint).get(self.name) if beside is None else beside.parent

    def _head(self, target: LoadedModel, resources: Resources) -> LoadedHead:
        """Returns the head that was named, else the one beside the model, checked to be this method's and target's."""
        path = self._path(target, resources)
        if path is None:
            from jaxspec.io.heads import head_name

            remedy = ", or train one with `python -m training.heads`" if self.trainable else ""
            raise ValueError(
                f"method {self.name} needs a head, and there is no {head_name(self.name)} beside the model; "
                f"give draft=DIR{remedy}"
            )
        head = resources.load_head(path, target)
        if head.config.kind != self.name:
            raise ValueError(f"{path} holds a head of {head.config.kind}; choose method={head.config.kind!r}")
        if head.target is not None and head.target != target.fingerprint:
            raise ValueError(
                f"{path} is a head of another model ({head.target}, this one is {target.fingerprint}); give one that "
                "was trained for this model"
            )
        return head

    def _params(self, head: LoadedHead, target: LoadedModel, resources: Resources) -> Params:
        """Returns the head's parameters, reduced to the tokens of `draft_vocab` for which the head has rows."""
        import jax.numpy as jnp
        import numpy as np

        from jaxspec.model.vocabulary import Vocabulary

        ids, own = self.vocabulary_ids(target, resources), dict(head.params)
        has_rows = "head" in own or any("head" in one for one in own.get("heads", ()))
        if head.rows is not None and head.rows < target.config.vocab_size and has_rows:
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

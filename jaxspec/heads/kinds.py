"""The table of the head types: one row for each, from which every other part reads what it needs to know of them.

Another package adds a row with an entry point of the group `jaxspec.heads`, which has the name of the head's method:

    [project.entry-points."jaxspec.heads"]
    my-head = "my_package.kind:KIND"
"""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple, Protocol

import numpy as np

from jaxspec.heads.dflash import files as dflash
from jaxspec.heads.dflash.network import usual as usual_dflash
from jaxspec.heads.dspark import files as dspark
from jaxspec.heads.dspark.network import usual as usual_dspark
from jaxspec.heads.eagle import files as eagle
from jaxspec.heads.eagle.network import usual_eagle, usual_eagle3
from jaxspec.heads.hydra import files as hydra
from jaxspec.heads.hydra.network import usual as usual_hydra
from jaxspec.heads.kangaroo import files as kangaroo
from jaxspec.heads.kangaroo.network import usual as usual_kangaroo
from jaxspec.heads.medusa import files as medusa
from jaxspec.heads.medusa.network import usual as usual_medusa
from jaxspec.heads.tensors import Entry, Head, part
from jaxspec.heads.uno import files as uno
from jaxspec.heads.uno.network import usual as usual_uno
from jaxspec.host import plugins
from jaxspec.io.tensors import Tensors
from jaxspec.model.config import LlamaConfig
from jaxspec.model.head import HeadConfig


class Format(Protocol):
    """The module `files` of a head type: how its published files are read."""

    def recognises(self, names: Collection[str]) -> bool:
        """Returns whether tensors of these names are such a head."""

    def read(self, directory: Path, content: Mapping[str, Any], found: Tensors, target: LlamaConfig) -> Head:
        """Returns the head, checked to fit a target; raises as `heads.files.read_head` does."""

    def entries(self, config: Any, /) -> Iterator[Entry]:
        """Yields name, shape and sources of every leaf, in the order of the tree `config.shapes`."""


class Writing(NamedTuple):
    """How heads of a type are written.

    Attributes:
      content: (config, name of the dtype) → the content of `config.json`, without the target.
      published: (config, name of a tensor in `entries`) → its name in the file.
      part: (config, ids int32[V'] or None) → further tensors, which name the tokens of the head's own rows.
    """

    content: Callable[[Any, str], dict[str, Any]]
    published: Callable[[Any, str], str] = lambda config, name: name
    part: Callable[[Any, np.ndarray | None], dict[str, np.ndarray]] | None = None


class Kind(NamedTuple):
    """A head type.

    Attributes:
      format: how its files are read.
      usual: target → the shape of a typical published head.
      writing: how its files are written; None if they are only read.
      layouts: other ways to write them, by the name of the trainer whose layout it is.
      by_token: a regular expression of the names of its tensors with one row per token, beside those of a Llama.
      training: the module whose `KINDS` has a row for `python -m training.heads`; None if it cannot be trained.
    """

    format: Format
    usual: Callable[[LlamaConfig], HeadConfig]
    writing: Writing | None = None
    layouts: Mapping[str, Writing] = MappingProxyType({})
    by_token: str | None = None
    training: str | None = None


# By the name of the method that drafts with the head. Earlier rows have precedence: if the files of two types have the
# same tensors, and if a target has several heads.
KINDS: dict[str, Kind] = {
    "dspark": Kind(
        dspark,
        usual_dspark,
        Writing(dspark.content, part=part),
        by_token=dspark.BY_TOKEN,
        training="training.heads.dspark",
    ),
    "dflash": Kind(
        dflash, usual_dflash, Writing(dflash.content, part=part), training="training.heads.dflash"
    ),
    "eagle3": Kind(
        eagle,
        usual_eagle3,
        Writing(eagle.content, eagle.published, part),
        {
            "specforge": Writing(eagle.specforge, eagle.published, part),
            "speculators": Writing(eagle.speculators, part=part),
        },
        training="training.heads.eagle",
    ),
    "eagle": Kind(eagle, usual_eagle, Writing(eagle.content, part=part), training="training.heads.eagle"),
    "kangaroo": Kind(kangaroo, usual_kangaroo, Writing(kangaroo.content), training="training.heads.kangaroo"),
    "hydra": Kind(
        hydra, usual_hydra, Writing(hydra.content), by_token=hydra.BY_TOKEN, training="training.heads.hydra"
    ),
    "medusa": Kind(
        medusa,
        usual_medusa,
        Writing(medusa.content, medusa.published),
        by_token=medusa.BY_TOKEN,
        training="training.heads.medusa",
    ),
    "uno": Kind(uno, usual_uno, Writing(uno.content), training="training.heads.uno"),
}


def known() -> dict[str, Kind]:
    """Returns all head types by name: `KINDS`, then those of other packages."""
    return KINDS | _added()


@functools.cache
def _added() -> dict[str, Kind]:
    """Returns the head types of other packages; one that cannot be loaded is a warning."""
    found = {}
    for name, point in plugins.added("jaxspec.heads", KINDS).items():
        try:
            found[name] = plugins.loaded(
                *(point, "head type", "a jaxspec.heads.kinds.Kind"), lambda one: isinstance(one, Kind)
            )
        except ValueError as error:
            warnings.warn(str(error), RuntimeWarning, stacklevel=2)
    return found

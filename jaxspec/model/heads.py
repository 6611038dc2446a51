"""The kinds of heads that draft: what each is made of says its `kind`, and its parameters' `shapes`."""

from __future__ import annotations

from jaxspec.model.dflash import DFlashConfig
from jaxspec.model.eagle import HeadConfig
from jaxspec.model.hydra import HydraConfig
from jaxspec.model.kangaroo import KangarooConfig
from jaxspec.model.medusa import MedusaConfig

AnyHead = HeadConfig | KangarooConfig | MedusaConfig | HydraConfig | DFlashConfig

"""Published figures of accelerators, and the names of topologies."""

from __future__ import annotations

import dataclasses
import math
import re

from jaxspec.host.arguments import parse_mesh
from jaxspec.host.messages import shown

# Operations of a decoding step after XLA's fusion, per layer and outside the layers, counted in a GPU's program.
LAYER_OPERATIONS, OTHER_OPERATIONS = 18, 6


@dataclasses.dataclass(frozen=True)
class Accelerator:
    """Published figures of one model of chip.

    Attributes:
      name: the name in a topology.
      memory_bytes: main memory per chip, bytes.
      bandwidth: bandwidth of the main memory, bytes per second.
      flops: peak operations per second in `dtype`.
      source: the address of the published figures.
      axes: number of axes of its topologies; 0 for GPUs, whose topologies have only a number of chips.
      launch_us: microseconds to start one operation of a program (not published). GPUs: derived from a measured round
        of 294 kernels of a 1b model, which took twice the .74 ms that reading the weights takes. TPUs: assumed.
      kind: JAX's name of an NVIDIA GPU (`jax.Device.device_kind`).
      capability: compute capability of an NVIDIA GPU, major and minor; None for TPUs.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    flops: float
    source: str
    axes: int
    launch_us: float = 1.0
    kind: str = ""
    capability: tuple[int, int] | None = None

    @property
    def dtype(self) -> str:
        """The dtype of 16 bits for which it has hardware."""
        return "float16" if self.capability is not None and self.capability < (8, 0) else "bfloat16"

    @property
    def is_gpu(self) -> bool:
        """Whether the accelerator is an NVIDIA GPU; all others are TPUs."""
        return self.capability is not None


_TPUS = {
    name: Accelerator(name, memory, bandwidth, flops, f"https://cloud.google.com/tpu/docs/{name}", axes)
    for name, memory, bandwidth, flops, axes in (
        ("v5e", 16 * 2**30, 819e9, 197e12, 2),
        ("v5p", 95 * 2**30, 2765e9, 459e12, 3),
        ("v6e", 32 * 2**30, 1600e9, 918e12, 2),
    )
}
# Figures of GPUs are those of the modules with these names, without sparsity.
ACCELERATORS = _TPUS | {
    name: Accelerator(
        name,
        memory,
        bandwidth,
        flops,
        f"https://www.nvidia.com/en-us/data-center/{name}/",
        axes=0,
        launch_us=2.5,
        kind=kind,
        capability=capability,
    )
    for name, memory, bandwidth, flops, kind, capability in (
        ("h100", 80 * 10**9, 3350e9, 989e12, "NVIDIA H100 80GB HBM3", (9, 0)),
        ("h200", 141 * 10**9, 4800e9, 989e12, "NVIDIA H200", (9, 0)),
        ("a100", 80 * 10**9, 2039e9, 312e12, "NVIDIA A100-SXM4-80GB", (8, 0)),
        ("l4", 24 * 10**9, 300e9, 121e12, "NVIDIA L4", (8, 9)),
        ("v100", 16 * 10**9, 900e9, 125e12, "Tesla V100-SXM2-16GB", (7, 0)),
        ("t4", 16 * 10**9, 320e9, 65e12, "Tesla T4", (7, 5)),
    )
}
# Maximum number of GPUs of a host.
_GPUS = 8


@dataclasses.dataclass(frozen=True)
class Topology:
    """A set of connected chips of one accelerator.

    Attributes:
      accelerator: the accelerator.
      bounds: number of chips along each axis; for GPUs, the number of chips.
    """

    accelerator: Accelerator
    bounds: tuple[int, ...]

    @property
    def num_devices(self) -> int:
        """Total number of chips."""
        return math.prod(self.bounds)


def parse_topology(text: str) -> Topology:
    """Parses a topology such as v5e:2x2, v5p:2x2x1, h100 or h100:8.

    Raises:
      ValueError: the text is not a topology; one line with the expected form.

    Examples:
      >>> parse_topology("v5e:2x2").num_devices
      4
      >>> parse_topology("h100:8").bounds
      (8,)
    """
    name, _, bounds = text.partition(":")
    kind = ACCELERATORS.get(name)
    if kind is None:
        raise ValueError(
            f"topology is {shown(text)}; give KIND:CHIPS with one of the kinds {', '.join(ACCELERATORS)}, such as "
            "v5e:2x2 or h100:1"
        )
    if kind.is_gpu:
        if not re.fullmatch(rf"{name}(:[1-{_GPUS}])?", text):
            raise ValueError(
                f"topology is {shown(text)}; give the number of GPUs of one host, 1 to {_GPUS}, such as {name}:2"
            )
        return Topology(kind, (int(bounds or 1),))
    if not re.fullmatch(r"[1-9]\d{0,2}" + r"x[1-9]\d{0,2}" * (kind.axes - 1), bounds):
        example = "x".join("221"[: kind.axes])
        raise ValueError(
            f"topology is {shown(text)}; give the chips along each of the {kind.axes} axes of {name}, such as "
            f"{name}:{example}"
        )
    return Topology(kind, tuple(map(int, bounds.split("x"))))


def mesh_axes(text: str | None, num_devices: int) -> dict[str, int]:
    """Returns the axes of a mesh over all devices, such as data=1,model=4; None shards the model over all devices.

    Raises:
      ValueError: the text is not a mesh, or the mesh does not have `num_devices` places; one line.

    Examples:
      >>> mesh_axes(None, 4)
      {'data': 1, 'model': 4}
    """
    if text is None:
        return {"data": 1, "model": num_devices}
    axes = parse_mesh(text)
    if math.prod(axes.values()) != num_devices:
        raise ValueError(
            f"mesh is {shown(text)}, which has {math.prod(axes.values())} places, and the topology has {num_devices} "
            f"chips; give data × model = {num_devices}"
        )
    return axes

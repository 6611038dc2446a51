"""Published figures of the accelerators that programs are compiled for, and the names of topologies."""

from __future__ import annotations

import dataclasses
import math
import re
from typing import Any

from jaxspec.host.mesh_text import parse_mesh
from jaxspec.host.messages import shown
from jaxspec.measuring.aot.cuda import PROCESSORS

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
      target: the compiler's name of the chip, if it differs from `name`.
      options: further arguments of the compiler's topology.
      launch_us: microseconds to start one operation of a program (not published). GPUs: derived from a measured round
        of 294 kernels of a 1b model, which took twice the .74 ms that reading the weights takes. TPUs: assumed.
      kinds: JAX's names of the device (`jax.Device.device_kind`).
      cycle_flops: bfloat16 operations of all matrix units in a cycle; 0 for GPUs.
    """

    name: str
    memory_bytes: int
    bandwidth: float
    flops: float
    source: str
    axes: int
    target: str = ""
    options: tuple[tuple[str, Any], ...] = ()
    launch_us: float = 1.0
    kinds: tuple[str, ...] = ()
    cycle_flops: int = 0

    @property
    def clock(self) -> float:
        """Returns a TPU's clock in Hz, as its published peak and its matrix units imply."""
        return self.flops / self.cycle_flops

    @property
    def dtype(self) -> str:
        """The dtype of 16 bits for which it has hardware."""
        return "float16" if self.is_gpu and PROCESSORS[self.name].capability < (8, 0) else "bfloat16"

    @property
    def is_gpu(self) -> bool:
        """Whether the accelerator is an NVIDIA GPU; all others are TPUs."""
        return self.name in PROCESSORS


# Multiplications and additions per cycle of a 128 × 128 matrix unit. A v5e has four such units, a v5p eight. The units
# of a v6e are 256 × 256; four of them are assumed, because the compiler's estimate of a large product implies more than
# 1.5 × the rate of two.
_UNITS = 2 * 128**2
# "megacore": the two cores of a chip share its memory and are one device.
_V5P: dict[str, Any] = {"target": "v5", "options": (("chip_config_name", "megacore"),)}
_TPUS = {
    name: Accelerator(
        name,
        memory,
        bandwidth,
        flops,
        f"https://cloud.google.com/tpu/docs/{name}",
        axes,
        kinds=kinds,
        cycle_flops=units * _UNITS,
        **more,
    )
    for name, memory, bandwidth, flops, axes, units, kinds, more in (
        ("v5e", 16 * 2**30, 819e9, 197e12, 2, 4, ("TPU v5 lite", "TPU v5e"), {}),
        ("v5p", 95 * 2**30, 2765e9, 459e12, 3, 8, ("TPU v5", "TPU v5p"), _V5P),
        ("v6e", 32 * 2**30, 1600e9, 918e12, 2, 16, ("TPU v6 lite", "TPU v6e"), {}),
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
        kinds=(kind,),
    )
    for name, memory, bandwidth, flops, kind in (
        ("h100", 80 * 10**9, 3350e9, 989e12, "NVIDIA H100 80GB HBM3"),
        ("h200", 141 * 10**9, 4800e9, 989e12, "NVIDIA H200"),
        ("a100", 80 * 10**9, 2039e9, 312e12, "NVIDIA A100-SXM4-80GB"),
        ("l4", 24 * 10**9, 300e9, 121e12, "NVIDIA L4"),
        ("v100", 16 * 10**9, 900e9, 125e12, "Tesla V100-SXM2-16GB"),
        ("t4", 16 * 10**9, 320e9, 65e12, "Tesla T4"),
    )
}
# Maximum number of chips of a TPU host along each axis, and of GPUs of a host.
_HOST, _GPUS = (2, 2, 1), 8


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

    @property
    def request(self) -> dict[str, Any]:
        """The arguments of `jax.experimental.topologies.get_topology_desc`."""
        kind = self.accelerator
        if kind.is_gpu:
            config = PROCESSORS[kind.name].target_config(kind.kinds[0], kind.memory_bytes, kind.bandwidth)
            # Numbers of slices, of hosts per slice, and of GPUs per host.
            return {"platform": "cuda", "target_config": config, "topology": f"1x1x{self.num_devices}"}
        hosts = tuple(map(min, (*self.bounds, 1)[:3], _HOST))
        name = f"{kind.target or kind.name}:{'x'.join(map(str, self.bounds))}"
        request = {"platform": "tpu", "topology_name": name, "chips_per_host_bounds": hosts}
        return request | dict(kind.options)


def published(kind: str) -> Accelerator | None:
    """Returns the published figures of a device by JAX's name of it (`device_kind`); None if the name is unknown.

    Examples:
      >>> published("TPU v5 lite").bandwidth
      819000000000.0
      >>> published("cpu") is None
      True
    """
    return next((one for one in ACCELERATORS.values() if kind in one.kinds), None)


def parse_topology(text: str) -> Topology:
    """Parses a topology such as v5e:2x2, v5p:2x2x1, h100 or h100:8.

    Raises:
      ValueError: the text is not a topology; one line with the expected form.

    Examples:
      >>> parse_topology("v5e:2x2").num_devices
      4
      >>> parse_topology("v5p:2x2x1").request["topology_name"]
      'v5:2x2x1'
      >>> parse_topology("h100:8").request["topology"]
      '1x1x8'
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

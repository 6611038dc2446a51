"""Descriptions of NVIDIA GPUs for XLA's compiler: published figures in the text form of `GpuTargetConfigProto`.

With a GPU, the compiler queries the device and times several kernels for each product. Without one, it uses these
descriptions and selects kernels by rules, so the kernels can differ from those on a real device. Copies, fusions and
memory do not differ.
"""

from __future__ import annotations

import dataclasses

# Versions of CUDA and cuDNN that the description reports in place of a driver.
_TOOLKIT = (13, 0, 0)
_DNN = (9, 12, 0)


@dataclasses.dataclass(frozen=True)
class Processor:
    """Properties of a GPU that determine the compiler's choices, apart from memory and bandwidth.

    Attributes:
      capability: compute capability, major and minor.
      multiprocessors: number enabled in the module (the full chip has more).
      cores: float32 cores per multiprocessor.
      threads: maximum number of resident threads per multiprocessor.
      shared_kib: shared memory per multiprocessor, KiB; a block can use 1 KiB less, below capability 8.0 all of it.
      l2_mib: level-2 cache, MiB.
      clock_ghz: maximum ("boost") clock, GHz.
      sources: addresses of the published figures; the first lists those that follow from the capability alone.
    """

    capability: tuple[int, int]
    multiprocessors: int
    cores: int
    threads: int
    shared_kib: int
    l2_mib: int
    clock_ghz: float
    sources: tuple[str, ...]

    def target_config(self, name: str, memory_bytes: int, bandwidth: float) -> str:
        """Returns the `GpuTargetConfigProto` in text form.

        Args:
          name: JAX's name of the device.
          memory_bytes: main memory, bytes.
          bandwidth: bandwidth of the main memory, bytes per second.

        Examples:
          >>> text = PROCESSORS["l4"].target_config("NVIDIA L4", 24 * 10**9, 300e9)
          >>> [line.strip() for line in text.splitlines() if "core_count" in line or "shared" in line]
          ['core_count: 58', 'shared_memory_per_block: 49152', 'shared_memory_per_core: 102400', \
'shared_memory_per_block_optin: 101376']
        """
        shared = self.shared_kib * 2**10
        info = {
            "core_count": self.multiprocessors,
            "fpus_per_core": self.cores,
            "threads_per_core_limit": self.threads,
            "shared_memory_per_block": 48 * 2**10,
            "shared_memory_per_core": shared,
            "shared_memory_per_block_optin": shared - (2**10 if self.capability >= (8, 0) else 0),
            "l2_cache_size": self.l2_mib * 2**20,
            "clock_rate_ghz": self.clock_ghz,
            "device_memory_size": memory_bytes,
            "memory_bandwidth": round(bandwidth),
            **_EVERY_GPU,
        }
        lines = [f"{key}: {number}" for key, number in info.items()]
        major, minor = self.capability
        lines.append(f"cuda_compute_capability {{ major: {major} minor: {minor} }}")
        toolkit = _version(_TOOLKIT)
        versions = ("driver_version", "runtime_version", "compile_time_toolkit_version")
        lines += [f'{key}: "{".".join(map(str, _TOOLKIT))}"' for key in versions]
        about = "\n".join(f"  {line}" for line in lines)
        return (
            f"gpu_device_info {{\n{about}\n}}\n"
            'platform_name: "CUDA"\n'
            f"dnn_version_info {{ {_version(_DNN)} }}\n"
            f"runtime_version {{ {toolkit} }}\n"
            f'device_description_str: "{name}"\n'
        )


def _version(numbers: tuple[int, int, int]) -> str:
    return " ".join(
        f"{part}: {number}" for part, number in zip(("major", "minor", "patch"), numbers, strict=True)
    )


# Limits common to all capabilities from 7.0 to 9.0.
_EVERY_GPU = {
    "threads_per_block_limit": 1024,
    "threads_per_warp": 32,
    "registers_per_core_limit": 2**16,
    "registers_per_block_limit": 2**16,
    "block_dim_limit_x": 2**31 - 1,
    "block_dim_limit_y": 2**16 - 1,
    "block_dim_limit_z": 2**16 - 1,
}
_GUIDE = "https://docs.nvidia.com/cuda/cuda-c-programming-guide/index.html#compute-capabilities"
_HOPPER = "https://developer.nvidia.com/blog/nvidia-hopper-architecture-in-depth/"
_AMPERE = (
    "https://images.nvidia.com/aem-dam/en-zz/Solutions/data-center/nvidia-ampere-architecture-whitepaper.pdf"
)
_VOLTA = "https://images.nvidia.com/content/volta-architecture/pdf/volta-architecture-whitepaper.pdf"
_TURING = (
    "https://images.nvidia.com/aem-dam/en-zz/Solutions/design-visualization/technologies/turing-architecture/"
    "NVIDIA-Turing-Architecture-Whitepaper.pdf"
)
_ADA = "https://images.nvidia.com/aem-dam/Solutions/geforce/ada/nvidia-ada-gpu-architecture.pdf"
PROCESSORS = {
    "h100": Processor((9, 0), 132, 128, 2048, 228, 50, 1.98, (_GUIDE, _HOPPER)),
    # The H200 has the chip of an H100 and other memory.
    "h200": Processor((9, 0), 132, 128, 2048, 228, 50, 1.98, (_GUIDE, _HOPPER)),
    "a100": Processor((8, 0), 108, 64, 2048, 164, 40, 1.41, (_GUIDE, _AMPERE)),
    "l4": Processor((8, 9), 58, 128, 1536, 100, 48, 2.04, (_GUIDE, _ADA)),
    "v100": Processor((7, 0), 80, 64, 2048, 96, 6, 1.53, (_GUIDE, _VOLTA)),
    "t4": Processor((7, 5), 40, 64, 1024, 64, 4, 1.59, (_GUIDE, _TURING)),
}

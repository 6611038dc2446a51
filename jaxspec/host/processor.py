"""Identifies the processor, on which compiled programs and measured times depend."""

from __future__ import annotations

import functools
import hashlib
import os
import platform
from pathlib import Path


@functools.cache
def processor() -> tuple[str, int, str]:
    """Returns the processor's name, the number of usable cores, and a digest of its instruction sets.

    They come from /proc/cpuinfo, or else from Python.
    """
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8", errors="replace").splitlines()
    except OSError:
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    flags = next((line for line in lines if line.startswith(("flags", "Features"))), "")
    usable = getattr(os, "sched_getaffinity", None)
    cores = len(usable(0)) if usable else os.cpu_count() or 1
    name = names[0] if names else platform.processor()
    return name, cores, hashlib.sha256(flags.encode()).hexdigest()[:16]

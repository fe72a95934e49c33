"""Cached probes of this machine: files in the user's cache folder.

A probe's name has its dependencies: the processor and its threads, the memory, the device, the
spill directory's disk, the dtype of updates and the time of watching the disk. `cache` lists other
parts. The machine's load is not one: a probe can be renewed.
"""

import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from protrain_plan.cache import Kept
from protrain_plan.hardware.probe import Watch, host_memory_bytes, processor_name
from protrain_runtime.contract.errors import RecordError
from protrain_runtime.contract.records import dumps_hardware, loads_hardware
from protrain_runtime.contract.records.hardware import KEPT_PROBE, Hardware
from protrain_runtime.contract.records.profile import DType
from protrain_runtime.devices import device as devices


class ProbeCache(Kept):
    """The probe of one device, in one spill directory."""

    name = "probes"
    libraries = ("torch",)
    settings = ("OMP_", "MKL_", "KMP_", "GOMP_", "TORCH", "PYTORCH", "CUDA_")

    def __init__(
        self, device: torch.device, spill_directory: Path, dtype: DType, watch: Watch, *, off: bool
    ) -> None:
        super().__init__(off=off)
        self._directory = spill_directory
        name = "" if devices.on_host(device) else devices.name(device)
        host = processor_name(), torch.get_num_threads(), host_memory_bytes()
        disk = 0
        try:
            disk = spill_directory.stat().st_dev
        except OSError:  # the probe reports the directory's error
            self._folder = None  # nothing is cached
        self._question = repr((*host, str(device), name, disk, dtype, watch))

    def machine(self) -> Hardware | None:
        """The probed machine, with its disk's present room; None if unknown."""
        text = self._read(self._question)
        with suppress(RecordError):
            if text is not None:
                found = loads_hardware(text)
                free = shutil.disk_usage(self._directory).free
                found = found.with_tier(replace(found.tier("disk"), capacity_bytes=free))
                return replace(found, sources=(*found.sources, KEPT_PROBE))
        return None

    def keep(self, machine: Hardware) -> None:
        """Cache a probe."""
        self._write(self._question, dumps_hardware(machine))

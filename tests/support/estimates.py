"""Models estimated without memory for them."""

from dataclasses import replace

import torch

from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.profiling.memory.fake_meter import NUMBER_BYTES
from protrain_runtime.contract.records.hardware import Hardware
from protrain_runtime.contract.records.profile import FormCost, Unit


def machine(name: str = "cpu") -> Hardware:
    hardware = load_hardware(name)
    return replace(hardware, device=replace(hardware.device, num_threads=torch.get_num_threads()))


def bytes_alone(unit: Unit, real: Unit) -> Unit:
    """The unit without seconds, nor the Python number that recomputation may take more or not."""
    forms: list[FormCost] = []
    for form, other in zip(unit.forms, real.forms, strict=True):
        excess = form.forward_peak_bytes - other.forward_peak_bytes
        allowed = (0,) if form.form == "keep" else (0, NUMBER_BYTES)
        peak = form.forward_peak_bytes - (excess if excess in allowed else 0)
        forms.append(replace(form, forward_peak_bytes=peak, forward_s=0.0, backward_s=0.0))
    return replace(unit, forms=tuple(forms))

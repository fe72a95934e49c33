"""A frozen model beside the trained one: a teacher, or a preference's reference."""

from dataclasses import replace
from itertools import accumulate

from protrain_runtime.contract.records.profile import Beside, Profile


def with_beside(profile: Profile, other: Profile) -> Profile:
    """The profile with another profile's frozen model on its device.

    bytes = weights + base + max over units u of (level(u - 1) + forward_peak(u))

    in every slot, with levels and peaks of the leanest forms: a forward without gradients holds no
    more, and its outputs for the loss stay until backward ends. seconds = the forwards of all its
    units, before the first unit's.
    """
    lean = [
        min(unit.forms, key=lambda f: (f.kept_bytes, f.forward_peak_bytes)) for unit in other.units
    ]
    levels = accumulate((form.kept_bytes for form in lean), initial=0)
    peak = max(level + form.forward_peak_bytes for level, form in zip(levels, lean, strict=False))
    beside = Beside(
        model=other.workload.model,
        weight_bytes=sum(unit.parameter_bytes for unit in other.units),
        forward_bytes=other.base_bytes + peak,
        forward_s=sum(unit.cost("keep").forward_s for unit in other.units),
    )
    launch_s = sum(unit.cost("keep").forward_launch_s for unit in other.units)
    first, *others = profile.units  # its forward begins later, in any form
    forms = (
        replace(
            form,
            forward_s=form.forward_s + beside.forward_s,
            forward_launch_s=form.forward_launch_s + launch_s,
        )
        for form in first.forms
    )
    return replace(
        profile,
        units=(replace(first, forms=tuple(forms)), *others),
        fixed_bytes=profile.fixed_bytes + beside.weight_bytes,
        base_bytes=profile.base_bytes + beside.forward_bytes,
        beside=beside,
    )

"""A plan on a machine: what its decisions take there, for the model as it is now."""

from dataclasses import dataclass
from functools import cached_property

from protrain_plan.checking.cases import Case
from protrain_plan.checking.growing import UnitGrowth, growth
from protrain_plan.checking.predicting import Predicted, misfit, on_machine, predicted
from protrain_plan.checking.reestimating import Broken, Today, Unavailable
from protrain_plan.checking.targets import Target
from protrain_plan.records.profile import Profile


@dataclass(frozen=True, kw_only=True)
class Model:
    """A plan's case, and its model as the source is today."""

    case: Case
    today: Today | Broken | Unavailable

    @property
    def changed(self) -> bool:
        """Whether today's model is another one than was profiled."""
        return isinstance(self.today, Today) and (
            bool(self.today.changed_keys)
            or self.today.model_fingerprint != self.case.profile.model_fingerprint
        )

    @cached_property
    def profile(self) -> Profile:
        """What the model costs on the plan's own machine.

        A model that is as it was profiled costs what was profiled. One that changed costs what an
        estimate says, and so does one whose profile was an estimate itself. On a CPU that was made
        where kernels could be measured, or with bounds: an estimate made here may have other peaks,
        and those of the profile hold for as long as the rest is the same.
        """
        recorded = self.case.profile
        if isinstance(self.today, Today) and (self.changed or recorded.method == "estimated"):
            found = self.today.profile(recorded.hardware)
            if isinstance(found, Profile) and not (
                recorded.workload.device == "cpu"
                and not self.changed
                and not growth(recorded, found)
            ):
                return found
        return recorded

    @property
    def growth(self) -> tuple[UnitGrowth, ...]:
        """What changed, unit by unit, since the profile was made; empty where nobody can tell."""
        return growth(self.case.profile, self.profile)


@dataclass(frozen=True, kw_only=True)
class Situation:
    """A plan with its model on one machine."""

    model: Model
    target: Target

    @property
    def case(self) -> Case:
        return self.model.case

    @cached_property
    def profile(self) -> Profile:
        """What the model costs on this machine: bytes for sure, seconds where it is the plan's."""
        return on_machine(self.model.profile, self.target.hardware)

    @cached_property
    def misfit(self) -> str | None:
        """Why the plan decides about another model than this one; None where it does not."""
        return misfit(self.case.plan, self.profile)

    @cached_property
    def predicted(self) -> Predicted:
        """What the plan takes here; only where there is no `misfit`."""
        return predicted(self.case.plan, self.profile)

    @cached_property
    def seconds(self) -> float | Unavailable:
        """The predicted step, with compute estimated for this machine where it is not the plan's.

        Estimated seconds stand for themselves alone: a measured profile's have to be measured.
        """
        if self.target.own:
            if self.profile.method != self.case.profile.method:
                return Unavailable(reason="the model changed since its seconds were measured")
            return self.predicted.step_seconds
        if not isinstance(self.model.today, Today):
            return Unavailable(reason=f"no estimate for this machine: {self.model.today.reason}")
        if self.target.hardware.rates is None:
            return Unavailable(reason="no estimate for this machine: its rates are not known")
        found = self.model.today.profile(self.target.hardware)
        if isinstance(found, Unavailable):
            return found
        return predicted(self.case.plan, found).step_seconds

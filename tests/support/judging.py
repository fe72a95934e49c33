"""A model through profile and plans, judged: trained like plain PyTorch below the peak, or refused.

In a process of its own, so that what crashes is an answer too.
"""

import faulthandler
import gc
import hashlib
import itertools
import json
import linecache
import math
import os
import random
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn

from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.batches import Batch, call_model, loss_of
from protrain_plan.models.optimizers import optimizer_factory
from protrain_plan.profiling.measured import measure_model
from protrain_plan.profiling.optimizer_cost import workspace
from protrain_runtime import prepare
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.memory import device_bytes
from protrain_runtime.contract.records.plan import (
    KEEP,
    OPTIMIZER_IN_BACKWARD,
    PERSISTENT,
    RECOMPUTE,
    Activations,
    Placement,
    Plan,
    UnitPlan,
)
from protrain_runtime.contract.records.profile import OptimizerCost, Profile
from protrain_runtime.devices.lanes import LaneError
from protrain_runtime.diagnostics.recording import measure_step
from protrain_runtime.engine.engine import Observer
from protrain_runtime.model.prepared import below_device
from tests.support.forked import CONTEXT
from tests.support.hostile_models import Hostile
from tests.support.peaks import bytes_of_others, without_freedom
from tests.support.programs import compile_units
from tests.support.runtime_cases import (
    copied,
    decided,
    described_by,
    differences,
    mixed,
    open_to,
    plan_for_profile,
)

NUM_STEPS = 6
"""The last is measured, and is an odd one: steps that take turns are not all the profiled one."""
PIECE_BYTES = 1 << 15

PlanName = Literal[
    "kept",
    "offloaded",
    "recomputed",
    "mixed",
    "lite",
    "mlp",
    "attn",
    "swap lite",
    "stepped",
    "in place",
]
PLANS: tuple[PlanName, ...] = ("kept", "offloaded", "recomputed", "mixed")


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The end of a model under one plan, or in the profile.

    `discarded` is a model that plain PyTorch does not train the same way twice.
    """

    under: PlanName | Literal["plain", "profile"]
    kind: Literal["like plain", "refused", "wrong", "discarded"]
    text: str = ""  # the refusal, or what is wrong
    gave_up: tuple[int, ...] = ()  # steps that were refused when they came


def judged(
    find: Callable[..., Hostile], *arguments: object, plans: Sequence[PlanName], seed: int
) -> list[Verdict]:
    """The verdicts on `find(*arguments)`, found in a process of its own.

    One for each plan, or a single one where the model is refused or goes wrong before. `find` is a
    function of a module, and its arguments can be pickled. What is at random in a plan is drawn
    from `seed`.
    """
    with TemporaryDirectory() as folder:
        answers, errors = Path(folder, "answers"), Path(folder, "errors")
        answers.touch()
        process = CONTEXT.Process(
            target=_answer, args=(find, arguments, plans, seed, Path(folder), answers, errors)
        )
        process.start()
        process.join(300)
        ended = process.exitcode
        if ended is None:
            process.kill()
            process.join()
        told = map(json.loads, answers.read_text(encoding="utf-8").splitlines())
        verdicts = [Verdict(**{**each, "gave_up": tuple(each["gave_up"])}) for each in told]
        if ended != 0:
            how = "did not end" if ended is None else f"ended with {ended}"
            said = errors.read_text(encoding="utf-8", errors="replace").strip()[:2000]
            seen = len([each for each in verdicts if each.under in PLANS])
            under = plans[seen] if seen < len(plans) else "profile"
            verdicts.append(Verdict(under=under, kind="wrong", text=f"the process {how}: {said}"))
        return verdicts


def _answer(
    find: Callable[..., Hostile],
    arguments: tuple[object, ...],
    plans: Sequence[PlanName],
    seed: int,
    folder: Path,
    answers: Path,
    errors: Path,
) -> None:
    gc.freeze()
    with errors.open("wb") as file:
        os.dup2(file.fileno(), 2)
    faulthandler.enable()
    judge = Judge(find(*arguments), seed, folder)
    with answers.open("a", encoding="utf-8") as told:
        for verdict in judge.verdicts(plans):
            print(json.dumps(asdict(verdict)), file=told, flush=True)


@dataclass
class Trained:
    """The results of training, and the bytes of the last step."""

    losses: list[float] = field(default_factory=list)
    gradients: list[dict[str, str]] = field(default_factory=list)  # digests, of each step
    parameters: dict[str, Tensor] = field(default_factory=dict)
    optimizer: dict[str, Any] = field(default_factory=dict)
    random_state: tuple[object, ...] = ()
    gave_up: dict[int, str] = field(default_factory=dict)  # what was said at these steps
    slot_bytes: tuple[int, ...] = ()
    device_bytes: int = 0


class Judge:
    profile: Profile

    def __init__(self, subject: Hostile, seed: int, folder: Path) -> None:
        self._subject, self._seed, self._folder = subject, seed, folder
        self._waits = random.Random(seed).random() < 0.5  # the mixed plan, for all gradients
        self._factory = subject.factory or optimizer_factory(subject.optimizer)

    def verdicts(self, plans: Sequence[PlanName]) -> Iterator[Verdict]:
        try:
            expected = self._plain(())
            again = self._plain(())
        except Exception as error:  # noqa: BLE001 (a model's own code)
            yield Verdict(under="plain", kind="discarded", text=first_line(error))
            return
        if list(_compared(again, expected)) or not all(map(math.isfinite, expected.losses)):
            yield Verdict(under="plain", kind="discarded", text="not the same twice, or not finite")
            return
        del again
        try:
            self.profile = profile = profiled(
                replace(self._subject, make=self._subject.before or self._subject.make),
                self._folder,
            )
        except Exception as error:  # noqa: BLE001
            yield _told("profile", error)
            return
        if wrong := "; ".join(self._mistold(profile)):
            yield Verdict(under="profile", kind="wrong", text=wrong)
        for name in plans:
            yield self._under(name, profile, expected)

    def _plain(self, skipped: Sequence[int]) -> Trained:
        model = self._subject.build()
        optimizer = self._factory(p for p in model.parameters() if p.requires_grad)
        return self._train(model, optimizer, skipped=skipped)

    def _mistold(self, profile: Profile) -> Iterator[str]:
        """Why blocks cannot run twice and states stay: what the profile has no reason to say."""
        once = {unit.runs_once for unit in profile.units} - {""}
        stays = {unit.stays for unit in profile.units} - {""}
        for told, right in ((once, self._subject.once), (stays, self._subject.stays)):
            if right is not None and told != {right} - {""}:
                yield f"told {sorted(told)}, not {right!r}"

    def _under(self, name: PlanName, profile: Profile, expected: Trained) -> Verdict:
        units = tuple(
            replace(plan, states=PERSISTENT) if unit.stays else plan
            for plan, unit in zip(
                open_to(profile, self._decided(name, described_by(profile))),
                profile.units,
                strict=True,
            )
        )
        waits = {"updates": "after backward"} if name == "mixed" and self._waits else {}
        plan = plan_for_profile(profile, units, piece_bytes=PIECE_BYTES, **waits)
        others = bytes_of_others()
        try:
            model, optimizer = prepare(
                self._subject.build(), plan, optimizer=self._factory, spill_directory=self._folder
            )
            found = self._train(model, optimizer, others=others)
        except Exception as error:  # noqa: BLE001
            return _told(name, error)
        disk = below_device(model)[1]
        same = expected if not found.gave_up else self._plain(tuple(found.gave_up))
        wrong = list(_compared(found, same))
        wrong += self._beside(profile, plan, found, disk)
        texts = " | ".join(found.gave_up.values())
        return Verdict(
            under=name,
            kind="wrong" if wrong else "like plain",
            text="; ".join(wrong[:4]) or texts,
            gave_up=tuple(found.gave_up),
        )

    def _decided(self, name: PlanName, units: tuple[UnitPlan, ...]) -> tuple[UnitPlan, ...]:
        match name:
            case "kept":
                return decided(units, KEEP, PERSISTENT)
            case "offloaded":
                return without_freedom(
                    decided(units, Activations(tier="disk"), Placement(tier="disk"))
                )
            case "recomputed":
                gathered = Placement(tier="disk", keep_gathered=True)
                return without_freedom(decided(units, RECOMPUTE, gathered))
            case "lite" | "mlp" | "attn" as form:
                return without_freedom(decided(units, Activations(form=form), PERSISTENT))
            case "swap lite":
                swapped = Activations(tier="disk", form="lite")
                return without_freedom(decided(units, swapped, PERSISTENT))
            case "stepped":
                return without_freedom(decided(units, KEEP, OPTIMIZER_IN_BACKWARD))
            case "in place":
                kept = decided(units, KEEP, PERSISTENT)
                return (*kept[:-1], replace(kept[-1], activations=Activations(form="in place")))
            case "mixed":
                rng = random.Random(self._seed)
                return without_freedom(mixed(units, rng, "disk", stepped=not self._waits))

    def _train(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        *,
        skipped: Sequence[int] = (),
        others: int | None = None,
    ) -> Trained:
        """Steps from known random states; `others` bytes stand by where the last is measured."""
        torch.manual_seed(1)
        random.seed(1)
        np.random.seed(1)
        found = Trained()
        loss: Tensor | None = None  # has a name up to the next one

        def step(batch: Batch, observe: Observer | None) -> None:
            nonlocal loss
            loss = loss_of(call_model(model, batch))
            loss.backward()
            if observe is None:
                found.gradients.append(_digests(model))
            else:
                observe("update")
            optimizer.step()
            optimizer.zero_grad()
            found.losses.append(loss.item())

        for number in range(NUM_STEPS):
            batch = self._subject.batch(number)
            if number in skipped:
                continue
            if others is not None and number == NUM_STEPS - 1:
                memory = measure_step(model, partial(step, batch), besides_bytes=others)
                found.slot_bytes, found.device_bytes = memory.slot_bytes, memory.device_bytes
                continue
            try:
                step(batch, None)
            except Exception as error:
                if number != self._subject.gives_up or not is_refusal(error):
                    raise
                found.gave_up[number] = first_line(error)
                optimizer.zero_grad()
        found.gradients = found.gradients[: NUM_STEPS - 1 - len(skipped)]
        found.parameters = copied(model.state_dict())
        found.optimizer = copied(optimizer.state_dict())
        found.random_state = (torch.get_rng_state(), random.getstate(), np.random.rand())
        return found

    def _beside(self, profile: Profile, plan: Plan, found: Trained, disk: int) -> list[str]:
        """Bytes above the prediction, or further below it than is said."""
        program = compile_units(
            plan.units,
            profile,
            piece_bytes=plan.settings.piece_bytes,
            updates=plan.settings.updates,
        )
        predicted = [slot.total for slot in device_bytes(program)]
        on_disk, most = program.tier_bytes("disk"), max(predicted)
        wrong = [] if disk <= on_disk else [f"{disk - on_disk} bytes more on disk than predicted"]
        over, above = self._subject.over, self._subject.above
        if found.device_bytes > most + over:
            wrong.append(f"peak {found.device_bytes} above the predicted {most}")
        if above is not None and most - found.device_bytes > above:
            wrong.append(f"peak {most - found.device_bytes} below the predicted {most}")
        if len(found.slot_bytes) > 1:  # else nothing is installed
            slots = list(enumerate(zip(found.slot_bytes, predicted, strict=True)))
            more = [(slot, seen - said) for slot, (seen, said) in slots if seen > said + over]
            wrong += [f"(slot, bytes above the prediction): {more}"] if more else []
            above = self._subject.above_slots
            less = [(n, said - seen) for n, (seen, said) in slots if said - seen > (above or 0)]
            wrong += [f"(slot, bytes below the prediction): {less}"] if less and above else []
        return wrong


def profiled(
    subject: Hostile, folder: Path, batches: Callable[[], Iterator[Batch]] | None = None
) -> Profile:
    """The model's measured profile, without the bytes of what others hold in this process."""
    others, model = bytes_of_others(), subject.build()
    seen = (subject.batch(step) for step in itertools.count() if step != subject.gives_up)
    dtypes = frozenset(parameter.dtype for parameter in model.parameters())
    profile = measure_model(
        model,
        batches() if batches else seen,
        workload=subject.workload,
        num_steps=1,
        spill_directory=folder,
        progress=lambda *_: None,
        optimizer=subject.optimizer,
        machine=load_hardware("cpu"),
        cost=_cost(subject.optimizer, dtypes),
    )
    return replace(profile, base_bytes=profile.base_bytes - others)


@cache
def _cost(optimizer: str, dtypes: frozenset[torch.dtype]) -> OptimizerCost:
    return OptimizerCost(
        name=optimizer,
        host_parameters_per_s=1e9,
        device_parameters_per_s=1e9,
        **workspace(optimizer, "float32", "pure", beside=dtypes)._asdict(),
    )


def _digests(model: nn.Module) -> dict[str, str]:
    """Digests of visible gradients: after updates in backward there are none."""

    def digest(gradient: Tensor) -> str:
        dense = gradient.to_dense().contiguous().view(-1)
        return hashlib.sha256(dense.view(torch.uint8).numpy().tobytes()).hexdigest()

    return {
        name: digest(p.grad)
        for name, p in model.named_parameters()
        if p.grad is not None and type(p.grad) is Tensor
    }


def _compared(found: Trained, expected: Trained) -> Iterator[str]:
    yield from differences(found.losses, expected.losses, "loss")
    for number, (own, plain) in enumerate(zip(found.gradients, expected.gradients, strict=True)):
        for name, digest in own.items():
            if plain.get(name) != digest:
                yield f"gradient of {name} in step {number}"
    yield from differences(found.parameters, expected.parameters, "parameters")
    yield from differences(found.optimizer, expected.optimizer, "optimizer")
    yield from differences(found.random_state, expected.random_state, "random state")


def _told(under: PlanName | Literal["profile"], error: Exception) -> Verdict:
    if is_refusal(error):
        return Verdict(under=under, kind="refused", text=str(error))
    where = traceback.extract_tb(error.__traceback__)[-1]
    place = f"{Path(where.filename).name}:{where.lineno}"
    return Verdict(
        under=under, kind="wrong", text=f"{type(error).__name__} at {place}: {first_line(error)}"
    )


def is_refusal(error: Exception) -> bool:
    """Whether the project itself says no: by its own class, or a RuntimeError that it raises."""
    if isinstance(error, LaneError):
        return False
    if isinstance(error, ProtrainError):
        return True
    where = traceback.extract_tb(error.__traceback__)[-1]
    own = any(part in where.filename for part in ("/protrain_plan/", "/protrain_runtime/"))
    line = linecache.getline(where.filename, where.lineno or 0).strip()
    return isinstance(error, RuntimeError) and own and line.startswith("raise ")


def first_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]

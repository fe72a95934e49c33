"""Fixes of refusals, followed: the loop trains then, bit for bit like plain PyTorch."""

import fcntl
import itertools
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from shutil import copytree
from tempfile import TemporaryDirectory
from typing import Any, Literal

import pytest
import torch
from safetensors.torch import save_file
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import checkpoint

from protrain_plan.models.batches import call_model, loss_of
from protrain_runtime import (
    MovingAverage,
    full_parameters,
    load,
    prepare,
    record,
    restore,
    save,
    save_pretrained,
)
from protrain_runtime.checkpoint.loading import read_extra
from protrain_runtime.contract.records.plan import (
    OPTIMIZER_IN_BACKWARD,
    PERSISTENT,
    RECOMPUTE,
    Placement,
    Plan,
)
from tests.support.hostile_models import (
    Block,
    Hostile,
    Make,
    Stack,
    Through,
    batch_of,
    by_torch,
    chosen,
    counts_forwards,
    does,
    in_order,
    next_token,
    reads_blocks,
    scales_input,
    stack,
)
from tests.support.judging import PlanName, is_refusal, judged
from tests.support.messages import Speaker
from tests.support.odd_optimizers import TOGETHER, UNCOUNTED
from tests.support.odd_optimizers import made as made_odd
from tests.support.plan_settings import with_settings
from tests.support.runtime_cases import (
    ADAMW,
    CATALOGUE,
    Subject,
    assert_bitwise,
    decided,
    one_group,
)
from tests.support.scenario import Loop, Run, Scenario, Script, refusal
from tests.support.thinning import thinned

Verb = str | Script
"""A part of a script: `step` or `backward` of the next batch, one of `VERBS`, or anything else."""

VERBS: dict[str, Script] = {
    "update": Run.update,
    "zero": lambda run: run.optimizer.zero_grad(),
    "update alone": lambda run: run.optimizer.step(),
    "clip": lambda run: run.clip(0.5),
    "clip values": lambda run: torch.nn.utils.clip_grad_value_(run.model.parameters(), 1e-3),
}


def does_all(*verbs: Verb) -> Script:
    def script(run: Run) -> None:
        numbers = itertools.count()
        for verb in verbs:
            if verb in ("step", "backward"):
                getattr(run, str(verb))(next(numbers))
            else:
                (VERBS[verb] if isinstance(verb, str) else verb)(run)

    return script


def inside(what: Script, *, modify: bool = False) -> Script:
    def script(run: Run) -> None:
        with full_parameters(run.model, modify):
            what(run)

    return script


@torch.no_grad()
def halves(run: Run) -> None:
    for parameter in run.model.parameters():
        parameter.mul_(0.5)


def norms(run: Run, count: int | None = None) -> None:
    parameters = itertools.islice(run.model.parameters(), count)
    run.seen += [parameter.detach().norm() for parameter in parameters]


norm = partial(norms, count=1)


def drops_a_gradient(run: Run) -> None:
    next(run.model.parameters()).grad = None


def changes_a_rate(run: Run) -> None:
    run.optimizer.param_groups[0]["lr"] = 5e-3


def two_losses(run: Run) -> None:
    loss = run.loss(0)
    (loss * 2).backward(retain_graph=True)
    (loss * 3).backward()
    run.update()


def one_sum(run: Run) -> None:
    loss = run.loss(0)
    (loss * 2 + loss * 3).backward()
    run.update()


def two_forwards(run: Run) -> None:
    (run.loss(0) + run.loss(1)).backward()
    run.update()


def differentiable_gradients(run: Run) -> None:
    for number in range(3):
        loss = run.loss(number)
        loss.backward(create_graph=True)
        run.seen.append(loss.detach())
        run.update()


def gradients_of_some(run: Run) -> None:
    run.step(0)
    run.loss(1).backward(inputs=[*run.model.parameters()][:3])
    run.update()


def others_frozen(run: Run) -> None:
    run.step(0)
    others = [*run.model.parameters()][3:]
    for parameter in others:
        parameter.requires_grad_(False)
    run.loss(1).backward()
    run.update()
    for parameter in others:
        parameter.requires_grad_(True)
    run.step(2)


def returned_gradients(run: Run) -> None:
    run.seen += torch.autograd.grad(run.loss(0), [[*run.model.parameters()][3]])


def standing_gradient(run: Run) -> None:
    given = [*run.model.parameters()][3]
    for parameter in run.model.parameters():
        parameter.requires_grad_(parameter is given)
    run.loss(0).backward()
    assert given.grad is not None
    run.seen.append(given.grad.clone())
    run.optimizer.zero_grad()


def assigns(run: Run, *, assign: bool = True) -> None:
    run.step(0)
    run.model.load_state_dict(run.values(), assign=assign)
    run.step(1)


def checkpoints(run: Run) -> None:
    """Act as Trainers do that are told to save memory."""
    given = run.subject.batch(0)
    anchor = torch.zeros(1, requires_grad=True)
    checkpoint(
        lambda _: loss_of(call_model(run.model, given)), anchor, use_reentrant=True
    ).backward()
    run.update()


def cuts_short(run: Run) -> None:
    """A backward that fails, of which a script thinks no more."""
    run.step(0)
    loss = run.loss(1)
    handle = next(run.model.parameters()).register_hook(fails)
    with pytest.raises(ZeroDivisionError):
        loss.backward()
    handle.remove()
    run.optimizer.zero_grad()
    run.step(2)


def fails(gradient: torch.Tensor) -> None:
    raise ZeroDivisionError


def averages_on(run: Run) -> None:
    average = MovingAverage(run.model)
    average.update()
    restore(run.model)
    average.update()


def averages_anew(run: Run) -> None:
    run.step(0)
    average = MovingAverage(run.model)
    average.update()
    state = average.state_dict()
    if run.planned:
        restore(run.model)
    again = MovingAverage(run.model)
    again.load_state_dict(state)
    again.update()
    run.seen += again.state_dict()["parameters"].values()


def average_first(run: Run) -> None:
    with MovingAverage(run.model).applied():
        pass


def averaged_first(run: Run) -> None:
    average = MovingAverage(run.model)
    average.update()
    with average.applied():
        run.look(0)


def converts_restored(run: Run) -> None:
    run.step(0)
    if run.planned:
        restore(run.model)
    run.model.double()


def freezes_late(run: Run) -> None:
    run.step(0)
    run.backward(1)
    for parameter in run.model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    run.update()


def records(run: Run, *, before: bool = False) -> None:
    if run.planned and not before:
        restore(run.model)
    if run.planned:
        with record(run.model):
            run.step(0)


def records_a_plan(run: Run) -> None:
    records(run, before=True)
    if not run.planned:
        run.step(0)


def looks_at_units(run: Run, unit: str = "layers.0") -> None:
    with full_parameters(run.model, units=[unit]):
        run.seen.append(run.model.get_parameter(f"{LAYER}.input_layernorm.weight").norm().detach())


LAYER = "model.layers.0"


def saves(run: Run, own: bool = False, *, plainly: bool = False) -> None:
    """Plainly, nothing but the parameters says which model an optimizer is of."""
    run.step(0)
    if run.folder is not None:
        if plainly:
            restore(run.model)
        other = ADAMW(CATALOGUE["gpt2"].build().parameters())
        save(run.model, run.optimizer if own else other, run.folder / "saved")
    if not plainly:
        run.step(1)


@contextmanager
def saved(run: Run) -> Iterator[Path]:
    """A folder for a checkpoint."""
    with TemporaryDirectory() as other:
        yield (run.folder or Path(other)) / "saved"


def loads_other_states(run: Run, *, states: bool = True) -> None:
    other = run.subject.build(1)
    with saved(run) as folder:
        save(other, torch.optim.SGD(other.parameters()), folder)
        load(run.model, run.optimizer if states else None, folder)
    run.step(1)


def loads_another_model(run: Run, model: str = "gpt2") -> None:
    with saved(run) as folder:
        save(CATALOGUE[model].build(1), None, folder)
        load(run.model, None, folder)
    run.step(1)


def saves_an_object(run: Run, extra: object = UserWarning) -> None:
    with saved(run) as folder:
        save(run.model, None, folder, extra={"dtype": extra})
        run.seen.append(read_extra(folder)["dtype"])
    run.step(1)


def saves_beside(run: Run, *, beside: bool = True) -> None:
    run.step(0)
    with saved(run) as folder:
        save(run.model, run.optimizer, folder, beside=beside and run.planned)
    run.step(1)


def saves_over_others(run: Run, name: str = "") -> None:
    """Into a folder of files that another library wrote."""
    with saved(run) as folder:
        folder.mkdir()
        save_file({"weight": torch.zeros(1)}, folder / "model.safetensors")
        save(run.model, run.optimizer, folder / name)
    run.step(0)


def saves_files_over_its_own(run: Run, name: str = "") -> None:
    with saved(run) as folder:
        save(run.model, None, folder)
        save_pretrained(run.model, folder / name)
    run.step(0)


def loads_linked(run: Run, *, copied: bool = False) -> None:
    """A checkpoint whose files lie elsewhere, as in a cache."""
    run.step(0)
    with saved(run) as folder, TemporaryDirectory() as elsewhere:
        save(run.model, run.optimizer, folder)
        [files] = (each for each in folder.iterdir() if each.is_dir())
        moved = files.rename(Path(elsewhere) / files.name)
        files.symlink_to(moved)
        if copied:
            folder = Path(copytree(folder, f"{folder}-copied"))
        load(run.model, run.optimizer, folder)
    run.step(1)


def cut(content: bytes) -> bytes:
    return content[:-3]


def flipped(content: bytes) -> bytes:
    return content[:-1] + bytes([content[-1] ^ 1])


def loads_damaged(
    run: Run,
    *,
    damage: Callable[[bytes], bytes] = cut,
    file: str = "*/*.safetensors",
    whole: bool = False,
) -> None:
    run.step(0)
    with saved(run) as folder:
        save(run.model, run.optimizer, folder)
        damaged = Path(copytree(folder, f"{folder}-damaged"))
        for path in damaged.glob(file):
            path.write_bytes(damage(path.read_bytes()))
        load(run.model, run.optimizer, folder if whole else damaged)
    run.step(1)


def loads_nothing(run: Run, *, named: bool = False) -> None:
    with saved(run) as folder:
        save(run.model, run.optimizer, folder / "own")
        load(run.model, run.optimizer, folder / "own" if named else folder)
    run.step(1)


def saves_meanwhile(run: Run, *, elsewhere: bool = False) -> None:
    """While another process saves into the folder: the lock is on its descriptor."""
    run.step(0)
    with saved(run) as folder:
        folder.mkdir()
        descriptor = os.open(folder, os.O_RDONLY)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        save(run.model, run.optimizer, folder / "other" if elsewhere else folder)
        os.close(descriptor)
    run.step(1)


def saves_files_of_a_layer(run: Run, *, own: bool = False) -> None:
    """A module that no library has files for."""
    run.step(0)
    with saved(run) as folder:
        layer = torch.nn.Linear(2, 2)
        save(layer, None, folder) if own else save_pretrained(layer, folder)


def converts_inside(run: Run) -> None:
    run.step(0)
    with full_parameters(run.model, modify=True):
        for parameter in run.model.parameters():
            parameter.data = parameter.data.double()


def averages_of_another(run: Run, model: str | None = "gpt2") -> None:
    run.step(0)
    average = MovingAverage(CATALOGUE[model].build() if model else run.model)
    average.update()
    own = MovingAverage(run.model)
    own.load_state_dict(average.state_dict())
    with own.applied():
        run.look(0)


@dataclass(frozen=True, kw_only=True)
class Fix:
    """A loop that is refused, and what the message says: another loop, or a plan with --clip."""

    refused: Script
    loop: Script | None = None
    micro_batches: int = 1
    clip: bool = False  # the plan, for the other loop
    clipped: bool = False  # the plan that refuses
    states: Placement = Placement(tier="disk")  # noqa: RUF009 (frozen)


def unless(script: Callable[..., object], **mended: Any) -> Fix:
    return Fix(refused=script, loop=partial(script, **mended))


ONCE = ("backward", "update")
STEPS = does_all("step", "step")
SKIPS = does_all("step", "backward", "zero", "step")  # as where a loss is not finite
WRITES = does_all("step", inside(halves, modify=True), "step")
UNWANTED = does_all("backward", "step")  # a backward for another model's sake, as in a GAN
LOOKS = does_all("backward", norm, "update")
LOOKS_INSIDE = does_all("backward", inside(norm), "update")
LOOKS_AFTER = does_all("step", inside(norm))
FIXES = {
    "a skipped step: --clip": Fix(refused=SKIPS, clip=True),
    "a skipped step: step": Fix(refused=SKIPS, loop=does_all("step", "backward", "update", "step")),
    "writes": Fix(refused=does_all("step", halves, "step"), loop=WRITES),
    "writes, unsaid": Fix(refused=does_all("step", inside(halves), "step"), loop=WRITES),
    "reads": Fix(
        refused=does_all("step", norms, "step"), loop=does_all("step", inside(norms), "step")
    ),
    "a dropped gradient": Fix(
        refused=does_all("step", "backward", drops_a_gradient, "update", "step"), clip=True
    ),
    "clips by norm": Fix(refused=does_all("backward", "clip", "update", "step"), clip=True),
    "clips by value": Fix(refused=does_all("backward", "clip values", "update", "step"), clip=True),
    "fewer micro-batches": Fix(
        refused=does_all("backward", *ONCE, "backward", "update"), micro_batches=2, clip=True
    ),
    "no zero_grad": Fix(refused=does_all("backward", "update alone", *ONCE), loop=STEPS),
    "two losses": Fix(refused=two_losses, loop=one_sum),
    "two forwards": Fix(
        refused=two_forwards, loop=does_all("backward", *ONCE), micro_batches=2, clip=True
    ),
    "an unwanted backward": Fix(
        refused=UNWANTED, loop=does_all("backward", "zero", "step"), clip=True
    ),
    "an unwanted backward, with --clip": Fix(
        refused=UNWANTED, loop=does_all("backward", "zero", "step"), clip=True, clipped=True
    ),
    "options changed late": Fix(
        refused=does_all("backward", changes_a_rate, "update", "step"),
        loop=does_all(changes_a_rate, "step", "step"),
    ),
    "a step too early": Fix(
        refused=does_all(lambda run: run.loss(0), "update alone"), loop=does_all("step")
    ),
    "a second step": Fix(refused=does_all("backward", "update alone", "update alone"), loop=STEPS),
    "a conversion": Fix(
        refused=does_all("step", lambda run: run.model.double(), "step"), loop=converts_restored
    ),
    "replaced gradients": Fix(refused=freezes_late, clip=True),
    "gradients with a graph": Fix(
        refused=differentiable_gradients, loop=does_all("step", "step", "step")
    ),
    "gradients of some": Fix(refused=gradients_of_some, loop=others_frozen),
    "gradients of one": Fix(refused=returned_gradients, loop=standing_gradient, clip=True),
    "a look at what is away": Fix(refused=LOOKS, loop=LOOKS_INSIDE, clip=True),
    "a full look before the step: --clip": Fix(refused=LOOKS_INSIDE, clip=True),
    "a full look before the step": Fix(refused=LOOKS_INSIDE, loop=LOOKS_AFTER),
    "a look before the step: --clip": Fix(refused=LOOKS, clip=True, states=OPTIMIZER_IN_BACKWARD),
    "a look before the step: before": Fix(
        refused=LOOKS, loop=does_all(inside(norm), "step"), states=OPTIMIZER_IN_BACKWARD
    ),
    "a look before the step: after": Fix(
        refused=LOOKS, loop=LOOKS_AFTER, states=OPTIMIZER_IN_BACKWARD
    ),
    "training inside": Fix(
        refused=inside(does_all("step")), loop=does_all(inside(does_all()), "step")
    ),
    "assigned values": unless(assigns, assign=False),
    "a checkpoint around the model": Fix(refused=checkpoints, loop=does_all("step")),
    "a backward that is cut short": Fix(refused=cuts_short, clip=True),
    "averages of a plan that has ended": Fix(refused=averages_on, loop=averages_anew),
    "averages of nothing": Fix(refused=average_first, loop=averaged_first),
    "a recording of no plan": Fix(refused=records, loop=records_a_plan),
    "a unit that is not there": unless(looks_at_units, unit=LAYER),
    "another optimizer to save": unless(saves, own=True),
    "states of another optimizer": unless(loads_other_states, states=False),
    "parameters of another model": unless(loads_another_model, model="llama-tied"),
    "an object to save": unless(saves_an_object, extra="float32"),
    "a save beside training": unless(saves_beside, beside=False),
    "a save over files of others": unless(saves_over_others, name="other"),
    "a save over its own": unless(saves_files_over_its_own, name="other"),
    "a checkpoint of links": unless(loads_linked, copied=True),
    "a conversion inside": Fix(refused=converts_inside, loop=converts_restored),
    "a damaged checkpoint": unless(loads_damaged, whole=True),
    "a damaged index": Fix(
        refused=partial(loads_damaged, file="*.safetensors*"),
        loop=partial(loads_damaged, whole=True),
    ),
    "a damaged parameter": Fix(
        refused=partial(loads_damaged, damage=flipped, file="*/model-*"),
        loop=partial(loads_damaged, whole=True),
    ),
    "a folder without a checkpoint": unless(loads_nothing, named=True),
    "a folder that another process saves to": unless(saves_meanwhile, elsewhere=True),
    "an optimizer of another model, plainly": unless(partial(saves, plainly=True), own=True),
    "files of a module": unless(saves_files_of_a_layer, own=True),
    "averages of another model": unless(averages_of_another, model=None),
}


@pytest.mark.nightly(by_day=12)
@pytest.mark.parametrize("name", thinned([*FIXES], every=2))
def test_a_loop_trains_when_the_message_is_followed(
    name: str, tmp_path: Path, assert_says: Speaker
) -> None:
    fix = FIXES[name]

    def scripted(script: Script, updates: Literal["in backward", "after backward"]) -> Scenario:
        late = fix.states == OPTIMIZER_IN_BACKWARD and updates == "after backward"
        states = PERSISTENT if late else fix.states
        return Scenario(
            units=lambda units: decided(units, RECOMPUTE, states),
            script=script,
            settings={"updates": updates, "micro_batches": fix.micro_batches},
        )

    refused = scripted(fix.refused, "after backward" if fix.clipped else "in backward")
    for folder in (tmp_path / "refused", tmp_path / "trained"):
        folder.mkdir()
    run = refused.start(tmp_path / "refused")
    error = refusal(lambda: refused.played(run), Exception)
    assert is_refusal(error), repr(error)
    assert_says(error)
    updates: Any = "after backward" if fix.clip else "in backward"
    scripted(fix.loop or fix.refused, updates).assert_like_plain(tmp_path / "trained")


LOOP = Scenario(
    units=lambda units: decided(units, RECOMPUTE, Placement(tier="disk")), script=Loop(num_steps=2)
)
"""The plan of the rows below, which trains once `prepare` takes what it is given."""


def prepared(folder: Path, model: Any = None, **given: Any) -> Run:
    model = LOOP.subject.build() if model is None else model
    return replace(LOOP, **given).prepared(model, folder)


def another(folder: Path, followed: bool) -> Run:
    plan = None if followed else (lambda _: LOOP.planned_for(CATALOGUE["gpt2"].build()))
    return prepared(folder, plan=plan)


def misnamed(folder: Path, followed: bool) -> Run:
    name = "model.layers.1" if followed else "model.layers.9"
    units = [
        replace(unit, name=name if unit.name == "model.layers.1" else unit.name)
        for unit in decided(LOOP.subject.units(), RECOMPUTE, Placement(tier="disk"))
    ]
    return prepared(folder, units=units)


def stepped_before(folder: Path, followed: bool) -> Run:
    model = LOOP.subject.build()
    optimizer = ADAMW(model.parameters())
    if not followed:
        next(model.parameters()).grad = torch.zeros_like(next(model.parameters()))
        optimizer.step()
    return given_optimizer(folder, model, optimizer)


def given_optimizer(folder: Path, model: Any, optimizer: torch.optim.Optimizer) -> Run:
    plan = LOOP.planned_for(model)
    planned, mine = prepare(model, plan, optimizer=optimizer, spill_directory=folder)
    return Run(LOOP.subject, planned, mine, folder=folder)


def from_files(folder: Path, model: Any, *, named: bool = True) -> Run:
    save(LOOP.subject.build(), None, folder / "weights")
    weights = folder / "weights" if named else None
    spills = folder / "spills"
    spills.mkdir(exist_ok=True)
    planned, mine = prepare(
        model, own_plan(None), optimizer=ADAMW, spill_directory=spills, weights=weights
    )
    return Run(LOOP.subject, planned, mine, folder=spills)


def made_anew() -> torch.nn.Module:
    return LOOP.subject.make().train()


def compiled(folder: Path, followed: bool) -> Run:
    """Blocks that the script has compiled, for a plan of blocks that are not."""
    model: Any = LOOP.subject.build()
    if not followed:
        for layer in model.model.layers:
            layer.compile()
    return prepared(folder, model, plan=own_plan)


def kernels(folder: Path, followed: bool, *, deterministic: bool) -> Run:
    """A plan for a card with kernels of one kind, and PyTorch with those of one kind."""
    plan = with_settings(own_plan(None), device="cuda", deterministic=deterministic)
    torch.use_deterministic_algorithms(deterministic == followed)
    try:
        return prepared(folder, plan=lambda _: plan)
    finally:
        torch.use_deterministic_algorithms(mode=False)


def own_plan(_: Any) -> Plan:
    return LOOP.planned_for(LOOP.subject.build())


def built() -> Any:
    return LOOP.subject.build()


def frozen(*, trains: bool) -> Any:
    return built().requires_grad_(trains)


def on_meta() -> torch.nn.Module:
    with torch.device("meta"):
        return made_anew()


def some_parameters(model: Any, first: int) -> list[dict[str, Any]]:
    return [{"params": [*model.parameters()][first:]}]


GIVEN: dict[str, Callable[[Path, bool], Run]] = {
    "a model that follows a plan": lambda folder, followed: prepared(
        folder, (restore if followed else lambda model: model)(LOOP.start(folder).model)
    ),
    "a model in a wrapper": lambda folder, followed: prepared(
        folder, built() if followed else torch.nn.DataParallel(built()), plan=own_plan
    ),
    "a plan for another model": another,
    "a unit that the model has not": misnamed,
    "a directory that is missing": lambda folder, followed: prepared(
        folder if followed else folder / "missing"
    ),
    "an optimizer with states": stepped_before,
    "an optimizer of another model": lambda folder, followed: given_optimizer(
        folder, model := built(), ADAMW((model if followed else built()).parameters())
    ),
    "parameters in no group": lambda folder, followed: prepared(
        folder, groups=partial(some_parameters, first=0 if followed else 3)
    ),
    "a frozen model": lambda folder, followed: prepared(
        folder, frozen(trains=followed), plan=own_plan
    ),
    "a model without values": lambda folder, followed: from_files(
        folder, on_meta(), named=followed
    ),
    "weights for a model with values": lambda folder, followed: from_files(
        folder, made_anew if followed else made_anew()
    ),
    "a function that makes no model": lambda folder, followed: from_files(
        folder, made_anew if followed else str
    ),
    "compiled blocks": compiled,
    "deterministic kernels": partial(kernels, deterministic=True),
    "the usual kernels": partial(kernels, deterministic=False),
}
"""Arguments that `prepare` refuses, and the same as the message says (`followed`)."""


@pytest.mark.nightly(by_day=8)
@pytest.mark.parametrize("name", GIVEN)
def test_prepare_takes_what_its_message_says(
    name: str, tmp_path: Path, assert_says: Speaker
) -> None:
    assert_says.refused(GIVEN[name], tmp_path, False)
    assert_bitwise(LOOP.played(GIVEN[name](tmp_path, True)), LOOP.plain())


def asked(states: Placement = Placement(tier="disk"), **given: Any) -> Scenario:  # noqa: B008
    """A plan, as `prepare` is asked to carry it out."""
    given.setdefault("units", lambda units: decided(units, RECOMPUTE, states))
    return Scenario(**{"script": Loop(num_steps=3), **given})


def changed(change: Callable[[Any], object]) -> Subject:
    return replace(CATALOGUE["llama"], change=change)


def widens(model: Any) -> None:
    """One weight of a block in double precision, with its products."""
    layer = model.model.layers[1].mlp
    layer.down_proj.double()
    layer.down_proj.register_forward_pre_hook(lambda _, given: (given[0].double(),))
    layer.down_proj.register_forward_hook(lambda _, __, found: found.float())


def widens_frozen(model: Any) -> None:
    widens(model)
    model.model.layers[1].mlp.down_proj.requires_grad_(False)


def shares_memory(model: Any, *, own: bool = False) -> None:
    first, second = (model.model.layers[number].mlp for number in (0, 1))
    memory = torch.linspace(-0.1, 0.1, 2 * first.up_proj.weight.numel())
    memory = memory.view(2, *first.up_proj.weight.shape)
    for number, (mlp, name) in enumerate(((first, "up_proj"), (second, "up_proj"))):
        values = memory[0] if number == 0 else memory.flatten()[96:][: memory[0].numel()]
        values = values.view(memory[0].shape)
        getattr(mlp, name).weight = torch.nn.Parameter(values.clone() if own else values)


def named(model: Any, prefix: str = "") -> list[dict[str, Any]]:
    return [{"params": [(prefix + name, p) for name, p in model.named_parameters()]}]


def two_kinds(model: Any, amsgrad: bool = False) -> list[dict[str, Any]]:
    given = [*model.parameters()]
    return [{"params": given[:3], "amsgrad": amsgrad}, {"params": given[3:], "amsgrad": True}]


class Damped(torch.optim.SGD):
    """Has an attribute that is no option of its groups."""

    def __init__(self, params: Any, damp: float = 1.0) -> None:
        super().__init__(params, lr=0.1)
        self.damp = damp


class Summing(torch.optim.SGD):
    """Sums gradients up, beside its states or in them."""

    def __init__(self, params: Any, *, inside: bool) -> None:
        super().__init__(params, lr=0.1)
        self.inside, self.sums = inside, dict[Any, torch.Tensor]()

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for parameter in self.param_groups[0]["params"]:
            if parameter.grad is None:
                continue
            kept = self.state[parameter] if self.inside else self.sums
            key = "sum" if self.inside else parameter
            kept[key] = kept.get(key, torch.zeros_like(parameter)) + parameter.grad
            parameter.sub_(kept[key], alpha=0.1)


def all_but_one(model: Any) -> list[dict[str, Any]]:
    """Plain PyTorch leaves its gradient, which updates in backward would use up."""
    left = model.get_parameter("model.layers.1.mlp.up_proj.weight")
    return [{"params": [p for p in model.parameters() if p is not left]}]


def sets_late(run: Run) -> None:
    optimizer: Any = run.optimizer
    optimizer.damp = 0.5
    run.step(0)


ODD = partial(made_odd, lr=1e-3)
SHARD = Placement(tier="device")


def of_masters(states: Placement, **given: Any) -> Scenario:
    scenario = asked(states, **given)
    return replace(scenario, settings={**scenario.settings, "precision": "master"})


EARLY = Placement(tier="disk", speculate=True)
CLIP: dict[str, Any] = {"updates": "after backward"}
TWO: dict[str, Any] = {"settings": {"micro_batches": 2, **CLIP}}
ADDED = Loop(num_steps=2, micro_batches=2)
SHARING = changed(shares_memory)
PLANS: dict[str, tuple[Scenario, Scenario]] = {
    "a check of another name": (
        asked(options={"check": "bits"}),
        asked(options={"check": "bitwise"}),
    ),
    "a shard on one device": (asked(SHARD), asked(PERSISTENT)),
    "a common copy on one device": (
        asked(Placement(tier="host", common_copy=True)),
        asked(Placement(tier="host")),
    ),
    "an update in backward, with --clip": (
        asked(OPTIMIZER_IN_BACKWARD, settings=CLIP),
        asked(PERSISTENT, settings=CLIP),
    ),
    "an update in backward, of micro-batches": (
        asked(OPTIMIZER_IN_BACKWARD, settings={"micro_batches": 2}),
        asked(PERSISTENT, **TWO, script=ADDED),
    ),
    "an update in backward, of no group": (
        asked(OPTIMIZER_IN_BACKWARD, groups=all_but_one),
        asked(PERSISTENT, groups=all_but_one),
    ),
    "an update ahead of the norm, without --clip": (asked(EARLY), asked()),
    "an update ahead of the norm, of micro-batches": (
        asked(EARLY, **TWO),
        asked(**TWO, script=ADDED),
    ),
    "overlapping steps of micro-batches": (
        asked(settings={"overlap_steps": True, "micro_batches": 2}),
        asked(settings={"micro_batches": 2}, script=Loop(num_steps=2, micro_batches=2)),
    ),
    "several dtypes: one": (asked(model=changed(widens)), asked(model=changed(lambda _: None))),
    "several dtypes: frozen": (asked(model=changed(widens)), asked(model=changed(widens_frozen))),
    "memory that blocks share: own": (
        asked(model=SHARING),
        asked(model=changed(partial(shares_memory, own=True))),
    ),
    "memory that blocks share: persistent": (
        asked(model=SHARING),
        asked(PERSISTENT, model=SHARING),
    ),
    "memory that blocks share, updated in backward": (
        asked(OPTIMIZER_IN_BACKWARD, model=SHARING),
        asked(PERSISTENT, model=SHARING),
    ),
    "names of groups: the model's": (
        asked(groups=partial(named, prefix="my ")),
        asked(groups=named),
    ),
    "names of groups: none": (asked(groups=partial(named, prefix="my ")), asked(groups=one_group)),
    "groups of two kinds": (
        asked(groups=two_kinds),
        asked(groups=partial(two_kinds, amsgrad=True)),
    ),
    "an optimizer of all parameters in backward: persistent": (
        asked(OPTIMIZER_IN_BACKWARD, factory=partial(ODD, features=TOGETHER[0])),
        asked(PERSISTENT, factory=partial(ODD, features=TOGETHER[0])),
    ),
    "an optimizer of all parameters in backward: AdamW": (
        asked(OPTIMIZER_IN_BACKWARD, factory=partial(ODD, features=TOGETHER[0])),
        asked(OPTIMIZER_IN_BACKWARD),
    ),
    "an optimizer of whole parameters: it stays": (
        asked(factory=torch.optim.Adafactor),
        asked(PERSISTENT, factory=torch.optim.Adafactor),
    ),
    "an optimizer of whole parameters: AdamW": (asked(factory=torch.optim.Adafactor), asked()),
    "an optimizer with states beside": (
        asked(factory=partial(Summing, inside=False)),
        asked(factory=partial(Summing, inside=True)),
    ),
    "an optimizer with more states later": (
        asked(factory=partial(ODD, features=UNCOUNTED[1])),
        asked(),
    ),
    "master weights: pure": (
        of_masters(PERSISTENT, factory=partial(ODD, features=TOGETHER[0])),
        asked(PERSISTENT, factory=partial(ODD, features=TOGETHER[0])),
    ),
    "master weights: AdamW": (
        of_masters(PERSISTENT, factory=partial(ODD, features=TOGETHER[0])),
        of_masters(PERSISTENT),
    ),
    "a group that was added late": (
        asked(
            script=lambda run: run.optimizer.add_param_group(
                {"params": [torch.nn.Parameter(torch.zeros(2))]}
            )
        ),
        asked(groups=lambda model: [{"params": [each]} for each in model.parameters()]),
    ),
    "an option that was set late": (
        replace(asked(factory=Damped), script=sets_late),
        asked(factory=partial(Damped, damp=0.5)),
    ),
}
"""Uses that `prepare` or the first steps refuse, and the same as the message says."""


@pytest.mark.nightly(by_day=6)
@pytest.mark.parametrize("name", PLANS)
def test_a_plan_trains_when_the_message_is_followed(
    name: str, tmp_path: Path, assert_says: Speaker
) -> None:
    refused, followed = PLANS[name]
    for folder in (tmp_path / "refused", tmp_path / "trained"):
        folder.mkdir()
    error = refusal(lambda: refused.played(refused.start(tmp_path / "refused")), Exception)
    assert is_refusal(error), repr(error)
    assert_says(error)
    followed.assert_like_plain(tmp_path / "trained")


def both(stack: Any, hidden: torch.Tensor, step: int) -> torch.Tensor:
    found = [block(hidden) for block in stack.blocks]
    taken = by_torch() < 0.5
    return found[taken] + 0 * found[not taken]  # type: ignore[no-any-return]


def either_order(stack: Any, hidden: torch.Tensor, step: int) -> torch.Tensor:
    for block in stack.blocks if by_torch() < 0.5 else reversed(stack.blocks):
        hidden = block(hidden)
    return hidden


def skips_some(stack: Any, hidden: torch.Tensor, step: int) -> torch.Tensor:
    for number, block in enumerate(stack.blocks):
        if number % 2 or by_torch() < 0.5:
            hidden = block(hidden)
    return hidden


def keeps_tensors(stack: Any, hidden: torch.Tensor, step: int) -> torch.Tensor:
    found = in_order(stack, hidden, step)
    stack.__dict__.setdefault("seen", []).append(found.detach())
    return found


def keeps_numbers(stack: Any, hidden: torch.Tensor, step: int) -> torch.Tensor:
    found = in_order(stack, hidden, step)
    stack.__dict__.setdefault("seen", []).append(found.detach().mean().item())
    return found


def differentiates(stack: Any, hidden: torch.Tensor, step: int) -> torch.Tensor:
    found = in_order(stack, hidden, step)
    (force,) = torch.autograd.grad(found.square().mean(), hidden, create_graph=True)
    return found + force


def in_a_thread(stack: Any, hidden: torch.Tensor, step: int) -> torch.Tensor:
    with ThreadPoolExecutor(1, "blocks") as pool:
        for block in stack.blocks:
            hidden = pool.submit(block, hidden).result()
    return hidden


def writes_saved(block: Any, hidden: torch.Tensor, *, copy: bool = False) -> torch.Tensor:
    """Writes to what it has saved for a graph that nobody differentiates."""
    inner = block.inner(block.norm(hidden))
    kept = inner.exp()
    block.__dict__["total"] = kept.sum()
    (kept.detach().clone() if copy else kept.detach()).mul_(2)
    return hidden + block.outer(F.gelu(inner))  # type: ignore[no-any-return]


def dropped(stack: Any, hidden: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    for block in stack.blocks:
        del block.__dict__["total"]
    return next_token(stack, hidden, tokens)


def scales(block: Any, hidden: torch.Tensor) -> torch.Tensor:
    return hidden * 0.9 + block.halved(hidden)  # type: ignore[no-any-return]


def writes_weight(block: Any, hidden: torch.Tensor) -> torch.Tensor:
    with torch.no_grad():
        block.inner.weight.mul_(0.999)
    return Block.forward(block, hidden)


def loss_of_logits(
    stack: Any, hidden: torch.Tensor, tokens: torch.Tensor, *, use: str = ""
) -> torch.Tensor:
    """In float32; `use` says what else is done with logits."""
    logits = stack.head(hidden)[:, :-1].flatten(0, 1)
    wide = logits.float()
    if use == "written before":
        logits.detach().mul_(2)
    if use == "read in C++":
        with torch._C.DisableTorchFunction():
            wide.mean()
    loss = F.cross_entropy(wide, tokens[:, 1:].flatten())
    if use == "written after":
        logits.detach().mul_(2)
    return loss + 1e-3 * wide.square().mean() if use == "twice" else loss


def in_bfloat16(use: str = "") -> torch.nn.Module:
    return Stack(depth=2, ends=partial(loss_of_logits, use=use)).bfloat16()


class Tied(Stack):
    def forward(self, tokens: torch.Tensor, step: int) -> Any:
        self.head.weight = self.embedding.weight
        return super().forward(tokens, step)


def tied_before() -> torch.nn.Module:
    model = Tied()
    call_model(model, batch_of(0))
    return model


def run_by(run: Through) -> Make:
    return stack(depth=2, run=run)


@dataclass(frozen=True)
class Followed:
    """A model that is refused, the same as the message says, and the plan that refuses it."""

    refused: Hostile
    mended: Hostile
    plan: PlanName


def changes(before: Make, now: Make, plan: PlanName = "offloaded") -> Followed:
    """A model that changes when it has been profiled, and is profiled anew."""
    return Followed(Hostile(now, before=before), Hostile(now), plan)


def mends(before: Make, now: Make, plan: PlanName = "mixed") -> Followed:
    """A model that is changed as the message says."""
    return Followed(Hostile(before), Hostile(now), plan)


MODELS = {
    "blocks that take turns": mends(
        run_by(lambda stack, hidden, _: stack.blocks[by_torch() < 0.5](hidden)), run_by(both)
    ),
    "blocks in another order": mends(run_by(either_order), run_by(in_order)),
    "blocks in another order: skipped": mends(run_by(either_order), run_by(skips_some)),
    "tensors that add up": mends(run_by(keeps_tensors), run_by(keeps_numbers)),
    "what was saved is written": mends(
        stack(does(writes_saved), ends=dropped),
        stack(does(partial(writes_saved, copy=True)), ends=dropped),
    ),
    "blocks in another thread": Followed(
        Hostile(run_by(in_a_thread), before=run_by(in_order)), Hostile(run_by(in_order)), "mixed"
    ),
    "blocks in another thread from the start": mends(run_by(in_a_thread), run_by(in_order)),
    "a gradient in the forward": mends(run_by(differentiates), run_by(in_order)),
    "an input is written": changes(stack(does(scales)), stack(does(scales_input)), "recomputed"),
    "not the same twice": changes(
        stack(does(Block.forward, calls=int)), stack(does(counts_forwards, calls=int)), "recomputed"
    ),
    "a block runs twice": changes(stack(), stack(run=chosen(lambda _: (0, 1, 1, 2, 3)))),
    "blocks are moved": changes(stack(), stack(run=chosen(lambda _: (0, 2, 1, 3)))),
    "a weight is written": changes(stack(does(Block.forward)), stack(does(writes_weight))),
    "a weight is read elsewhere": changes(
        run_by(in_order),
        run_by(lambda stack, *given: in_order(stack, *given) + 1e-3 * stack.blocks[1].norm.weight),
    ),
    "tied in the forward": Followed(Hostile(Tied), Hostile(tied_before, before=Tied), "mixed"),
    "a gradient that comes late": changes(
        partial(reads_blocks, 9), partial(reads_blocks, 1), "stepped"
    ),
    **{
        f"logits: {use}": changes(in_bfloat16, partial(in_bfloat16, use), "in place")
        for use in ("twice", "written before", "written after", "read in C++")
    },
}


def found(name: str, *, followed: bool) -> Hostile:
    return MODELS[name].mended if followed else MODELS[name].refused


@pytest.mark.nightly
@pytest.mark.parametrize("name", MODELS)
def test_a_model_is_profiled_and_trains_when_the_message_is_followed(
    name: str, assert_says: Speaker
) -> None:
    before, after = (
        judged(partial(found, followed=followed), name, plans=[MODELS[name].plan], seed=3)
        for followed in (False, True)
    )
    assert [one.kind for one in before] == ["refused"]
    assert_says(before[0].text)
    assert [(one.kind, one.text) for one in after] == [("like plain", "")]

"""One scenario: a script trains a model plainly and under a plan, and both compute the same bits.

A script is a function of a `Run`, written in its verbs: `step`, `backward`, `clip`, `update` ...
`Loop` is the usual one, with options. A `Scenario` says which model, which plan and which script:

    Scenario(
        model="gpt2",
        units=lambda units: decided(units, RECOMPUTE, Placement(tier="disk")),
        script=Loop(micro_batches=2, clips=0.5),
        settings={"updates": "after backward", "micro_batches": 2},
    ).assert_like_plain(tmp_path)
"""

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from protrain_plan.models.batches import call_model, loss_of
from protrain_runtime import load, prepare, record, restore, save
from protrain_runtime.contract.records.plan import Plan, UnitPlan
from protrain_runtime.diagnostics.recording import StepMemory, measure_step
from protrain_runtime.engine.engine import Engine, Observer
from protrain_runtime.model.prepared import engine_of
from protrain_runtime.states.stand_ins import ConsumedGradient, OffloadedGradient
from tests.support.runtime_cases import (
    ADAMW,
    CATALOGUE,
    Factory,
    Groups,
    Outcome,
    Scheduler,
    Subject,
    assert_bitwise,
    attached,
    device,
    differences,
    outcome,
    plan_for,
    random_states,
    set_random_states,
    where,
)

Units = Sequence[UnitPlan]
Looking = type[torch.no_grad | torch.inference_mode]


# --- a script -------------------------------------------------------------------------------------


@dataclass
class Run:
    """A training script under way, with a plan or without: the same verbs either way.

    `seen` is compared between the two: losses, norms, what was looked at, in the script's order.
    """

    subject: Subject
    model: nn.Module
    optimizer: torch.optim.Optimizer
    folder: Path | None = None  # where a plan spills; plain, without one
    rank: int = 0
    num_ranks: int = 1
    seen: list[Any] = field(default_factory=list[Any])
    gradients: list[dict[str, Tensor]] = field(default_factory=list[dict[str, Tensor]])
    before: Any = None  # what a person could see on the modules before `prepare`
    others: int = 0  # bytes of tensors that are not of the run
    memory: StepMemory | None = None  # of the step that was measured

    @property
    def planned(self) -> bool:
        return self.folder is not None

    @property
    def engine(self) -> Engine:
        found = engine_of(self.model)
        assert found is not None
        return found

    def loss(self, number: int) -> Tensor:
        return loss_of(call_model(self.model, self.subject.batch(number)))

    def backward(
        self,
        number: int,
        *,
        weigh: Callable[[Tensor], Tensor] | None = None,
        between: Callable[[], object] | None = None,
        last: bool = True,
    ) -> None:
        """Forward and backward; `last` of its step's micro-batches, which matters to ranks."""
        loss = self.loss(number)
        if between is not None:
            between()
        (loss if weigh is None else weigh(loss)).backward()
        self.seen.append(loss.detach())

    def clip(self, max_norm: float, **options: Any) -> None:
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), max_norm, **options)
        self.seen.append(norm)

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def step(self, *numbers: int) -> None:
        for number in numbers:
            self.backward(number)
            self.update()

    def look(self, *numbers: int, mode: Looking = torch.no_grad) -> None:
        """The losses without a graph."""
        with mode():
            self.seen += [self.loss(number).clone() for number in numbers]

    def outcome(self) -> Outcome:
        found = outcome(self.model, self.optimizer, self.seen)
        found.gradients = self.gradients
        return found

    def values(self) -> dict[str, Tensor]:
        return {name: value.detach().clone() for name, value in self.model.state_dict().items()}

    def become(self, other: "Run") -> None:
        self.model, self.optimizer = other.model, other.optimizer
        self.folder, self.before = other.folder, other.before


Script = Callable[[Run], object]
Hook = Callable[[Run, int], object]
"""Called with the number of a step."""


@dataclass(frozen=True, kw_only=True)
class Loop:
    """The usual loop: steps 0, 1, ... of as many micro-batches each."""

    num_steps: int = 5
    micro_batches: int = 1
    clips: float | None = None  # the largest norm
    scales: bool = False  # the loss, by a GradScaler
    looks: tuple[Looking | None, Looking | None] = (None, None)  # before backward, after the step
    evaluates: bool = False  # looks in evaluation mode
    scheduler: Scheduler | None = None
    gradients: bool = False  # those that stand after backward are compared, too
    measured: bool = False  # the last step's bytes, under a plan
    before: Hook | None = None  # a step
    between: Hook | None = None  # backward, clipped, and the optimizer's step
    after: Hook | None = None

    @property
    def hooked(self) -> bool:
        return any((self.before, self.between, self.after))

    def __call__(self, run: Run) -> None:
        rates = self.scheduler(run.optimizer) if self.scheduler else None
        scaler = torch.amp.GradScaler(
            device().type, init_scale=8.0, growth_interval=2, enabled=self.scales
        )
        numbers = itertools.count(run.rank, run.num_ranks)
        for number in range(self.num_steps):
            if self.before is not None:
                self.before(run, number)
            one = partial(self._step, run, number, numbers, scaler)
            if self.measured and run.planned and number == self.num_steps - 1:
                run.memory = measure_step(run.model, one, besides_bytes=run.others)
            else:
                one(lambda _: None)
            if rates is not None:
                rates.step()
            if self.after is not None:
                self.after(run, number)

    def _step(
        self,
        run: Run,
        number: int,
        numbers: Iterator[int],
        scaler: torch.amp.GradScaler,
        observe: Observer,
    ) -> None:
        modes: Any = run.optimizer if hasattr(run.optimizer, "eval") else None
        if modes is not None:
            modes.train()
        for part in range(self.micro_batches):
            run.backward(
                next(numbers),
                weigh=scaler.scale if self.scales else None,
                between=partial(self._look, run, number + 100, self.looks[0]),
                last=part + 1 == self.micro_batches,
            )
        observe("update")
        if self.clips is not None:
            scaler.unscale_(run.optimizer)
            run.clip(self.clips)
        if self.gradients:
            run.gradients.append(standing_gradients(run.model))
        if self.between is not None:
            self.between(run, number)
        scaler.step(run.optimizer)
        scaler.update()
        if self.scales:
            run.seen.append(torch.tensor(scaler.get_scale()))
        run.optimizer.zero_grad()
        if modes is not None:
            modes.eval()
        self._look(run, number + 200, self.looks[1])

    def _look(self, run: Run, number: int, mode: Looking | None) -> None:
        if mode is None:
            return
        if self.evaluates:
            run.model.eval()
        run.look(number, mode=mode)
        if self.evaluates:
            run.model.train()


def standing_gradients(model: nn.Module) -> dict[str, Tensor]:
    """Gradients after backward; of one that waits below the device, as its update will see it."""
    found: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        gradient = parameter.grad
        if isinstance(gradient, OffloadedGradient):
            found[name] = gradient.stored.whole()
        elif gradient is not None and not isinstance(gradient, ConsumedGradient):
            found[name] = gradient.detach().clone()
    return found


# --- a scenario -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Scenario:
    """A model, a plan for it, an optimizer and a script."""

    model: str | Subject = "llama-tied"
    script: Script = Loop()
    units: Units | Callable[[Units], Units] = ()  # decisions, or what decides them; (): none
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of the plan's step
    piece_bytes: int = 20_000
    plan: Callable[[nn.Module], Plan] | None = None  # instead of the three before it
    factory: Factory = ADAMW
    plain_factory: Factory | None = None  # where plain PyTorch takes another one
    groups: Groups | None = None
    options: Mapping[str, Any] = field(default_factory=dict[str, Any])  # of `prepare`

    @property
    def subject(self) -> Subject:
        return CATALOGUE[self.model] if isinstance(self.model, str) else self.model

    def planned_for(self, model: nn.Module) -> Plan:
        if self.plan is not None:
            return self.plan(model)
        given = self.units
        units = given(self.subject.units()) if callable(given) else given or self.subject.units()
        return plan_for(model, units, **{"piece_bytes": self.piece_bytes, **self.settings})

    def start(self, folder: Path | None = None, *, seed: int = 0) -> Run:
        """A run under the plan, which spills into `folder`; plainly, without one."""
        model = self.subject.build(seed)
        return self.plain_run(model) if folder is None else self.prepared(model, folder)

    def plain_run(self, model: nn.Module) -> Run:
        """A run of this model without a plan."""
        trained = [p for p in model.parameters() if p.requires_grad]
        groups = self.groups(model) if self.groups is not None else trained
        return Run(self.subject, model, (self.plain_factory or self.factory)(groups))

    def prepared(self, model: nn.Module, folder: Path | None) -> Run:
        """A run of this model under the plan."""
        before = attached(model)
        planned, optimizer = prepare(
            model,
            self.planned_for(model),
            optimizer=self.factory,
            param_groups=self.groups(model) if self.groups is not None else None,
            spill_directory=folder,
            **self.options,
        )
        return Run(self.subject, planned, optimizer, folder=folder, before=before)

    def played(self, run: Run) -> Outcome:
        """The script, with dropout from a known state."""
        torch.manual_seed(1 + run.rank)
        self.script(run)
        return run.outcome()

    def plain(self) -> Outcome:
        if isinstance(self.script, Loop) and not self.script.hooked:
            return _plain(
                self.subject, self.script, self.factory, self.plain_factory, self.groups, where()
            )
        return self.played(self.start())

    def assert_like_plain(self, folder: Path, *checks: Callable[[Run], object]) -> Run:
        """The same bits under the plan; then the checks, such as `restored`."""
        run = self.start(folder)
        assert_bitwise(self.played(run), self.plain())
        for check in checks:
            check(run)
        return run


@lru_cache(maxsize=64)
def _plain(
    subject: Subject,
    script: Loop,
    factory: Factory,
    plain_factory: Factory | None,
    groups: Groups | None,
    _where: object,
) -> Outcome:
    scenario = Scenario(
        model=subject, script=script, factory=factory, plain_factory=plain_factory, groups=groups
    )
    return scenario.played(scenario.start())


def go_on(run: Run, again: Callable[[Path], Run], how: str, saves: Path | None = None) -> None:
    """Train on by files or states under another plan, with other weights before; or plainly."""
    if run.folder is None:
        return
    model, optimizer = run.model, run.optimizer
    if how == "plainly":
        restore(model)
    elif how.startswith("files"):
        saved = (saves or run.folder) / "checkpoint"
        save(model, optimizer, saved)
        run.become(again(run.folder))
        load(run.model, run.optimizer, saved)
    else:
        weights, states, randomness = model.state_dict(), optimizer.state_dict(), random_states()
        run.become(again(run.folder))
        run.model.load_state_dict(weights)
        run.optimizer.load_state_dict(states)
        set_random_states(randomness)


# --- checks, and refusals -------------------------------------------------------------------------


def restored(run: Run) -> None:
    """`restore` gives the model back as it was, with what was trained, and leaves no file."""
    found = run.outcome()
    assert restore(run.model) is run.model
    assert attached(run.model) == run.before
    assert list(differences(run.model.state_dict(), found.parameters, "restored")) == []
    assert list(differences(run.optimizer.state_dict(), found.optimizer, "restored")) == []
    assert run.folder is not None
    assert list(run.folder.iterdir()) == []


def recorded(run: Run) -> None:
    """One more step's recording has every move of the programme, and has ended."""
    with record(run.model) as recorder:
        run.step(len(run.seen))
        assert not run.engine._carried
        names = {event.name for event in recorder.recording().events}
    program = run.engine.program
    assert {program.move_name(number) for number in range(len(program.moves))} <= names


def refusal(use: Callable[[], object], kind: type[Exception] = RuntimeError) -> Any:
    with pytest.raises(kind) as caught:
        use()
    return caught.value

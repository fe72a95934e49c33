"""`discover`: the units of a model, found by running it. No list of names anywhere.

A unit is a *block* (a module that repeats, such as a decoder layer) or a *part* (what runs
before, between and after blocks). Units are in execution order. Every parameter belongs to
exactly one, the one that reads it first, and every operator runs in exactly one.

`record_execution` runs the forward and writes down which modules ran when, and which parameters
each operator read. `undisturbed` and `starting_from` frame every forward that a profile runs: the
model is left as it was, and each forward begins from the same random numbers and counters.
"""

import hashlib
import random
import re
import sys
import threading
from bisect import bisect
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from itertools import count, pairwise
from typing import Any, Literal, NamedTuple
from weakref import WeakSet

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from protrain_plan.models.batches import Batch, call_model
from protrain_plan.profiling.structure import whereabouts
from protrain_plan.profiling.structure.dispatching import NothingCompiled
from protrain_plan.profiling.structure.faking import asked
from protrain_runtime.activations.compiled import uncompiled
from protrain_runtime.activations.recompute import let_parametrize_rerun
from protrain_runtime.activations.trees import tensors_in, written_arguments
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records.folding import fold, runs
from protrain_runtime.devices import device as devices
from protrain_runtime.states.chunk_layouts import extent

# --- one forward, written down --------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleCall:
    """One run of a module's forward, from `begin` to `end` on the execution's clock."""

    path: str
    module: nn.Module
    begin: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operator: the parameters whose storage it was given, and whether it does any work.

    `written` are those of them that it wrote to, and `placed` those that it took from a place in
    their storage. `signature` is its name with its arguments: shapes, strides and dtypes of
    tensors, and numbers.
    """

    at: int
    parameters: tuple[str, ...]
    written: tuple[str, ...]
    placed: tuple[str, ...]
    trivial: bool  # a view, or bookkeeping: computes nothing and saves nothing
    signature: str


_FLOATS = re.compile(r"-?\d+\.\d*(e[-+]?\d+)?")


@dataclass(frozen=True, slots=True, kw_only=True)
class Execution:
    """The calls in order of their beginnings, and the operations in order.

    `steers` says whether the forward changed numbers that may steer the next one: counters of
    modules, random states of Python and NumPy. `asks`: it asked for the value of a tensor.
    `by_values`: the shape of some result depends on values.
    """

    calls: tuple[ModuleCall, ...]
    operations: tuple[Operation, ...]
    steers: bool
    asks: bool
    by_values: bool

    @property
    def work(self) -> tuple[list[str], list[str]]:
        """The modules that ran, and the operators on shapes, whatever numbers scale them."""
        ran = [call.path for call in self.calls]
        return ran, [_FLOATS.sub("", operation.signature) for operation in self.operations]

    def work_of(self, calls: Iterable[ModuleCall] | None = None) -> int:
        """The number of operators that compute something, in all or in these calls."""
        at = [operation.at for operation in self.operations if not operation.trivial]
        if calls is None:
            return len(at)
        return sum(bisect(at, call.end) - bisect(at, call.begin) for call in calls)


Attributes = dict[nn.Module, dict[str, object]]
"""By module and name: plain values, which are no part of what it computes with but may steer it."""


@dataclass(frozen=True, slots=True)
class Start:
    """A forward's state besides its batch: a seed of all generators, and attributes."""

    seed: int
    attributes: Attributes


def plain_attributes(model: nn.Module) -> Attributes:
    """The numbers, truths and texts that modules have as attributes, such as counters of steps."""
    return {
        module: {
            name: value
            for name, value in module.__dict__.items()
            if isinstance(value, bool | int | float | str) or value is None
        }
        for module in model.modules()
    }


def restore_attributes(attributes: Attributes) -> None:
    """Give modules these attributes again, but those that they have in another kind now."""
    for module, values in attributes.items():
        for name, value in values.items():
            if name in module.__dict__ and type(module.__dict__[name]) is type(value):
                module.__dict__[name] = value


def starting_from(model: nn.Module, start: Start) -> AbstractContextManager[object]:
    """Every forward inside begins from `start`: what it does by chance or by count is the same."""

    def begin(*_: object) -> None:
        torch.manual_seed(start.seed)
        random.seed(start.seed)
        if "numpy" in sys.modules:
            sys.modules["numpy"].random.seed(start.seed)
        restore_attributes(start.attributes)

    return model.register_forward_pre_hook(begin)


def record_execution(model: nn.Module, batch: Batch, start: Start | None = None) -> Execution:
    """Run one forward in train mode with gradients enabled, and write down what happened.

    Compiled modules run uncompiled, so that all of theirs is seen. Parameters, gradients, buffers,
    train flags, hooks and the random state are afterwards what they were; the autograd graph is
    freed. Fake tensors work too.
    """
    let_parametrize_rerun()
    recorder = _Recorder(model)
    with ExitStack() as stack:
        stack.enter_context(undisturbed(model))
        if start is not None:
            stack.enter_context(starting_from(model, start))
        began_with: list[object] = []
        begun = model.register_forward_pre_hook(lambda *_: began_with.append(_steering(model)))
        stack.callback(begun.remove)
        stack.enter_context(uncompiled())
        for module in model.modules():
            stack.enter_context(
                module.register_forward_pre_hook(recorder.begin, prepend=True, with_kwargs=True)
            )
            stack.enter_context(module.register_forward_hook(recorder.end, with_kwargs=True))
        stack.enter_context(torch.enable_grad())
        stack.enter_context(recorder)
        call_model(model, batch)
        steers = _steering(model) != began_with[0]
    return Execution(
        calls=tuple(sorted(recorder.calls, key=lambda call: call.begin)),
        operations=tuple(recorder.operations),
        steers=steers,
        asks=recorder.asks,
        by_values=recorder.by_values,
    )


def _steering(model: nn.Module) -> object:
    """The numbers that a forward may change and ask, in a form that `==` compares."""
    numpy = sys.modules.get("numpy")
    drawn = numpy.random.get_state()[1].tolist() if numpy else None
    return plain_attributes(model), random.getstate(), drawn


# Operators that compute nothing although their schema names no alias.
_BOOKKEEPING = frozenset(
    ("aten::detach", "aten::lift_fresh", "aten::_local_scalar_dense", "aten::empty")
)


class _Recorder(NothingCompiled, TorchDispatchMode):
    """Sees every operator below autograd, functional ones on bare parameters included."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls: list[ModuleCall] = []
        self.operations: list[Operation] = []
        self.asks = self.by_values = False
        self._paths = {module: path for path, module in model.named_modules()}
        self._tick = count(1).__next__
        self._thread = threading.get_ident()
        self._begun: dict[nn.Module, list[int]] = defaultdict(list)
        self._inside: list[str] = []  # the paths of the modules that run
        # Parameters by the storage they live in; several may share a flat one. An identity, not
        # an address: fake tensors have none.
        self._owners: dict[int, list[tuple[int, int, str]]] = defaultdict(list)
        for name, parameter in model.named_parameters():
            first, past = extent(parameter)
            self._owners[parameter.untyped_storage()._cdata].append((first, past, name))

    def begin(self, module: nn.Module, *_: object) -> None:
        """A module's forward begins: a hook of every module."""
        if threading.get_ident() != self._thread:
            raise ProtrainError(
                f"{self._paths[module]} was called in thread '{threading.current_thread().name}'"
                " while the model's forward runs in another: a plan moves what one thread uses",
                fix="call blocks in the thread that calls the model",
            )
        self._begun[module].append(self._tick())
        self._inside.append(self._paths[module])
        whereabouts.in_module(self._inside[-1])

    def end(self, module: nn.Module, *_: object) -> None:
        """It ends."""
        self._inside.pop()
        whereabouts.in_module(self._inside[-1] if self._inside else "")
        self.calls.append(
            ModuleCall(
                path=self._paths[module],
                module=module,
                begin=self._begun[module].pop(),
                end=self._tick(),
            )
        )

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "prim":  # questions that fake tensors ask about themselves
            return asked(func, args, kwargs or {})
        self.asks |= torch.Tag.data_dependent_output in func.tags
        self.by_values |= torch.Tag.dynamic_output_shape in func.tags
        used = self._parameters_in(tensors_in((args, kwargs)))
        writes = bool(used) and func._schema.is_mutable
        written = written_arguments(func, args, kwargs or {}) if writes else ()
        # An offset counts from where the storage begins, which is elsewhere where chunks move. Of a
        # storage itself all may be read.
        by_offset = func is torch.ops.aten.as_strided.default and args[3:] not in ((), (None,))
        storages = {one._cdata for one in args if isinstance(one, torch.UntypedStorage)}
        taken = [name for key in storages for *_, name in self._owners.get(key, ())]
        self.operations.append(
            Operation(
                at=self._tick(),
                parameters=tuple(dict.fromkeys((*used, *taken))),
                written=self._parameters_in(written),
                placed=(*(used if by_offset else ()), *taken),
                trivial=func.is_view or func._schema.name in _BOOKKEEPING,
                signature=f"{func} {tree_map_only(Tensor, _geometry, (args, kwargs or {}))}",
            )
        )
        return func(*args, **(kwargs or {}))

    def _parameters_in(self, tensors: Iterable[Tensor]) -> tuple[str, ...]:
        """The parameters whose memory the tensors are of, each once."""
        found: dict[str, None] = {}
        for tensor in tensors:
            if tensor.layout is not torch.strided:
                continue
            owners = self._owners.get(tensor.untyped_storage()._cdata, ())
            first, past = extent(tensor) if len(owners) > 1 else (0, 0)
            for owner_first, owner_past, name in owners:
                if len(owners) == 1 or (first < owner_past and owner_first < past):
                    found[name] = None
        return tuple(found)


def _geometry(tensor: Tensor) -> object:
    strided = tensor.layout is torch.strided
    return tensor.dtype, tuple(tensor.shape), tensor.stride() if strided else tensor.layout


@contextmanager
def undisturbed(model: nn.Module) -> Iterator[None]:
    """Train mode inside; train flags, buffers and random states as before afterwards.

    Random states are those of PyTorch (of the model's devices too), of Python and, where it is
    loaded, of NumPy. A buffer that a forward makes or gives its size keeps it until the outermost
    of these ends, as it has it in the further steps of a run.
    """
    within = model in _UNDISTURBED
    _UNDISTURBED.add(model)
    flags = [(module, module.training) for module in model.modules()]
    buffers = [
        (
            module,
            dict(module._buffers),
            [
                (buffer, buffer.detach(), buffer.detach().clone())
                for buffer in module._buffers.values()
                if buffer is not None
            ],
        )
        for module in model.modules()
    ]
    # Besides those that `fork_rng` knows.
    numpy = sys.modules.get("numpy")
    states = random.getstate(), numpy.random.get_state() if numpy else None
    accelerators = {
        device: devices.random_state(device)
        for device in {tensor.device for tensor in (*model.parameters(), *model.buffers())}
        if device.type != "meta" and not devices.on_host(device)
    }
    with torch.random.fork_rng(devices=[]):
        try:
            model.train()
            yield
        finally:
            random.setstate(states[0])
            if numpy:
                numpy.random.set_state(states[1])
            for device, state in accelerators.items():
                devices.set_random_state(device, state)
            for module, training in flags:
                module.training = training
            with torch.no_grad():
                for module, named, contents in buffers:
                    for buffer, memory, content in contents:
                        if buffer.shape != content.shape:
                            if within:
                                continue
                            buffer.data = memory
                        buffer.copy_(content)
                    now = dict(module._buffers) if within else {}
                    module._buffers.clear()
                    module._buffers.update(named)
                    for name, made in now.items():
                        old = named.get(name)
                        if made is not None and (old is None or old.shape != made.shape):
                            module._buffers[name] = made
            if not within:
                _UNDISTURBED.discard(model)


_UNDISTURBED: WeakSet[nn.Module] = WeakSet()


# --- the units ------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class FoundUnit:
    """A stretch of the forward.

    `name` is unique: a block's path; for a part the path of the first module that runs in it, and
    nowhere else, so that its call tells where the part begins; else the name of its first
    parameter, if that is a module's; else "(input)", "(output)" or "(after ...)".
    `parameters` are names as in `model.named_parameters()`, in order of first use;
    `also_uses` are those of earlier units that this one reads too (a tied head), and `writes` the
    parameters that its forward writes to, such as an average of others; `placed` are those that it
    takes from a place in their storage (an offset of `as_strided`). Blocks of equal `signature`
    have the same structure and ran the same operators on tensors of the same shapes.
    `repeats` names the layers of a part that run several times in a forward; empty: none do.
    """

    kind: Literal["block", "part"]
    name: str
    module: nn.Module | None  # of a block
    parameters: tuple[str, ...]
    also_uses: tuple[str, ...]
    signature: str = ""  # of a block
    writes: tuple[str, ...] = ()
    placed: tuple[str, ...] = ()
    repeats: str = ""  # of a part

    @property
    def listed(self) -> tuple[str, ...]:
        """The parameters to name in a record: all of a part's, and a block's from elsewhere."""
        inside = f"{self.name}."
        named = (p for p in self.parameters if self.kind == "part" or not p.startswith(inside))
        return tuple(sorted(named))


SEEDS = 32
"""Forwards in which blocks that are skipped at random may all run: of four that are skipped every
other time, all run in one of sixteen."""


def fullest(model: nn.Module, batch: Batch) -> tuple[Start, Execution]:
    """A forward that runs all blocks, and its start; the first one, where nothing is skipped.

    Profiles are of that forward: steps that skip blocks take less, and so do those in which blocks
    hand on what they got. ProtrainError where blocks run in some forwards, and never all in one.
    """
    before = plain_attributes(model)
    tried: list[_Tried] = []
    most: dict[object, int] = {}  # operators of blocks of a kind
    for seed in range(SEEDS):
        start = Start(seed, plain_attributes(model))
        execution = record_execution(model, batch, start)
        blocks = _blocks(model, execution)
        work: dict[str, tuple[object, int]] = {}
        for call in blocks:
            operations = _between(execution.operations, call.begin, call.end)
            count = sum(not operation.trivial for operation in operations)
            kind = _structure(call.module)
            work[call.path] = kind, count
            most[kind] = max(count, most.get(kind, 0))
        tried.append(_Tried(_idle(model, execution, blocks), work, start, execution))
        steady = seed == 1 and tried[0].work == work  # experts without tokens, in every forward
        if not tried[-1].idle and (steady or not tried[-1].short(most)):
            break
    restore_attributes(before)
    best = min(tried, key=lambda one: (len(one.idle), one.short(most)))
    idle = [set(one.idle) for one in tried]
    turns = set[str]().union(*idle) - idle[0].intersection(*idle)
    parents = {name.rpartition(".")[0] for name in turns}
    # Where no sibling is skipped from forward to forward, what never ran is used by nothing.
    skipped = [name for name in best.idle if name.rpartition(".")[0] in parents]
    if skipped:
        inside = tuple(f"{name}." for name in skipped)
        outer = [name for name in skipped if not name.startswith(inside)]
        raise ProtrainError(
            f"the model skips blocks from forward to forward, and all of them ran in none of"
            f" {SEEDS}: {', '.join(outer)} did not in the fullest",
            fix="profile with no block skipped (a drop probability of zero): plans hold for steps"
            " that skip some. Of blocks that take turns run all, the idle ones times zero",
        )
    return best.start, best.execution


@dataclass(frozen=True, slots=True)
class Variation:
    """Further steps of a model that does other work from step to step.

    `by_values`: shapes of results depend on values, such as how many tokens an expert gets, so that
    no number of steps shows the most.
    """

    steps: tuple[tuple[Start, Batch], ...]
    by_values: bool

    def __str__(self) -> str:
        """Remark for the profile: which steps were measured."""
        seen = f"bytes are the most of {len(self.steps) + 1} different steps"
        if not self.by_values:
            return seen
        return f"{seen}, with their range to spare: no number of steps shows the most"


_STEADY, _STEERED, FURTHER_STEPS = 2, 16, 8
"""Forwards that are compared with the first one: where nothing in it may steer them, and where
something may. Most of those that differ, which tell the bytes.

Of eight samples of a normal distribution, the range is 2.85 standard deviations in the mean
(L. H. C. Tippett, Biometrika 17, 1925). A block that is skipped three times in ten is skipped in
one of sixteen forwards with a probability of 99.7 %."""


def variation(model: nn.Module, execution: Execution, batches: Iterator[Batch]) -> Variation | None:
    """The steps that differ from `execution`, in counters, by chance or by values; None: none do.

    They go on from the numbers that modules have, which are as before afterwards. ProtrainError
    where the blocks run in another order, or more than once, which no plan has slots for.
    """
    before = plain_attributes(model)
    order = {call.path: place for place, call in enumerate(_blocks(model, execution))}
    seen, steps = [execution.work], list[tuple[Start, Batch]]()
    looked_at = _STEERED if execution.steers or execution.asks else _STEADY
    try:
        for number, batch in zip(range(SEEDS), batches, strict=False):
            start = Start(SEEDS + number, plain_attributes(model))
            other = record_execution(model, batch, start)
            ran = [call.path for call in other.calls if call.path in order]
            for earlier, later in pairwise(ran):
                if order[later] <= order[earlier]:
                    came = "ran twice" if later == earlier else f"came after {earlier}"
                    raise ProtrainError(
                        f"the blocks run in another order from step to step: {later} {came} in one"
                        " forward, and not in another",
                        fix="run the blocks in one order, each once: a plan has a place for each in"
                        " a step. Some may be skipped",
                    )
            if (work := other.work) not in seen:
                seen.append(work)
                steps.append((start, batch))
            if len(steps) == FURTHER_STEPS or (not steps and number + 1 == looked_at):
                break
    finally:
        restore_attributes(before)
    return Variation(tuple(steps), execution.by_values) if steps else None


@dataclass(frozen=True, slots=True)
class _Tried:
    """A forward: the blocks that did not run, and the operators of those that did."""

    idle: list[str]
    work: dict[str, tuple[object, int]]  # by path: the kind of block, and how many
    start: Start
    execution: Execution

    def short(self, most: Mapping[object, int]) -> int:
        """How many blocks did less than others of their kind have done."""
        return sum(count < most[kind] for kind, count in self.work.values())


def _idle(model: nn.Module, execution: Execution, blocks: Iterable[ModuleCall]) -> list[str]:
    """Modules outside blocks that did not run, though siblings of their class did."""
    ran = {call.module for call in execution.calls}
    inside = {module for call in blocks for module in call.module.modules()}
    idle: list[str] = []
    for path, parent in model.named_modules():
        if parent in inside:
            continue
        children = [(name, c) for name, c in parent.named_children() if _has_parameters(c)]
        kinds = Counter(type(child) for _, child in children)
        idle += [
            f"{path}.{name}".lstrip(".")
            for name, child in children
            if child not in ran
            and kinds[type(child)] > 1
            and not isinstance(child, nn.ModuleList | nn.ModuleDict)  # which never run
        ]
    return idle


def discover(
    model: nn.Module, batch: Batch, execution: Execution | None = None
) -> tuple[FoundUnit, ...]:
    """The units of `model`, from one forward of `batch` in train mode: `execution`, or a new one.

    The first and the last unit are parts, empty of parameters or not: the loss is computed in
    the last one. Between two blocks there is a part only where something is computed or a
    parameter read. A parameter that nothing reads belongs to the block that it is in (an expert
    that got no token), else to the last part. A model where nothing repeats has its children
    as blocks; one without children that run once is a single part. Layers that run several times
    have one place, in a part that says so.

    The model, its gradients, buffers and the random state stay as they are.
    """
    if execution is None:
        execution = record_execution(model, batch)
    blocks = _blocks(model, execution)
    stretches, repeated = _stretches(execution, blocks), _repeated(model, execution)
    if blocks and repeated.work < max(execution.work_of([block]) for block in blocks):
        repeated = _Repeated((), 0)  # a helper, such as a projection of two views
    uses = [dict.fromkeys(used for o in s.operations for used in o.parameters) for s in stretches]
    owner: dict[str, int] = {}
    for index, read in enumerate(uses):
        for name in read:
            owner.setdefault(name, index)
    # Parameters that this forward did not read.
    names = {parameter: name for name, parameter in model.named_parameters()}
    for index, stretch in enumerate(stretches):
        if stretch.block is not None:
            for parameter in stretch.block.module.parameters():
                owner.setdefault(names[parameter], index)
    for name in names.values():
        owner.setdefault(name, len(stretches) - 1)
    times: Counter[str] = Counter()  # a module may run in two parts: the second "x" is "x#2"
    units: list[FoundUnit] = []
    for index, (name, block, operations) in enumerate(stretches):
        times[name] += 1
        ran = "".join(operation.signature for operation in operations)
        facts = "" if block is None else f"{_structure(block.module)!r}{ran}"
        units.append(
            FoundUnit(
                kind="part" if block is None else "block",
                name=name if times[name] == 1 else f"{name}#{times[name]}",
                module=None if block is None else block.module,
                parameters=tuple(name for name, own in owner.items() if own == index),
                also_uses=tuple(used for used in uses[index] if owner[used] < index),
                signature=hashlib.sha256(facts.encode()).hexdigest() if facts else "",
                writes=tuple(dict.fromkeys(name for o in operations for name in o.written)),
                placed=tuple(name for o in operations for name in o.placed),
                repeats="" if block else repeated.within(operations),
            )
        )
    return tuple(units)


# --- which modules are blocks ---------------------------------------------------------------------


def _blocks(model: nn.Module, execution: Execution) -> tuple[ModuleCall, ...]:
    """The calls of the blocks: disjoint, in order."""
    once = _calls_of_modules_that_run_once(execution)
    groups = [[once[module] for module in group] for group in _alike(model, once)]
    # Two norms or two embeddings side by side are alike too: single layers are blocks only in a
    # model where nothing larger repeats.
    composite = [group for group in groups if _is_composite(group[0].module)]
    found = _outermost(call for group in composite or groups for call in group)
    found = found or _children(model, once)
    # Nor is what stands around layers that do most of the work, and run several times.
    repeated = _repeated(model, execution)
    if 2 * repeated.work <= execution.work_of():
        return found
    least = min(execution.work_of([call]) for call in repeated.calls)
    return tuple(call for call in found if 2 * execution.work_of([call]) >= least)


def _alike(model: nn.Module, among: Container[nn.Module]) -> Iterator[list[nn.Module]]:
    """Siblings with parameters, two or more.

    Alike are children of equal structure; in a list of modules, where layers may differ in details
    (T5's first layer owns the position bias of all), of the same class.
    """
    for parent in model.modules():
        kind = type if isinstance(parent, nn.ModuleList) else _structure
        alike: dict[object, list[nn.Module]] = defaultdict(list)
        for child in parent.children():
            if child in among and _has_parameters(child):
                alike[kind(child)].append(child)
        yield from (group for group in alike.values() if len(group) > 1)


def _is_composite(module: nn.Module) -> bool:
    return any(True for _ in module.children())


@dataclass(frozen=True, slots=True)
class _Repeated:
    """All calls of the layers that run several times in a forward, and their work."""

    calls: tuple[ModuleCall, ...]
    work: int

    def within(self, operations: Sequence[Operation]) -> str:
        """Say how often those run that run among these operations; empty: none do."""
        first, last = (operations[0].at, operations[-1].at) if operations else (0, 0)
        times = Counter(call.path for call in self.calls)
        here = {call.path for call in self.calls if first <= call.end and call.begin <= last}
        if not here:
            return ""
        names = [path for path in times if path in here]
        paths = [fold(names[run[0]], names[run[-1]]) for run in runs(names)]
        least, most = min(times[name] for name in names), max(times[name] for name in names)
        often = f"{most}" if least == most else f"{least} to {most}"
        verb, subject = ("runs", "it is") if len(names) == 1 else ("run", "they are")
        repeated = f"{', '.join(paths)} {verb} {often} times in a forward"
        return f"{repeated}, so {subject} planned as one unit"


def _repeated(model: nn.Module, execution: Execution) -> _Repeated:
    """The outermost layers that run several times: siblings, where these do most of the work."""
    several = {
        module
        for module, number in Counter(call.module for call in execution.calls).items()
        if number > 1 and module is not model and _is_composite(module) and _has_parameters(module)
    }
    siblings = {module for group in _alike(model, several) for module in group}
    outer, inner = (
        _outermost(call for call in execution.calls if call.module in modules)
        for modules in (several, siblings)
    )
    work = execution.work_of(outer), execution.work_of(inner)
    return _Repeated(inner, work[1]) if 2 * work[1] > work[0] else _Repeated(outer, work[0])


def _calls_of_modules_that_run_once(execution: Execution) -> dict[nn.Module, ModuleCall]:
    times = Counter(call.module for call in execution.calls)
    return {call.module: call for call in execution.calls if times[call.module] == 1}


def _has_parameters(module: nn.Module) -> bool:
    return any(True for _ in module.parameters())


def _structure(module: nn.Module) -> object:
    parameters = tuple(
        (name, tuple(p.shape), p.dtype, p.requires_grad)
        for name, p in module.named_parameters(recurse=False)
    )
    children = tuple((name, _structure(child)) for name, child in module.named_children())
    return type(module), parameters, children


def _outermost(calls: Iterable[ModuleCall]) -> tuple[ModuleCall, ...]:
    kept: list[ModuleCall] = []
    for call in sorted(calls, key=lambda call: call.begin):
        if not (kept and kept[-1].begin < call.begin and call.end < kept[-1].end):
            kept.append(call)
    return tuple(kept)


def _children(model: nn.Module, once: dict[nn.Module, ModuleCall]) -> tuple[ModuleCall, ...]:
    """The children with parameters that run once; a model in a wrapper is unwrapped first."""
    having = [child for child in model.children() if _has_parameters(child)]
    if len(having) == 1 and any(True for _ in having[0].children()):
        return _children(having[0], once)
    return _outermost(once[child] for child in having if child in once)


# --- from blocks to units -------------------------------------------------------------------------


class _Stretch(NamedTuple):
    """A unit to be: a block's call, or what ran since the last one."""

    name: str
    block: ModuleCall | None
    operations: list[Operation]


def _stretches(execution: Execution, blocks: tuple[ModuleCall, ...]) -> list[_Stretch]:
    last = max((call.end for call in execution.calls), default=0) + 1
    # The model itself has no path; containers that hold blocks lie across the parts' borders.
    once = _calls_of_modules_that_run_once(execution).values()
    calls = [call for call in execution.calls if call.path and call in once]
    stretches: list[_Stretch] = []
    begin = 0
    for index, block in enumerate((*blocks, None)):
        end = block.begin if block else last
        operations = _between(execution.operations, begin, end)
        works = any(o.parameters or not o.trivial for o in operations)
        if index == 0 or block is None or works:
            runs = next((c.path for c in calls if begin < c.begin and c.end < end), "")
            first = next((name for o in operations for name in o.parameters), "")
            # Where no module runs and no module below the root owns a parameter: its place.
            place = f"(after {blocks[index - 1].path})" if index else "(input)"
            if block is None:
                place = "(output)" if blocks else "(model)"
            name = runs or (first if "." in first else "") or place
            stretches.append(_Stretch(name, None, operations))
        if block is not None:
            operations = _between(execution.operations, block.begin, block.end)
            stretches.append(_Stretch(block.path, block, operations))
            begin = block.end
    return stretches


def _between(operations: Iterable[Operation], begin: int, end: int) -> list[Operation]:
    return [o for o in operations if begin < o.at < end]

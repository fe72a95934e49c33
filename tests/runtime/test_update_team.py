"""The host's update lane: ranges on several threads, and masters in batches, give plain bits."""

import itertools
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from copy import deepcopy
from functools import partial
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from protrain_plan.hardware.speeds import in_worker
from protrain_plan.models.optimizers import OPTIMIZERS
from protrain_plan.profiling.optimizer_cost import workspace
from protrain_runtime.contract.program.program import PIECE_ALIGNMENT
from protrain_runtime.devices.lanes import Backend
from protrain_runtime.devices.memory_meter import MemoryMeter
from protrain_runtime.devices.stores import HostStore
from protrain_runtime.states.chunk_layouts import make_chunk
from protrain_runtime.states.known_optimizers import KNOWN
from protrain_runtime.states.master_weights import MasterOptimizer, with_master_weights
from protrain_runtime.states.offloading import offload
from protrain_runtime.states.stand_ins import GradientInStore
from protrain_runtime.states.stepping import OptimizerFactory
from protrain_runtime.states.trials import ElementRange
from protrain_runtime.states.update_rules import UpdateRules
from protrain_runtime.states.updates import (
    Piece,
    UpdateTeam,
    ranges,
    spare_threads,
    updates_by_lines,
)
from tests.support.runtime_cases import differences
from tests.support.thinning import thinned

CPU = torch.device("cpu")
SHAPES = ((37, 61), (64,), (1000,), (3,), (128, 33), (1,), (700,), (65, 2))
FROZEN = 2  # these of the shapes, by number
SOMETIMES = 4  # has a gradient in some steps only
FACTORIES: dict[str, OptimizerFactory] = {
    **OPTIMIZERS,
    "adamw for each": partial(torch.optim.AdamW, lr=3e-4, foreach=False),
    "adamw foreach": partial(torch.optim.AdamW, lr=3e-4, foreach=True),
    "adagrad": partial(torch.optim.Adagrad, lr=1e-2),
}


@pytest.fixture(params=[0, 1, 2, 3, 5], ids="{} threads".format)
def team(request: pytest.FixtureRequest) -> Iterator[UpdateTeam | None]:
    """Cuts wherever it may, in spans that are shorter than most tensors; none, as on a device."""
    if request.param == 0:
        yield None
        return
    with closing(UpdateTeam(request.param, smallest=64, longest=512)) as made:
        yield made


# --- ranges ---------------------------------------------------------------------------------------


@given(
    lengths=st.lists(st.integers(1, 5000), max_size=12),
    count=st.integers(1, 7),
    longest=st.sampled_from([64, 512, 10**9]),
)
def test_ranges_hold_every_element_once_and_are_alike(
    lengths: list[int], count: int, longest: int
) -> None:
    longest = longest if longest < 10**9 else max(lengths, default=1)
    found = ranges(lengths, count, longest=longest)
    assert len(found) <= count
    assert all(found)
    spans = [span for share in found for span in share]
    place = ElementRange(-1, 0, 0)
    for span in spans:
        if span.tensor != place.tensor:
            assert (span.tensor, span.start) == (place.tensor + 1, 0)
            assert place.tensor < 0 or place.stop == lengths[place.tensor]
        else:
            assert span.start == place.stop
            assert span.start % PIECE_ALIGNMENT == 0 or longest % PIECE_ALIGNMENT
        assert 0 < span.stop - span.start <= longest
        place = span
    assert sum(span.stop - span.start for span in spans) == sum(lengths)
    for share in found:
        elements = sum(span.stop - span.start for span in share)
        assert elements <= sum(lengths) / count + PIECE_ALIGNMENT


def test_small_pieces_are_not_cut() -> None:
    with closing(UpdateTeam(3, smallest=1000)) as team:
        assert [len(team.ranges([size])) for size in (64, 1999, 2000, 3000, 10**6)] == [
            *(1, 1),
            *(2, 3, 3),
        ]


def test_one_processor_is_left_to_launch_and_all_to_compute() -> None:
    """On an accelerator's machine, and on a CPU, where the processors that update compute."""
    num_threads = torch.get_num_threads()
    try:
        for threads, spare in ((1, 1), (2, 1), (8, 7)):
            torch.set_num_threads(threads)
            assert spare_threads(torch.device("cuda", 0)) == spare
            assert spare_threads(CPU) == 1
    finally:
        torch.set_num_threads(num_threads)


def test_a_rank_has_its_share_of_a_nodes_processors(monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher leaves each rank one thread, unless it is told another number."""
    monkeypatch.setattr("os.sched_getaffinity", lambda _: set(range(32)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert spare_threads(torch.device("cuda", 0)) == 7
    assert spare_threads(CPU) == 1
    monkeypatch.setenv("OMP_NUM_THREADS", "4")
    assert spare_threads(torch.device("cuda", 0)) == max(1, torch.get_num_threads() - 1)


def test_helpers_and_lanes_have_one_thread_and_later_threads_have_the_old_number() -> None:
    num_threads = torch.get_num_threads()
    seen: list[tuple[str, int]] = []

    def see() -> None:
        seen.append((threading.current_thread().name, torch.get_num_threads()))
        everyone.wait()

    everyone = threading.Barrier(3)
    for number in (1, 3):
        lane = Backend(CPU).lane("any", on_device=False, num_threads=number)
        lane.submit(
            "look", lambda: seen.append(("lane", torch.get_num_threads())), ()
        ).synchronize()
        lane.close()
    with closing(UpdateTeam(3)) as team:
        team.run([see, see, see])
        later = threading.Thread(target=lambda: seen.append(("later", torch.get_num_threads())))
        later.start()
        later.join()
    here = threading.current_thread().name
    assert sorted(seen) == sorted(
        [
            (here, num_threads),
            ("protrain update_0", 1),
            ("protrain update_1", 1),
            ("later", num_threads),
            ("lane", 1),
            ("lane", 3),
        ]
    )
    names = [thread.name for thread in threading.enumerate()]
    assert not [name for name in names if name.startswith("protrain update_")]


@pytest.mark.parametrize("kind", [kind for kind, row in KNOWN.items() if row.by_lines])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_fused_steps_have_the_same_bits_with_any_number_of_threads(
    kind: Callable[..., torch.optim.Optimizer], dtype: torch.dtype
) -> None:
    """By lines of a cache, of which the last one is not full."""

    def stepped() -> list[Tensor]:
        torch.manual_seed(0)
        parameter = nn.Parameter(torch.randn(100_003).to(dtype))
        optimizer = kind([parameter], fused=True)
        for _ in range(3):
            parameter.grad = torch.randn(100_003).to(dtype)
            optimizer.step()
        return [parameter.detach(), *optimizer.state[parameter].values()]

    expected, *others = (in_worker(stepped, num_threads=number) for number in (1, 2, 3, 7))
    assert all(list(differences(other, expected, "step")) == [] for other in others)


@pytest.mark.parametrize("masters", [False, True])
def test_fused_adams_are_shared_out_by_pytorch_and_others_by_ranges(*, masters: bool) -> None:
    def team_of(factory: OptimizerFactory) -> tuple[int, int]:
        made = (with_master_weights(factory) if masters else factory)([{"params": [one]}])
        with closing(UpdateTeam(4, by_lines=updates_by_lines(made))) as team:
            return team.inside, team.num_threads

    one = nn.Parameter(torch.zeros(1, dtype=torch.bfloat16))
    inside = {name for name, factory in FACTORIES.items() if team_of(factory) == (4, 1)}
    assert inside == {"adamw", "adam", "adamw-amsgrad"}
    assert all(team_of(FACTORIES[name]) == (1, 4) for name in FACTORIES.keys() - inside)


def test_what_one_thread_raises_is_raised_when_all_have_ended() -> None:
    ended: list[int] = []
    raised = threading.Event()

    def fails() -> None:
        raised.set()
        raise ValueError("no step")

    def goes_on() -> None:
        raised.wait()
        ended.append(1)

    with closing(UpdateTeam(3)) as team:
        for tasks in ([fails, goes_on, goes_on], [goes_on, goes_on, fails]):
            raised.clear()
            ended.clear()
            with pytest.raises(ValueError, match="no step"):
                team.run(tasks)
            assert ended == [1, 1]


# --- pieces ---------------------------------------------------------------------------------------


class Rig:
    """A chunk in host memory, and the same parameters with the user's plain optimizer."""

    def __init__(
        self, factory: OptimizerFactory, dtype: torch.dtype, *, masters: bool, absent: int = 0
    ) -> None:
        self.absent = absent
        self.pieces: dict[tuple[int, int], Piece] = {}  # that are used in every step
        self.kept = 0  # steps whose optimizers went on to the next
        random_numbers = torch.Generator().manual_seed(1)
        own = [
            nn.Parameter(torch.randn(shape, generator=random_numbers).to(dtype)) for shape in SHAPES
        ]
        for number, parameter in enumerate(own):
            parameter.requires_grad_(number != FROZEN)
        self.plain = {str(number): deepcopy(parameter) for number, parameter in enumerate(own)}
        self.masters = masters
        copies = {
            name: nn.Parameter(parameter.detach().float()) if masters else parameter
            for name, parameter in self.plain.items()
        }
        self.copies = copies
        # Two groups, with options of their own: they alternate among the parameters.
        trainable = [name for name in copies if name != str(FROZEN)]
        own_names, others = trainable[::2], trainable[1::2]
        groups = [
            {"params": [copies[name] for name in own_names], "lr": 2e-3},
            {"params": [copies[name] for name in others], "weight_decay": 0.0},
        ]
        self.optimizer = factory(groups)
        self.factory = with_master_weights(factory) if masters else factory
        self.options: dict[str, dict[str, Any]] = {}
        for names, group in zip((own_names, others), self.optimizer.param_groups, strict=True):
            chosen = {key: value for key, value in group.items() if key != "params"}
            self.options |= dict.fromkeys(names, chosen)
        self.chunk = make_chunk(0, [(str(n), p) for n, p in enumerate(own)], used_by=(0,))
        store = HostStore(Backend(CPU))
        offload(self.chunk, store, UpdateRules(self.factory))
        self.chunk.gradient_store = store
        self.chunk.gradient_offset = store.reserve(self.chunk.gradient_bytes)
        self.store = store
        self.random_numbers = random_numbers

    def step(self, number: int, team: UpdateTeam | None, *, num_pieces: int, clips: bool) -> None:
        """One step of both; gradients are at hand or wait in host memory, one of them to be scaled.

        The plain optimizer gets the product, as a loop that clips computes it.
        """
        at_hand: dict[str, Tensor] = {}
        factor = torch.tensor(0.37)
        for part in self.chunk.slices:
            parameter = self.plain[part.name]
            if not part.trainable or (part.name == str(SOMETIMES) and number % 2 == self.absent):
                self.copies[part.name].grad = None
                continue
            gradient = torch.randn(part.shape, generator=self.random_numbers).to(parameter.dtype)
            flat = gradient.flatten()
            if clips:
                place = self.chunk.gradient_offset + part.start * part.dtype.itemsize
                self.store.write(place, flat.clone().view(torch.uint8))
                self.chunk.offloaded_gradients[part.name] = GradientInStore(
                    store=self.store,
                    offset=place,
                    shape=part.shape,
                    stride=part.stride,
                    dtype=part.dtype,
                    device=CPU,
                    factors=[factor],
                )
                gradient = gradient * factor
            else:
                at_hand[part.name] = flat
            self.copies[part.name].grad = gradient.float() if self.masters else gradient
        self.optimizer.step()
        with torch.no_grad():
            for name, parameter in self.plain.items():
                parameter.copy_(self.copies[name])
        total = self.chunk.num_trainable
        cuts = [self.chunk.cut(total * n // num_pieces) for n in range(num_pieces)] + [total]
        for start, stop in itertools.pairwise(cuts):
            waiting = self.chunk.offloaded_gradients
            piece = self.pieces.setdefault(
                (start, stop), Piece(self.chunk, start, stop, keeps=True)
            )
            piece.waiting = dict(waiting)
            if piece.kept is None:
                piece.view_store()
            covered = {
                part.name: at_hand[part.name][low:high]
                for part, low, high in piece.parts
                if part.name in at_hand
            }
            piece.update(self.factory, self.options, covered, team)
            piece.write(parameters=False)
            self.kept += piece.kept is not None
        self.chunk.offloaded_gradients.clear()

    def count_on(self) -> None:
        """Put other counters in the place of those that there are, as `load_state_dict` does."""
        for name, scalars in self.chunk.current.scalars.items():
            state = self.optimizer.state[self.copies[name]]
            for key, value in scalars.items():
                state[key] = value + 10 if key == "step" else state[key]
            own = {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
            self.chunk.current.scalars[name] = {key: own[key] for key in scalars}

    def differences(self) -> list[str]:
        found: dict[str, Any] = {}
        expected: dict[str, Any] = {}
        for part in self.chunk.slices:
            place = self.chunk.current.offset + part.offset
            values = self.store.view(place, part.num_bytes).view(part.dtype).view(part.shape)
            found[part.name], expected[part.name] = values, self.plain[part.name].detach()
            if part.name not in self.chunk.current.updated:
                assert not self.optimizer.state[self.copies[part.name]]
                continue
            states = dict(self.chunk.current.scalars[part.name])
            for layout in self.chunk.current.states:
                size = layout.dtype.itemsize
                flat = self.store.view(layout.offset + part.start * size, part.numel * size)
                states[layout.key] = flat.view(layout.dtype).view(part.shape)
            found[f"states {part.name}"] = states
            plain = dict(self.optimizer.state[self.copies[part.name]])
            if self.masters:
                plain["master"] = self.copies[part.name].detach()
            expected[f"states {part.name}"] = plain
        return list(differences(found, expected, "chunk"))


def first_absent(name: str) -> int:
    """The first step without some gradient: PyTorch's fused SGD wants all of them at first."""
    return 1 if name == "sgd-momentum" else 0


WAYS = {"at hand": False, "waiting": True}  # clipped


@pytest.mark.parametrize(
    ("name", "precision", "way", "num_pieces"),
    thinned([*FACTORIES], ["float32", "bfloat16", "master"], [*WAYS], [1, 4], every=15),
)
def test_updates_in_pieces_by_threads_are_plain_pytorchs_bitwise(
    name: str, precision: str, way: str, num_pieces: int, team: UpdateTeam | None
) -> None:
    """Oracle: the user's optimizer on whole parameters, or on float32 copies of them.

    Pieces cut parameters, and threads cut pieces. Rates change in every step and counters in one,
    and a gradient is missing in some.
    """
    if (name, precision) == ("sgd-momentum", "bfloat16"):
        return  # PyTorch's own first step reads memory that nobody wrote (2.13, on a CPU)
    dtype = torch.float32 if precision == "float32" else torch.bfloat16
    rig = Rig(FACTORIES[name], dtype, masters=precision == "master", absent=first_absent(name))
    for number in range(7):
        for options in (*rig.options.values(), *rig.optimizer.param_groups):
            options["lr"] = 1e-3 / (1 + number)
        if number == 5:
            rig.count_on()
        rig.step(number, team, num_pieces=num_pieces, clips=WAYS[way])
        # Adagrad makes states before it has a gradient.
        assert number == 0 or rig.differences() == []
    assert rig.kept > 0 or way == "at hand"  # which is not cut in the same places


def test_one_optimizer_is_made_per_thread() -> None:
    made: list[int] = []

    def counting(groups: Any) -> torch.optim.Optimizer:
        groups = list(groups)
        made.append(sum(len(group["params"]) for group in groups))
        return torch.optim.AdamW(groups, fused=True)

    rig = Rig(counting, torch.float32, masters=False)
    with closing(UpdateTeam(3, smallest=64)) as team:
        made.clear()
        rig.step(1, team, num_pieces=1, clips=False)
    assert len(made) == 3
    assert sum(made) <= len(SHAPES) - 1 + 2  # a parameter is cut where a range ends


# --- masters --------------------------------------------------------------------------------------


def narrow(shapes: Sequence[tuple[int, ...]], *, wide: tuple[int, ...] = ()) -> list[nn.Parameter]:
    """bfloat16 parameters, but for those of these numbers."""
    random_numbers = torch.Generator().manual_seed(0)
    return [
        nn.Parameter(
            torch.randn(shape, generator=random_numbers).to(
                torch.float32 if number in wide else torch.bfloat16
            )
        )
        for number, shape in enumerate(shapes)
    ]


@pytest.mark.nightly(by_day=12)
@pytest.mark.parametrize("name", FACTORIES)
@pytest.mark.parametrize("room", [0, 3000, 10**6])
def test_masters_in_batches_are_one_optimizer_over_float32_copies_bitwise(
    name: str, room: int
) -> None:
    """Groups, absent gradients, other strides, and parameters that are float32 themselves."""
    shapes: list[tuple[int, ...]] = [(70, 33), (64,), (1000,), (5,), (2, 3, 40), (900,)]
    own = narrow(shapes, wide=(1, 5))
    own[4] = nn.Parameter(own[4].detach().transpose(0, 2))
    copies = [nn.Parameter(parameter.detach().clone().float()) for parameter in own]

    def groups(parameters: list[nn.Parameter]) -> list[dict[str, Any]]:
        return [{"params": parameters[::2], "lr": 1e-2}, {"params": parameters[1::2]}]

    optimizer = MasterOptimizer(groups(own), FACTORIES[name])
    optimizer.room_elements = room
    plainly = FACTORIES[name](groups(copies))
    for number in range(4):
        for place, (parameter, copy) in enumerate(zip(own, copies, strict=True)):
            absent = place == 3 and number % 2 == first_absent(name)
            gradient = torch.empty_like(parameter).normal_()
            parameter.grad = None if absent else gradient
            copy.grad = None if absent else gradient.float()
        optimizer.step()
        plainly.step()
    for parameter, copy in zip(own, copies, strict=True):
        assert torch.equal(parameter, copy.to(parameter.dtype))
        made, expected = dict(optimizer.state[parameter]), dict(plainly.state[copy])
        if parameter.dtype == torch.bfloat16:
            expected["master"] = copy.detach()
        assert list(differences(made, expected, "state")) == []


def most_besides(step: Callable[[], None]) -> int:
    """Bytes that a step needs beyond what it leaves."""
    with MemoryMeter("cpu") as meter:
        meter.mark("step")
        step()
    segment = meter.segments[0]
    return segment.peak_bytes - segment.start_bytes


@pytest.mark.nightly(by_day=12)
@pytest.mark.parametrize("name", ["adamw", "sgd-momentum", "nadam", "adamw foreach"])
@pytest.mark.parametrize("room", [0, 5000, 22_980])
def test_a_step_on_masters_stays_within_the_room_that_is_counted(name: str, room: int) -> None:
    """Oracle: the same optimizer's step on one parameter as large as the room, all at once."""
    largest = 3000
    own = narrow([(largest,)] + [(999,)] * 20)  # 22,980 elements
    optimizer = MasterOptimizer(own, FACTORIES[name])
    optimizer.room_elements = room
    alone = narrow([(max(largest, room),)])
    reference = MasterOptimizer(alone, FACTORIES[name])
    for each in (optimizer, reference):
        for _ in range(2):
            for parameter in each.param_groups[0]["params"]:
                parameter.grad = torch.ones_like(parameter)
            each.step()
    found, counted = most_besides(optimizer.step), most_besides(reference.step)
    scalars = 64 * len(own)  # single elements, such as steps
    assert 4 * largest <= found <= counted + scalars


def test_the_workspace_of_masters_is_two_bytes_per_byte_of_the_parameter() -> None:
    """As test_peaks counts: a float32 gradient for each bfloat16 element."""
    assert workspace("adamw", "bfloat16", "master").workspace_fraction == 2.0


class KeepsGradients(torch.optim.Optimizer):
    """Adds the gradient of the step before, which it keeps as it was given."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.5})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        assert closure is None
        for group in self.param_groups:
            for parameter in group["params"]:
                before = self.state[parameter].get("before")
                if before is not None:
                    parameter.add_(before, alpha=-group["lr"])
                self.state[parameter]["before"] = parameter.grad


def test_an_optimizer_may_keep_a_masters_gradient() -> None:
    """The room that it lies in is the next batch's."""
    own = narrow([(100,)] * 3)
    optimizer = MasterOptimizer(own, KeepsGradients)
    for step in range(2):
        for number, parameter in enumerate(own):
            parameter.grad = torch.full_like(parameter, 10 * step + number)
        optimizer.step()
    for number, parameter in enumerate(own):
        before = optimizer.state[parameter]["before"]
        assert torch.equal(before, torch.full((100,), 10.0 + number))
        start = narrow([(100,)] * 3)[number].float()
        assert torch.equal(optimizer.state[parameter]["master"], start - 0.5 * number)

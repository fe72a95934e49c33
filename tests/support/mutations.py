"""Mutations of the product, and for each of them the test of every run that fails under it.

    python -m tests.support.mutations [WORD ...]

applies every mutation, or those with one of the words in them, to a copy of the tree, runs its test
there, and says which were killed.
"""

import argparse
import ast
import importlib
import os
import shutil
import subprocess
import sys
import textwrap
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import reduce
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]
NOT_COPIED = (".git", ".venv", ".*_cache", "__pycache__", "site", "results")
BY_DEFAULT = "not slow and not gpu"
"""The marks of the tests that `make test` runs."""

LIMIT_S = 600.0
"""A mutation may make a test wait for ever: one that has not ended by then is killed, too."""


@dataclass(frozen=True, kw_only=True)
class Mutation:
    """A change of one line, and the test that fails under it.

    `where` is a file and a function in it, which has `line` once; `keeps` says what happens without
    the line. `scenario` names the function that shows it, where one test has several of them.
    """

    where: str
    line: str
    instead: str = "pass"
    keeps: str
    test: str = ""
    scenario: str = ""

    @property
    def file(self) -> Path:
        return ROOT / self.where.partition("::")[0]

    @property
    def function(self) -> str:
        return self.where.partition("::")[2]

    @property
    def place(self) -> str:
        return f"{self.file.stem}.{self.function}"

    @property
    def change(self) -> str:
        """The line and what stands in its place, as Markdown."""
        change = " ".join(self.line.split())
        if self.instead.strip() not in ("", "pass"):
            change += f"` becomes `{' '.join(self.instead.split())}"
        return f"`{change}`"


def names(mutations: Sequence[Mutation]) -> list[str]:
    """For pytest."""
    return [f"{number}-{mutation.place}" for number, mutation in enumerate(mutations)]


def lines_of(mutation: Mutation, text: str) -> slice:
    """The lines of the mutation's function in the text of its file."""
    scope: ast.AST = ast.parse(text)
    for name in mutation.function.split("."):
        scope = next(
            node
            for node in ast.iter_child_nodes(scope)
            if isinstance(node, ast.FunctionDef | ast.ClassDef) and node.name == name
        )
    assert isinstance(scope, ast.FunctionDef) and scope.end_lineno
    first = min([scope.lineno, *(each.lineno for each in scope.decorator_list)])
    return slice(first - 1, scope.end_lineno)


def mutated_function(mutation: Mutation, text: str) -> str:
    """The function with the change, not indented."""
    source = textwrap.dedent("".join(text.splitlines(keepends=True)[lines_of(mutation, text)]))
    assert source.count(mutation.line) == 1, f"{mutation.where}: {mutation.line}"
    return source.replace(mutation.line, mutation.instead)


def mutated_text(mutation: Mutation, text: str) -> str:
    """The file with the change."""
    lines, chosen = text.splitlines(keepends=True), lines_of(mutation, text)
    first = lines[chosen.start]
    indent = first[: len(first) - len(first.lstrip())]
    function = textwrap.indent(mutated_function(mutation, text), indent)
    return "".join([*lines[: chosen.start], function, *lines[chosen.stop :]])


def mutate(monkeypatch: pytest.MonkeyPatch, mutation: Mutation) -> None:
    """Change the function in this process."""
    package = mutation.file.relative_to(ROOT).with_suffix("").parts
    module = importlib.import_module(".".join(package[package[0] == "runtime" :]))
    *owners, name = mutation.function.split(".")
    made: dict[str, Any] = {}
    source = mutated_function(mutation, mutation.file.read_text(encoding="utf-8"))
    exec(compile(source, mutation.place, "exec"), module.__dict__, made)  # noqa: S102 (our own)
    monkeypatch.setattr(reduce(getattr, owners, module), name, made[name])


# --- the tables -----------------------------------------------------------------------------------

ON_A_DEVICE_TEST = "tests/runtime/test_ordering.py::test_the_scenario_holds[{}]"
AMONG_RANKS_TEST = "tests/ranks/test_ordering_ranks.py::test_scenarios_hold"

ON_A_DEVICE = (
    Mutation(
        where="runtime/protrain_runtime/devices/lanes.py::StreamTicket.wait",
        line="devices.current_stream(self._device).wait_event(self._end())",
        instead="self._end()",
        keeps="compute reads a buffer before the copy to it has ended",
        scenario="from_host_with_late_lanes",
    ),
    Mutation(
        where="runtime/protrain_runtime/devices/lanes.py::ThreadTicket.wait",
        line="self.synchronize()",
        keeps="compute reads a buffer that is being read from disk",
        scenario="from_disk_with_late_threads",
    ),
    Mutation(
        where="runtime/protrain_runtime/devices/lanes.py::ThreadTicket.synchronize",
        line="not self._ended",
        instead="False",
        keeps="states are updated while they are being read from disk",
        scenario="from_disk_with_late_threads",
    ),
    Mutation(
        where="runtime/protrain_runtime/devices/lanes.py::StreamTicket._end",
        line="self._issue.synchronize()",
        keeps="work is waited for that is not on its stream yet",
        scenario="the_launching_thread_goes_on",
    ),
    Mutation(
        where="runtime/protrain_runtime/devices/lanes.py::StreamTicket.synchronize",
        line="while not event.query():",
        instead="while False:",
        keeps="the host's optimizer reads a gradient before it has arrived",
        scenario="from_host_with_late_lanes",
    ),
    Mutation(
        where="runtime/protrain_runtime/devices/lanes.py::StreamLane._issue",
        line="self._stream.wait_event(item.fence)",
        keeps="a copy takes what compute has not written yet, or overwrites what it still reads",
        scenario="from_host_with_late_compute",
    ),
    Mutation(
        where="runtime/protrain_runtime/devices/lanes.py::StreamLane._issue",
        line="other.wait()",
        keeps="a gradient arrives where the one before it is still being added",
        scenario="micro_batches_with_late_threads",
    ),
    Mutation(
        where="runtime/protrain_runtime/devices/lanes.py::StreamLane.submit",
        line="self._waiting is None and all(",
        instead="all(",
        keeps="work overtakes what was submitted to its lane before it",
        scenario="a_stream_keeps_its_order",
    ),
    Mutation(
        where="runtime/protrain_runtime/devices/lanes.py::StreamLane.submit",
        line="all(other.issued() for other in after)",
        instead="True",
        keeps="the thread that launches compute waits for a thread of a lane",
        scenario="the_launching_thread_goes_on",
    ),
    Mutation(
        where="runtime/protrain_runtime/devices/lanes.py::StreamLane.close",
        line="self._stream.synchronize()",
        keeps="a lane that is closed still works on what is freed then",
        scenario="a_closed_lane_has_ended",
    ),
    Mutation(
        where="runtime/protrain_runtime/devices/lanes.py::ThreadLane._run",
        line="other.synchronize()",
        keeps="the host's optimizer starts before the gradients are there",
        scenario="from_host_with_late_lanes",
    ),
    Mutation(
        where="runtime/protrain_runtime/devices/lanes.py::ThreadLane._do",
        line="self._stream.wait_event(item.fence)",
        keeps="what goes to disk is taken before compute has written it",
        scenario="from_disk_on_another_stream_with_late_streams",
    ),
    Mutation(
        where="runtime/protrain_runtime/devices/lanes.py::ThreadLane._do",
        line="    self._stream.synchronize()",
        instead="    pass",
        keeps="work counts as ended while its copies are on their way",
        scenario="a_thread_ends_with_its_stream",
    ),
    Mutation(
        where="runtime/protrain_runtime/engine/engine.py::Engine._begin_slot",
        line="self._end(number)",
        keeps="a slot computes before what it reads is back",
        scenario="from_host_with_late_lanes",
    ),
    Mutation(
        where="runtime/protrain_runtime/engine/engine.py::Engine._begin_slot",
        line="self._end(earlier)",
        keeps="the device holds what a slot's bytes do not count any more",
        scenario="peaks_with_late_lanes",
    ),
    Mutation(
        where="runtime/protrain_runtime/engine/engine.py::Engine._end",
        line="    self._tickets[number].wait()",
        instead="    pass",
        keeps="memory is freed, and serves compute again, under a copy from it",
        scenario="from_host_with_late_lanes",
    ),
    Mutation(
        where="runtime/protrain_runtime/engine/engine.py::Engine._end_moves",
        line="self._tickets[number].synchronize()",
        keeps="the next step reads parameters that are being updated",
        scenario="from_host_with_late_lanes",
    ),
    Mutation(
        where="runtime/protrain_runtime/engine/engine.py::Engine._give_up",
        line="end.synchronize()",
        keeps="a forward that was cut short frees what its copies still use",
        scenario="cut_short",
    ),
    Mutation(
        where="runtime/protrain_runtime/engine/engine.py::Engine._await_fetches",
        line="self._tickets[number].wait()",
        keeps="an evaluation computes with a chunk that is on its way",
        scenario="evaluated_between",
    ),
    Mutation(
        where="runtime/protrain_runtime/engine/engine.py::Engine._submit",
        line="for other in move.after",
        instead='for other in move.after if move.kind != "update"',
        keeps="an update starts before its gradients, or its states, are there",
        scenario="from_host_with_late_lanes",
    ),
    Mutation(
        where="runtime/protrain_runtime/engine/engine.py::Engine._submit",
        line="for other in move.after",
        instead='for other in move.after if move.kind != "read states"',
        keeps="states are read to a staging buffer that is not written out yet",
        scenario="from_disk_with_late_threads",
    ),
    Mutation(
        where="runtime/protrain_runtime/engine/engine.py::Engine._submit",
        line="for other in move.after",
        instead='for other in move.after if move.kind != "write states"',
        keeps="states are written out before they are updated",
        scenario="from_disk_with_late_threads",
    ),
    Mutation(
        where="runtime/protrain_runtime/engine/engine.py::Engine._submit",
        line="for other in move.after",
        instead='for other in move.after if move.kind != "add gradients"',
        keeps="gradients are added before they have arrived",
        scenario="micro_batches_with_late_lanes",
    ),
    Mutation(
        where="runtime/protrain_runtime/engine/engine.py::Engine._submit",
        line="for other in move.after",
        instead='for other in move.after if move.kind != "spill gradients"',
        keeps="gradients arrive where those of another chunk are still being added",
        scenario="micro_batches_with_late_threads",
    ),
    Mutation(
        where="runtime/protrain_runtime/engine/engine.py::Engine._submit",
        line="after += [self._carried[other] for other in awaited if other in self._carried]",
        keeps="the next step fetches parameters that are being updated",
        scenario="overlapping_with_late_threads",
    ),
    Mutation(
        where="runtime/protrain_runtime/engine/engine.py::Engine.__init__",
        line="self._awaited[unit].add(number)",
        keeps="the next step fetches parameters that an update ahead of the norm still writes",
        scenario="ahead_of_the_norm_with_late_lanes",
    ),
    Mutation(
        where="runtime/protrain_runtime/engine/engine.py::Engine._end_carried",
        line="        wait()",
        instead="        pass",
        keeps="what is read between steps is being updated",
        scenario="overlapping_with_late_threads",
    ),
    Mutation(
        where="runtime/protrain_runtime/engine/engine.py::Engine._begin_slot",
        line="self._end_carried(earlier, self._carried[earlier].wait)",
        instead="self._end_carried(earlier, lambda: None)",
        keeps="a slot's memory is that of a chunk whose update still writes it out",
        scenario="on_the_device_with_late_lanes",
    ),
    Mutation(
        where="runtime/protrain_runtime/contract/program/compiling.py::_Compiler._add_updates",
        line="waits = gradients  # which it reads, too",
        keeps="gradients are read with the states before they are in host memory",
        scenario="micro_batches_on_the_device_with_late_threads",
    ),
    Mutation(
        where="runtime/protrain_runtime/contract/program/compiling.py::_Compiler._add_updates",
        line="waits = gradients  # which it reads, too",
        keeps="gradients are copied for an update ahead of the norm before they are in host memory",
        scenario="ahead_of_the_norm_from_disk_with_late_lanes",
    ),
    Mutation(
        where="runtime/protrain_runtime/engine/engine.py::Engine._begin_slot",
        line="sorted(self._carried) if index == self._num_units else ()",
        instead="()",
        keeps="what a step holds is freed when a move of the step before it has ended",
        scenario="clipped_on_the_device_with_late_lanes",
    ),
    Mutation(
        where="runtime/protrain_runtime/engine/moves.py::Moves.start",
        line="self._working[number] = piece, piece.waiting",
        instead="pass",
        keeps="a factor that clips is freed before the update has multiplied by it",
        scenario="clipped_on_the_device_with_late_lanes",
    ),
    Mutation(
        where="runtime/protrain_runtime/engine/moves.py::Moves.start",
        line="work, self._held[number] = spills.spill(move, chunk)",
        instead="work, _ = spills.spill(move, chunk)",
        keeps="a gradient is freed under the copy from it",
        scenario="from_host_with_late_lanes",
    ),
    Mutation(
        where="runtime/protrain_runtime/engine/step_times.py::StepTimes.end",
        line="devices.synchronize(self._device)",
        keeps="a step counts as ended, and is read off events, while the device is in it",
        scenario="recorded",
    ),
    Mutation(
        where="runtime/protrain_runtime/devices/stores.py::HostStore.write",
        line="self.view(offset, source.numel()).copy_(source)",
        instead="self.view(offset, source.numel()).copy_(source, non_blocking=True)",
        keeps="loaded parameters are read before they have arrived in host memory",
        scenario="loaded_and_read",
    ),
    Mutation(
        where="runtime/protrain_runtime/devices/stores.py::HostStore.write",
        line="devices.synchronize(self._backend.device)",
        keeps="an evaluation that runs still computes with what is loaded after it",
        scenario="evaluated_then_loaded",
    ),
    Mutation(
        where="runtime/protrain_runtime/devices/stores.py::HostStore.close",
        line="devices.synchronize(self._backend.device)",
        keeps="host memory is unpinned under a copy",
        scenario="evaluated_then_dropped",
    ),
    Mutation(
        where="runtime/protrain_runtime/devices/stores.py::_Passage.down",
        line="            pending[2].synchronize()",
        instead="            pass",
        keeps="a part goes to the file before the device has written it",
        scenario="through_the_passage",
    ),
    Mutation(
        where="runtime/protrain_runtime/devices/stores.py::_Passage.down",
        line="\n        pending[2].synchronize()",
        instead="",
        keeps="the last part goes to the file before the device has written it",
        scenario="through_the_passage",
    ),
    Mutation(
        where="runtime/protrain_runtime/devices/stores.py::_Passage.up",
        line="gone[-2].synchronize()",
        keeps="a part is read over one that the device still copies",
        scenario="through_the_passage",
    ),
    Mutation(
        where="runtime/protrain_runtime/devices/stores.py::_Passage.up",
        line="event.synchronize()",
        keeps="the next read overwrites what the device still copies",
        scenario="through_the_passage",
    ),
    Mutation(
        where="runtime/protrain_runtime/engine/moves.py::Moves._swap_in",
        line="storages = self._arriving[number] = list",
        instead="storages = list",
        keeps="what nobody waits for any more is freed under the copy to it",
        scenario="aside_with_late_lanes",
    ),
    Mutation(
        where="runtime/protrain_runtime/devices/lanes.py::ThreadLane.submit",
        line="fence = None if self._device is None else devices.record_event(self._device)",
        instead="fence = None",
        keeps="a thread's copies are ordered behind the default stream alone",
        scenario="from_disk_on_another_stream_with_late_streams",
    ),
)

AMONG_RANKS = (
    Mutation(
        where="runtime/protrain_runtime/engine/engine.py::Engine._submit",
        line="for other in move.after",
        instead='for other in move.after if move.kind != "all-gather"',
        keeps="other ranks get a shard that has not come from its host yet",
        scenario="from_host_with_late_lanes",
    ),
    Mutation(
        where="runtime/protrain_runtime/engine/engine.py::Engine._submit",
        line="for other in move.after",
        instead='for other in move.after if move.kind != "spill gradients"',
        keeps="a sum leaves for the host before all ranks have added to it",
        scenario="from_host_with_late_lanes",
    ),
    Mutation(
        where="runtime/protrain_runtime/engine/engine.py::Engine._end",
        line="    self._tickets[number].wait()",
        instead="    self._program.moves[number].lane == COLLECT or self._tickets[number].wait()",
        keeps="the optimizer steps with gradients that are being added up",
        scenario="updated_in_backward_with_late_lanes",
    ),
    Mutation(
        where="runtime/protrain_runtime/engine/engine.py::Engine._end_moves",
        line="self._tickets[number].wait()",
        keeps="the same, where nothing is updated in backward",
        scenario="persistent_with_late_lanes",
    ),
    Mutation(
        where="runtime/protrain_runtime/engine/engine.py::Engine._begin_slot",
        line="self._end(number)",
        instead="self._program.moves[number].lane == COLLECT or self._end(number)",
        keeps="a slot computes before other ranks' shards are there",
        scenario="shards_with_late_lanes",
    ),
    Mutation(
        where="runtime/protrain_runtime/engine/engine.py::Engine._collect",
        line="self.lanes[COLLECT].submit(what, work, ()).wait()",
        instead="self.lanes[COLLECT].submit(what, work, ())",
        keeps="an evaluation computes before other ranks' shards are there",
        scenario="evaluated",
    ),
    Mutation(
        where="runtime/protrain_runtime/engine/engine.py::Engine._collect",
        line="self.lanes[COLLECT].submit(what, work, ()).wait()",
        instead="self.lanes[COLLECT].submit(what, work, ())",
        keeps="a forward begins with running statistics of its own",
        scenario="running_statistics",
    ),
    Mutation(
        where="runtime/protrain_runtime/devices/lanes.py::StreamLane._issue",
        line="self._stream.wait_event(item.fence)",
        instead='self.name == "collect" or self._stream.wait_event(item.fence)',
        keeps="gradients are added up before backward has computed them",
        scenario="persistent_with_late_compute",
    ),
    Mutation(
        where="runtime/protrain_runtime/devices/lanes.py::StreamLane._issue",
        line="self._stream.wait_event(item.fence)",
        instead='self.name == "collect" or self._stream.wait_event(item.fence)',
        keeps="other ranks get a shard that the optimizer has not updated yet",
        scenario="shards_with_late_compute",
    ),
    Mutation(
        where="runtime/protrain_runtime/engine/moves.py::Reductions.reduce_scatter",
        line="self._sums[number] = total",
        instead="self._sums[number] = _Sum({}, total.parts, total.present, total.counts)",
        keeps="the buffers of a sum serve compute again while ranks add to them",
        scenario="shards_with_late_lanes",
    ),
    Mutation(
        where="runtime/protrain_runtime/engine/moves.py::Moves.start",
        line="work, self._held[number] = spills.spill(move, chunk)",
        instead="work, _ = spills.spill(move, chunk)",
        keeps="a rank's part of a sum is freed under the copy from it",
        scenario="from_host_with_late_lanes",
    ),
    Mutation(
        where="runtime/protrain_runtime/ranks/group.py::gather_shards",
        line="_gather(whole, own, group=group)",
        instead="_gather(whole, own, group=group, async_op=True)",
        keeps="an all-gather counts as ended while shards are on their way",
        scenario="shards_with_late_lanes",
    ),
    Mutation(
        where="runtime/protrain_runtime/ranks/group.py::sum_shards",
        line="_reduce_scatter(mine, whole, group=group)",
        instead="_reduce_scatter(mine, whole, group=group, async_op=True)",
        keeps="a rank takes its part of a sum before all have added to it",
        scenario="shards_with_late_lanes",
    ),
    Mutation(
        where="runtime/protrain_runtime/ranks/group.py::Ranks.reduce_scatter",
        line="dist.all_reduce(_lent(mine), group=self._replicas)",
        instead="dist.all_reduce(_lent(mine), group=self._replicas, async_op=True)",
        keeps="the same, where replicas add to it",
        scenario="replicas_with_late_lanes",
    ),
    Mutation(
        where="runtime/protrain_runtime/ranks/group.py::Ranks.all_reduce",
        line="dist.all_reduce(_lent(values), group=self._all)",
        instead="dist.all_reduce(_lent(values), group=self._all, async_op=True)",
        keeps="a sum counts as ended while ranks add to it",
        scenario="persistent_with_late_lanes",
    ),
    Mutation(
        where="runtime/protrain_runtime/ranks/group.py::Ranks.sum_of_shards",
        line="dist.all_reduce(_lent(values), group=self._sharing)",
        instead="dist.all_reduce(_lent(values), group=self._sharing, async_op=True)",
        keeps="gradients are clipped by the norm of a part of them",
        scenario="clipped",
    ),
    Mutation(
        where="runtime/protrain_runtime/ranks/group.py::Ranks.broadcast",
        line="dist.broadcast(flat, src=self._members[source], group=self._all)",
        instead="dist.broadcast(flat, src=self._members[0], group=self._all, async_op=True)",
        keeps="a forward begins before the first rank's running statistics are there",
        scenario="running_statistics",
    ),
)

MIXTURES = (
    "tests/runtime/test_compressed.py"
    "::test_gradients_of_mixtures_are_those_of_plain_pytorch_but_for_what_is_packed"
)
GUARDS: tuple[Mutation, ...] = (
    Mutation(
        where="runtime/protrain_runtime/engine/moves.py::Moves._piece",
        line="dict(chunk.offloaded_gradients)",
        instead="chunk.offloaded_gradients",
        keeps="gradients of an update that runs on are dropped when its step ends",
        test=(
            "tests/runtime/test_running_on.py"
            "::test_updates_run_on_and_training_is_bitwise[in backward-late-emulated]"
        ),
    ),
    Mutation(
        where="runtime/protrain_runtime/engine/moves.py::Moves._read_states",
        line="dict(piece.waiting)",
        instead="chunk.offloaded_gradients",
        keeps="an update ahead of the norm counts as made of the gradients that are left",
        test=(
            "tests/runtime/test_steps.py"
            "::test_a_gradient_that_its_owner_removed_or_replaced_counts_as_such[ahead-removed-cpu]"
        ),
    ),
    Mutation(
        where="runtime/protrain_runtime/engine/engine.py::Engine.begin",
        line="self.end_updates()  # the first of all leave",
        instead="pass  # the first of all leave",
        keeps="staging buffers are missing in the second step, whose updates read states",
        test=(
            "tests/runtime/test_running_on.py"
            "::test_updates_run_on_and_training_is_bitwise[in backward-late-cpu]"
        ),
    ),
    Mutation(
        where="runtime/protrain_runtime/engine/moves.py::GradientMoves.spill",
        line="stored.factors = []",
        keeps="what scaled a sum of micro-batches is applied once more when it is read",
        test=(
            "tests/runtime/test_steps.py"
            "::test_sums_that_are_clipped_between_micro_batches_are_those_of_plain_pytorch[emulated]"
        ),
    ),
    Mutation(
        where="runtime/protrain_runtime/activations/saved_tensors.py::SwappedStorage.leave",
        line="self._check()",
        keeps="a write to what is on its way out is lost, or half of it",
        test=(
            "tests/runtime/test_habits.py"
            "::test_a_write_to_a_saved_activation_is_refused_as_in_plain_pytorch[leaves]"
        ),
    ),
    Mutation(
        where="runtime/protrain_runtime/activations/saved_tensors.py::SwappedStorage.bytes",
        line="self._check()",
        keeps="backward reads what was written after it was saved",
        test=(
            "tests/runtime/test_habits.py"
            "::test_a_write_to_a_saved_activation_is_refused_as_in_plain_pytorch[stays]"
        ),
    ),
    Mutation(
        where="runtime/protrain_runtime/engine/engine.py::Engine._end_slot",
        line="chunk.refuse_written(forward=slot.forward)",
        keeps="what a pass writes to a parameter is lost when that leaves the device",
        test=(
            "tests/runtime/test_habits.py"
            "::test_a_pass_that_writes_to_a_parameter_that_leaves_is_refused[backward]"
        ),
    ),
    Mutation(
        where="protrain_plan/planning/search/pacing.py::Pacer.walk",
        line="paced(within_s)",
        instead="paced(inf)",
        keeps="a walk goes on that cannot be as fast as what there is",
        test="tests/planning/test_pacing.py::test_a_walk_that_is_cut_short_would_have_taken_longer",
    ),
    Mutation(
        where="runtime/protrain_runtime/activations/compressed.py::dequantized",
        line="mul_(scales)",
        instead="mul_(scales * 1.1)",
        keeps="gradients of what is packed as int8 are too large",
        test=MIXTURES,
    ),
    Mutation(
        where="runtime/protrain_runtime/activations/compressed.py::rebuilt",
        line="result.mul_(1 / (rank * _magnitude(rank) ** 2))",
        instead="result",
        keeps="gradients of what is projected have another size",
        test=MIXTURES,
    ),
)

ALL = (
    *(replace(one, test=ON_A_DEVICE_TEST.format(one.scenario)) for one in ON_A_DEVICE),
    *(replace(one, test=AMONG_RANKS_TEST) for one in AMONG_RANKS),
    *GUARDS,
)


# --- the command ----------------------------------------------------------------------------------


def asked(tree: Path, *tests: str) -> subprocess.CompletedProcess[str]:
    """How pytest ends that runs these tests in a copy of the tree."""
    chosen = ("-q", "-x", "-p", "no:cacheprovider", "-m", BY_DEFAULT, *tests)
    path = os.pathsep.join(map(str, (tree, tree / "runtime")))
    return subprocess.run(
        [sys.executable, "-m", "pytest", *chosen],
        cwd=tree,
        env=os.environ | {"PYTHONPATH": path, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )


def verdict(mutation: Mutation, tree: Path) -> str:
    """The end of its test in a copy of the tree that has the mutation."""
    file = tree / mutation.file.relative_to(ROOT)
    text = file.read_text(encoding="utf-8")
    file.write_text(mutated_text(mutation, text), encoding="utf-8")
    try:
        ended = asked(tree, mutation.test)
    except subprocess.TimeoutExpired:
        return "killed (it waits)"
    finally:
        file.write_text(text, encoding="utf-8")
    if ended.returncode == 0:
        return "SURVIVED"
    if ended.returncode == 1:
        return "killed"
    return f"killed (exit code {ended.returncode})" if ended.returncode < 0 else ended.stdout


def main() -> int:
    """Say of every mutation whether its test fails; 1 if one survives."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", metavar="WORD", help="those that have one of the words")
    words = parser.parse_args().words
    chosen = [one for one in ALL if not words or any(word in repr(one) for word in words)]
    survived = 0
    with TemporaryDirectory() as folder:
        tree = Path(folder, "tree")
        shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*NOT_COPIED))
        without = asked(tree, *{one.test for one in chosen})
        if without.returncode:
            sys.exit(f"a test fails without any mutation:\n{without.stdout}")
        for one in chosen:
            start = time.monotonic()
            found = verdict(one, tree)
            survived += not found.startswith("killed")
            seconds = round(time.monotonic() - start)
            print(f"{found}, {seconds} s: {one.place}: {one.change}", flush=True)
    print(f"{len(chosen) - survived} of {len(chosen)} mutations were killed")
    return min(survived, 1)


if __name__ == "__main__":
    sys.exit(main())

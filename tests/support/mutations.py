"""Mutations of the product, and for each of them the test of every run that fails under it.

    python -m tests.support.mutations [WORD ...]

applies every mutation, or those with one of the words in them, to a copy of the tree, runs its test
there, and says which were killed.
"""

import argparse
import ast
import importlib
import os
import re
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


def read(table: str) -> tuple[Mutation, ...]:
    """A table of mutations: a place, and for each of them there what happens under it (`=`).

    Then come the line (`-`), what stands in its place (`+`), and the scenario, or the test (`@`).
    """
    found: list[Mutation] = []
    for part in re.split(r"^(?=[\w=])", table.strip(), flags=re.MULTILINE)[1:]:
        first, *others = part.splitlines()
        if not first.startswith("= "):
            where = first
            continue
        lines, instead, at = ([o[2:] for o in others if o[0] == mark] for mark in "-+@")
        shows = "".join(at)
        found.append(
            Mutation(
                where=where,
                line="\n".join(lines),
                instead="\n".join(instead or ["pass"]),
                keeps=first[2:],
                test=shows if "::" in shows else "",
                scenario="" if "::" in shows else shows,
            )
        )
    return tuple(found)


ON_A_DEVICE_TEST = "tests/runtime/test_ordering.py::test_the_scenario_holds[{}]"
AMONG_RANKS_TEST = "tests/ranks/test_ordering_ranks.py::test_scenarios_hold"

ON_A_DEVICE = read("""
runtime/protrain_runtime/devices/lanes.py::StreamTicket.wait
= compute reads a buffer before the copy to it has ended
- devices.current_stream(self.device).wait_event(self._end())
+ self._end()
@ from_host_with_late_lanes
runtime/protrain_runtime/devices/lanes.py::ThreadTicket.wait
= compute reads a buffer that is being read from disk
- self.synchronize()
@ from_disk_with_late_threads
runtime/protrain_runtime/devices/lanes.py::ThreadTicket.synchronize
= states are updated while they are being read from disk
- not self._ended
+ False
@ from_disk_with_late_threads
runtime/protrain_runtime/devices/lanes.py::StreamTicket._end
= work is waited for that is not on its stream yet
- self.submitted.synchronize()
@ the_launching_thread_goes_on
runtime/protrain_runtime/devices/lanes.py::StreamTicket.synchronize
= the host's optimizer reads a gradient before it has arrived
- while not event.query():
+ while False:
@ from_host_with_late_lanes
runtime/protrain_runtime/devices/lanes.py::StreamLane._issue
= a copy takes what compute has not written yet, or overwrites what it still reads
- self._stream.wait_event(item.fence)
@ from_host_with_late_compute
= a gradient arrives where the one before it is still being added
- other.wait()
@ micro_batches_with_late_threads
runtime/protrain_runtime/devices/lanes.py::StreamLane.submit
= work overtakes what was submitted to its lane before it
- self._waiting is None and all(
+ all(
@ a_stream_keeps_its_order
= the thread that launches compute waits for a thread of a lane
- all(other.issued() for other in after)
+ True
@ the_launching_thread_goes_on
runtime/protrain_runtime/devices/lanes.py::StreamLane.close
= a lane that is closed still works on what is freed then
- self._stream.synchronize()
@ a_closed_lane_has_ended
runtime/protrain_runtime/devices/lanes.py::ThreadLane._run
= the host's optimizer starts before the gradients are there
- other.synchronize()
@ from_host_with_late_lanes
runtime/protrain_runtime/devices/lanes.py::ThreadLane._do
= what goes to disk is taken before compute has written it
- self._stream.wait_event(item.fence)
@ from_disk_on_another_stream_with_late_streams
= work counts as ended while its copies are on their way
-     self._stream.synchronize()
+     pass
@ a_thread_ends_with_its_stream
runtime/protrain_runtime/engine/engine.py::Engine._begin_slot
= a slot computes before what it reads is back
- self._end(number)
@ from_host_with_late_lanes
= the device holds what a slot's bytes do not count any more
- self._end(earlier)
@ peaks_with_late_lanes
runtime/protrain_runtime/engine/engine.py::Engine._end
= memory is freed, and serves compute again, under a copy from it
-     self._tickets[number].wait()
+     pass
@ from_host_with_late_lanes
runtime/protrain_runtime/engine/engine.py::Engine._end_moves
= the next step reads parameters that are being updated
- self._tickets[number].synchronize()
@ from_host_with_late_lanes
runtime/protrain_runtime/engine/engine.py::Engine._give_up
= a forward that was cut short frees what its copies still use
- end.synchronize()
@ cut_short
runtime/protrain_runtime/engine/engine.py::Engine._await_fetches
= an evaluation computes with a chunk that is on its way
- self._tickets[number].wait()
@ evaluated_between
runtime/protrain_runtime/engine/engine.py::Engine._submit
= an update starts before its gradients, or its states, are there
- for other in move.after
+ for other in move.after if move.kind != "update"
@ from_host_with_late_lanes
= states are read to a staging buffer that is not written out yet
- for other in move.after
+ for other in move.after if move.kind != "read states"
@ from_disk_with_late_threads
= states are written out before they are updated
- for other in move.after
+ for other in move.after if move.kind != "write states"
@ from_disk_with_late_threads
= gradients are added before they have arrived
- for other in move.after
+ for other in move.after if move.kind != "add gradients"
@ micro_batches_with_late_lanes
= gradients arrive where those of another chunk are still being added
- for other in move.after
+ for other in move.after if move.kind != "spill gradients"
@ micro_batches_with_late_threads
= the next step fetches parameters that are being updated
- after += [self._carried[other] for other in awaited if other in self._carried]
@ overlapping_with_late_threads
runtime/protrain_runtime/engine/engine.py::Engine.__init__
= the next step fetches parameters that an update ahead of the norm still writes
- self._awaited[unit].add(number)
@ ahead_of_the_norm_with_late_lanes
runtime/protrain_runtime/engine/engine.py::Engine._end_carried
= what is read between steps is being updated
-         wait()
+         pass
@ overlapping_with_late_threads
runtime/protrain_runtime/engine/engine.py::Engine._begin_slot
= a slot's memory is that of a chunk whose update still writes it out
- self._end_carried(earlier, self._carried[earlier].wait)
+ self._end_carried(earlier, lambda: None)
@ on_the_device_with_late_lanes
runtime/protrain_runtime/contract/program/compiling.py::_Compiler._add_updates
= gradients are read with the states before they are in host memory
- waits = gradients  # which it reads, too
@ micro_batches_on_the_device_with_late_threads
= gradients are copied for an update ahead of the norm before they are in host memory
- waits = gradients  # which it reads, too
@ ahead_of_the_norm_from_disk_with_late_lanes
runtime/protrain_runtime/engine/engine.py::Engine._begin_slot
= what a step holds is freed when a move of the step before it has ended
- sorted(self._carried) if index == self._num_units else ()
+ ()
@ clipped_on_the_device_with_late_lanes
runtime/protrain_runtime/engine/moves.py::Moves.start
= a factor that clips is freed before the update has multiplied by it
- self._working[number] = piece, piece.waiting
@ clipped_on_the_device_with_late_lanes
= a gradient is freed under the copy from it
- work, self._held[number] = spills.spill(move, chunk)
+ work, _ = spills.spill(move, chunk)
@ from_host_with_late_lanes
runtime/protrain_runtime/engine/step_times.py::StepTimes.end
= a step counts as ended, and is read off events, while the device is in it
- devices.synchronize(self._device)
@ recorded
runtime/protrain_runtime/devices/stores.py::HostStore.write
= loaded parameters are read before they have arrived in host memory
- self.view(offset, source.numel()).copy_(source)
+ self.view(offset, source.numel()).copy_(source, non_blocking=True)
@ loaded_and_read
= an evaluation that runs still computes with what is loaded after it
- devices.synchronize(self.backend.device)
@ evaluated_then_loaded
runtime/protrain_runtime/devices/stores.py::HostStore.close
= host memory is unpinned under a copy
- devices.synchronize(self.backend.device)
@ evaluated_then_dropped
runtime/protrain_runtime/devices/stores.py::_Passage.down
= a part goes to the file before the device has written it
-             pending[2].synchronize()
+             pass
@ through_the_passage
= the last part goes to the file before the device has written it
-
-         pending[2].synchronize()
+
@ through_the_passage
runtime/protrain_runtime/devices/stores.py::_Passage.up
= a part is read over one that the device still copies
- gone[-2].synchronize()
@ through_the_passage
= the next read overwrites what the device still copies
- event.synchronize()
@ through_the_passage
runtime/protrain_runtime/engine/moves.py::Moves.start
= what nobody waits for any more is freed under the copy to it
- self._arriving[number] = storages
+ pass
@ aside_with_late_lanes
runtime/protrain_runtime/devices/lanes.py::ThreadLane.submit
= a thread's copies are ordered behind the default stream alone
- fence = None if self._device is None else devices.record_event(self._device)
+ fence = None
@ from_disk_on_another_stream_with_late_streams
""")

AMONG_RANKS = read("""
runtime/protrain_runtime/engine/engine.py::Engine._submit
= other ranks get a shard that has not come from its host yet
- for other in move.after
+ for other in move.after if move.kind != "all-gather"
@ from_host_with_late_lanes
= a sum leaves for the host before all ranks have added to it
- for other in move.after
+ for other in move.after if move.kind != "spill gradients"
@ from_host_with_late_lanes
runtime/protrain_runtime/engine/engine.py::Engine._end
= the optimizer steps with gradients that are being added up
-     self._tickets[number].wait()
+     self._program.moves[number].lane == COLLECT or self._tickets[number].wait()
@ updated_in_backward_with_late_lanes
runtime/protrain_runtime/engine/engine.py::Engine._end_moves
= the same, where nothing is updated in backward
- self._tickets[number].wait()
@ persistent_with_late_lanes
runtime/protrain_runtime/engine/engine.py::Engine._begin_slot
= a slot computes before other ranks' shards are there
- self._end(number)
+ self._program.moves[number].lane == COLLECT or self._end(number)
@ shards_with_late_lanes
runtime/protrain_runtime/engine/engine.py::Engine._collect
= an evaluation computes before other ranks' shards are there
- self.lanes[COLLECT].submit(what, work, ()).wait()
+ self.lanes[COLLECT].submit(what, work, ())
@ evaluated
= a forward begins with running statistics of its own
- self.lanes[COLLECT].submit(what, work, ()).wait()
+ self.lanes[COLLECT].submit(what, work, ())
@ running_statistics
runtime/protrain_runtime/devices/lanes.py::StreamLane._issue
= gradients are added up before backward has computed them
- self._stream.wait_event(item.fence)
+ self.name == "collect" or self._stream.wait_event(item.fence)
@ persistent_with_late_compute
= other ranks get a shard that the optimizer has not updated yet
- self._stream.wait_event(item.fence)
+ self.name == "collect" or self._stream.wait_event(item.fence)
@ shards_with_late_compute
runtime/protrain_runtime/engine/reductions.py::Reductions.reduce_scatter
= the buffers of a sum serve compute again while ranks add to them
- self._sums[number] = total
+ self._sums[number] = _Sum({}, total.parts, total.present, total.counts)
@ shards_with_late_lanes
runtime/protrain_runtime/engine/moves.py::Moves.start
= a rank's part of a sum is freed under the copy from it
- work, self._held[number] = spills.spill(move, chunk)
+ work, _ = spills.spill(move, chunk)
@ from_host_with_late_lanes
runtime/protrain_runtime/ranks/group.py::gather_shards
= an all-gather counts as ended while shards are on their way
- _gather(whole, own, group=group)
+ _gather(whole, own, group=group, async_op=True)
@ shards_with_late_lanes
runtime/protrain_runtime/ranks/group.py::sum_shards
= a rank takes its part of a sum before all have added to it
- _reduce_scatter(mine, whole, group=group)
+ _reduce_scatter(mine, whole, group=group, async_op=True)
@ shards_with_late_lanes
runtime/protrain_runtime/ranks/group.py::Ranks.reduce_scatter
= the same, where replicas add to it
- dist.all_reduce(_lent(mine), group=self._replicas)
+ dist.all_reduce(_lent(mine), group=self._replicas, async_op=True)
@ replicas_with_late_lanes
runtime/protrain_runtime/ranks/group.py::Ranks.all_reduce
= a sum counts as ended while ranks add to it
- dist.all_reduce(_lent(values), group=self._all)
+ dist.all_reduce(_lent(values), group=self._all, async_op=True)
@ persistent_with_late_lanes
runtime/protrain_runtime/ranks/group.py::Ranks.sum_of_shards
= gradients are clipped by the norm of a part of them
- dist.all_reduce(_lent(values), group=self._sharing)
+ dist.all_reduce(_lent(values), group=self._sharing, async_op=True)
@ clipped
runtime/protrain_runtime/ranks/group.py::Ranks.broadcast
= a forward begins before the first rank's running statistics are there
- dist.broadcast(flat, src=self._members[source], group=self._all)
+ dist.broadcast(flat, src=self._members[0], group=self._all, async_op=True)
@ running_statistics
""")

GUARDS = read("""
runtime/protrain_runtime/engine/moves.py::Moves._piece
= gradients of an update that runs on are dropped when its step ends
- dict(chunk.offloaded_gradients)
+ chunk.offloaded_gradients
@ tests/runtime/test_running_on.py
@ ::test_updates_run_on_and_training_is_bitwise[in backward-late-emulated]
runtime/protrain_runtime/engine/moves.py::Moves._read_states
= an update ahead of the norm counts as made of the gradients that are left
- dict(piece.waiting)
+ chunk.offloaded_gradients
@ tests/runtime/test_steps.py
@ ::test_a_gradient_that_its_owner_removed_or_replaced_counts_as_such[ahead-removed-cpu]
runtime/protrain_runtime/engine/engine.py::Engine.begin
= staging buffers are missing in the second step, whose updates read states
- self.end_updates()  # the first of all leave
+ pass  # the first of all leave
@ tests/runtime/test_running_on.py
@ ::test_updates_run_on_and_training_is_bitwise[in backward-late-cpu]
runtime/protrain_runtime/engine/moves.py::GradientMoves.spill
= what scaled a sum of micro-batches is applied once more when it is read
- stored.factors = []
@ tests/runtime/test_steps.py
@ ::test_sums_that_are_clipped_between_micro_batches_are_those_of_plain_pytorch[emulated]
runtime/protrain_runtime/activations/saved_tensors.py::SwappedStorage.leave
= a write to what is on its way out is lost, or half of it
- self._check()
@ tests/runtime/test_habits.py
@ ::test_a_write_to_a_saved_activation_is_refused_as_in_plain_pytorch[leaves]
runtime/protrain_runtime/activations/saved_tensors.py::SwappedStorage.bytes
= backward reads what was written after it was saved
- self._check()
@ tests/runtime/test_habits.py
@ ::test_a_write_to_a_saved_activation_is_refused_as_in_plain_pytorch[stays]
runtime/protrain_runtime/engine/engine.py::Engine._end_slot
= what a pass writes to a parameter is lost when that leaves the device
- chunk.refuse_written(forward=slot.forward)
@ tests/runtime/test_habits.py
@ ::test_a_pass_that_writes_to_a_parameter_that_leaves_is_refused[backward]
protrain_plan/planning/search/pacing.py::Pacer.walk
= a walk goes on that cannot be as fast as what there is
- paced(within_s)
+ paced(inf)
@ tests/planning/test_pacing.py
@ ::test_a_walk_that_is_cut_short_would_have_taken_longer
runtime/protrain_runtime/activations/compressed.py::dequantized
= gradients of what is packed as int8 are too large
- mul_(scales)
+ mul_(scales * 1.1)
@ tests/runtime/test_compressed.py
@ ::test_gradients_of_mixtures_are_those_of_plain_pytorch_but_for_what_is_packed
runtime/protrain_runtime/activations/compressed.py::rebuilt
= gradients of what is projected have another size
- result.mul_(1 / (rank * _magnitude(rank) ** 2))
+ result
@ tests/runtime/test_compressed.py
@ ::test_gradients_of_mixtures_are_those_of_plain_pytorch_but_for_what_is_packed
""")

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

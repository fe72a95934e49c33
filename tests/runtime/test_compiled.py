"""Compiled blocks: profiled, and run under plans with the bits of the compiled plain model."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.utils import counters

from protrain_plan.hardware.catalogue import load_hardware
from protrain_plan.models.sources import load_source
from protrain_plan.profiling.compiling import compilation_since, compiled_so_far
from protrain_plan.profiling.measured import compiler_bytes
from protrain_plan.profiling.memory.unit_bytes import analyze_units, measure_bytes
from protrain_plan.profiling.structure.discovery import discover
from protrain_runtime.activations.compiled import compile_each
from protrain_runtime.activations.forms import wrap_forward
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records import (
    dumps_plan,
    dumps_profile,
    fingerprint,
    loads_plan,
    loads_profile,
)
from protrain_runtime.contract.records.forms import FORMS, opt_ins_of
from protrain_runtime.contract.records.plan import KEEP, RECOMPUTE, Activations, Placement, Plan
from protrain_runtime.contract.records.profile import Compilation, Compile, Profile, Unit
from protrain_runtime.devices.memory_meter import MemoryMeter
from protrain_runtime.preparation import compile_blocks
from tests.support import forked
from tests.support.commands import printed, protrain
from tests.support.estimates import estimate, measure
from tests.support.hostile_models import Chain
from tests.support.messages import Speaker
from tests.support.plan_settings import with_settings
from tests.support.planning_cases import cpu, decoder
from tests.support.runtime_cases import (
    ADAMW,
    CATALOGUE,
    Subject,
    assert_bitwise,
    attached,
    batch,
    build,
    decided,
    described,
)
from tests.support.scenario import Loop, Run, Scenario, refusal, restored
from tests.support.thinning import thinned
from tests.support.training_rows import workload

BACKENDS = [
    "aot_eager",
    pytest.param(
        "inductor",
        marks=[
            pytest.mark.slow,
            pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler"),
        ],
    ),
]
DECISIONS: dict[str, Any] = {
    "keep": KEEP,
    "recompute": RECOMPUTE,
    "swap": Activations(tier="disk"),
    "swap-input": Activations(form="full", tier="disk"),
}


def compile_layers(model: nn.Module, *, backend: str, wrapped: bool = False) -> None:
    """In place or as modules around them."""
    torch.compiler.reset()
    layers = model.get_submodule("model.layers")
    assert isinstance(layers, nn.ModuleList)
    for index, layer in enumerate(layers):
        if wrapped:
            layers[index] = torch.compile(layer, backend=backend)  # type: ignore[assignment]
        else:
            layer.compile(backend=backend)


def compiled(backend: str = "aot_eager", *, wrapped: bool = False) -> Subject:
    change = partial(compile_layers, backend=backend, wrapped=wrapped)
    return replace(CATALOGUE["llama"], change=change)


BLOCKS = {"workload": workload({"precision": "float32", "compiled": "blocks"})}


def tried(
    activations: Activations = RECOMPUTE,
    *,
    model: str | Subject = "llama",
    blocks: bool = True,
    options: dict[str, Any] | None = None,
    **settings: Any,
) -> Scenario:
    """Two steps of a plan for compiled blocks."""
    return Scenario(
        model=model,
        units=decided(described("llama"), activations, Placement(tier="disk")),
        settings={**(BLOCKS if blocks else {}), **settings},
        script=Loop(num_steps=2),
        options=options or {},
    )


def compiled_here(model: nn.Module) -> None:
    """As `prepare` compiles it."""
    compile_blocks(model, tried().planned_for(model))


def refused(asked: Scenario, model: nn.Module | None = None) -> ProtrainError:
    given = asked.subject.build() if model is None else model
    found: ProtrainError = refusal(partial(asked.prepared, given, None), ProtrainError)
    return found


@pytest.mark.nightly("keep-aot_eager", "swap-aot_eager")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("decision", thinned(tuple(DECISIONS)))
def test_plans_of_compiled_blocks_compute_the_bits_of_the_compiled_model(
    decision: str, backend: str, tmp_path: Path
) -> None:
    tried(DECISIONS[decision], model=compiled(backend)).assert_like_plain(tmp_path, restored)


@pytest.mark.nightly
@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("form", ["full", "fused"])
def test_what_is_recomputed_in_the_graph_is_one_run_of_compiled_code(
    form: str, tmp_path: Path
) -> None:
    asked = tried(Activations(form=form), exact=form == "full", allowed=("rounding",))
    expected = replace(asked, model=replace(asked.subject, change=compiled_here)).plain()
    run = asked.start(tmp_path)
    with torch.profiler.profile() as recorded:
        found = asked.played(run)
    runs = sum(event.name == "CompiledFunction" for event in recorded.events())
    assert runs == 2 * 4 * (2 if form == "full" else 1)  # steps, blocks, and runs in each
    assert_bitwise(found, expected)  # this compiler fuses nothing
    run.model.eval()
    run.look(0)


@pytest.mark.parametrize("whole", [pytest.param(True, marks=pytest.mark.slow), False])
def test_mlps_of_compiled_code_are_not_tiled(whole: bool) -> None:
    """Such a block is recomputed as in full: compiled code has forwards of its own."""

    def found(form: str) -> dict[str, torch.Tensor]:
        torch.compiler.reset()
        model = build("llama")
        layers = model.get_submodule("model.layers").children()
        for layer in list(layers)[:2]:
            (layer if whole else layer.get_submodule("mlp")).compile(backend="aot_eager")
            wrap_forward(layer, form)
        Run(CATALOGUE["llama"], model, ADAMW(model.parameters())).loss(0).backward()
        return {n: p.grad for n, p in model.named_parameters() if p.grad is not None}

    full, tiled = found("full"), found("tiled")
    assert all(torch.equal(full[key], tiled[key]) for key in full)


def forms(model: nn.Module) -> list[tuple[str, str, tuple[str, ...]]]:
    given = batch("llama", 0)
    units = measure_bytes(
        model, given, analyze_units(model, given, discover(model, given)), MemoryMeter
    )[0]
    return [(u.kind, u.name, tuple(cost.form for cost in u.forms)) for u in units]


@pytest.mark.slow  # every form of activations compiles anew
@pytest.mark.parametrize("wrapped", [False, True])
def test_a_profile_of_compiled_blocks_has_the_units_of_the_plain_model(wrapped: bool) -> None:
    model = compiled(wrapped=wrapped).build()
    before = attached(model)
    found = forms(model)
    assert [unit[:2] for unit in found] == [
        ("part", "model.embed_tokens"),
        *(("block", f"model.layers.{number}") for number in range(4)),
        ("part", "model.norm"),
    ]
    for _, _, names in found[1:-1]:
        assert (names[0], names[-1]) == ("keep", "full")
    assert attached(model) == before


def test_a_model_that_is_compiled_as_a_whole_is_refused(assert_says: Speaker) -> None:
    asked = tried(blocks=False)
    plan = asked.planned_for(build("llama"))
    inside = build("llama")
    inside.get_submodule("model").compile(backend="eager")
    wrapped: Any = torch.compile(build("llama"), backend="eager")
    for model in (inside, wrapped):
        assert_says(refused(replace(asked, plan=lambda _: plan), model))


# --- the flag: profile, plan and prepare --------------------------------------------------------


@pytest.fixture
def quick_compiler() -> Iterator[None]:
    """Compile with a backend that needs no C++ compiler where no other is named."""
    torch.compiler.reset()
    with torch.compiler.set_stance("default", force_backend="aot_eager"):
        yield


@pytest.mark.nightly
@pytest.mark.usefixtures("quick_compiler")
def test_prepare_compiles_equal_blocks_once_and_restore_takes_it_back(tmp_path: Path) -> None:
    asked = tried()
    expected = replace(asked, model=replace(asked.subject, change=compiled_here)).plain()
    torch.compiler.reset()
    counters.clear()
    run = asked.start(tmp_path)
    before_step = compiled_so_far()
    assert_bitwise(asked.played(run), expected)
    assert counters["stats"]["unique_graphs"] == 1  # of four blocks
    found = compilation_since(before_step)
    assert found is not None
    assert (found.num_graphs, found.cache) == (1, "none")  # Inductor alone has a cache
    assert found.seconds > 0
    assert compilation_since(compiled_so_far()) is None
    assert list(run.model.state_dict()) == list(build("llama").state_dict())
    restored(run)


@pytest.mark.nightly
@pytest.mark.usefixtures("quick_compiler")
def test_a_plain_copy_is_compiled_like_the_model(tmp_path: Path) -> None:
    run = tried(options={"check": "bitwise"}).start(tmp_path)
    counters.clear()
    run.step(0)
    assert counters["stats"]["unique_graphs"] == 1  # which both run


def compiling(path: str, backend: str) -> Scenario:
    change = partial(nn.Module.compile, backend=backend)
    subject = replace(CATALOGUE["llama"], change=lambda model: change(model.get_submodule(path)))
    return tried(model=subject)


WHOLE = compiling("", "eager")
PLAINLY = tried(model=compiled(), blocks=False)
FOLLOWED: dict[str, tuple[Scenario, Scenario]] = {
    "compiled as a whole: each block": (WHOLE, tried(model=compiled())),
    "compiled in a plan for plain ones: profile with --compile": (PLAINLY, tried(model=compiled())),
    "compiled in a plan for plain ones: not": (PLAINLY, tried(blocks=False)),
    "wrapped in a plan for plain ones: not": (
        tried(model=compiled(wrapped=True), blocks=False),
        tried(blocks=False),
    ),
    "some: all": (
        compiling("model.layers.2", "aot_eager"),
        tried(model=compiled()),
    ),
    "a copy of compiled blocks: prepare compiles": (
        tried(model=compiled(), options={"check": "bitwise"}),
        tried(options={"check": "bitwise"}),
    ),
}


@pytest.mark.nightly(but=("wrapped in a plan for plain ones: not", "some: all"))
@pytest.mark.usefixtures("quick_compiler")
@pytest.mark.parametrize("name", FOLLOWED)
def test_compiled_blocks_train_when_the_message_is_followed(
    name: str, tmp_path: Path, assert_says: Speaker
) -> None:
    asked, followed = FOLLOWED[name]
    if asked is WHOLE:  # which has other parameters' names
        plan = tried(blocks=False).planned_for(build("llama"))
        asked = replace(asked, plan=lambda _: plan)
    model = asked.subject.build()
    before = attached(model)
    assert_says(refused(asked, model))
    assert attached(model) == before
    run = followed.start(tmp_path)
    found = followed.played(run)
    torch.compiler.reset()
    compiles = followed.planned_for(build("llama")).workload.compile and not followed.subject.change
    subject = replace(followed.subject, change=compiled_here) if compiles else followed.subject
    assert_bitwise(found, replace(followed, model=subject, options={}).plain())


def edited(form: str) -> Plan:
    exactness, allowed = FORMS[form].exactness, opt_ins_of([form])
    exact = exactness == "bitwise"
    asked = tried(Activations(form=form), exact=exact, exactness=exactness, allowed=allowed)
    return asked.planned_for(build("llama"))


@pytest.mark.parametrize(
    "form", thinned([name for name, form in FORMS.items() if form.looks_inside])
)
def test_a_plan_edited_to_a_form_that_looks_inside_compiled_blocks_is_refused(form: str) -> None:
    plan = edited(form)
    errors = [
        refused(replace(tried(), plan=lambda _: plan)),
        # As `prepare`, `run` and `check` read a file.
        refusal(lambda: loads_plan(dumps_plan(plan)), ProtrainError),
    ]
    for error in errors:
        assert error.key == "units[1].activations"
        assert error.fix == "plan again: protrain plan"
        assert "goes by the operators inside a block" in error.message
    plain = with_settings(plan, compile="")
    assert loads_plan(dumps_plan(plain)) == plain


def test_a_plan_for_plain_blocks_edited_to_a_form_of_a_graph_is_refused() -> None:
    compiling = edited("fused")
    plan = with_settings(compiling, compile="")
    with pytest.raises(ProtrainError, match="these blocks are not compiled"):
        loads_plan(dumps_plan(plan))
    assert "these blocks are not compiled" in str(refused(replace(tried(), plan=lambda _: plan)))
    assert loads_plan(dumps_plan(compiling)) == compiling


def test_a_profile_of_compiled_blocks_with_a_form_that_looks_inside_is_refused(
    assert_says: Speaker,
) -> None:
    profile = decoder(cpu(), blocks=2)
    block = profile.units[1]
    forms = (*block.forms, replace(block.forms[0], form="lite"))
    edited = replace(
        profile, units=(profile.units[0], replace(block, forms=forms), *profile.units[2:])
    )
    assert loads_profile(dumps_profile(edited)) == edited
    assert_says.refused(
        loads_profile,
        dumps_profile(replace(edited, workload=replace(profile.workload, compile="blocks"))),
    )


PROFILE = ("profile", "tiny-llama", "--batch-size", 2, "--seq-len", 64, "--steps", 1, "--compile")


def cache_in(folder: Path) -> dict[str, str]:
    """PyTorch's cache of compiled graphs, for a process."""
    return {"TORCHINDUCTOR_CACHE_DIR": str(folder)}


@pytest.fixture(scope="module")
def cold(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """A folder with a profile and the cache that it has filled; and what was printed."""
    if shutil.which("g++") is None:
        pytest.skip("needs a C++ compiler")
    folder = tmp_path_factory.mktemp("cold")
    return folder, printed(
        protrain(*PROFILE, "--json", folder=folder, **cache_in(folder / "cache"))
    )


@pytest.mark.slow  # a compiler, twice
def test_a_run_says_whether_pytorchs_cache_had_its_graphs(
    cold: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    folder, profiled = cold
    assert profiled["compilation"]["cache"] == "cold"
    planned = ("plan", folder / "profile.yaml", "--json")
    printed(forked.protrain(*planned, folder=tmp_path))
    words = ("run", "plan.yaml", "--verify", "--json")
    warm = printed(protrain(*words, folder=tmp_path, **cache_in(folder / "cache")))
    assert warm["compilation"]["cache"] == "warm"
    assert warm["compilation"]["num_graphs"] > 0
    assert (warm["verified"], warm["compile"]) == (True, "blocks")
    assert warm["compilation"]["seconds"] < profiled["compilation"]["seconds"]


@pytest.mark.slow  # a compiler, twice
def test_a_profile_that_found_graphs_in_a_cache_promises_what_a_run_without_them_holds(
    cold: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    profiled = printed(protrain(*PROFILE, "--json", folder=tmp_path, **cache_in(cold[0] / "cache")))
    assert profiled["compilation"]["cache"] == "warm"
    printed(forked.protrain("plan", "profile.yaml", "--json", folder=tmp_path))
    ran = printed(
        protrain("run", "plan.yaml", "--json", folder=tmp_path, **cache_in(tmp_path / "other"))
    )
    assert ran["compilation"]["cache"] == "cold"
    assert ran["measured_peak_bytes"]["context"] <= ran["predicted_peak_bytes"]["context"]


def test_a_profile_that_found_graphs_in_a_cache_counts_the_compiler_that_makes_them() -> None:
    cold = Compilation(num_graphs=1, seconds=1.0, cache="cold")
    none = replace(cold, cache="none")
    assert [compiler_bytes(found) for found in (None, none, cold)] == [0, 0, 0]
    warm, partly = (replace(cold, cache=found) for found in ("warm", "partly"))
    assert 0 < compiler_bytes(warm) == compiler_bytes(partly)
    assert compiler_bytes(replace(warm, num_graphs=2)) > compiler_bytes(warm)


class Breaking(nn.Module):
    """A block that looks at a value in the middle."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(8, 8)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.inner(hidden)
        if hidden.sum().item() > 0:  # HERE
            return hidden
        return 2 * hidden


def breaking() -> tuple[nn.Module, list[dict[str, object]]]:
    """A factory: its batches are features [2, 8]."""
    return Chain(Breaking(), Breaking(), Breaking()), [{"hidden": torch.ones(2, 8)}]


@pytest.mark.nightly
def test_a_graph_break_is_refused_with_its_place(tmp_path: Path) -> None:
    lines = Path(__file__).read_text(encoding="utf-8").splitlines()
    line = next(number for number, text in enumerate(lines, 1) if text.endswith("# HERE"))
    error = refusal(partial(profiled, "breaking", tmp_path, compile="blocks"), ProtrainError)
    assert error.source is not None
    assert (Path(error.source).resolve(), error.line) == (Path(__file__), line)
    assert error.message.startswith("the block layers.0 cannot be compiled as one graph: ")
    assert error.fix == "change that line, or profile without --compile and plan again"


@pytest.mark.skipif(
    not torch.__version__.startswith("2.13."),
    reason="PyTorch 2.14 compiles it, and 2.11 runs it uncompiled without a word",
)
@pytest.mark.parametrize(
    "block", [nn.Sequential(nn.Linear(8, 8), nn.ReLU()), nn.TransformerEncoderLayer(8, 2, 8)]
)
def test_a_block_of_pytorchs_own_code_alone_is_refused(
    block: nn.Module, assert_says: Speaker
) -> None:
    compile_each({"layers.0": block}, backend="aot_eager")
    assert_says.refused(block, torch.ones(2, 4, 8))


def steady() -> tuple[nn.Module, list[dict[str, object]]]:
    """A factory of blocks that can be compiled; its batches are features [64, 128]."""

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.out = nn.LayerNorm(128), nn.Linear(128, 128)

        def forward(self, hidden: torch.Tensor) -> torch.Tensor:
            found: torch.Tensor = hidden + self.out(torch.sin(self.norm(hidden)).exp())
            return found

    batch: dict[str, object] = {"hidden": torch.linspace(0, 1, 64 * 128).view(64, 128)}
    return Chain(*(Block() for _ in range(5))), [batch]


def steady_compiled() -> tuple[nn.Module, list[dict[str, object]]]:
    """The same, compiled by the script."""
    model, batches = steady()
    for block in model.get_submodule("layers").children():
        block.compile(backend="aot_eager")
    return model, batches


def profiled(name: str, folder: Path, *, compile: Compile, **options: Any) -> Profile:  # noqa: A002
    return measure(
        load_source(f"{__name__}:{name}"),
        batch_size=1,
        seq_len=1,
        dtype="float32",
        compile=compile,
        device="cpu",
        num_steps=1,
        spill_directory=folder,
        machine=load_hardware("cpu"),
        **options,
    )


@pytest.mark.slow  # two profiles
@pytest.mark.usefixtures("quick_compiler")
def test_a_profile_of_compiled_blocks_says_so_and_has_forms_that_look_at_none_inside(
    tmp_path: Path,
) -> None:
    allow = ("rounding", "int8-activations", "low-rank-activations")
    counters.clear()
    flagged = profiled("steady", tmp_path, compile="blocks", allow=allow)
    # The first block's input has no gradient. None is for hooks and forms of profiling, but for the
    # fused one, which the compiler recomputes.
    assert counters["stats"]["unique_graphs"] == 2 * 2
    by_script = profiled("steady_compiled", tmp_path, compile="", allow=allow)
    assert flagged.workload.compile == by_script.workload.compile == "blocks"
    inside = {name for name, form in FORMS.items() if form.looks_inside}
    for profile in (flagged, by_script):
        forms = {cost.form for unit in profile.units for cost in unit.forms}
        assert {"keep", "full", "int8"} <= forms
        assert not forms & inside
        assert ("fused" in forms) == (profile is flagged)  # a script's compiling is its own
    bytes_of = [
        [
            (cost.form, cost.kept_bytes, cost.backward_peak_bytes)
            for unit in profile.units
            for cost in unit.forms
            if cost.form != "fused"
        ]
        for profile in (flagged, by_script)
    ]
    assert bytes_of[0] == bytes_of[1]


@pytest.mark.slow  # two profiles
@pytest.mark.usefixtures("quick_compiler")
def test_compiled_blocks_measured_unit_by_unit_have_the_bytes_of_the_whole_model(
    tmp_path: Path,
) -> None:
    def bytes_of(*, unit_by_unit: bool) -> list[Unit]:
        found = profiled("steady", tmp_path, compile="blocks", unit_by_unit=unit_by_unit)
        assert found.compilation is not None
        assert found.compilation.num_graphs == 2  # the first block's input has no gradient
        torch.compiler.reset()
        return [
            replace(
                unit, forms=tuple(replace(cost, forward_s=0, backward_s=0) for cost in unit.forms)
            )
            for unit in found.units
        ]

    assert bytes_of(unit_by_unit=True) == bytes_of(unit_by_unit=False)


@pytest.mark.nightly
@pytest.mark.usefixtures("quick_compiler")
def test_an_estimate_of_compiled_blocks_is_that_of_plain_ones_with_fewer_forms() -> None:
    def estimated(name: str, compile: Compile) -> Profile:  # noqa: A002
        return estimate(
            load_source(f"{__name__}:{name}"),
            hardware=load_hardware("rtx-4090"),
            batch_size=1,
            seq_len=1,
            dtype="float32",
            compile=compile,
        )

    plain, asked = estimated("steady", ""), estimated("steady", "blocks")
    assert asked.workload == replace(plain.workload, compile="blocks")
    for before, now in zip(plain.units, asked.units, strict=True):
        left = tuple(cost for cost in before.forms if not FORMS[cost.form].looks_inside)
        assert now == replace(before, forms=left)
    assert fingerprint(asked) != fingerprint(plain)

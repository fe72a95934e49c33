"""Bytes of fake tensors against bytes of real ones, which the allocator reports."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

from protrain_plan.hardware.operators import allocator_of
from protrain_plan.hardware.probe import processor_name
from protrain_plan.models.batches import Batch
from protrain_plan.models.sources import ModelSource
from protrain_plan.profiling.memory import passes
from protrain_plan.profiling.memory.fake_meter import FakeMeter
from protrain_plan.profiling.structure.discovery import discover
from protrain_plan.profiling.structure.faking import fake_batch, faking, know, without_values
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.program.program import BLOCK_BYTES
from protrain_runtime.contract.records.hardware import DeviceKind
from protrain_runtime.contract.records.profile import DType, Form
from protrain_runtime.devices.memory_meter import MemoryMeter, Segment
from tests.support.configs import CONFIGS
from tests.support.estimates import batches_of, device, model_of, small_source
from tests.support.messages import Speaker
from tests.support.thinning import thinned

aten = torch.ops.aten


def segments(
    made: ModelSource,
    batch: Batch,
    form: Form,
    meter: passes.MeterFactory,
    dtype: DType = "float32",
) -> tuple[Segment, ...]:
    model = model_of(made, dtype=dtype)
    modules = [unit.module for unit in discover(model, batch)]
    return passes.memory_segments(model, modules, batch, form, meter=meter)


SLOTS: dict[str, tuple[str, Form, DType, int, int]] = {
    **{
        f"{name}, {form}": (name, form, "float32", 2, 32)
        for name in sorted(CONFIGS)
        for form in ("keep", "full")
    },
    # Transformers looks at the position ids of all sequences: with many, that is a slot's peak.
    "looking for packed sequences": ("llama", "keep", "float32", 64, 16),
    "bfloat16": ("llama", "keep", "bfloat16", 2, 32),
    "float16": ("llama", "keep", "float16", 2, 32),
}


@pytest.mark.nightly("bert, keep", "gemma2, full", "looking for packed sequences")
@pytest.mark.parametrize("case", thinned(tuple(SLOTS)))
def test_every_slot_of_a_step_has_the_bytes_of_real_tensors(case: str) -> None:
    """In 16 bits, those of the machine at hand."""
    name, form, dtype, batch_size, seq_len = SLOTS[case]
    made = small_source(name, num_hidden_layers=2)
    batch = next(iter(batches_of(made, batch_size=batch_size, seq_len=seq_len)))
    allocator = allocator_of(device(name="" if dtype == "float32" else processor_name()))
    real = segments(made, batch, form, MemoryMeter, dtype)
    with faking() as mode:
        faked = fake_batch(mode, batch)
        assert segments(made, faked, form, partial(FakeMeter, allocator), dtype) == real


def live(operator: Callable[..., Any], *args: Any, name: str = "") -> tuple[Segment, Segment]:
    """One operator's bytes: of fake tensors on the processor `name`, of real ones."""
    operator(*args)  # what is made once
    with MemoryMeter() as real:
        real.mark("operator")
        result = operator(*args)
    del result
    with faking() as mode:
        fakes = [mode.from_tensor(a) if isinstance(a, Tensor) else a for a in args]
        with FakeMeter(allocator_of(device(name=name))) as fake:
            fake.mark("operator")
            result = operator(*fakes)
        del result
    return fake.segments[0], real.segments[0]


X = torch.ones(64, 128)
HALF = X.bfloat16()
TOKENS = torch.zeros(8, 16, dtype=torch.int64)
HEADS = torch.ones(2, 200, 4, 32).transpose(1, 2)  # [batch, heads, sequence, width]
SUMS = torch.ones(2, 4, 200)
EXACT: dict[str, tuple[Any, ...]] = {
    "a number of the tensor's dtype": (aten.mul.Tensor, X, 2.0),
    "a number and whole numbers": (aten.eq.Scalar, TOKENS, 1),
    "a number in place": (aten.div_.Scalar, X.clone(), 2.0),
    "operands of two dtypes": (aten.add.Tensor, X, HALF),
    "in place with a wider operand": (aten.mul_.Tensor, HALF.clone(), X),
    "comparison of two dtypes": (aten.eq.Tensor, X, HALF),
    "choice between two dtypes": (aten.where.self, X > 0, X, HALF),
    "choice with a number": (aten.where.ScalarOther, X > 0, X, 0.0),
    "mean": (aten.mean.dim, X, [-1], True),
    "running sum of bools": (aten.cumsum.default, X > 0, -1),
    "copy of a transposed matrix": (aten.clone.default, X.t()),
    "softmax that may be masked": (aten._safe_softmax.default, HEADS, -1),
    "embedding of a transposed gradient": (
        aten.embedding_dense_backward.default,
        torch.ones(8, 32, 16).transpose(1, 2), TOKENS, 100, -1, False,
    ),
    "embedding of a part of the tokens": (aten.embedding.default, X, TOKENS[:, 1:]),
    "embedding's backward of a part of the tokens": (
        aten.embedding_dense_backward.default,
        torch.ones(8, 15, 16), TOKENS[:, 1:], 100, -1, False,
    ),
    "norm": (
        aten.native_layer_norm_backward.default,
        X, X, [128], torch.ones(64, 1), torch.ones(64, 1), torch.ones(128), torch.ones(128),
        [True, True, True],
    ),
    "sort": (aten.sort.default, TOKENS.flatten()),
    "histogram": (aten.histc.default, torch.ones(256), 4, 0, 3),
    "Fourier transform of inner dimensions": (aten._fft_r2c.default, HEADS, [1], 1, True),
    "complex Fourier transform": (aten._fft_c2c.default, HEADS.to(torch.cfloat), [2], 1, True),
    "dropout": (aten.native_dropout.default, X, 0.5, True),
    "dropout's backward": (aten.native_dropout_backward.default, X, X > 0, 2.0),
    "attention": (
        aten._scaled_dot_product_flash_attention_for_cpu.default, HEADS, HEADS, HEADS, 0.0, True,
    ),
    "attention's backward": (
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        HEADS, HEADS, HEADS, HEADS, HEADS, SUMS, 0.0, True,
    ),
    "attention's backward, heads outermost": (
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        HEADS.contiguous(), HEADS, HEADS, HEADS, HEADS, SUMS, 0.0, True,
    ),
}  # fmt: skip


@pytest.mark.nightly(by_day=12)
@pytest.mark.parametrize("name", EXACT)
def test_operators_take_the_workspace_that_the_table_says(name: str) -> None:
    operator, *args = EXACT[name]
    fake, real = live(operator, *args)
    assert fake == real


BOUNDED: dict[str, tuple[Any, ...]] = {
    "product": (aten.mm.default, HALF, HALF.t()),
    "product of a transposed operand": (aten.mm.default, HALF.t(), HALF),
    "products": (aten.bmm.default, HALF.view(4, 16, 128), HALF.view(4, 128, 16)),
    "scattered sums": (
        aten.scatter_add.default, HALF, 0, torch.zeros(4, 128, dtype=torch.int64), HALF[:4],
    ),
    "sums at indices": (aten.index_add.default, HALF, 0, torch.arange(32), HALF[:32]),
    "mean": (aten.mean.default, HALF),
    "attention": (
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        HEADS.bfloat16(), HEADS.bfloat16(), HEADS.bfloat16(), 0.0, True,
    ),
    "attention's backward": (
        aten._scaled_dot_product_flash_attention_for_cpu_backward.default,
        *[HEADS.bfloat16()] * 5, SUMS, 0.0, True,
    ),
    "convolution": (
        aten.convolution.default,
        torch.ones(2, 3, 32, 32), torch.ones(16, 3, 8, 8), None,
        [8, 8], [0, 0], [1, 1], False, [0, 0], 1,
    ),
    "convolution's backward": (
        aten.convolution_backward.default,
        torch.ones(2, 16, 4, 4), torch.ones(2, 3, 32, 32), torch.ones(16, 3, 8, 8), [16],
        [8, 8], [0, 0], [1, 1], False, [0, 0], 1, [True, True, True],
    ),
}  # fmt: skip


@pytest.mark.nightly(by_day=8)
@pytest.mark.parametrize("name", BOUNDED)
def test_kernels_that_choose_their_scratch_memory_stay_below_the_bound(name: str) -> None:
    operator, *args = BOUNDED[name]
    fake, real = live(operator, *args)
    assert (fake.start_bytes, fake.end_bytes) == (real.start_bytes, real.end_bytes)
    assert fake.peak_bytes >= real.peak_bytes


@pytest.mark.nightly(by_day=12)
@pytest.mark.parametrize("name", [*EXACT, *BOUNDED])
def test_operators_take_what_they_take_on_the_machine_at_hand(name: str) -> None:
    operator, *args = {**EXACT, **BOUNDED}[name]
    fake, real = live(operator, *args, name=processor_name())
    assert fake == real


def steps(
    function: Callable[..., Tensor], meter: MemoryMeter | FakeMeter, given: Mapping[str, Tensor]
) -> None:
    x = given["x"].clone().requires_grad_()
    with meter:
        meter.mark("forward")
        total = function(**{**given, "x": x}).sum()
        meter.mark("backward")
        total.backward()


functional = torch.nn.functional
DIFFERENTIATED: dict[str, Callable[..., Tensor]] = {
    "rows": lambda x, rows, **_: x[rows],
    "rows by a mask": lambda x, mask, **_: x[mask],
    "rows that are replaced": lambda x, mask, y, **_: x.index_put((mask,), y),
    "chosen rows": lambda x, rows, **_: x.index_select(0, rows),
    "gathered": lambda x, rows, **_: x.gather(0, rows[:, None]),
    "taken": lambda x, rows, **_: x.take(rows),
    "chosen by a mask": lambda x, mask, **_: x.masked_select(mask[:, None]),
    "scattered by a mask": lambda x, mask, y, **_: y.masked_scatter(mask[:, None].expand_as(y), x),
    "highest": lambda x, **_: x.max(1).values,
    "largest": lambda x, **_: x.topk(3, 1).values,
    "sorted": lambda x, **_: x.sort(1).values,
    "medians": lambda x, **_: x.median(1).values,
    "running highest": lambda x, **_: x.cummax(0).values,
    "highest of scattered": lambda x, y, rows, **_: x.scatter_reduce(
        0, rows[:, None].expand_as(y), y, "amax"
    ),
    "squared errors": lambda x, y, **_: functional.mse_loss(x, y),
    "their sum": lambda x, y, **_: functional.mse_loss(x, y[:1].expand_as(x), reduction="sum"),
    "smooth errors": lambda x, y, **_: functional.smooth_l1_loss(x, y),
    "margins": lambda x, y, **_: functional.soft_margin_loss(x, y),
    "cross entropy of two classes": lambda x, y, **_: functional.binary_cross_entropy(
        x.sigmoid(), y.abs().clamp(max=1)
    ),
    "batch norm of a transposed input": lambda x, **_: functional.gelu(
        functional.batch_norm(x.view(8, 8, 128).transpose(1, 2), None, None, training=True)
    ),
    "batch norm of an input without gradients": lambda x, y, **_: functional.batch_norm(
        y, None, None, x[0], training=True
    ),
    "bags of rows": lambda x, rows, **_: functional.embedding_bag(rows[None], x),
    "windows": lambda x, **_: functional.unfold(x.view(2, 4, 32, 32), 4),
}


@pytest.mark.parametrize("name", DIFFERENTIATED)
def test_backwards_write_in_place_what_they_write_of_real_tensors(name: str) -> None:
    given = {"x": X.clone(), "y": X, "mask": X[:, 0] > 0, "rows": torch.arange(64)}
    steps(DIFFERENTIATED[name], MemoryMeter(), given)  # what is made once
    steps(DIFFERENTIATED[name], real := MemoryMeter(), given)
    with faking() as mode:
        fake = FakeMeter(allocator_of(device(name=processor_name())))
        fakes = {name: know(mode.from_tensor(tensor), tensor) for name, tensor in given.items()}
        steps(DIFFERENTIATED[name], fake, fakes)
    assert fake.segments == real.segments


def test_attention_is_counted_as_packed_for_tiles_which_some_processors_do() -> None:
    """An Intel Xeon with AMX took those bytes, and others less."""
    operator = EXACT["attention"][0]
    with faking() as mode, FakeMeter(allocator_of(replace(device(), num_threads=2))) as meter:
        heads = mode.from_tensor(HEADS).to(torch.bfloat16)
        meter.mark("attention")
        result = operator(heads, heads, heads, 0.0, True)
    assert meter.segments[0].peak_bytes - meter.segments[0].start_bytes == 510_208
    del result


def test_a_number_goes_with_a_graph_that_is_dropped() -> None:
    def drop(given: Tensor) -> None:
        scaled = given * 2.5
        scaled.exp().sum()

    def keep(given: Tensor) -> Tensor:
        return (given * 2.5).exp().sum()

    given = X.clone().requires_grad_()
    for operator, left in ((drop, 0), (keep, X.nbytes + 8 + 4)):
        fake, real = live(operator, given)
        assert fake == real
        assert fake.end_bytes == left


def test_cuda_rounds_every_storage_up_to_a_block() -> None:
    with faking(), FakeMeter(allocator_of(device("cuda"))) as meter:
        meter.mark("two")
        small, large = torch.empty(1), torch.empty(129)
        meter.mark("one")
        del large
    assert [segment.end_bytes for segment in meter.segments] == [3 * BLOCK_BYTES, BLOCK_BYTES]
    del small


def test_segments_are_refused_before_the_end() -> None:
    with pytest.raises(RuntimeError, match=r"^FakeMeter: segments are known after the with"):
        _ = FakeMeter(allocator_of(device())).segments


def test_what_faking_replaces_is_there_again_afterwards() -> None:
    from transformers import masking_utils

    before = (torch.get_rng_state, torch.set_rng_state, masking_utils.find_packed_sequence_indices)
    with pytest.raises(ZeroDivisionError), faking():
        raise ZeroDivisionError
    after = (torch.get_rng_state, torch.set_rng_state, masking_utils.find_packed_sequence_indices)
    assert after == before
    assert type(torch.ones(1)) is Tensor


@pytest.mark.parametrize(
    "code",
    [lambda: torch.rand(3).nonzero(), lambda: torch.nn.LSTM(4, 4)(torch.rand(2, 1, 4))],
    ids=["values", "an LSTM"],
)
def test_what_fake_tensors_cannot_say_is_refused(
    code: Callable[[], object], assert_says: Speaker
) -> None:
    with pytest.raises(ProtrainError) as refused, faking(), without_values("my.model:factory"):
        code()
    assert_says(refused.value)


@pytest.mark.nightly(but=("cpu-dtype0-False-False-True", "cuda-dtype3-False-False-False"))
@pytest.mark.parametrize(
    ("kind", "dtype", "grouped", "cast", "keeps_scores"),
    [
        ("cpu", torch.bfloat16, False, False, True),
        ("cuda", torch.bfloat16, False, False, False),
        ("cuda", torch.bfloat16, True, False, False),
        ("cuda", torch.float32, False, False, False),
        ("cuda", torch.float32, True, False, True),
        ("cuda", torch.float32, True, True, False),  # autocast casts inside of the attention
    ],
)
def test_attention_with_dropout_takes_the_devices_kernel(
    kind: DeviceKind, dtype: torch.dtype, grouped: bool, cast: bool, keeps_scores: bool
) -> None:
    with (
        faking(kind),
        FakeMeter(allocator_of(device(kind))) as meter,
        torch.autocast("cpu", torch.bfloat16, enabled=cast),  # fake tensors are there
    ):
        query = torch.ones(1, 4, 512, 16, dtype=dtype, requires_grad=True)
        key = torch.ones(1, 2 if grouped else 4, 512, 16, dtype=dtype, requires_grad=True)
        meter.mark("attention")
        result = torch.nn.functional.scaled_dot_product_attention(
            query, key, key, dropout_p=0.1, enable_gqa=grouped
        )
    scores = 4 * 512 * 512 * dtype.itemsize
    assert (meter.segments[0].end_bytes - meter.segments[0].start_bytes > scores) == keeps_scores
    del result

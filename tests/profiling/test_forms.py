"""Partial recomputation, on single blocks: what is kept, and what must not change it.

Whole models under plans with these forms are in test_runtime_parity.py and test_peaks.py.
"""

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812

from protrain_runtime.activations.forms import in_form as code_in_form
from protrain_runtime.contract.records.forms import allowed_forms, names_of
from protrain_runtime.contract.records.profile import Form
from protrain_runtime.devices.memory_meter import MemoryMeter
from tests.support.estimates import weighed
from tests.support.messages import Speaker
from tests.support.operator_logs import counting
from tests.support.runtime_cases import RECOMPUTED, batch, build
from tests.support.scenario import refusal

Block = Callable[[Tensor], Tensor]
WIDTH = 96  # more than the inner dimension of a low-rank product
RANK = 4
KERNEL = "aten::_scaled_dot_product_flash_attention_for_cpu"


def weights(count: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(WIDTH, WIDTH, generator=generator) for _ in range(count)]
    return [(matrix * 0.2).requires_grad_() for matrix in made]


def hidden() -> Tensor:
    generator = torch.Generator().manual_seed(1)
    return torch.randn(2, 8, WIDTH, generator=generator).requires_grad_()


def in_form(block: Callable[[Tensor], Any], form: Form) -> Block:
    return cast(Block, code_in_form(form, block, nn.Module()))


def trained(block: Block, parameters: list[Tensor], after: Block = torch.sin) -> list[Tensor]:
    """The loss and all gradients of the block with `after` behind it, and the random state."""
    torch.manual_seed(5)
    given = hidden()
    loss = after(block(given)).square().mean()
    gradients = torch.autograd.grad(loss, [given, *parameters])
    return [loss.detach(), *gradients, torch.get_rng_state()]


def assert_forms_change_nothing(
    block: Callable[[Tensor], Any],
    parameters: list[Tensor],
    after: Callable[[Any], Tensor] = torch.sin,
) -> None:
    expected = trained(block, parameters, after)
    for form in RECOMPUTED:
        found = trained(in_form(block, form), parameters, after)
        for one, other in zip(found, expected, strict=True):
            assert torch.equal(one, other), form


def transformer(attend: Callable[[Tensor, Tensor, Tensor], Tensor]) -> tuple[Block, list[Tensor]]:
    """A pre-norm block with residuals, and its parameters."""
    query, key, value, out, up, down = parameters = weights(6)

    def block(given: Tensor) -> Tensor:
        normed = F.layer_norm(given, (WIDTH,))
        mixed = attend(normed @ query, normed @ key, normed @ value)
        between = given + F.dropout(mixed @ out, 0.2)
        return between + F.dropout(F.silu(F.layer_norm(between, (WIDTH,)) @ up) @ down, 0.2)

    return block, parameters


def kernel(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    one_head = F.scaled_dot_product_attention(query[:, None], key[:, None], value[:, None])
    return one_head[:, 0]


def spelled_out(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    return F.dropout((query @ key.transpose(-1, -2)).softmax(-1), 0.3) @ value


def narrow_heads(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Heads of eight: both products have low ranks, by their shapes."""
    heads = [one.unflatten(-1, (-1, 8)).transpose(1, 2) for one in (query, key, value)]
    return spelled_out(*heads).transpose(1, 2).flatten(2)


def run_in_backward(block: Block) -> Counter[str]:
    loss = block(hidden()).sum()
    with counting() as names:
        loss.backward()
    return names


# --- what runs again ------------------------------------------------------------------------------


def adapted() -> tuple[Block, list[Tensor]]:
    """A pre-norm block whose matrices have low-rank products beside them, and its parameters."""
    parameters = weights(6)  # query, key, value, out, up, down
    # Of each; two of the changes are added to `up` in one batch.
    first = [matrix.detach()[:, :RANK].contiguous().requires_grad_() for matrix in weights(7)]
    second = [matrix.detach()[-RANK:].contiguous().requires_grad_() for matrix in weights(7)]

    def linear(given: Tensor, place: int) -> Tensor:
        product = given @ parameters[place]
        return product + (given @ first[place] @ second[place]).mul_(0.5)

    def block(given: Tensor) -> Tensor:
        normed = F.layer_norm(given, (WIDTH,))
        mixed = kernel(linear(normed, 0), linear(normed, 1), linear(normed, 2))
        between = given + linear(mixed, 3)
        normed = F.layer_norm(between, (WIDTH,))
        # As experts have it: a change of whole matrices, of their size.
        changed = torch.baddbmm(
            torch.stack([parameters[4]] * 2),
            torch.stack([first[4], first[6]]),
            torch.stack([second[4], second[6]]),
        )
        gate, inner = torch.bmm(normed, changed).sin().chunk(2)
        return between + linear(F.silu(torch.cat([gate, inner])), 5)

    return block, [*parameters, *first, *second]


MM, BMM, ADDED = "aten::mm", "aten::bmm", "aten::baddbmm"
BLOCKS: dict[str, Callable[[], tuple[Block, list[Tensor]]]] = {
    "with a kernel": partial(transformer, kernel),
    "spelled out": partial(transformer, spelled_out),
    "of narrow heads": partial(transformer, narrow_heads),
    "adapted": adapted,
}
AGAIN: dict[str, dict[Form, dict[str, int]]] = {
    "with a kernel": {
        "lite": {MM: 0, KERNEL: 0},
        "mlp": {MM: 2, KERNEL: 0},
        "attn": {MM: 3, KERNEL: 0},
        "full": {MM: 6, KERNEL: 1},
    },
    # Without a kernel attention is found by its softmax, and its own products are kept, however
    # low their ranks.
    **{
        block: {"lite": {BMM: 0}, "mlp": {BMM: 0}, "attn": {BMM: 0}, "full": {BMM: 2}}
        for block in ("spelled out", "of narrow heads")
    },
    # Low-rank products run once more in every form: of q, k, v, the projection and `down`. The
    # very last is never reached.
    "adapted": {
        "lite": {MM: 4, ADDED: 1, BMM: 0},
        "mlp": {MM: 3 + 2 + 2, ADDED: 1, BMM: 1},
        "attn": {MM: 3 + 3 + 2, ADDED: 1, BMM: 1},
        "full": {MM: 14, ADDED: 1, BMM: 1},
    },
}


@pytest.mark.parametrize("block", AGAIN)
def test_what_a_form_does_not_keep_is_computed_once_more(block: str) -> None:
    made, _ = BLOCKS[block]()
    plain = run_in_backward(made)
    for form, expected in AGAIN[block].items():
        extra = run_in_backward(in_form(made, form)) - plain
        assert {name: extra[name] for name in expected} == expected, form


@pytest.mark.parametrize("block", BLOCKS)
def test_forms_match_plain_torch_bitwise(block: str) -> None:
    assert_forms_change_nothing(*BLOCKS[block]())


def test_a_product_that_nothing_in_backward_needs_is_not_kept() -> None:
    """A block's last one: recomputation ends before it."""
    first, second = weights(2)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach())
        return saved[-1]

    given = hidden()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        in_form(lambda given: F.silu(given @ first) @ second, "lite")(given)
    its_input, product = saved
    assert torch.equal(its_input, given)
    assert torch.equal(product.view_as(given), given @ first)


def test_a_low_rank_product_that_the_block_hands_on_is_not_copied() -> None:
    """Nothing is kept of it, so that whoever gets it may write to it."""
    first, second = (matrix.detach()[:RANK].contiguous() for matrix in weights(2))
    parameters = [first.t().contiguous().requires_grad_(), second.requires_grad_()]
    down, up = parameters

    def block(given: Tensor) -> Tensor:
        return F.silu(given @ down) @ up

    def copies(run: Block) -> int:
        with counting() as names:
            run(hidden())
        return names["aten::clone"]

    assert copies(in_form(block, "lite")) == copies(block)
    assert_forms_change_nothing(block, parameters, lambda given: given.mul_(3))


def test_evaluation_runs_plainly() -> None:
    block, _ = transformer(kernel)
    with torch.no_grad(), counting() as names:
        in_form(block, "lite")(hidden())
    assert names["aten::mm"] == 6


def test_what_is_kept_is_gone_after_backward() -> None:
    """Without the garbage collector: nothing that is kept stands in a cycle."""
    block, parameters = transformer(kernel)
    gradients = sum(parameter.nbytes for parameter in parameters)
    for form in RECOMPUTED:
        given = hidden()
        with MemoryMeter() as meter:
            meter.mark("forward")
            loss = in_form(block, form)(given).sum()
            meter.mark("backward")
            loss.backward()
            del loss
            meter.mark("end")
        for parameter in parameters:
            parameter.grad = None
        assert meter.segments[-1].start_bytes == gradients + given.nbytes, form


# --- what must not change it ----------------------------------------------------------------------


def test_products_that_are_written_to_in_the_block_match_plain_torch_bitwise() -> None:
    first, second, third = parameters = weights(3)

    def block(given: Tensor) -> Tensor:
        doubled = (given @ first).mul_(2)
        doubled[:, 1:].add_(doubled[:, :1])  # through a view, and kept already
        return F.gelu(doubled) @ second + torch.zeros(()).add(F.silu(given @ third))

    assert_forms_change_nothing(block, parameters)


def test_products_that_others_write_to_match_plain_torch_bitwise() -> None:
    """The block hands on what it keeps, and whoever gets it writes to it."""
    first, second = parameters = weights(2)
    assert_forms_change_nothing(
        lambda given: (given @ first, F.gelu(given @ second)),
        parameters,
        lambda handed: torch.sin(handed[0].mul_(3) + handed[1]),
    )


def test_a_write_that_nobody_could_see_coming_is_an_error() -> None:
    first, second = weights(2)
    stashed: list[Tensor] = []

    def block(given: Tensor) -> Tensor:
        product = given.flatten(0, 1) @ first
        stashed.append(product.detach())
        return F.gelu(product.sin() @ second)

    loss = in_form(block, "lite")(hidden()).sum()
    stashed[0].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


@torch.library.custom_op("protrain_tests::dropout_attention", mutates_args=())
def dropout_attention(query: Tensor, key: Tensor, value: Tensor, dropout_p: float) -> list[Tensor]:
    """Attention as accelerators have it: one operator, which draws what it drops."""
    probabilities = (query @ key.transpose(-1, -2)).softmax(-1)
    kept = (torch.rand_like(probabilities) >= dropout_p).to(query.dtype)
    return [(probabilities * kept) @ value, kept]


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, float], output: list[Tensor]) -> None:
    ctx.save_for_backward(*inputs[:3], output[1])


def _backward(ctx: Any, gradients: list[Tensor]) -> tuple[Tensor | None, ...]:
    *operands, kept = ctx.saved_tensors
    with torch.enable_grad():
        query, key, value = (each.detach().requires_grad_() for each in operands)
        out = ((query @ key.transpose(-1, -2)).softmax(-1) * kept) @ value
    return *torch.autograd.grad(out, (query, key, value), gradients[0]), None


dropout_attention.register_autograd(_backward, setup_context=_save)


def test_an_attention_that_draws_leaves_the_random_numbers_to_those_after_it() -> None:
    """It is not run again, and the dropout behind it draws the same numbers all the same."""
    assert_forms_change_nothing(
        *transformer(lambda query, key, value: dropout_attention(query, key, value, 0.3)[0])
    )


def test_autocast_is_that_of_the_forward() -> None:
    block, parameters = transformer(kernel)

    def lower(given: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return block(given)

    assert_forms_change_nothing(lower, parameters)
    outside = [in_form(block, form) for form in RECOMPUTED]
    with torch.autocast("cpu", torch.bfloat16):
        expected, *found = [trained(run, parameters, torch.sin) for run in (block, *outside)]
    for each in found:
        assert all(torch.equal(one, other) for one, other in zip(each, expected, strict=True))


# --- errors ---------------------------------------------------------------------------------------


def test_a_second_backward_and_another_computation_are_refused(assert_says: Speaker) -> None:
    loss = in_form(transformer(kernel)[0], "lite")(hidden()).sum()
    loss.backward(retain_graph=True)
    assert_says(refusal(loss.backward))
    matrix, bias = weights(2)
    calls: list[int] = []

    def block(given: Tensor) -> Tensor:
        calls.append(1)
        product = given @ matrix if len(calls) == 1 else F.linear(given, matrix, bias[0])
        return F.gelu(product)

    loss = in_form(block, "lite")(hidden()).sum()
    assert_says(refusal(loss.backward))


class Squares(torch.autograd.Function):
    """Reads what it has saved once, or twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, times: int) -> Tensor:
        ctx.save_for_backward(x)
        ctx.times = times
        return x * x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        factor = sum(ctx.saved_tensors[0] for _ in range(ctx.times)) * (2 / ctx.times)
        return gradient * factor, None


def test_a_function_of_a_block_in_parts_reads_what_it_saved_once(assert_says: Speaker) -> None:
    """As the refusal says; in a block that is recomputed as a whole it may read it twice."""
    inner, parameters = transformer(kernel)

    def gradients(times: int, form: Form | None) -> list[Tensor]:
        def block(given: Tensor) -> Tensor:
            return Squares.apply(inner(given), times)  # type: ignore[no-any-return,no-untyped-call]

        return trained(in_form(block, form) if form else block, parameters)

    assert_says(refusal(partial(gradients, 2, "lite")))
    for times, form in ((1, "lite"), (2, "full")):
        assert all(map(torch.equal, gradients(times, form), gradients(times, None)))


# --- compiled blocks, and what profiles say -------------------------------------------------------


@pytest.mark.nightly("adapted-aot_eager")
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("block", ["with a kernel", "adapted"])
def test_forms_of_a_compiled_block_match_it_bitwise(block: str, backend: str) -> None:
    made, parameters = BLOCKS[block]()
    assert_forms_change_nothing(torch.compile(made, backend=backend), parameters)


def forms(name: str) -> list[tuple[str, ...]]:
    model, first = build(name), batch(name, 0)
    units, _ = weighed(model, first)
    return [tuple(cost.form for cost in unit.forms) for unit in units]


@pytest.mark.nightly
def test_profiles_have_the_forms_that_a_block_can_take() -> None:
    part, last = ("keep",), ("keep", "in place")
    exact = allowed_forms(())
    blocks = ("keep", *(form for form in names_of("blocks") if form in exact))
    assert forms("gpt2") == [part, *[blocks] * 4, last]
    assert forms("functional-no-attention") == [part, *[("keep", "lite", "full")] * 4, last]

"""Uses that scripts make of states and gradients between a plan's moves: verbs of a `Run`."""

import ctypes
from collections import defaultdict
from collections.abc import Callable, Iterator

import pytest
import torch
from torch import Tensor, nn

from tests.support.scenario import Run


def parameters(run: Run) -> Iterator[nn.Parameter]:
    """Every third one, so that in all places some are edited and some are not."""
    yield from [p for g in run.optimizer.param_groups for p in g["params"]][::3]


def emptied(run: Run) -> None:
    for parameter in parameters(run):
        run.optimizer.state[parameter] = {}


def popped(run: Run) -> None:
    for parameter in parameters(run):
        assert "exp_avg" in run.optimizer.state.pop(parameter)
        assert run.optimizer.state.pop(parameter, None) is None


def deleted(run: Run) -> None:
    for parameter in parameters(run):
        if parameter in run.optimizer.state:
            del run.optimizer.state[parameter]
        assert parameter not in run.optimizer.state
        with pytest.raises(KeyError):
            del run.optimizer.state[parameter]


def cleared(run: Run) -> None:
    run.optimizer.state.clear()
    assert len(run.optimizer.state) == 0


def replaced(run: Run) -> None:
    run.optimizer.state = defaultdict(dict)


def zeroed(run: Run) -> None:
    for parameter in parameters(run):
        for value in run.optimizer.state[parameter].values():
            if torch.is_tensor(value):
                value.zero_()


def zeroed_past_autograd(run: Run) -> None:
    """No version counts it."""
    for parameter in parameters(run):
        run.optimizer.state[parameter]["exp_avg"].data.view(-1)[::2] = 0.25


def pruned(run: Run) -> None:
    """ReLoRA: the states' smallest values become zeros."""
    for state in run.optimizer.state.values():
        for key in ("exp_avg", "exp_avg_sq"):
            state[key].mul_(state[key].abs() > state[key].abs().mean())


def exchanged(run: Run) -> None:
    for parameter in parameters(run):
        state = run.optimizer.state[parameter]
        state["exp_avg"] = torch.full_like(state["exp_avg"], 1e-3)
        state["step"] = torch.full_like(state["step"], 7.0)  # a fused step counts on its device


def given(run: Run) -> None:
    """Whole states of the script's own making."""
    for parameter in parameters(run):
        zeros = torch.zeros(parameter.shape, dtype=parameter.dtype, device=parameter.device)
        run.optimizer.state[parameter] = {
            "step": torch.tensor(3.0),
            "exp_avg": zeros + 1e-3,
            "exp_avg_sq": zeros + 1e-4,
            "max_exp_avg_sq": zeros + 1e-4,
        }


def looked_at(run: Run) -> None:
    for parameter, state in run.optimizer.state.items():
        assert parameter in run.optimizer.state
        run.seen += [state["exp_avg"].norm().cpu(), torch.as_tensor(state["step"]).cpu()]
    run.seen.append(torch.tensor(len(run.optimizer.state)))


EDITS: dict[str, Callable[[Run], None]] = {
    edit.__name__: edit
    for edit in (
        *(emptied, popped, deleted, cleared, replaced, zeroed, zeroed_past_autograd, pruned),
        *(exchanged, given, looked_at),
    )
}


def edited(edit: Callable[[Run], None], run: Run, number: int) -> None:
    if number in (1, 2):
        edit(run)


def by_value(run: Run, _: int) -> None:
    torch.nn.utils.clip_grad_value_(run.model.parameters(), 1e-3)


def by_value_one_by_one(run: Run, _: int) -> None:
    torch.nn.utils.clip_grad_value_(run.model.parameters(), 1e-3, foreach=False)


def by_value_and_norm(run: Run, number: int) -> None:
    by_value(run, number)
    run.clip(0.05)
    by_value(run, number)


def by_norm_and_value(run: Run, number: int) -> None:
    run.clip(0.05)
    by_value(run, number)
    run.clip(0.01, norm_type=1.0)
    run.clip(0.01, norm_type=float("inf"), foreach=False)


def gradients(run: Run) -> Iterator[Tensor]:
    yield from (p.grad for p in run.model.parameters() if p.grad is not None)


def norms_of_each(run: Run, _: int) -> None:
    """Read alone: nothing is written back, and the norm that was taken stays."""
    for gradient in gradients(run):
        run.seen += [gradient.norm().cpu(), gradient.abs().max().cpu()]
    run.seen.append(torch.cat([g.view(-1) for g in gradients(run)]).square().sum().cpu())
    run.clip(0.05)


def clipped_each(run: Run, _: int) -> None:
    """NFNet's adaptive clipping, roughly."""
    for gradient in gradients(run):
        gradient.mul_((0.01 / (gradient.norm() + 1e-6)).clamp(max=1.0))


def with_noise(run: Run, number: int) -> None:
    noise = torch.Generator().manual_seed(number)
    for gradient in gradients(run):
        gradient.add_(torch.randn(gradient.shape, generator=noise).to(gradient.device) * 1e-3)


def centred(run: Run, _: int) -> None:
    for gradient in gradients(run):
        if gradient.dim() > 1:
            gradient.sub_(gradient.mean(dim=-1, keepdim=True))
            gradient[0] = 0.0
            gradient += 1e-4


def past_autograd(run: Run, _: int) -> None:
    """Views, which no version of the gradient counts."""
    for gradient in gradients(run):
        gradient.data.clamp_(-1e-3, 1e-3)
        gradient.detach().view(-1)[::2].mul_(0.5)


def replaced_each(run: Run, _: int) -> None:
    for parameter in run.model.parameters():
        if parameter.grad is not None:
            parameter.grad = parameter.grad.clone().nan_to_num_() * 0.5


def unfinite(run: Run, _: int) -> None:
    for gradient in gradients(run):
        if not torch.isfinite(gradient).all():
            raise AssertionError
        torch.nan_to_num(gradient, out=gradient)


def held_views(run: Run, _: int) -> None:
    views = [gradient.view(-1) for gradient in gradients(run)]
    run.clip(0.05)
    for view in views:
        view.clamp_(-1e-4, 1e-4)


def as_one_vector(run: Run, _: int) -> None:
    """Gradients of all parameters in one vector, and back."""
    found = [p for p in run.model.parameters() if p.grad is not None]
    vector = torch.cat([p.grad.reshape(-1) for p in found if p.grad is not None]) * 0.5
    for parameter, part in zip(found, vector.split([p.numel() for p in found]), strict=True):
        assert parameter.grad is not None
        parameter.grad.copy_(part.view_as(parameter))


def alike(run: Run) -> list[nn.Parameter]:
    found = [p for p in run.model.parameters() if p.grad is not None]
    shape = next(p.shape for p in found if sum(q.shape == p.shape for q in found) > 2)
    return [p for p in found if p.shape == shape]


def exchanged_gradients(run: Run, _: int) -> None:
    """Two parameters exchange theirs, and one is given another's."""
    one, other, third, *_rest = alike(run)
    one.grad, other.grad = other.grad, one.grad
    third.grad = one.grad


def masked(run: Run, _: int) -> None:
    for gradient in gradients(run):
        mask = torch.rand(gradient.shape, generator=torch.Generator().manual_seed(1)) > 0.5
        gradient.mul_(mask.to(gradient.device))
        gradient.mul_(torch.tensor([0.5]).to(gradient.device))
    torch._foreach_mul_(list(gradients(run)), [0.5] * len(list(gradients(run))))


def by_address(run: Run, _: int) -> None:
    """Write as extensions and numpy do, on a CPU."""
    for number, gradient in enumerate(gradients(run)):
        if gradient.device.type != "cpu":
            gradient.mul_(0.5)
        elif number % 2:
            values = gradient.numpy()
            values *= 0.5
        else:
            address = gradient.data_ptr()
            ctypes.memset(address, 0, gradient.numel() * gradient.element_size())


USES: dict[str, Callable[[Run, int], None]] = {
    use.__name__: use
    for use in (
        *(by_value, by_value_one_by_one, by_value_and_norm, by_norm_and_value, norms_of_each),
        *(clipped_each, with_noise, centred, past_autograd, replaced_each, unfinite, held_views),
        *(exchanged_gradients, masked, by_address, as_one_vector),
    )
}

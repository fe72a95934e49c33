"""`optimizer.state` under a plan: one mapping for all parameters, wherever their states are.

[Note: states on loan] The states of an offloaded parameter lie in a store and cannot be read or
written there. Code that asks for them gets a loan: a dictionary of copies on the parameter's
device. Before the store is read again (by a forward, a step, a checkpoint), loans are written back,
so that writes, replacements and removals take effect as in plain PyTorch. A loan without other
references then ends and frees its memory. A loan with references shows the new values after each
step: its tensors are refilled and stay the same objects.
"""

import sys
from collections.abc import Iterable, Iterator, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch

from protrain_runtime.devices.lanes import num_holders
from protrain_runtime.engine.engine import Engine
from protrain_runtime.states.chunks import Chunk, Slice, read_values, write_values
from protrain_runtime.states.compositions import (
    is_composed,
    put_together,
    taken_apart,
    tensors_in,
)
from protrain_runtime.states.stepping import by_value


@dataclass(eq=False, repr=False)
class PlannedStates(MutableMapping[Any, Any]):
    """The `state` of `prepare`'s optimizer, as in `torch.optim.Optimizer`.

    Keys other than offloaded parameters are the inner optimizer's. A read copies an offloaded
    parameter's states to its device; all ranks read together. RuntimeError for states that a
    backward has updated or is updating.
    """

    inner: torch.optim.Optimizer
    # Of offloaded parameters.
    places: dict[Any, tuple[Chunk, Slice]] = field(
        default_factory=dict[Any, tuple[Chunk, Slice]], init=False
    )
    _engine: Engine | None = field(default=None, init=False)
    _loans: dict[Any, dict[str, Any]] = field(default_factory=dict[Any, dict[str, Any]], init=False)
    # By parameter: its loan's contents at the start of a forward whose backward updates it.
    _noted: dict[Any, list[torch.Tensor]] = field(
        default_factory=dict[Any, list[torch.Tensor]], init=False
    )
    # Ranks may hold loans, which they compare after each step.
    _shared: bool = field(default=False, init=False)

    def attach(self, chunks: Sequence[Chunk], engine: Engine) -> None:
        """Serve parameters of offloaded chunks, between the engine's steps."""
        self.places = {part.parameter: (c, part) for c in chunks for part in c.slices}
        self._engine = engine
        engine.before_states_move = self.write_back

    def detach(self) -> dict[Any, dict[str, Any]]:
        """Serve the inner optimizer alone from now on; returns the present loans."""
        self.write_back()
        loans, self._loans, self.places, self._engine = self._loans, {}, {}, None
        return loans

    def __getitem__(self, key: Any) -> Any:
        if key not in self.places:
            return self.inner.state[key]
        self._settle()
        if key not in self._loans:
            self._loans[key] = self._read(*self.places[key])
        return self._loans[key]

    def _read(self, chunk: Chunk, part: Slice) -> dict[str, Any]:
        """An offloaded parameter's states, copied to its device; all ranks call."""
        self._shared |= chunk.sharding is not None
        for _, own, states in offloaded_states([chunk], {part.name}):
            return self.at_home(own, *states)
        return {}

    def __setitem__(self, key: Any, value: Any) -> None:
        if key not in self.places:
            self.inner.state[key] = value
            return
        if not isinstance(value, dict):
            name = self.places[key][1].name
            raise TypeError(f"the state of {name!r} is a dict, not a {type(value).__name__}")
        self._loans.pop(key, None)  # also a loan that does not fit
        self._settle()
        self._shared |= self.places[key][0].sharding is not None
        self._loans[key] = value

    def __delitem__(self, key: Any) -> None:
        if key not in self.places:
            del self.inner.state[key]
            return
        if self._loans.pop(key, None) is None and key not in self:
            raise KeyError(self.places[key][1].name)
        _drop(*self.places[key])

    def __contains__(self, key: object) -> bool:
        if key not in self.places:
            return key in self.inner.state
        self._settle()
        return key in self._loans or self.places[key][1].name in _scalars(self.places[key][0])

    # Unlike a defaultdict's `[]`, these create no state.

    def get(self, key: Any, default: Any = None) -> Any:
        found = key in self
        return self[key] if found else default

    def pop(self, key: Any, *default: Any) -> Any:
        if default and key not in self:
            return default[0]
        value = self.get(key)
        del self[key]
        return value

    def setdefault(self, key: Any, default: Any = None) -> Any:
        if key not in self:
            self[key] = default
        return self[key]

    def __iter__(self) -> Iterator[Any]:
        """Parameters in the order of groups, then other keys."""
        self._settle()
        grouped = [p for group in self.inner.param_groups for p in group["params"]]
        ordered = [key for key in grouped if key in self]
        return iter([*ordered, *(key for key in self.inner.state if key not in set(ordered))])

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def __repr__(self) -> str:
        return f"{type(self).__name__}({dict(self)})"

    def forget(self) -> None:
        """End all loans without writing back: other states have been loaded."""
        self._loans.clear()

    def write_back(self, *, updating: bool = False) -> None:
        """Write loans back to their stores, and end those without other references.

        `updating`: a forward begins whose backward updates; later writes are too late. RuntimeError
        for states without a place in the plan; they stay on loan.
        """
        if not self._loans or self._engine is None:
            return
        self._engine.end_updates()
        for key in list(self._loans):
            chunk, part = self.places[key]
            state = self._loans[key]
            if state:
                _refuse_misfits(chunk, part, state)
                load_state(chunk, part, state)
            else:
                _drop(chunk, part)
            chunk.speculated = None
            goes = bool(state)  # an empty one stays until the next step
            del state
            if goes and not _is_held(self._loans, key):
                del self._loans[key]
        self._noted = {
            key: [tensor.clone() for tensor in tensors_in(state)]
            for key, state in self._loans.items()
            if updating
        }

    def refuse_late_writes(self) -> None:
        """RuntimeError where a loan has changed since the forward began."""
        for key, before in self._noted.items():
            now = tensors_in(self._loans.get(key, {}))
            if len(now) != len(before) or not all(map(torch.equal, now, before)):
                raise RuntimeError(
                    f"the optimizer's state of {self.places[key][1].name!r} was written between"
                    " the forward and optimizer.step(): this plan has updated it in backward with"
                    " the old values. Write it before the forward or after the step, or plan with"
                    " --clip: updates then come after backward"
                )

    def renew(self) -> None:
        """Refill loans that are still referenced with the values after a step; end the others."""
        self._noted = {}
        held = {self.places[key][1].name for key in self._loans if _is_held(self._loans, key)}
        if self._shared and self._engine is not None:
            # Reads are collective: all ranks read each rank's loans.
            ranks = next(c.sharding.ranks for c, _ in self.places.values() if c.sharding)
            held = held.union(*ranks.all_objects(held, "optimizer.step()"))
            self._shared = bool(held)
        if held and self._engine is not None:
            self._engine.end_updates()
        for key, (chunk, part) in self.places.items() if held else ():
            if part.name in held:
                now = self._read(chunk, part)  # also if only another rank holds it
                if key in self._loans:
                    _fill(self._loans[key], now)
        self._loans = {k: v for k, v in self._loans.items() if self.places[k][1].name in held}

    def at_home(
        self, part: Slice, scalars: Mapping[str, Any], states: Mapping[str, torch.Tensor]
    ) -> dict[str, Any]:
        """A parameter's states as plain PyTorch has them: counters where their kernel reads."""
        device = part.parameter.device
        counts_there = any(
            group.get("fused") or group.get("capturable")
            for group in self.inner.param_groups
            if any(one is part.parameter for one in group["params"])
        )
        home = {**scalars, **states}
        for key, value in home.items():
            if torch.is_tensor(value) and (key in states or counts_there or value.numel() > 1):
                home[key] = value.to(device)
        return put_together(home, part.shape)

    def _settle(self) -> None:
        if self._engine is None:
            return
        if self._engine.updating_soon:
            raise RuntimeError(
                "optimizer.state was used between a forward and optimizer.step(): this plan"
                " updates states in backward. Use it before the forward or after the step, or plan"
                " with --clip: updates then come after backward"
            )
        self._engine.settle("optimizer.state was used")


def offloaded_states(
    chunks: Iterable[Chunk], names: Set[str] | None = None
) -> Iterator[tuple[Chunk, Slice, tuple[dict[str, Any], dict[str, torch.Tensor]]]]:
    """Scalars and elementwise states, on the host, of the chunks' parameters with states.

    `names` selects parameters (default: all). All ranks call, for their shards.
    """
    for chunk in chunks:
        scalars = _scalars(chunk)
        for part in chunk.slices:
            if part.name in scalars and (names is None or part.name in names):
                layouts = chunk.own.current.of(part)
                states = {layout.key: read_values(chunk, part, layout) for layout in layouts}
                # Copies: steps count in place, several parameters may share a tensor, and code may
                # change its copy.
                own = by_value(scalars[part.name])
                if own or states:  # plain SGD has none
                    yield chunk, part, (own, states)


def load_state(chunk: Chunk, part: Slice, loaded: Mapping[str, Any]) -> None:
    """Store these states of an offloaded parameter."""
    layouts = chunk.own.current.of(part)
    state = taken_apart(unwrapped(loaded, {layout.key for layout in layouts}))
    for layout in layouts:
        write_values(chunk, part, state.pop(layout.key), layout)
    # A fused optimizer has counters on the device, a chunk steps on the host. Each parameter has
    # its own counter: updates write in place.
    chunk.current.scalars[part.name] = {
        key: value.to("cpu", copy=True) if torch.is_tensor(value) else value
        for key, value in state.items()
    }
    chunk.current.updated.add(part.name)


def unwrapped(state: Mapping[str, Any], keys: Set[str]) -> dict[str, Any]:
    """A parameter's states without the dictionary that bitsandbytes puts around some."""
    found: dict[str, Any] = {}
    for key, value in state.items():
        wraps = isinstance(value, Mapping) and bool(keys & value.keys())
        found |= value if wraps else {key: value}
    return found


def _scalars(chunk: Chunk) -> dict[str, dict[str, Any]]:
    """Non-elementwise states by parameter; all ranks call, for their shards."""
    own = {
        name: chunk.current.scalars[name]
        for name in chunk.current.updated
        if chunk.has_states(name)
    }
    if chunk.sharding is None:
        return own
    merged: dict[str, dict[str, Any]] = {}
    for of_rank in chunk.sharding.ranks.all_objects(own, "optimizer.state_dict()"):
        merged |= of_rank
    return merged


def _drop(chunk: Chunk, part: Slice) -> None:
    """Drop the states of an offloaded parameter."""
    chunk.current.updated.discard(part.name)
    chunk.current.scalars.pop(part.name, None)
    chunk.speculated = None


def _refuse_misfits(chunk: Chunk, part: Slice, state: Mapping[str, Any]) -> None:
    """RuntimeError if states differ in kind from the optimizer's own for this parameter."""
    layouts = {layout.key: layout for layout in chunk.own.current.of(part)}
    found = taken_apart(unwrapped(state, layouts.keys()))
    problem = ""
    for key in [*layouts, *(key for key in found if key not in layouts)]:
        value, layout = found.get(key), layouts.get(key)
        if layout is None:
            if torch.is_tensor(value) and value.shape == part.shape and part.numel > 1:
                problem = f"has {key!r}, which the plan has not counted"
        elif not isinstance(value, torch.Tensor):
            problem = f"lacks {key!r}"
        elif value.dtype != layout.dtype or value.numel() != layout.rule.count(part.numel):
            given, count = f"{value.dtype} {list(value.shape)}", layout.rule.count(part.numel)
            needs = f"{layout.dtype} {list(part.shape) if count == part.numel else [count]}"
            problem = f"has {key!r} as {given}, and the plan has room for {needs}"
        if problem:
            raise RuntimeError(
                f"optimizer.state[{part.name!r}] {problem}: keep the keys, shapes and dtypes that"
                " the optimizer made, or remove the whole state (optimizer.state[parameter] = {})"
            )


def _fill(state: dict[str, Any], now: Mapping[str, Any]) -> None:
    """Fill a dictionary's tensors with other values, in place."""
    for key in [key for key in state if key not in now]:
        del state[key]
    for key, value in now.items():
        own: Any = state.get(key)
        alike = torch.is_tensor(own) and torch.is_tensor(value) and not is_composed(value)
        if alike and (own.shape, own.dtype) == (value.shape, value.dtype):
            own.detach().copy_(value)
        else:
            state[key] = value


def _is_held(loans: Mapping[Any, dict[str, Any]], key: Any) -> bool:
    """Whether a loan has other references: to its dictionary, one of its tensors, or a view."""
    if sys.getrefcount(loans[key]) > _ALONE:
        return True
    for name in loans[key]:
        if is_composed(loans[key][name]):
            if sys.getrefcount(loans[key][name]) > _ALONE:
                return True
        elif torch.is_tensor(loans[key][name]) and (
            sys.getrefcount(loans[key][name]) > _ALONE
            or num_holders(loans[key][name].untyped_storage()) > 1 + loans[key][name]._is_view()
        ):
            return True  # a view keeps its base, too
    return False


_DICTIONARY: dict[str, Any] = {"value": object()}
_ALONE = sys.getrefcount(_DICTIONARY["value"])
"""The reference count of a dictionary's value that has no other references."""

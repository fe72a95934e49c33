"""Arguments of any class are taken apart and made anew; buffers get their size in a forward."""

from collections import Counter, OrderedDict, UserDict, UserList, defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple, NoReturn

import pytest
import torch
from torch import Tensor
from transformers import BatchEncoding
from transformers.modeling_outputs import BaseModelOutput

from protrain_runtime.activations.trees import leaves_in, taken_apart, tensors_in


def refuse(*_: object) -> NoReturn:
    raise AssertionError("code of the user's class was called")


class Own:
    """A class whose own code copies, pickles, makes and writes it as nobody else may."""

    __slots__ = ("__dict__", "__hidden")
    __hidden: Tensor

    def __new__(cls, *args: object) -> "Own":
        assert args
        return super().__new__(cls)

    def __init__(self, x: Tensor) -> None:
        object.__setattr__(self, "x", x)
        object.__setattr__(self, "_Own__hidden", x + 1)

    __copy__ = __deepcopy__ = __reduce__ = __reduce_ex__ = __getstate__ = refuse
    __setattr__ = __delattr__ = refuse

    def parts(self) -> list[Tensor]:
        return [self.__dict__["x"], self.__hidden]


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Tensor
    more: Any = None


@dataclass
class Made:
    x: Tensor
    doubled: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.doubled = 2 * self.x


class Named(NamedTuple):
    x: Tensor
    more: Any


class Pair(tuple[Any, ...]):
    def __new__(cls, one: object, two: object) -> "Pair":
        return super().__new__(cls, (one, two))


class Marked(dict[str, Any]):
    def __init__(self, *, mark: str, **items: Any) -> None:
        super().__init__(**items)
        self.mark = mark

    __copy__ = copy = __iter__ = items = refuse


class Ordered(OrderedDict[str, Any]):
    def __init__(self, first: str, **items: Any) -> None:
        super().__init__(**items)
        self.move_to_end(first, last=False)


class Default(defaultdict[str, Any]):
    pass


class Listed(list[Any]):
    def __init__(self, one: object, two: object) -> None:
        super().__init__([one, two])

    append = refuse


class Attributes(set[Any]):
    note: object = None


def noted(x: Tensor) -> Attributes:
    made = Attributes({1})
    made.note = x
    return made


def holding_itself(x: Tensor) -> Any:
    made = SimpleNamespace(x=x)
    made.itself = made
    return made


MAKERS: dict[str, Callable[[Tensor], Any]] = {
    "UserDict": lambda x: UserDict({"x": x, "n": 1}),
    "UserList": lambda x: UserList([x, 1]),
    "UserDict within": lambda x: UserDict({"inner": UserDict({"x": x})}),
    "BatchEncoding": lambda x: BatchEncoding({"x": x}),
    "own": Own,
    "frozen": lambda x: Frozen(x, Frozen(x + 1)),
    "made": Made,
    "output": lambda x: BaseModelOutput(last_hidden_state=x),
    "named": lambda x: Named(x, [x + 1]),
    "pair": lambda x: Pair(x, UserDict({"x": x + 1})),
    "marked": lambda x: Marked(mark="m", x=x),
    "ordered": lambda x: Ordered("z", x=x, y=1, z=x + 1),
    "default": lambda x: Default(list, x=x),
    "counter": lambda x: Counter({"x": x}),
    "listed": lambda x: Listed(x, 1),
    "a set's attribute": noted,
    "itself": holding_itself,
}


def values_in(thing: object) -> list[object]:
    return [leaf for leaf in leaves_in(thing) if not isinstance(leaf, Tensor) and leaf is not thing]


@pytest.mark.parametrize("name", MAKERS)
def test_an_object_of_any_class_is_made_anew(name: str) -> None:
    x = torch.arange(3.0)
    given = MAKERS[name](x)
    expected = [t.clone() for t in tensors_in(given)]
    assert expected
    tensors, rebuild = taken_apart(given)
    made = rebuild([t + 10 for t in tensors])
    assert type(made) is type(given)
    assert made is not given
    assert [t.tolist() for t in tensors_in(made)] == [(t + 10).tolist() for t in expected]
    assert [t.tolist() for t in tensors_in(given)] == [t.tolist() for t in expected]
    assert values_in(made) == values_in(given)
    if isinstance(given, Ordered):
        assert list(made) == list(given)
    if isinstance(given, Default):
        assert made.default_factory is list


def test_what_is_taken_apart_holds_no_tensor() -> None:
    _, rebuild = taken_apart(UserDict({"x": torch.zeros(3)}))
    assert not any(
        isinstance(cell.cell_contents, Tensor | UserDict) for cell in rebuild.__closure__ or ()
    )

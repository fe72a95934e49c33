"""Which parameters lie in which unit's chunk."""

from collections.abc import Sequence

from torch import nn

from protrain_plan.records.plan import Persistent, UnitPlan
from protrain_runtime.chunks import ALIGNMENT, Chunk, make_chunk
from protrain_runtime.ranks import Ranks
from protrain_runtime.sharding import make_sharded_chunk


def unit_parameters(
    model: nn.Module, units: Sequence[tuple[str, str, Sequence[str]]]
) -> list[list[tuple[str, nn.Parameter]]]:
    """The parameters of each unit's chunk, given (kind, name, listed parameters) per unit.

    A block has its module's parameters but those that another unit lists. A tied parameter goes by
    its first name in the model.
    """
    by_name = dict(model.named_parameters(remove_duplicate=False))
    canonical = {parameter: name for name, parameter in model.named_parameters()}
    listed = {canonical[by_name[name]] for _, _, names in units for name in names}
    taken: set[str] = set()
    chunks: list[list[tuple[str, nn.Parameter]]] = []
    for kind, unit_name, names in units:
        own = [canonical[by_name[name]] for name in names]
        if kind == "block":
            module = model.get_submodule(unit_name)
            inside = [canonical[parameter] for parameter in module.parameters()]
            own.extend(name for name in inside if name not in listed)
        fresh = [name for name in dict.fromkeys(own) if name not in taken]
        taken.update(fresh)
        chunks.append([(name, by_name[name]) for name in fresh])
    return chunks


def make_chunks(
    model: nn.Module,
    units: Sequence[UnitPlan],
    ranks: Ranks | None = None,
    *,
    alignment: int = ALIGNMENT,
) -> list[Chunk]:
    """One chunk per unit, empty where the unit has no parameters of its own.

    With `ranks`, they share those that are not persistent. Parameters start at multiples of
    `alignment` bytes.
    """
    index_of = {unit.name: index for index, unit in enumerate(units)}
    shape = [(unit.kind, unit.name, unit.parameters) for unit in units]
    chunks: list[Chunk] = []
    for index, parameters in enumerate(unit_parameters(model, shape)):
        users = (index, *(index_of[name] for name in units[index].also_used_by))
        if ranks is None or isinstance(units[index].states, Persistent) or not parameters:
            own = users if parameters else ()
            chunks.append(make_chunk(index, parameters, own, alignment=alignment))
        else:
            chunks.append(make_sharded_chunk(index, parameters, users, ranks))
    return chunks

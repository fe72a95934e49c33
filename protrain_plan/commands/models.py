"""`protrain models`."""

from protrain_plan import rendering
from protrain_plan.commands.options import JsonOption
from protrain_plan.commands.output import show
from protrain_plan.models.presets import presets

EXAMPLES = "Example: protrain models"


def models(as_json: JsonOption = False) -> None:
    """List the published models that `protrain profile` knows by name (no weights)."""
    listed = presets()
    show(as_json, rendering.presets_json(listed), lambda: rendering.presets_text(listed))

"""`protrain models`."""

from protrain_plan.commands.options import JsonOption
from protrain_plan.commands.output import show
from protrain_plan.models.presets import presets
from protrain_plan.rendering.models import presets_json, presets_text

EXAMPLES = "Example: protrain models"


def models(as_json: JsonOption = False) -> None:
    """List the published models that `protrain profile` knows by name (no weights)."""
    listed = presets()
    show(as_json, presets_json(listed), lambda: presets_text(listed))

"""What `protrain models` prints."""

from collections.abc import Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from rich.console import RenderableType
from rich.text import Text

from protrain_plan.rendering.tables import table_of

if TYPE_CHECKING:
    from protrain_plan.models.presets import Preset


def presets_json(presets: Sequence["Preset"]) -> dict[str, Any]:
    """What `protrain models --json` prints."""
    return {"models": [asdict(preset) for preset in presets]}


def presets_text(presets: Sequence["Preset"]) -> RenderableType:
    """What `protrain models` prints."""
    table = table_of("name", "parameters", "layers", "hidden", "source")
    table.columns[-1].justify = "left"
    for preset in presets:
        # Hugging Face's repository says enough; other sources are sentences.
        repository = preset.source.removeprefix("https://huggingface.co/").partition("/blob/")[0]
        table.add_row(
            preset.name,
            f"{preset.num_parameters / 1e6:,.1f} M",
            str(preset.num_layers),
            str(preset.hidden_size),
            Text(repository),
        )
    return table

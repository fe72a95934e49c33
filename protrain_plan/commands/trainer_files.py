"""A trainer's file in the place of a model: its options apply unless the command line has them."""

from pathlib import Path
from typing import TYPE_CHECKING

import typer

from protrain_plan.commands.option_records import option, option_record
from protrain_plan.commands.options import on_command_line
from protrain_runtime.contract.errors import ProtrainError

if TYPE_CHECKING:
    from protrain_plan.models.trainer_files import TrainerFile

_ANSWERED = {
    "named": ("model",),
    "global_batch": ("batch_size", "accumulate"),
    "updates": ("clip",),
}
"""Options of a file that are replaced by an option of the command line with another name."""


@option_record
class FileOptions:
    """Options for models that a trainer's file may leave open."""

    named: str | None = option(
        "The model, if MODEL is a trainer's file that names no known one.",
        "--model",
        metavar="MODEL",
    )
    beside: str | None = option(
        "A frozen model that runs a forward on the same batch in each step, such as a teacher or a"
        " reference: a preset, a config.json, a factory, or none.",
        metavar="MODEL",
    )

    def frozen(self, model: str, file: "TrainerFile | None") -> str:
        """The frozen model beside the trained one; empty for none."""
        from protrain_plan.models.presets import is_factory, known_model

        named = self.beside if self.beside is not None else file and file.options.get("beside")
        if named in (None, "none"):
            return ""
        if is_factory(model) != is_factory(str(named)):
            problem = "a factory makes its own batches, and both models need the same ones"
            fix = "name two factories with such batches, or two models"
            raise ProtrainError(problem, key="--beside", fix=fix)
        return known_model(str(named))

    def read(self, context: typer.Context, model: str) -> "TrainerFile | None":
        """The file that a MODEL argument names; None for a model."""
        from protrain_plan.models.presets import is_factory

        if Path(model).suffix.lower() in (".yaml", ".yml", ".json"):  # others need no reader
            from protrain_plan.models.trainer_files import TrainerFile, is_trainer_file

            if is_trainer_file(model):
                if self.named is not None and is_factory(self.named):
                    problem = "a factory makes its own batches, not those of a file"
                    fix = "pass the factory in place of the file, with options for the rest"
                    raise ProtrainError(problem, key="--model", fix=fix)
                given = on_command_line(context)  # even with default values
                given.remove("model" if "model" in given else "profile")  # the argument itself
                answered = [option for name in given for option in _ANSWERED.get(name, (name,))]
                return TrainerFile(model, given=answered, model=self.named)
        if self.named is not None:
            problem = f"{model} is not a trainer's file, and already names a model"
            raise ProtrainError(problem, key="--model")
        return None

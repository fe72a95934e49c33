"""A trainer's file in the place of a model: its options stand where the command line has none."""

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
"""Options of a file that one of the command line answers, where that is not of the same name."""


@option_record
class FileOptions:
    """Options for what a trainer's file may leave open: its model, and one beside that."""

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
            raise ProtrainError(
                "a factory makes its own batches, and both models need the same ones",
                key="--beside",
                fix="name two factories with such batches, or two models",
            )
        return known_model(str(named))

    def read(self, context: typer.Context, model: str) -> "TrainerFile | None":
        """The file that a MODEL argument names; None where that is a model."""
        from protrain_plan.models.presets import is_factory

        if Path(model).suffix.lower() in (".yaml", ".yml", ".json"):  # others need no reader
            from protrain_plan.models.trainer_files import TrainerFile, is_trainer_file

            if is_trainer_file(model):
                if self.named is not None and is_factory(self.named):
                    raise ProtrainError(
                        "a factory makes its own batches, not those of a file",
                        key="--model",
                        fix="pass the factory in place of the file, with options for the rest",
                    )
                given = on_command_line(context)  # by default values, too
                given.remove("model" if "model" in given else "profile")  # the argument itself
                answered = [option for name in given for option in _ANSWERED.get(name, (name,))]
                return TrainerFile(model, given=answered, model=self.named)
        if self.named is not None:
            problem = f"{model} is not a trainer's file, and already names a model"
            raise ProtrainError(problem, key="--model")
        return None

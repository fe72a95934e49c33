"""Layout of --help: groups of options, names of their values, and which are rare."""

from typing import Any

from typer.core import TyperCommand, TyperGroup

MOST = 25
"""Options that --help shows: a command with more of them leaves its rare ones to --help-all."""
GROUPS = {
    "Model and machine": "on=NAME profile=FILE among=FILE seq-len=N batch-size=N global-batch=N"
    " set=TEXT sweep=TEXT* model=MODEL* beside=MODEL* interconnect=NAME",
    "Training step": "dtype=TYPE precision=MODE lora=ARGS quantize=TYPE optimizer=NAME"
    " optimizer-args=ARGS* clip updates=WHEN* clip-share=SHARE* accumulate=N* compile*",
    "Budgets": "device-memory=SIZE host-memory=SIZE disk=SIZE budgets=FILE tight* page-cache=SIZE*"
    " disk-gain=SHARE*",
    "Devices": "num-devices=N stages=N stage=N nodes=N* replicas=N*",
    "What may be decided": "allow=FORM* pin=TEXT pins=FILE* exact-updates*",
    "Goal": "speed=X price-limit=X price=X max-slowdown=X maximize=WHAT pareto points=N*",
    "Search and limits": "time-limit=SEC gap=X* solver=NAME* seed=N* lp=FILE* jobs=N* no-cache*"
    " model-memory=SIZE",
    "On this machine": "device=NAME name=NAME steps=N text=FILE weights=DIR memory-limit=SIZE"
    " deterministic unit-by-unit probe* in-process* spill-directory=DIR*",
    "Speed of the disk": "disk-seconds=SEC* disk-bytes=SIZE*",
    "Checks": "verify check plain records-only strict expect=N",
    "Checkpoints": "save=DIR save-every=N resume=DIR",
    "Output": "output=FILE to=TOOL format=NAME title=TEXT if-plans trace=FILE"
    " record=FILE recording=FILE explain compare what-helps sort=NAME* columns=NAMES* report=FILE*"
    " json help",
}
"""Options in the order of help: `name` or `name=VALUE`, and `*` after rare ones."""
ROWS = [
    (f"--{name}", group, value, entry.endswith("*"))
    for group, entries in GROUPS.items()
    for entry in entries.split()
    for name, _, value in [entry.rstrip("*").partition("=")]
]


def place(option: Any) -> int:
    """The row of an option; -1 for an argument, and for what is missing in the table."""
    return next((at for at, (name, *_) in enumerate(ROWS) if name in option.opts), -1)


class Command(TyperCommand):
    """A command whose --help shows the common options, and whose --help-all shows all."""

    def get_help_option_names(self, _: Any) -> list[str]:
        """Return --help-all, too, where --help leaves options out."""
        return ["-h", "--help", *["--help-all"] * (len(self.params) > MOST)]

    def parse_args(self, context: Any, arguments: list[str]) -> list[str]:
        """Note which help is wanted."""
        context.meta["all"] = "--help-all" in arguments
        return super().parse_args(context, arguments)

    def format_help(self, context: Any, formatter: Any) -> None:
        """Print the options sorted, with the names of their values, and without rare ones."""
        from typer import rich_utils

        parameters: list[Any] = self.get_params(context)
        for one in parameters:
            if one.param_type_name == "argument":
                one.metavar = one.name.upper()
                continue
            _, one.rich_help_panel, value, is_rare = ROWS[place(one)]
            one.metavar = "" if one.is_flag else value or one.metavar
            one.hidden = is_rare and len(self.params) > MOST and not context.meta["all"]
            if "--help-all" in one.opts:
                one.help = "Show this message; --help-all shows every option."
        self.params.sort(key=place)
        vars(rich_utils)["STYLE_OPTIONS_TABLE_PADDING"] = (0, 1, 0, 0)  # many columns are empty
        super().format_help(context, formatter)


class Group(TyperGroup):
    """A group of commands, whose own options are flags."""

    def format_help(self, context: Any, formatter: Any) -> None:
        """Print the help without the type of flags."""
        for option in self.get_params(context):
            option.metavar = ""
        super().format_help(context, formatter)

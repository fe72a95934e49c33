"""A mistake is one message and exit code 2; the catalogue has the messages.

Commands run in this process, as `main` runs them, in a folder with records of all kinds.
"""

import os
import re
import shlex
from collections.abc import Iterator
from contextlib import chdir
from pathlib import Path
from typing import Any

import pytest
import typer

from protrain_plan.cli import app
from protrain_plan.commands.help import ROWS
from protrain_runtime.contract.records import write_plan, write_profile
from tests.support.checking_cases import offloading
from tests.support.messages import Speaker
from tests.support.planning_cases import cpu, decoder, gpu, joined
from tests.support.record_fuzz import run
from tests.support.reporting_cases import small_step


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """It is as it was, after all of them."""
    folder = tmp_path_factory.mktemp("mistakes")
    step = small_step()
    write_profile(decoder(cpu(), blocks=3), folder / "profile.yaml")
    write_profile(decoder(gpu(), blocks=6, pieces=4), folder / "card.yaml")
    write_profile(decoder(joined(gpu()), blocks=3), folder / "joined.yaml")
    write_plan(step.plan, folder / "plan.yaml")
    write_plan(offloading(), folder / "offloading.yaml")
    text = (folder / "plan.yaml").read_text()
    (folder / "typo.yaml").write_text(text.replace("persistent", "persistant"))
    (folder / "broken.yaml").write_text("protrain: plan\nunits: [\n")
    (folder / "prices.yaml").write_text("rtx-4090: {price_per_hour: 0.5, num_devices: [1]}\n")
    for name in ("shown", "empty"):
        (folder / name).mkdir()
    write_profile(step.profile, folder / "shown/profile.yaml")
    write_plan(step.plan, folder / "shown/plan.yaml")
    (folder / "there").touch()
    (folder / "axolotl.yml").write_text("base_model: tiny-llama\nmicro_batch_size: 1\n")
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / "mine.py").write_text("def made():\n    return 1\n")
    before = sorted(folder.rglob("*"))
    yield folder
    assert sorted(folder.rglob("*")) == before


MISTAKES = """
nonsense
run
run missing.yaml
run card.yaml
run broken.yaml
run typo.yaml
run offloading.yaml --memory-limit 1.5GX
run offloading.yaml --memory-limit 24
run offloading.yaml --plain --record r.json
profile tiny-lama --in-process
profile tiny-llama --dtype float33
profile tiny-llama --device tpu
profile tiny-llama -o .
profile tiny-llama --on l4 --steps 3
profile tiny-llama --on l4 --disk-seconds 60
profile tiny-llama --on l4 --disk-bytes 9GiB
plan missing.yaml
plan offloading.yaml
plan tiny-llama
plan meta-llama/Llama-3.1-8B
plan axolotl.yml
plan config.json
plan mine.py:made
plan card.yaml --page-cache 4
plan profile.yaml --device-memory 1.5GX
plan profile.yaml -o /dev/null/no/plan.yaml
plan profile.yaml -o - --lp /dev/fd/1
plan card.yaml --allow int8-activations
plan card.yaml --pareto --maximize batch-size
plan card.yaml --maximize layers
plan card.yaml --updates later
plan card.yaml --updates in-backward --clip
plan card.yaml --clip --clip-share 1.2
plan card.yaml --solver cplex
plan tiny-llama --on rtx-4090 --global-batch 8 --accumulate 2
plan tiny-llama --on rtx-4090 -o there/plan
plan gpt2 --model gpt2
plan gpt2 --beside gpt2
plan joined.yaml --num-devices 4 --stages many --global-batch 4
plan joined.yaml --num-devices 4 --stages auto --global-batch 4 --pareto
show shown/plan.yaml --profile card.yaml
simulate shown/plan.yaml --profile card.yaml
simulate shown/plan.yaml --trace no/trace.json
report shown/plan.yaml --profile card.yaml
report shown/plan.yaml -o .
report shown/plan.yaml --recording none.json
report shown/plan.yaml --recording card.yaml
export plan.yaml --to deepspeed
fit tiny-llama --on rtx-4091
fit tiny-llama --batch 3
fit tiny-llama --on rtx-4090 --host-memory 128
fit tiny-llama --on rtx-4090 --disk 500
fit tiny-llama --on rtx-4090 --sweep host=64..128
fit mine.py:made --on cpu --batch-size 2
fit mine.py:made --on cpu --seq-len 2048
fit mine.py:made --on cpu --global-batch 8
fit tiny-llama --on cpu --beside mine.py:made
plan mine.py:made --on cpu --batch-size 1
profile mine.py:made --seq-len 512
profile mine.py:made --text profile.yaml
hardware search mine.py:made --speed 1 --seq-len 64
fit lama-3.1-8b --on cpu
hardware copy rtx-4091
hardware copy plan.yaml
fit tiny-llama --on cpu --seq-len many
fit tiny-llama --on cpu --batch-size 0
fit tiny-llama --on cpu --host-memory 64GiB
fit tiny-llama --on cpu --precision mixed
fit tiny-llama --on cpu --price cheap
fit tiny-llama --on cpu --price 1e-300
fit tiny-llama --on cpu --columns speed
fit tiny-llama --on cpu --seq-len 64 --sweep host=1GiB
fit tiny-llama --on rtx-4090 --set prize=1
fit tiny-llama --on rtx-4090 --set accumulate=0
fit tiny-llama --on rtx-4090 --set optimizer=adan
fit tiny-llama --on rtx-4090 --sort speed
fit tiny-llama --seq-len 64
fit tiny-llama --on rtx-4090 --global-batch 8 --batch-size 2
fit tiny-llama --on rtx-4090 --global-batch 8 --accumulate 2
fit tiny-llama
fit missing.yaml --on h200
fit gpt2 --model gpt2 --on h200
fit tiny-gpt2 --on h200 --seq-len 64 --beside gpt3
fit gpt2 --on h200 --beside gpt2 --stages 2 --global-batch 8
fit tiny-llama --on h200 --set optimiser=sgd
fit tiny-llama --on h200 --set optimizer=sgd --optimizer adamw
fit tiny-llama --on h200 --set host=8GiB --host-memory 4GiB
fit tiny-llama --on h200 --sweep seq-len=64 --seq-len 32
fit tiny-llama --on h200 --set accumulate=2 --global-batch 4
fit tiny-llama --on h200 --sort cost
fit tiny-llama --on h200 --sort time --speed 1
fit tiny-llama --on h200 --what-helps --speed 1
fit tiny-llama --on h200 --among prices.yaml
fit tiny-llama --on h200 --stages auto --global-batch 4 --compare
fit tiny-llama --on h200 --stages auto --global-batch 4 --batch-size 2
hardware show 'RTX 4090'
hardware show A100
hardware show plan.yaml
hardware show broken.yaml
hardware show ./none.yaml
hardware show .
hardware probe -o /no/such/folder/machine.yaml
hardware search tiny-llama --speed 1 --among none.yaml
hardware search tiny-llama --speed 1 --among prices.yaml --price-limit 0.2
hardware search tiny-llama --speed 1 --among prices.yaml --dtype int8
hardware search tiny-llama --speed 1 --num-devices 2
hardware search tiny-llama --speed 1 --price 2
check nothing
check empty
check shown --format html
check shown --on rtx-409
"""


@pytest.mark.nightly(
    "profile tiny-llama --device tpu", "fit tiny-gpt2 --on h200 --seq-len 64 --beside gpt3"
)
@pytest.mark.parametrize("command", MISTAKES.strip().splitlines())
def test_mistakes_are_one_message(command: str, folder: Path, assert_says: Speaker) -> None:
    with chdir(folder):
        code, told = run(shlex.split(command))
    assert code == 2, told
    assert told.startswith("error: ")
    assert "Traceback" not in told
    assert_says(told)


HELPED = (
    *("profile", "fit", "plan", "show", "simulate", "report", "run", "check", "diff", "export"),
    *("models", "hardware", "hardware list", "hardware show", "hardware copy", "hardware probe"),
    "hardware search",
)


@pytest.mark.parametrize("command", HELPED)
def test_help_is_short_and_shows_an_example(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It has at most 25 options; descriptions have 45 columns of 80 also where all are shown."""
    monkeypatch.setenv("COLUMNS", "80")
    told = {}
    for option in ("--help", "-h", *["--help-all"] * (command in ("profile", "fit", "plan"))):
        code, told[option] = run([*command.split(), option])
        assert code == 0
        lines = told[option].splitlines()
        assert f"protrain {command} " in f"{told[option].partition('Example')[2]} "
        assert max(map(len, lines)) <= 80
        blanks = [len(found[1]) for line in lines if (found := re.match(r"│( +)\w", line))]
        assert max(blanks, default=0) <= 80 - 45 - 3
        shown = [line for line in lines if re.match("│(  |[*]) ?--|│ --", line)]
        assert len(shown) <= 25 or option == "--help-all"
    assert told["--help"] == told["-h"]
    assert os.environ["COLUMNS"] == "80"


def test_every_option_has_a_place_in_the_help() -> None:
    group: Any = typer.main.get_command(app)
    commands = [*group.commands.values(), *group.commands["hardware"].commands.values()]
    options = {
        max(one.opts, key=len)
        for command in commands
        for one in command.params
        if one.param_type_name == "option"
    }
    assert options | {"--help"} == {row[0] for row in ROWS}

"""Names that are something else for whoever prints, draws or compares them."""

from dataclasses import replace
from functools import cache

from protrain_plan.presentation.report.step import Step
from protrain_runtime.contract.records.plan import (
    KEEP,
    PERSISTENT,
    RECOMPUTE,
    Activations,
    Placement,
    Schedule,
)
from protrain_runtime.contract.records.profile import Profile
from tests.support.planning_cases import decoder, gpu
from tests.support.reporting_cases import step_of

SETS_A_MARK = "document.documentElement.dataset.mark='set'"
NAMES = (
    "[/]",
    "[bold red]x[/bold red][link=https://evil.example]y[/link]",
    "\x1b[31mred\x1b]0;title\x07\x9b2J\x1bc",
    "\u202egpj.\u2066exe\u2069\u200b\ufeff",
    "a\nb\r\n::error file=x,line=1::\n  ::add-mask::a\x0b\x0c\x85\u2028::stop-commands::x",
    "::set-output name=a::b",
    "# ## ###[x]y",
    f"</script></title><script>{SETS_A_MARK}</script><!--<script>",
    f"<img src=x onerror={SETS_A_MARK}>\" onload='{SETS_A_MARK}' x=\"",
    f"<svg onload={SETS_A_MARK}></svg>&lt;b&gt;&amp;]]><![CDATA[",
    "a|b \\|c\\\\| d",
    "`a``b` ` ```\n# x",
    "![x](http://evil.example/x.png)[y](javascript:alert(1))<http://evil.example>",
    "@someone #1 GH-2 www.evil.example https://evil.example someone@evil.example",
    "\n\n# head\n\n- item\n\n    code\n\n| a |\n|---|\n| b |\n",
    "%0A%0D%25::error::x,y=z",
    "\0\ufffe\uffff\ud800 \udcff\x7f",
    "__proto__",
    "{0} {{1}} [a](1) \\[b](2)",
    "-rf --output=x",
    " \t ",
    "$(touch x) ${{ github.token }} `id`; $title $$",
)


def hostile_profile() -> Profile:
    """A profile in which every unit, the model, the machine and the optimizer has such a name."""
    profile = decoder(gpu(disk_gb=1000), blocks=len(NAMES) - 2, pieces=2)
    first, second, third, *_ = NAMES[7:]
    return replace(
        profile,
        units=tuple(
            replace(unit, name=name) for unit, name in zip(profile.units, NAMES, strict=True)
        ),
        workload=replace(profile.workload, model=first, adapter=NAMES[4]),
        hardware=replace(
            profile.hardware,
            name=second,
            device=replace(profile.hardware.device, name=third),
            sources=NAMES,
        ),
        optimizer=replace(profile.optimizer, name=NAMES[0]),
    )


@cache
def hostile_step() -> Step:
    """A step of that profile, no two neighbours decided alike."""
    prompt = Schedule(forward_lead=1, backward_lead=1, swap_lead=1, swap_drain=0, update_drain=1)
    choices = (
        (Activations(tier="host"), Placement(tier="host"), prompt),
        (RECOMPUTE, Placement(tier="disk"), prompt),
        (KEEP, PERSISTENT, Schedule()),
    )
    profile = hostile_profile()
    last = len(profile.units) - 1
    return step_of(profile, [choices[n % 3 if 0 < n < last else 2] for n in range(last + 1)])

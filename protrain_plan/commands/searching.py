"""`protrain hardware search`: the cheapest machine for a speed, the fastest for a price."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from protrain_plan.commands.option_records import (
    BudgetOptions,
    StepOptions,
    WorkloadOptions,
    option_record,
    with_records,
)
from protrain_plan.commands.options import (
    JsonLinesOption,
    ModelArgument,
    NoCacheOption,
    TightOption,
    integers,
    refuse_of_factory,
)
from protrain_plan.commands.staging import (
    StageOptions,
    Staging,
    refuse_without_global_batch,
    staged_on,
)
from protrain_runtime.contract.errors import ProtrainError

if TYPE_CHECKING:
    from protrain_plan.commands.measuring import ProfileRequest, Progress
    from protrain_plan.hardware.offers import MachineOffer
    from protrain_plan.planning.questions.shopping import Tried, Variation
    from protrain_plan.profiling.estimate_cache import EstimateCache
    from protrain_runtime.contract.records.hardware import Hardware
    from protrain_runtime.contract.records.plan import StepSettings
    from protrain_runtime.contract.records.profile import Profile


@option_record
class WantedOptions:
    """Options of what is wanted, and of the machines to look among."""

    speed: Annotated[
        float | None, typer.Option(min=1e-3, help="Tokens per second of all devices to reach.")
    ] = None
    price_limit: Annotated[
        float | None, typer.Option(min=0.0, help="The most that all devices may cost an hour.")
    ] = None
    among: Annotated[
        Path | None,
        typer.Option(
            help="A YAML file of machines and prices: 'rtx-4090: 0.35' in a line; default: the"
            " catalogue's machines that have a price."
        ),
    ] = None

    def offers(self) -> "list[MachineOffer]":
        """Return the machines within the price; ProtrainError where nothing is wanted, or found."""
        from protrain_plan.hardware.offers import catalogue_offers, read_offers

        if self.speed is None and self.price_limit is None:
            raise ProtrainError(
                "what is to be found?",
                key="--speed",
                fix="--speed 5000 for the cheapest that is as fast, --price-limit 3 for the"
                " fastest",
            )
        offered = catalogue_offers() if self.among is None else read_offers(self.among)
        limit = self.price_limit
        within = [one for one in offered if limit is None or one.price_per_hour <= limit]
        if not within:
            cheapest = min(one.price_per_hour for one in offered)
            raise ProtrainError(
                f"the cheapest of {len(offered)} costs {cheapest:g} an hour", key="--price-limit"
            )
        return within


@with_records
def search(
    context: typer.Context,
    model: ModelArgument,
    workload: WorkloadOptions,
    step: StepOptions,
    wanted: WantedOptions,
    stages: StageOptions,
    seq_len: Annotated[str, typer.Option(help="Tokens per sequence.")] = "2048",
    batch_size: Annotated[
        str | None,
        typer.Option(
            help="Sequences of each device's batch; of several, any may be best. Default: 1.",
            show_default=False,
        ),
    ] = None,
    global_batch: Annotated[
        int | None, typer.Option(min=1, help="Sequences per update, with --stages.")
    ] = None,
    tight: TightOption = False,
    no_cache: NoCacheOption = False,
    as_json: JsonLinesOption = False,
) -> None:
    """Find the cheapest machine that trains a model at a speed, or the fastest within a price.

    Machines, counts of their devices, host memory and links are those of --among. What cannot
    reach the speed is ruled out by a bound, the rest is planned in the order of prices, so that the
    first that reaches it is the cheapest. Seconds are estimates from data-sheet rates. With --json,
    each machine that was looked at is a line, and the last line is the answer.

    Examples: protrain hardware search llama-3.1-8b --speed 5000 --among prices.yaml
    | protrain hardware search llama-3.1-8b --price-limit 3 --among prices.yaml --batch-size 1,4
    | protrain hardware search llama-3.1-8b --speed 20000 --stages auto --global-batch 128
    """
    refuse_of_factory(context, model)
    many = None
    if stages.stages is not None:
        many = refuse_without_global_batch(global_batch, batch_size, step.accumulate)
    elif global_batch is not None:
        raise ProtrainError("it is for stages", key="--global-batch", fix="--stages auto")
    within, settings = wanted.offers(), step.settings()
    budgets = BudgetOptions(tight=tight)
    from protrain_plan.commands.answering import GAP
    from protrain_plan.commands.measuring import estimated
    from protrain_plan.commands.output import print_json, print_rendered, progress
    from protrain_plan.planning.questions import shopping
    from protrain_plan.presentation.choosing import offer_json, search_json, search_text
    from protrain_plan.profiling.estimate_cache import EstimateCache

    requests = workload.requests(
        model, integers("--seq-len", seq_len), integers("--batch-size", batch_size or "1")
    )
    listed = list(dict.fromkeys(replace(one.listed, price_per_hour=0.0) for one in within))
    cache = EstimateCache(off=no_cache)
    with progress(quiet=as_json) as report:
        report("estimating", 0.0)
        if many is not None:
            numbers = stages.numbers()
            offers = [
                variation
                for one in requests
                for variation in _staged(
                    one, within, listed, settings, budgets, many, numbers, cache, report
                )
            ]
        else:
            estimates = estimated(requests, listed, report, cache)
            offers = [
                _variation(one, row[_place(one, listed)], settings, budgets)
                for row in estimates
                for one in within
            ]
        seen: list[Variation] = []

        def told(offer: "Variation") -> None:
            report(offer.name, len(seen) / len(offers))
            seen.append(offer)

        def done(offer: "Tried") -> None:
            if as_json:
                print_json(offer_json(offer), indent=None)

        found = shopping.search(offers, speed=wanted.speed, gap=GAP, told=told, done=done)
    best = found.best.variation.question.profile.hardware if found.best else None
    data = search_json(
        found, {"tokens_per_second": wanted.speed, "price_limit": wanted.price_limit}
    )
    if as_json:
        print_json(data, indent=None)
    else:
        print_rendered(search_text(data, best))
    if found.best is None:
        raise typer.Exit(3)


def _place(offer: "MachineOffer", listed: "Sequence[Hardware]") -> int:
    """The number of the offer's machine; a price is no part of what is estimated."""
    return listed.index(replace(offer.listed, price_per_hour=0.0))


def _staged(
    request: "ProfileRequest",
    within: "Sequence[MachineOffer]",
    listed: "Sequence[Hardware]",
    settings: "StepSettings",
    budgets: BudgetOptions,
    global_batch: int,
    numbers: tuple[int, ...],
    cache: "EstimateCache",
    report: "Progress",
) -> "Iterator[Variation]":
    """Yield the questions about stages on the machines of the list."""
    from protrain_plan.planning.questions.kept_answers import AnswerCache
    from protrain_plan.planning.questions.shopping import Variation

    groups = [
        (_place(one, listed), replace(one.machine, price_per_hour=0.0), one.group) for one in within
    ]
    found = staged_on(
        request, listed, groups, budgets, settings, global_batch, numbers, cache, report
    )
    staging = Staging(kept=AnswerCache(off=cache.is_off))
    for one, asked in zip(within, found, strict=True):
        yield Variation(
            name=one.name,
            price_per_hour=one.price_per_hour,
            question=asked.base,
            answer=partial(staging.answer, asked),
            others=asked.others,
        )


def _variation(
    offer: "MachineOffer", profile: "Profile", settings: "StepSettings", budgets: BudgetOptions
) -> "Variation":
    """Return the question on a machine of the list; a price is no part of what is estimated.

    Sizes and links alter no bytes of a profile, nor seconds of its units.
    """
    from protrain_plan.planning.questions.answers import Question
    from protrain_plan.planning.questions.shopping import Variation

    profile = replace(profile, hardware=replace(offer.machine, price_per_hour=0.0))
    question = Question(
        profile=profile,
        settings=replace(settings, group=offer.group),
        replicas=offer.group.replica_counts,
        budgets=budgets.of(profile, offer.group),
    )
    return Variation(name=offer.name, price_per_hour=offer.price_per_hour, question=question)

"""The pages in headless Chromium: drawn without an error, and they do what they say.

`--write-golden` writes the page's texts anew.
"""

import itertools
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from playwright.sync_api import Browser, Locator, Page

from protrain_plan.planning.questions.answers import Question
from protrain_plan.planning.questions.cells import Cell, planned
from protrain_plan.planning.questions.objectives import fit
from protrain_plan.planning.search.improving import Effort
from protrain_plan.presentation.grids import row_of
from protrain_plan.presentation.report.fit_page import fit_page
from protrain_plan.presentation.report.page import page_text
from protrain_plan.presentation.report.step import memory, simulated, slot_begins_s
from protrain_runtime.contract.escaping import one_line
from protrain_runtime.contract.records.plan import KEEP, PERSISTENT, Budgets, Placement, Schedule
from protrain_runtime.contract.units import format_bytes, format_seconds
from tests.support.browsers import chromium, needs_chromium, opened
from tests.support.hostile_names import NAMES, hostile_step
from tests.support.planning_cases import MB, decoder, gpu
from tests.support.reporting_cases import (
    FRONT,
    GOLDEN,
    Decision,
    deep_step,
    recorded,
    small_step,
    stages_step,
    step_of,
)

pytestmark = [pytest.mark.browser, needs_chromium]


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of the small step, with a recording and a front."""
    path = tmp_path_factory.mktemp("page") / "report.html"
    step = small_step()
    path.write_text(page_text(step, recording=recorded(step), front=FRONT), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def fits_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page of answers: one that fits in several ways, a tight one, and one that has none."""
    profile = decoder(gpu(disk_gb=1000), blocks=4, pieces=2)
    budgets = [Budgets(device=mb * MB, host=10**12, disk=10**12) for mb in (100_000, 3_000, 1)]
    asked = [Question(profile=profile, budgets=budget) for budget in budgets]
    fits = [fit(question, effort=Effort(), compare=True) for question in asked]
    assert [one.verdict for one in fits] == ["fits", "fits with a plan", "does not fit"]
    path = tmp_path_factory.mktemp("fits") / "fits.html"
    rows = [row_of(planned(Cell(question=one.question), one)) for one in fits]
    path.write_text(fit_page(rows, columns=["mfu", "hours"]), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def stages_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("stages") / "stages.html"
    path.write_text(page_text(stages_step(micro_batches=24)), encoding="utf-8")
    return path


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with chromium() as browser:
        yield browser


@pytest.fixture
def page(browser: Browser, file: Path) -> Iterator[Page]:
    with opened(browser) as page:
        page.goto(file.as_uri())
        yield page


def point(page: Page, x: float, y: float) -> tuple[float, float]:
    """The place in the window of a share of the chart's width and of pixels from its top."""
    chart = page.locator("#time")
    chart.scroll_into_view_if_needed()
    box = chart.bounding_box()
    assert box is not None
    return box["x"] + x * box["width"], box["y"] + y


def hover(page: Page, x: float, y: float) -> Locator:
    page.mouse.move(*point(page, x, y))
    tip = page.locator("#tip")
    tip.wait_for(state="visible")
    return tip


def settled(page: Page) -> None:
    """Drawing waits for the next frame."""
    page.evaluate("() => new Promise((done) => requestAnimationFrame(() => setTimeout(done)))")


def shown(page: Page) -> str:
    settled(page)
    return page.locator("#range").inner_text()


DEVICE = 150  # pixels from the chart's top: in the device's memory


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [500, 1280, 2200])
def test_a_page_is_drawn_without_an_error(
    browser: Browser, file: Path, width: int, *, dark: bool
) -> None:
    with opened(browser, width=width, dark=dark) as page:
        page.goto(file.as_uri())
        settled(page)
        assert page.locator("h1").inner_text() == "synthetic"
        areas = page.locator("#time path[data-area=device]").count()
        assert areas == len(memory(small_step())[0].by_kind)
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
        background = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        assert background == ("rgb(16, 19, 24)" if dark else "rgb(246, 247, 249)")


def lines_of_text(page: Page) -> list[dict[str, Any]]:
    """Each line of text that is seen: its box, and its contrast with what is behind it."""
    settled(page)
    script = (Path(__file__).parents[1] / "support/lines_of_text.js").read_text(encoding="utf-8")
    found: list[dict[str, Any]] = page.evaluate(script)
    return found


@pytest.mark.nightly("390-light-fits_file")
@pytest.mark.parametrize("name", ["file", "fits_file", "stages_file"])
@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("width", [390, 1280])
def test_all_text_can_be_read(
    browser: Browser, request: pytest.FixtureRequest, name: str, width: int, *, dark: bool
) -> None:
    with opened(browser, width=width, dark=dark) as page:
        page.goto(request.getfixturevalue(name).as_uri())
        lines = lines_of_text(page)
        assert len(lines) > 30
        assert [line for line in lines if line["contrast"] < 4.5] == []
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")
        if name == "fits_file":
            covered = [
                (one["text"], other["text"])
                for one, other in itertools.combinations(lines, 2)
                if all(
                    max(one["box"][side], other["box"][side])
                    < min(one["box"][side + 2], other["box"][side + 2])
                    for side in (0, 1)
                )
            ]
            assert covered == []


def test_stages_are_rows_of_boxes_that_pointer_and_keys_tell(
    browser: Browser, stages_file: Path
) -> None:
    of = stages_step(micro_batches=24).of_stages
    assert of is not None
    with opened(browser, width=390) as page:
        page.goto(stages_file.as_uri())
        settled(page)
        chart = page.locator("#stages-chart")
        assert chart.locator("[data-box]").count() == len(of.pipeline.run.spans)
        assert page.evaluate(
            "() => document.querySelector('#stages-chart').clientWidth"
            " > 2 * document.querySelector('#stages .scroll').clientWidth"
        )
        rows = page.locator("#stages-table tbody tr").all_inner_texts()
        assert [row.split()[1] for row in rows] == ["embedding", "layers.2", "layers.4", "layers.6"]
        assert page.locator("#step-title").inner_text() == "The step, stage 0"
        chart.locator("[data-box='1 0']").hover()
        assert page.locator("#tip").inner_text().startswith("forward of micro-batch 0\non\tstage 1")
        chart.focus()
        for key in ("ArrowRight", "ArrowDown", "End", "ArrowRight"):
            page.keyboard.press(key)
        assert page.locator("#tip").inner_text().startswith("forward of micro-batch 1\non\tstage 1")
        assert (page.locator("#said").text_content() or "").startswith("stage 1: forward")
        for _ in range(60):
            page.keyboard.press("ArrowRight")
        assert page.locator("#tip").inner_text().startswith("update")
        page.keyboard.press("Escape")
        assert page.locator("#tip").is_hidden()
        assert page.evaluate("() => document.documentElement.scrollWidth <= innerWidth")


def test_bars_are_beside_their_names_and_end_where_the_device_does(
    browser: Browser, fits_file: Path
) -> None:
    with opened(browser) as page:
        page.goto(fits_file.as_uri())
        rows = page.locator(".fits tr:not(.cell)").all()
        texts = [row.locator("th, td").all_inner_texts() for row in rows[1:]]
        assert [text[0] for text in texts].count("plain PyTorch") == 3
        for row, (_, tokens, *_, why) in zip(rows[1:], texts, strict=True):
            fits = tokens != "does not fit"
            assert row.locator("td:nth-child(2) .made").count() == fits
            assert why.startswith("lacks ") != fits
            assert row.locator(".over").count() <= ("device memory" in why)


def test_every_decision_of_a_plan_has_a_colour_of_its_own(page: Page) -> None:
    for what in ("activations", "states"):
        swatches = page.locator(f"#{what}-legend .swatch")
        shown = swatches.evaluate_all("all => all.map((one) => getComputedStyle(one).background)")
        assert len(set(shown)) == len(shown) > 3


def test_a_page_of_many_blocks_is_drawn_without_an_error(browser: Browser, tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    path.write_text(page_text(deep_step()), encoding="utf-8")
    with opened(browser) as page:
        page.goto(path.as_uri())
        settled(page)
        assert page.locator("#strip rect[data-unit]").count() == 2 * 128
        assert page.locator("#decisions-table tbody tr").count() == 128


def test_rows_of_decisions_are_runs_of_blocks_that_decide_all_alike(
    browser: Browser, tmp_path: Path
) -> None:
    """Ends are parts, and never of a run, even where they decide as blocks do."""
    host, soon = Placement(tier="host"), Schedule(update_drain=2)
    kept: tuple[Decision, ...] = ((KEEP, PERSISTENT, Schedule()),) * 3
    moved = [(KEEP, host, one) for one in (*(soon,) * 4, replace(soon, forward_lead=1))]
    plain = step_of(decoder(gpu(), blocks=9), [*kept, *moved, *kept])
    units = [
        replace(unit, schedule=replace(unit.schedule, update_late=number in (3, 4)))
        for number, unit in enumerate(plain.plan.units)
    ]
    settings = replace(plain.plan.settings, overlap_steps=True)
    plan = replace(plain.plan, settings=settings, units=tuple(units))
    path = tmp_path / "report.html"
    path.write_text(page_text(simulated(plan, plain.profile)), encoding="utf-8")
    with opened(browser) as page:
        page.goto(path.as_uri())
        rows = page.locator("#decisions-table tbody td:first-child").all_text_contents()
    assert rows == [
        "embedding",
        "layers.0 to 1",
        "layers.2 to 3",
        "layers.4 to 5",
        "layers.6",
        "layers.7 to 8",
        "head and the loss",
    ]


def test_the_page_s_texts_are_the_golden_ones(page: Page, request: pytest.FixtureRequest) -> None:
    texts: dict[str, Any] = {
        "title": page.title(),
        "figures": page.locator("#figures > div").all_inner_texts(),
        "legend": page.locator("#legend > *").all_inner_texts(),
        "lane-legend": page.locator("#lane-legend > *").all_inner_texts(),
        "words": page.locator("#words li").all_inner_texts(),
        "verdict": page.locator("#recorded-verdict").inner_text(),
        "foot": page.locator("#foot").inner_text(),
    }
    for name in ("recorded", "front", "waits", "lanes", "decisions"):
        rows = page.locator(f"#{name}-table tr").all()
        texts[name] = [row.locator("th, td").all_text_contents() for row in rows]
    found = json.dumps(texts, indent=1) + "\n"
    if request.config.getoption("--write-golden"):
        (GOLDEN / "page.json").write_text(found, encoding="utf-8")
    assert found == (GOLDEN / "page.json").read_text(encoding="utf-8")


def test_pointing_says_what_stands_on_the_device(page: Page) -> None:
    step = small_step()
    device = memory(step)[0]
    tip = hover(page, 0.5, DEVICE).inner_text()
    slot = next(n for n, one in enumerate(step.report.slots) if tip.startswith(one.name))
    for kind, sizes in device.by_kind.items():
        there = re.search(rf"^{kind}\t(.*)$", tip, re.MULTILINE)
        assert (there[1] if there else None) == (format_bytes(sizes[slot]) if sizes[slot] else None)
    assert f"device\t{format_bytes(device.totals[slot])}" in tip
    assert f"free\t{format_bytes(device.budget_bytes - device.totals[slot])}" in tip
    page.mouse.move(5, 5)
    assert page.locator("#tip").is_hidden()


@pytest.mark.nightly
def test_pointing_at_a_lane_says_what_moves(page: Page) -> None:
    step = small_step()
    span = max(step.timeline.spans, key=lambda one: one.end_s - one.start_s)
    boxes = page.locator("#time rect.bar-mark").all()
    widest = max(boxes, key=lambda box: (box.bounding_box() or {"width": 0})["width"])
    widest.hover()
    tip = page.locator("#tip").inner_text()
    assert f"on\t{span.lane}" in tip
    assert f"takes\t{format_seconds(span.end_s - span.start_s)}" in tip


def test_a_wait_is_told_with_its_cause(page: Page) -> None:
    box = page.locator("#time rect.wait").last.bounding_box()
    assert box is not None
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + 3)
    assert "for the last optimizer states (write states 4 @7" in page.locator("#tip").inner_text()


@pytest.mark.nightly
def test_zoom_by_buttons_keys_wheel_and_dragging(page: Page) -> None:
    whole = shown(page)
    assert whole == f"0 s to {format_seconds(1.25 * small_step().report.step_seconds)}"
    page.click("#zoom-in")
    half = shown(page)
    assert half != whole
    page.click("#zoom-out")
    assert shown(page) == whole

    page.mouse.move(*point(page, 0.4, DEVICE))
    page.mouse.down()
    page.mouse.move(*point(page, 0.6, DEVICE), steps=4)
    page.mouse.up()
    dragged = shown(page)
    assert dragged != whole
    page.mouse.dblclick(*point(page, 0.5, DEVICE))
    assert shown(page) == whole

    page.keyboard.down("Control")
    page.mouse.wheel(0, -300)
    page.keyboard.up("Control")
    assert shown(page) != whole
    page.click("#zoom-fit")
    assert shown(page) == whole

    page.focus("#time")
    page.keyboard.press("+")
    assert shown(page) == half
    page.keyboard.press("Shift+ArrowRight")
    assert shown(page) != half
    page.keyboard.press("0")
    assert shown(page) == whole


def test_the_window_in_the_overview_moves_the_view(page: Page) -> None:
    page.click("#zoom-in")
    before = shown(page)
    page.mouse.click(*point(page, 0.9, 15))
    assert shown(page) != before


def test_lanes_and_memory_keep_one_time_axis(page: Page) -> None:
    step = small_step()
    whole = 1.25 * step.report.step_seconds
    for start, end in ((0.0, whole), (whole / 4, whole * 3 / 4)):
        settled(page)
        frame = page.locator("#time rect.frame").first
        left, width = (float(frame.get_attribute(name) or "") for name in ("x", "width"))

        def place(
            time: float,
            start: float = start,
            end: float = end,
            left: float = left,
            width: float = width,
        ) -> float:
            return left + (time - start) / (end - start) * width

        area = page.locator("#time path[data-area=device]").first.get_attribute("d") or ""
        edges = [float(x) for x in re.findall(r"[MH](-?[0-9.]+)", area)]
        begins = [place(time) for time in slot_begins_s(step) if start <= time <= end]
        assert all(min(abs(edge - begin) for edge in edges) < 0.02 for begin in begins)
        bars = page.locator("#time rect.bar-mark").evaluate_all(
            "(all) => all.map((b) => +b.getAttribute('x'))"
        )
        spans = [place(span.start_s) for span in step.timeline.spans if start < span.start_s < end]
        far = [span for span in spans if min(abs(bar - span) for bar in bars) > 1]
        assert far == []
        page.click("#zoom-in")


def test_a_legend_button_takes_a_kind_away_and_brings_it_back(page: Page) -> None:
    areas = page.locator("#time path[data-c=states]")
    before = areas.count()
    button = page.locator("button[data-kind=states]")
    assert button.get_attribute("aria-pressed") == "true"
    button.click()
    settled(page)
    assert button.get_attribute("aria-pressed") == "false"
    assert areas.count() == 0
    assert "device, shown" in hover(page, 0.5, DEVICE).inner_text()
    button.click()
    settled(page)
    assert areas.count() == before > 0


def test_the_keyboard_goes_from_slot_to_slot(page: Page) -> None:
    step = small_step()
    page.focus("#time")
    peak, names = step.report.peak_slot, [slot.name for slot in step.report.slots]
    said = page.locator("#said")
    page.keyboard.press("ArrowRight")
    assert said.text_content() is not None
    assert (said.text_content() or "").startswith(names[peak])
    page.keyboard.press("ArrowRight")
    assert (said.text_content() or "").startswith(names[peak + 1])
    page.keyboard.press("Home")
    assert (said.text_content() or "").startswith("forward of embedding")
    assert page.locator("#tip").is_visible()
    page.keyboard.press("Escape")
    assert page.locator("#tip").is_hidden()


def test_everything_is_reached_with_the_tab_key(page: Page) -> None:
    reached: list[str] = []
    for _ in range(40):
        page.keyboard.press("Tab")
        reached.append(
            page.evaluate(
                "() => document.activeElement.id || document.activeElement.dataset.kind"
                " || document.activeElement.name || document.activeElement.tagName"
            )
        )
    expected = ["theme", "strip", "zoom-in", "zoom-out", "zoom-fit", "states", "time"]
    assert [name for name in expected if name not in reached] == []


def test_a_unit_that_is_picked_is_followed(page: Page) -> None:
    page.locator("#strip rect[data-unit='2']").first.click()
    settled(page)
    dim = page.locator("#time rect.bar-mark.dim").count()
    bars = page.locator("#time rect.bar-mark").count()
    assert 0 < dim < bars
    page.keyboard.press("Escape")
    settled(page)
    assert page.locator("#time rect.bar-mark.dim").count() == 0


def test_the_switch_decides_on_the_colours(page: Page) -> None:
    def background() -> str:
        text: str = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
        return text

    assert background() == "rgb(246, 247, 249)"
    page.locator("input[value=dark]").check(force=True)
    assert background() == "rgb(16, 19, 24)"
    page.locator("input[value=auto]").check(force=True)
    assert background() == "rgb(246, 247, 249)"


def test_the_page_asks_for_nothing_and_may_not(browser: Browser, file: Path) -> None:
    with opened(browser) as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(file.as_uri())
        settled(page)
        assert [url for url in asked if not url.startswith("data:")] == [file.as_uri()]
    policy = re.search(r'Content-Security-Policy" content="([^"]+)"', file.read_text("utf-8"))
    assert policy is not None
    assert policy[1].startswith("default-src 'none'; ")
    assert "unsafe" not in policy[1]


def test_print_shows_everything_without_the_tools(page: Page) -> None:
    page.locator("input[value=dark]").check(force=True)
    page.emulate_media(media="print")
    paper = page.evaluate("() => getComputedStyle(document.body).backgroundColor")
    assert paper == "rgb(255, 255, 255)"
    assert page.locator("#zoom-in").is_hidden()
    assert page.locator(".switch").is_hidden()
    assert page.locator("#decisions-table").is_visible()
    assert page.pdf().startswith(b"%PDF")


def test_hostile_names_are_shown_and_run_nothing(browser: Browser, tmp_path: Path) -> None:
    """Every name is text, wherever one points; nothing asks the network or sets the mark."""
    step = hostile_step()
    path = tmp_path / "report.html"
    path.write_text(page_text(step), encoding="utf-8")
    shown = [one_line(name) for name in NAMES]
    shown[-1] += " and the loss"
    with opened(browser) as page:
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.goto(path.as_uri())
        settled(page)
        assert page.locator("h1").text_content() == one_line(step.plan.workload.model)
        assert page.title().startswith(one_line(step.plan.workload.model)[:20])
        cells = page.locator("#decisions-table tbody td:first-child").all_text_contents()
        assert cells == shown
        page.focus("#strip")
        for name in shown:
            page.keyboard.press("ArrowRight")
            assert page.locator("#tip b").text_content() == name
        page.focus("#time")
        for key in ("Home", *["ArrowRight"] * 3, "End"):
            page.keyboard.press(key)
        for x in (0.2, 0.5, 0.8):
            hover(page, x, DEVICE)
        settled(page)
        assert page.evaluate("() => document.documentElement.dataset.mark") is None
        found = "script:not([id]), img, iframe, object, embed, a, base, form"
        assert page.locator(found).count() == 1  # its own script
        names = page.evaluate(
            "() => [...document.querySelectorAll('*')].flatMap((e) => e.getAttributeNames())"
        )
        assert [name for name in names if name.startswith("on")] == []
        assert [url for url in asked if not url.startswith("data:")] == [path.as_uri()]

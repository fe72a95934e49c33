"""Names are data: hostile ones through every output format, read back by that format's parser."""

import ast
import io
import json
import re
import shlex
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pyte
import pytest
from rich.console import Console, Group, RenderableType

from protrain_plan.checking.diffing import plan_diff
from protrain_plan.checking.rules import RULES, Failed, Finding, Passed, Report, Skipped
from protrain_plan.cli import main
from protrain_plan.commands import output
from protrain_plan.planning.outcome import Infeasible
from protrain_plan.presentation.checks.diffs import diff_markdown, diff_text, error_markdown
from protrain_plan.presentation.checks.reports import github, plain_data, text
from protrain_plan.presentation.plans import infeasible_text
from protrain_plan.presentation.profiles import machine_text, machines_text, profile_text
from protrain_plan.presentation.report.page import page_text, step_data, trace_text
from protrain_plan.presentation.report.screen import Screen, summary_text
from protrain_plan.presentation.terminal import plain
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.escaping import in_code, lines, one_line
from protrain_runtime.contract.records.commands import profile_command
from tests.support.checking_cases import commit
from tests.support.hostile_names import NAMES, SETS_A_MARK, hostile_profile, hostile_step
from tests.support.markdown import code, rendered
from tests.support.reporting_cases import small_step

ROOT = Path(__file__).parents[2]
FORMATS = Path(__file__).parents[1] / "formats"
RULE = RULES["MEM001"]
OUR_COLOURS = re.compile(r"\x1b\[[0-9;]*m")
FILES = [name for name in NAMES if "\0" not in name]  # names that a file can have


def findings() -> Iterator[Finding]:
    for name in FILES:
        verdicts = (
            Failed(problem=f"{name} is too large", fix=name),
            Skipped(reason=name),
            Passed(found=name),
        )
        for verdict in verdicts:
            for machine in (None, name):
                yield Finding(rule=RULE, plan=name, line=3, machine=machine, verdict=verdict)


REPORT = Report(findings=tuple(findings()), num_plans=len(FILES))


def assert_safe(printed: str) -> None:
    """Text that a terminal and the log of a job take as it is: lines that are seen, no command."""
    for line in OUR_COLOURS.sub("", printed).split("\n"):
        assert line.isprintable(), ascii(line)
        assert not line.lstrip().startswith("::"), line


def shown(renderable: RenderableType, capsys: pytest.CaptureFixture[str]) -> str:
    output.print_rendered(renderable)
    return capsys.readouterr().out


# --- a terminal, and the log of a job -------------------------------------------------------------

SCREENS: Mapping[str, Callable[[], RenderableType]] = {
    "check": lambda: text(REPORT),
    "show": lambda: Screen(step=hostile_step()),
    "simulate": lambda: summary_text(hostile_step()),
    "profile": lambda: profile_text(hostile_profile(), Path(NAMES[4])),
    "machine": lambda: machine_text(hostile_profile().hardware),
    "machines": lambda: machines_text(
        [replace(hostile_profile().hardware, name=name) for name in NAMES]
    ),
    "probe": lambda: machine_text(hostile_profile().hardware, written=Path(NAMES[4])),
    "diff": lambda: diff_text(plan_diff(small_step().plan, hostile_step().plan)),
    "infeasible": lambda: infeasible_text(
        Infeasible(
            tier="device",
            slot=f"forward of {NAMES[4]}",
            occupants=tuple((name, 1) for name in NAMES),
            budget_bytes=1,
            shortfall_bytes=1,
            smallest_budget_bytes=2,
            proven_budget_bytes=2,
            advice=NAMES,
        )
    ),
}


@pytest.mark.parametrize("colours", [False, True])
@pytest.mark.parametrize("screen", SCREENS)
def test_nothing_steers_a_terminal_or_a_job(
    screen: str, colours: bool, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for width in (40, 80, 10_000):  # a line may be broken anywhere
        console = Console(markup=False, emoji=False, width=width, force_terminal=colours)
        monkeypatch.setattr(output, "_out", console)
        printed = shown(SCREENS[screen](), capsys)
        assert_safe(printed)
        assert ("\x1b[" in printed) >= colours or screen in ("machines", "infeasible")


@pytest.mark.nightly("check")
@pytest.mark.parametrize("screen", SCREENS)
def test_a_terminal_is_afterwards_as_it_was(
    screen: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Title, modes, margins, character sets, colours and tab stops; every line is where it was."""
    console = Console(markup=False, emoji=False, width=400, force_terminal=True)
    monkeypatch.setattr(output, "_out", console)
    printed = shown(SCREENS[screen](), capsys)
    lines = printed.split("\n")
    terminal, untouched = pyte.Screen(2000, len(lines)), pyte.Screen(2000, len(lines))
    answers: list[str] = []
    terminal.write_process_input = answers.append
    pyte.Stream(terminal).feed(printed.replace("\n", "\r\n"))
    for state in STATES:
        assert getattr(terminal, state) == getattr(untouched, state), state
    assert terminal.cursor.attrs == untouched.cursor.attrs
    assert answers == []
    assert [line.rstrip() for line in terminal.display] == [
        OUR_COLOURS.sub("", line).rstrip() for line in lines
    ]


STATES = (
    "title",
    "icon_name",
    "mode",
    "margins",
    "charset",
    "g0_charset",
    "g1_charset",
    "tabstops",
)


def test_a_console_that_reads_markup_finds_none() -> None:
    """Whoever prints our texts: no name is lost, and none is an error."""
    console = Console(width=10_000, file=io.StringIO())
    for screen in SCREENS.values():
        console.print(screen())
    assert isinstance(console.file, io.StringIO)
    printed = console.file.getvalue()
    missing = [name for name in FILES if one_line(name).strip() not in printed]
    assert missing == []


def test_errors_and_warnings_are_lines_that_are_only_read(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in NAMES:
        error = ProtrainError(f"got\n{name}", source=name, line=1, key=name, fix=f"see\n{name}")
        assert_safe(str(error))
        output.print_error(str(error), hint=name)
        assert_safe(capsys.readouterr().err)
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)
    output.prepare_streams()
    for name in NAMES:
        assert_safe(warnings.formatwarning(name, UserWarning, name, 1))


@pytest.mark.nightly
def test_long_work_is_told_in_lines_where_there_is_no_terminal(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def told(every_s: float, *, threaded: bool, rank: int = 0) -> list[str]:
        file = io.StringIO()
        monkeypatch.setattr(output, "_err", Console(file=file, markup=False, width=20))
        monkeypatch.setattr(output, "EVERY_S", every_s)
        with output.progress(quiet=True, threaded=threaded, rank=rank) as tell:
            for name in NAMES:
                tell(name, 0.25)
                time.sleep(0.02)
        return file.getvalue().splitlines()

    for threaded in (True, False):
        assert told(60.0, threaded=threaded) == []
        assert told(0.001, threaded=threaded, rank=1) == []
        lines = [line for line in told(0.001, threaded=threaded) if "starting: 0%" not in line]
        found = [re.fullmatch(r"\.\.\. (.*): 25%, [0-9.]+ m?s", line) for line in lines]
        names = {one[1] for one in found if one}
        assert all(found)
        assert names <= set(map(one_line, NAMES))
        assert names if threaded else names >= set(map(one_line, NAMES[1:]))


def test_a_progress_bar_shows_names_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    file = io.StringIO()
    console = Console(file=file, markup=False, emoji=False, force_terminal=True, width=300)
    monkeypatch.setattr(output, "_err", console)
    for name in NAMES:
        with output.progress(quiet=False, threaded=False) as tell:
            tell(name, 0.5)
        drawn = file.getvalue()
        assert one_line(name).strip() in OUR_COLOURS.sub("", drawn)
        # What moves the cursor is the bar's own.
        assert_safe(re.sub(r"\x1b\[(\?25[hl]|[0-9]?[AK]|2K)|\r|\n", "", drawn))
        file.seek(0)
        file.truncate()


def test_json_says_names_exactly_in_ascii(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_json(plain_data(REPORT))
    printed = capsys.readouterr().out
    assert_safe(printed)
    assert printed.isascii()
    plans = [finding["plan"] for finding in json.loads(printed)["findings"]]
    assert plans == [finding.plan for finding in REPORT.findings]


# --- formats of reports ---------------------------------------------------------------------------


REGISTERED = {"error", "warning", "notice", "debug", "group", "endgroup", "add-mask"} | {
    *("set-output", "set-env", "add-path", "stop-commands", "save-state", "echo", "add-matcher")
}
UNESCAPED = {"%0D": "\r", "%0A": "\n", "%3A": ":", "%2C": ","}


def unescaped(value: str, *also: str) -> str:
    for escape in ("%0D", "%0A", *also):
        value = value.replace(escape, UNESCAPED[escape])
    return value.replace("%25", "%")


def command(line: str) -> tuple[str, dict[str, str], str] | None:
    """A line as a runner of GitHub Actions reads it (its ActionCommand.TryParseV2)."""
    line = line.strip()
    if not line.startswith("::") or "::" not in line[2:]:
        return None
    info, data = line[2:].split("::", 1)
    name, _, listed = info.partition(" ")
    if name not in REGISTERED:
        return None
    pairs = (pair.split("=", 1) for pair in listed.split(",") if pair)
    properties = {pair[0].strip(): unescaped(pair[1], "%3A", "%2C") for pair in pairs}
    return name, properties, unescaped(data)


def test_annotations_are_those_of_the_findings(capsys: pytest.CaptureFixture[str]) -> None:
    output.print_text(github(REPORT, root=Path()))
    *printed, summary = re.split(r"\r\n|\r|\n", capsys.readouterr().out.rstrip("\n"))
    counted = command(summary)
    assert counted is not None
    assert counted[:2] == ("notice", {"title": "protrain check"})
    told = [finding for finding in REPORT.findings if not isinstance(finding.verdict, Passed)]
    for line, finding in zip(printed, told, strict=True):
        assert line.isprintable() or "\u2028" in line
        found = command(line)
        assert found is not None
        kind, properties, message = found
        assert kind == ("error" if isinstance(finding.verdict, Failed) else "notice")
        assert properties.keys() == {"file", "line", "title"}
        assert_safe(message)
        exact = str(Path(finding.plan))
        assert one_line(properties["file"]) == one_line(exact)
        if all(c.isprintable() or c in "\r\n" for c in exact):
            assert properties["file"] == exact


# --- Markdown -------------------------------------------------------------------------------------


def test_a_comparison_in_markdown_is_code_and_words_of_ours() -> None:
    diff = plan_diff(small_step().plan, hostile_step().plan)
    units = [change.units for change in diff.decisions]
    assert len(units) >= len(NAMES)
    for name in NAMES:
        printed = diff_markdown(diff, title=name)
        assert_safe(printed)
        tokens = rendered(printed)
        assert [token.tag for token in tokens if token.type == "heading_open"] == ["h3"]
        assert sum(token.type == "table_open" for token in tokens) == 3
        title, *cells = code(tokens)
        assert title == (one_line(name).replace("|", r"\x7c") or " ")
        assert cells[: len(units)] == [one_line(unit).replace("|", r"\x7c") for unit in units]


def test_a_plan_that_cannot_be_read_is_code_in_markdown() -> None:
    for name in NAMES:
        error = ProtrainError(f"got\n{name}", source=name, fix=name)
        printed = error_markdown(error, title=name)
        assert_safe(printed)
        tokens = rendered(printed)
        [block] = [token for token in tokens if token.type == "code_block"]
        assert block.content.rstrip() == str(error).rstrip()
        assert "".join(code(tokens)) == (one_line(name).replace("|", r"\x7c") or " ")


def test_a_code_span_holds_any_text() -> None:
    for name in NAMES:
        [paragraph] = [t for t in rendered(f"see {in_code(name)}.") if t.type == "inline"]
        assert [t.type for t in paragraph.children or ()] == ["text", "code_inline", "text"]


# --- the page and the trace -----------------------------------------------------------------------


class Elements(HTMLParser):
    """The elements of a page with their attributes, and what stands in those of text."""

    def __init__(self, page: str) -> None:
        super().__init__(convert_charrefs=True)
        self.found: list[tuple[str, tuple[tuple[str, str | None], ...]]] = []
        self.texts: dict[str, str] = {}
        self.feed(page)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, tuple(attrs)))

    def handle_data(self, data: str) -> None:
        if self.found:
            tag, attributes = self.found[-1]
            name = dict(attributes).get("id") or tag
            self.texts[name] = self.texts.get(name, "") + data

    def handle_comment(self, data: str) -> None:
        raise AssertionError(data)


def test_a_page_of_hostile_names_has_the_elements_of_any_page() -> None:
    step = hostile_step()
    page, other = Elements(page_text(step)), Elements(page_text(small_step()))
    assert page.found == other.found
    data = json.loads(page.texts["data"])
    assert [unit["name"] for unit in data["units"]] == [one_line(name) for name in NAMES]
    assert page.texts["title"].startswith(f"{one_line(step.plan.workload.model)}: ")
    assert SETS_A_MARK in page.texts["data"]
    assert page.texts["script"] == other.texts["script"]


def test_the_page_s_script_makes_no_markup_of_data() -> None:
    folder = ROOT / "protrain_plan/presentation/report"
    script = "".join(path.read_text(encoding="utf-8") for path in folder.glob("*.js"))
    makers = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|Function\(|srcdoc"
    assert re.findall(makers, script) == []
    template = "".join((folder / f"{name}.html").read_text() for name in ("head", "page"))
    parts = {"policy", "title", "style", "stages", "data", "script"}
    assert {*re.findall(r"\$(\w+)", template)} == parts


def test_a_trace_says_names_exactly() -> None:
    step = hostile_step()
    printed = trace_text(step)
    assert printed.isascii()
    trace = json.loads(printed)
    assert trace["otherData"]["model"] == step.plan.workload.model
    units = {event["args"].get("unit") for event in trace["traceEvents"] if event["ph"] == "X"}
    assert set(NAMES) <= units
    assert plain(step_data(step))["units"][0]["name"] == NAMES[0]


# --- commands -------------------------------------------------------------------------------------


Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command_line(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Command:
    """A command in this process, in an empty folder: its exit code and what it printed."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(warnings, "formatwarning", warnings.formatwarning)

    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["protrain", *arguments])
        with pytest.raises(SystemExit) as stop:
            main()
        return int(stop.value.code or 0), *capsys.readouterr()

    return run


def test_files_of_any_name_are_checked_and_compared(command_line: Command, tmp_path: Path) -> None:
    plan = commit(tmp_path / "plans")
    plan.rename(plan.parent / "a")
    budgets = "protrain: budgets\nversion: 1\nbudgets:\n  box: {device: 900MB}\n"
    (tmp_path / "budgets.yaml").write_text(budgets)
    for name in IN_FILES:
        (plan.parent / name).write_bytes((plan.parent / "a").read_bytes())
    arguments = ("check", "--records-only", "plans", "--format")
    code, printed, said = command_line(*arguments, "text")
    assert (code, said) == (1, "")
    assert_safe(printed)
    code, printed, said = command_line(*arguments, "github")
    assert (code, said) == (1, "")
    told = [command(line) for line in re.split(r"\r\n|\r|\n", printed)]
    *found, summary = [one for one in told if one is not None]
    assert {one[0] for one in found} == {"error", "notice"}
    assert (summary[0], summary[1]) == ("notice", {"title": "protrain check"})
    files = {one_line(one[1]["file"]) for one in found}
    assert files == {one_line(f"plans/{name}") for name in IN_FILES}
    for name in IN_FILES:
        code, printed, said = command_line("diff", "--", f"plans/{name}", f"{name}.missing")
        assert (code, printed) == (2, "")
        assert_safe(said)


IN_FILES = [
    "".join(names).replace("/", "_") + ".yaml"
    for names in (NAMES[0:3], NAMES[3:5], NAMES[5:7], NAMES[10:12], NAMES[19:])
]


@pytest.mark.nightly
def test_arguments_of_any_text_are_one_message(command_line: Command) -> None:
    for name in NAMES:
        for arguments in (("show", f"x{name}"), ("run", "p", "--steps", name), (f"--x{name}",)):
            code, printed, said = command_line(*arguments)
            assert (code, printed) == (2, "")
            assert said.startswith("error: ")
            assert_safe(said)


def test_commands_in_messages_are_of_the_shell_s_words() -> None:
    workload = replace(hostile_profile().workload, adapter="")
    for name in NAMES:
        said = profile_command(replace(workload, model=name), optimizer=name, output=name, on=name)
        words = shlex.split(said)
        assert words.count(name) == 4 or name == "adamw"
        assert name in (words[2], words[-1])
        assert not name.startswith("-") or words[-2:] == ["--", name]


# --- the class ------------------------------------------------------------------------------------

PRINTING = {"protrain_plan/presentation/terminal.py", "protrain_plan/commands/output.py"}


def imports(tree: ast.AST) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield from (f"{node.module}.{alias.name}" for alias in node.names)


@pytest.mark.nightly
def test_text_for_people_is_made_and_printed_in_two_places() -> None:
    """Others lay lines out; nobody else prints, and nobody reads markup."""
    layout = {
        "rich.console." + name
        for name in ("Group", "RenderableType", "Console", "ConsoleOptions", "RenderResult")
    } | {"rich.padding.Padding", "rich.cells.cell_len"}
    for file in (*ROOT.glob("protrain_plan/**/*.py"), *ROOT.glob("runtime/**/*.py")):
        name, tree = file.relative_to(ROOT).as_posix(), ast.parse(file.read_text())
        used = {module for module in imports(tree) if module.split(".")[0] == "rich"}
        assert name in PRINTING or used <= layout, (name, used - layout)
        for node in ast.walk(tree):
            written = ast.unparse(node) if isinstance(node, ast.Attribute) else ""
            streams = ("sys.stdout", "sys.stderr", "sys.__stdout__", "sys.__stderr__")
            allowed = name in PRINTING or name == "runtime/protrain_runtime/devices/memory_meter.py"
            assert allowed or written not in streams, (name, written)
            assert "markup" not in written, (name, written)
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("Console", "TextColumn"):
                assert {key.arg: ast.unparse(key.value) for key in node.keywords}["markup"] == (
                    "False"
                ), name


def test_a_string_that_was_laid_out_all_the_same_is_shown_too(
    capsys: pytest.CaptureFixture[str],
) -> None:
    for name in NAMES:
        assert_safe(shown(Group(name, name.replace("\x1b", "")), capsys))


def test_escapes_are_those_of_what_cannot_be_seen() -> None:
    assert one_line("plans/a b/\u00fcmlaut-\u4e2d.yaml") == "plans/a b/\u00fcmlaut-\u4e2d.yaml"
    assert one_line("a\n\x1b\u202e\udcff") == r"a\n\x1b\u202e\udcff"
    assert lines("a\n ::b\n##[c") == "a\n \\x3a:b\n##[c"
    assert lines("std::vector") == "std::vector"

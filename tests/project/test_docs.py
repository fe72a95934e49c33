"""Commands of the README and the documentation work, and the site is built from them.

Commands are those of fenced `sh` blocks. The ones below a heading are one script, which runs as it
stands in bash, in a folder of its own. The reference is made from the code: `--write-golden`.
"""

import ast
import functools
import re
import shlex
import shutil
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from importlib.util import find_spec
from pathlib import Path

import pytest

from benchmarks.quotes import BLOCK, BLOCKS, with_quotes
from docs.generating import cli_page, files_page
from tests.support.browsers import chromium, needs_chromium
from tests.support.checking_cases import AssertGolden
from tests.support.commands import bash, copy_example
from tests.support.markdown import PAGES

ROOT = Path(__file__).parents[2]
PLANS = ROOT / "plans"

# --- commands -------------------------------------------------------------------------------------


def nothing(folder: Path) -> None:
    """The commands make what they read."""


def examples(folder: Path) -> None:
    shutil.copytree(ROOT / "examples", folder / "examples")


@dataclass(frozen=True, slots=True, kw_only=True)
class Runs:
    """The script runs, where `prepare` has been; `smaller` replaces what would take long."""

    prepare: Callable[[Path], object] = nothing
    slow: bool = True
    smaller: Mapping[str, str] = field(default_factory=dict)


TINY = {"llama-3.2-1b": "tiny-llama"}
SMALL = {"llama-3.2-1b": "smollm2-135m"}
SCRIPTS: dict[str, Runs] = {
    "README.md#does-it-fit": Runs(),
    "README.md#three-commands": Runs(smaller={"--steps 10": "--steps 2"}),
    "docs/tutorial.md#without-a-gpu-would-it-fit": Runs(),
    "docs/tutorial.md#on-this-machine-train-under-a-limit": Runs(
        smaller={"smollm2-135m": "tiny-llama"}  # as it stands it is the README's
    ),
    "docs/how-to/ci.md#check-plans-in-ci": Runs(prepare=copy_example),
    "docs/how-to/ci.md#the-budget": Runs(prepare=copy_example, slow=False),
    "docs/how-to/ci.md#in-a-workflow": Runs(prepare=copy_example, slow=False),
    "docs/how-to/ci.md#when-it-fails": Runs(prepare=copy_example),
    "docs/how-to/adapters.md#lora": Runs(),
    "docs/how-to/adapters.md#quantized-weights": Runs(),
    "docs/how-to/optimizers.md#optimizers-precision-and-clipping": Runs(smaller=TINY),
    "docs/how-to/optimizers.md#whole-matrices": Runs(),
    "docs/how-to/optimizers.md#mixed-precision": Runs(),
    "docs/how-to/optimizers.md#clip-and-accumulate": Runs(),
    "docs/how-to/long-sequences.md#long-sequences": Runs(),
    "docs/how-to/long-sequences.md#rounding": Runs(
        smaller={"llama-3.1-8b": "tiny-llama", "131072": "512"}
    ),
    "docs/how-to/long-sequences.md#compressed-activations": Runs(),
    "docs/how-to/long-sequences.md#costs": Runs(
        smaller={"llama-3.1-8b": "tiny-llama", "8192": "512"}
    ),
    "docs/how-to/plan.md#does-it-fit": Runs(),
    "docs/how-to/plan.md#beside-other-methods": Runs(smaller={"llama-3.1-8b": "smollm2-135m"}),
    "docs/how-to/plan.md#plan": Runs(
        prepare=partial(shutil.copy, PLANS / "smollm2-135m-cpu-1100MiB/profile.yaml")
    ),
    "docs/how-to/plan.md#what-to-change": Runs(),
    "docs/how-to/saving.md#save-and-resume": Runs(),
    "docs/how-to/several-gpus.md#several-gpus": Runs(
        smaller={"llama-3.1-70b": "tiny-llama", "llama-3.1-8b": "tiny-llama", "512": "64"}
    ),
    "docs/how-to/several-gpus.md#train-on-several-ranks": Runs(prepare=examples),
    "docs/how-to/several-gpus.md#pipeline-stages": Runs(prepare=examples),
    "docs/how-to/frameworks.md#in-your-framework": Runs(prepare=examples),
    "docs/how-to/frameworks.md#trainers-files": Runs(
        smaller={"meta-llama/Llama-3.2-3B": "HuggingFaceTB/SmolLM2-135M"}
    ),
    "docs/how-to/frameworks.md#a-frozen-second-model": Runs(
        smaller={"qwen3-0.6b": "smollm2-135m", "qwen3-4b": "smollm2-135m"}
    ),
    "docs/how-to/profile.md#profile-a-model": Runs(smaller=TINY),
    "docs/how-to/machines.md#choose-a-machine": Runs(),
    "docs/how-to/machines.md#what-would-help": Runs(smaller={"llama-3.1-8b": "smollm2-135m"}),
    "docs/how-to/machines.md#cost": Runs(smaller={"llama-3.1-8b": "smollm2-135m"}),
    "docs/how-to/machines.md#the-cheapest-machine-that-is-fast-enough": Runs(
        smaller={"llama-3.1-8b": "smollm2-135m"}
    ),
    "docs/how-to/questions.md#does-my-model-fit": Runs(smaller=SMALL),
    "docs/how-to/questions.md#what-does-it-cost-in-speed-against-fsdp2": Runs(smaller=SMALL),
    "docs/how-to/questions.md#my-gpu-is-not-in-the-catalogue-what-now": Runs(),
    "docs/how-to/questions.md#how-do-i-use-two-gpus": Runs(smaller=SMALL),
    "docs/how-to/questions.md#how-do-i-save-for-transformers": Runs(),
    "docs/how-to/questions.md#how-exact-is-it": Runs(),
    "docs/how-to/questions.md#why-is-my-step-slow": Runs(smaller=SMALL),
    "docs/how-to/questions.md#how-do-i-update-an-old-plan": Runs(),
    "docs/how-to/questions.md#does-it-train-mixtures-of-experts": Runs(),
    "docs/how-to/questions.md#does-it-work-with-torchcompile": Runs(),
    "docs/looking.md#looking-at-a-plan": Runs(
        prepare=lambda folder: shutil.copytree(PLANS, folder / "plans"), slow=False
    ),
}
"""Every script in the documentation, by page and heading, and how it is tested."""


def scripts() -> Iterator[tuple[str, str]]:
    """Place and commands of every fenced `sh` block; those below one heading are one script."""
    for path in PAGES:
        page = path.relative_to(ROOT).as_posix()
        text = path.read_text(encoding="utf-8")
        # A `#` in a fence is no heading: fences are looked for first.
        fences = re.compile(r"^ *```(\w*)\n(.*?)^ *```$|^#+ ([^\n]+)$", re.MULTILINE | re.DOTALL)
        place = page
        for language, commands, heading in fences.findall(text):
            if heading:
                place = f"{page}#{slug(heading)}"
            elif language == "sh":
                yield place, commands


def slug(heading: str) -> str:
    return re.sub(r"[^a-z0-9-]", "", heading.lower().replace(" ", "-"))


def found() -> dict[str, str]:
    together: dict[str, str] = {}
    for place, commands in scripts():
        together[place] = together.get(place, "") + commands
    return together


def test_every_script_is_in_the_table() -> None:
    assert found().keys() == SCRIPTS.keys()


@pytest.mark.nightly(
    "docs/how-to/ci.md#the-budget",
    "docs/how-to/ci.md#in-a-workflow",
    "docs/looking.md#looking-at-a-plan",
)
@pytest.mark.parametrize(
    "place",
    [
        pytest.param(place, marks=[pytest.mark.slow, pytest.mark.timeout(1800)] * how.slow)
        for place, how in SCRIPTS.items()
    ],
)
def test_the_commands_work(place: str, tmp_path: Path) -> None:
    how, script = SCRIPTS[place], found()[place]
    how.prepare(tmp_path)
    for written, smaller in how.smaller.items():
        assert written in script
        script = script.replace(written, smaller)
    # torchrun warns of the threads that it sets
    result = bash(f"set -u\n{script}", folder=tmp_path, LOGLEVEL="ERROR")
    # Progress of long work, and remarks on files and weights.
    remarks = re.compile(r"\.\.\. |\S+: a step of |replaces the plan\.yaml |trained random weights")
    others = [line for line in result.stderr.splitlines() if not remarks.match(line)]
    assert (result.returncode, others) == (0, []), result.stdout
    for name in re.findall(r" (?:-o|--lp|--trace) (\S+)", script):
        assert (tmp_path / name).stat().st_size


@pytest.mark.slow
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("name", ["demo", "large_model"])
def test_make_demo_holds_what_it_promises(name: str, tmp_path: Path) -> None:
    """With fewer steps; `make` adds the environment that this test runs in."""
    assert f"\t@$(BIN)/python examples/{name}.py\n" in (ROOT / "Makefile").read_text()
    demo = f"{shlex.quote(sys.executable)} {shlex.quote(str(ROOT / f'examples/{name}.py'))}"
    result = bash(f"{demo} --steps 2", folder=tmp_path)
    assert result.returncode == 0, result.stdout + result.stderr
    assert result.stdout.splitlines()[-1] == "everything held"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_script_of_one_s_own_trains_and_goes_on_where_it_was_killed(tmp_path: Path) -> None:
    """The pipe is closed behind step 14, so that the process is killed; step 10 was saved."""
    examples(tmp_path)

    def planned(name: str) -> None:
        """The commands of the example, up to its own start."""
        said = (ROOT / "examples" / name).read_text(encoding="utf-8").split("\n\n")[1]
        made = bash(said.partition("python ")[0], folder=tmp_path)
        assert made.returncode == 0, made.stderr

    planned("train.py")
    trained = bash("python examples/train.py plan.yaml", folder=tmp_path)
    assert (trained.returncode, len(trained.stdout.splitlines())) == (0, 5), trained.stderr
    planned("resume.py")
    resume = "python examples/resume.py plan.yaml saved"
    killed = bash(f"set +o pipefail; {resume} 2> /dev/null | head -n 15", folder=tmp_path)
    assert killed.stdout.splitlines()[-1].startswith("step 14: ")
    resumed = bash(resume, folder=tmp_path)
    assert resumed.returncode == 0, resumed.stderr
    assert [line.split(":")[0] for line in resumed.stdout.splitlines()] == [
        f"step {number}" for number in range(10, 40)
    ]
    assert resumed.stdout.splitlines()[:5] == killed.stdout.splitlines()[10:]


# --- the pages ------------------------------------------------------------------------------------


def test_the_commands_page_is_today_s(assert_golden: AssertGolden) -> None:
    assert_golden(ROOT / "docs/reference/cli.md", cli_page())


def test_the_files_page_is_today_s(assert_golden: AssertGolden) -> None:
    assert_golden(ROOT / "docs/reference/files.md", files_page())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_numbers_of_benchmarks_are_quoted_from_their_results(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text.count("<!-- quoted: ") == len(BLOCK.findall(text))
    assert with_quotes(text) == text, "python -m benchmarks.quotes writes it anew"


def test_every_block_is_quoted_somewhere() -> None:
    quoted = {name for page in PAGES for name, _ in BLOCK.findall(page.read_text(encoding="utf-8"))}
    assert quoted == BLOCKS.keys()


def test_what_was_not_measured_is_said(tmp_path: Path) -> None:
    page = "<!-- quoted: front -->\nold\n<!-- end of quote -->\nmore\n"
    assert with_quotes(page, results=tmp_path) == (
        "<!-- quoted: front -->\n"
        "Not measured yet: there is no `benchmarks/results/front.json`.\n"
        "<!-- end of quote -->\nmore\n"
    )


PROMISES = ROOT / "docs/reference/promises.md"


def test_every_promise_names_tests_that_exist() -> None:
    rows = re.findall(r"^\| (?!---)(.+) \| (`.+`) \|$", PROMISES.read_text(encoding="utf-8"), re.M)
    assert len(rows) > 50
    for promise, tests in rows:
        for file, name in re.findall(r"`(\S+?)(?:::(\w+))?`", tests):
            assert name in functions(f"tests/{file}"), promise


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_pages_have_no_hidden_comments(page: Path) -> None:
    found = re.findall(r"<!--.*?-->", page.read_text(encoding="utf-8"), re.DOTALL)
    marks = ("<!-- quoted: ", "<!-- end of quote", "<!-- rules")
    assert [one for one in found if not one.startswith(marks)] == []


BESIDE = [ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]


@pytest.mark.parametrize("page", [*PAGES, *BESIDE], ids=lambda page: page.stem)
def test_links_lead_somewhere(page: Path) -> None:
    """Links of the site's pages stay within the site."""
    text = re.sub(r"```.*?```|`[^`\n]*`", "", page.read_text(encoding="utf-8"), flags=re.DOTALL)
    for link in re.findall(r"\]\(([^)\s]+)\)", text):
        if re.match(r"\w+:", link):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert ROOT / "docs" not in page.parents or ROOT / "docs" in target.parents, link
        if anchor:
            headings = re.findall(r"^#+ (.+)$", target.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in map(slug, headings), link


@pytest.mark.parametrize("page", sorted(ROOT.glob("docs/decisions/*.md")), ids=lambda p: p.stem)
def test_decisions_are_dated(page: Path) -> None:
    records = re.findall(r"^- (.+(?:\n  .+)*)", page.read_text(encoding="utf-8"), re.MULTILINE)
    dated = re.compile(r"\*\*[^*]+\*\*\s\(\d{4}-\d\d-\d\d(, revised \d{4}-\d\d-\d\d)?[,)]")
    assert records
    assert [record for record in records if not dated.match(record)] == []


OURS = ("chunk", "part", "persistent", "buffer", "lead", "drain", "piece")
"""Words of the glossary that a newcomer cannot know."""


def test_the_readme_is_short_and_in_words_of_the_field() -> None:
    text = (ROOT / "README.md").read_text(encoding="utf-8")
    assert len(text.splitlines()) <= 120
    seen = re.sub(r"```.*?```|\]\([^)]*\)", "", text, flags=re.DOTALL)
    assert set(OURS).isdisjoint(re.findall(r"\w+", seen.lower()))
    glossary = (ROOT / "docs/glossary.md").read_text(encoding="utf-8").lower()
    assert [word for word in OURS if f"## {word}\n" not in glossary] == []


def test_each_question_of_newcomers_has_a_short_answer_and_a_command() -> None:
    text = (ROOT / "docs/how-to/questions.md").read_text(encoding="utf-8")
    answers = text.split("\n## ")[1:]
    assert len(answers) == 10
    assert all(len(answer.split()) <= 200 and "```sh\n" in answer for answer in answers)


@functools.cache
def functions(file: str) -> frozenset[str]:
    tree = ast.parse((ROOT / file).read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


# --- the site -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The site, built from a copy, since building leaves nothing where it was built from."""
    if find_spec("material") is None:
        pytest.skip("mkdocs-material is not installed: pip install -e '.[docs]'")
    folder = tmp_path_factory.mktemp("site")
    command = (sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", folder)
    built = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert built.returncode == 0, built.stderr
    return folder


@pytest.mark.slow
def test_every_page_is_built(site: Path) -> None:
    built = {path.relative_to(site).with_suffix("").as_posix() for path in site.rglob("*.html")}
    pages = {path.relative_to(ROOT / "docs").with_suffix("").as_posix() for path in PAGES[1:]}
    assert built == pages | {"404"}


LOADING = re.compile(
    r"""<(?:script|img|iframe|source|video|audio)\b[^>]*?\ssrc="([^"]*)"
    | <link\b[^>]*?\shref="([^"]*)"
    | (?:url\(|@import\s)\s*["']?([^"')]*)""",
    re.VERBOSE,
)


@pytest.mark.slow
def test_nothing_is_loaded_from_elsewhere(site: Path) -> None:
    files = [path for path in site.rglob("*") if path.suffix in (".html", ".css")]
    loaded = [
        "".join(match)
        for path in files
        for match in LOADING.findall(path.read_text(encoding="utf-8"))
    ]
    assert len(loaded) > len(files)
    assert [url for url in loaded if re.match(r"(?!data:)\w+:|//", url)] == []


@pytest.mark.slow
@pytest.mark.browser
@needs_chromium
def test_a_browser_asks_nobody_else(site: Path) -> None:
    """Scripts may load at run time, too: pages are opened, and something is searched for."""
    handler = functools.partial(QuietHandler, directory=str(site))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server, chromium() as browser:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        here = f"http://127.0.0.1:{server.server_port}/"
        page = browser.new_page()
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        for name in ("index", "tutorial", "reference/cost-model", "looking"):
            page.goto(f"{here}{name}.html", wait_until="networkidle")
        page.goto(f"{here}index.html?q=drain", wait_until="networkidle")
        page.locator(".md-search-result__link").first.wait_for(state="attached")
        server.shutdown()
    assert [url for url in asked if not url.startswith((here, "data:", "blob:"))] == []


class QuietHandler(SimpleHTTPRequestHandler):
    """Says nothing of what it serves."""

    def log_message(self, *arguments: object) -> None:
        """Nothing."""

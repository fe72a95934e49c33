"""The simulated step as one HTML file: template, style and script of this folder, and the data.

The page loads nothing and may load nothing: its own content security policy allows this style and
this script, by their hashes, and forbids everything else.
"""

import base64
import hashlib
import html
import json
from collections.abc import Sequence
from importlib.resources import files
from string import Template

from protrain_plan.reporting.data import FrontPoint, step_data
from protrain_plan.reporting.step import Step
from protrain_plan.simulation.recording import Recording


def page_text(
    step: Step, *, recording: Recording | None = None, front: Sequence[FrontPoint] = ()
) -> str:
    """The page; a recording must be one of the step's plan."""
    data = step_data(step, recording=recording, front=front)
    style, script = _part("page.css"), _part("page.js")
    return Template(_part("page.html")).substitute(
        title=html.escape(f"{step.plan.workload.model}: {data['workload']}"),
        policy=f"default-src 'none'; img-src data:; base-uri 'none'; form-action 'none';"
        f" style-src '{_hash(style)}'; script-src '{_hash(script)}'",
        style=style,
        script=script,
        data=_embedded(json.dumps(data, separators=(",", ":"))),
    )


def _part(name: str) -> str:
    return (files("protrain_plan.reporting") / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return f"sha256-{base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()}"


def _embedded(text: str) -> str:
    """JSON that cannot end the element it stands in: a name may hold any character."""
    return text.replace("<", "\\u003c")

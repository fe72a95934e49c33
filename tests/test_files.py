"""A file is the old one or the new one, whatever happens to the writer: tried on real processes."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from protrain_plan.errors import RecordError
from protrain_plan.records.files import read_text, replace_text

ROOT = Path(__file__).parent.parent

# Writes a new file and stops in the middle: the bytes are there, the name is not.
STOPS_IN_THE_MIDDLE = """
import os, signal, sys, time
# A shell that runs tests in the background lets them ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
from protrain_plan.records.files import replace_text
def stop(descriptor):
    print("in the middle", flush=True)
    time.sleep(60)
os.fsync = stop
replace_text(sys.argv[1], "new\\n" * 1000)
"""

# Writes two files of its own in turn, for ever.
WRITES_FOR_EVER = """
import sys
from protrain_plan.records.files import replace_text
print("started", flush=True)
while True:
    for letter in "ab":
        replace_text(sys.argv[1], letter * 3_000_000)
"""


def start(script: str, path: Path) -> subprocess.Popen[str]:
    """A process that runs the script on the file, once it has said its first line."""
    process = subprocess.Popen(
        [sys.executable, "-c", script, str(path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


def end(process: subprocess.Popen[str], signal_number: int) -> None:
    process.send_signal(signal_number)
    process.wait(timeout=30)
    assert process.stdout is not None
    process.stdout.close()


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_killed_writer_leaves_the_old_file_and_a_leftover_that_is_swept(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("old\n")
    process = start(STOPS_IN_THE_MIDDLE, path)
    leftover = f".plan.yaml.{process.pid}.tmp"
    assert names(tmp_path) == [leftover, "plan.yaml"]

    replace_text(path, "another\n")  # beside a living writer, whose file stays
    assert names(tmp_path) == [leftover, "plan.yaml"]

    end(process, signal.SIGKILL)
    assert read_text(path) == "another\n"
    assert names(tmp_path) == [leftover, "plan.yaml"]

    replace_text(tmp_path / "other.yaml", "other\n")  # another file's leftovers are not its own
    assert names(tmp_path) == [leftover, "other.yaml", "plan.yaml"]
    replace_text(path, "newest\n")
    assert names(tmp_path) == ["other.yaml", "plan.yaml"]
    assert read_text(path) == "newest\n"


def test_an_interrupted_writer_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("old\n")
    process = start(STOPS_IN_THE_MIDDLE, path)
    end(process, signal.SIGINT)  # KeyboardInterrupt
    assert process.returncode != 0
    assert names(tmp_path) == ["plan.yaml"]
    assert read_text(path) == "old\n"


def test_a_file_is_whole_whenever_its_writer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("b" * 3_000_000)
    for milliseconds in (1, 5, 9, 14, 20):
        process = start(WRITES_FOR_EVER, path)
        time.sleep(milliseconds / 1000)
        end(process, signal.SIGKILL)
        assert read_text(path) in ("a" * 3_000_000, "b" * 3_000_000)


def test_a_link_is_followed_and_permissions_stay(tmp_path: Path) -> None:
    path, link = tmp_path / "plan.yaml", tmp_path / "link.yaml"
    path.write_text("old\n")
    path.chmod(0o640)
    link.symlink_to(path)
    replace_text(link, "new\n")
    assert link.is_symlink()
    assert path.read_text() == "new\n"
    assert path.stat().st_mode & 0o777 == 0o640


def test_a_new_file_has_the_permissions_of_any_new_file(tmp_path: Path) -> None:
    (tmp_path / "any").write_text("")
    replace_text(tmp_path / "plan.yaml", "new\n")
    assert (tmp_path / "plan.yaml").stat().st_mode == (tmp_path / "any").stat().st_mode


def test_what_cannot_be_written_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    long = "x" * 255  # a name that is as long as names can be: the temporary one is longer
    cases = {
        tmp_path / "no" / "plan.yaml": "the directory of this file does not exist\n"
        f"  fix: mkdir -p {tmp_path / 'no'}",
        tmp_path / "file" / "plan.yaml": "the directory of this file does not exist\n"
        f"  fix: mkdir -p {tmp_path / 'file'}",
        tmp_path: "this is a directory, not a file",
        tmp_path / long: "cannot be written: File name too long",
    }
    for path, message in cases.items():
        with pytest.raises(RecordError) as caught:
            replace_text(path, "new\n")
        assert str(caught.value) == f"{path}: {message}"
    assert names(tmp_path) == ["file"]


def test_what_cannot_be_read_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"name: \xff\n")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    cases = {
        tmp_path / "no.yaml": "there is no such file",
        tmp_path: "this is a directory, not a file",
        tmp_path / "bytes": "not UTF-8 text: the byte 0xff at 6",
        tmp_path / "loop": f"cannot be read: {os.strerror(40)}",
    }
    for path, message in cases.items():
        with pytest.raises(RecordError) as caught:
            read_text(path)
        assert str(caught.value) == f"{path}: {message}"

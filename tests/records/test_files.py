"""A file is the old one or the new one, whatever happens to the writer: tried on real processes."""

import os
import signal
import stat
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from protrain_runtime.contract.errors import RecordError
from protrain_runtime.contract.records.files import descriptor_of, read_text, replace_text

ROOT = Path(__file__).parents[2]

# Writes a new file and stops in the middle: the bytes are there, the name is not.
STOPS_IN_THE_MIDDLE = """
import os, signal, sys, time
# A shell that runs tests in the background lets them ignore Ctrl-C.
signal.signal(signal.SIGINT, signal.default_int_handler)
from protrain_runtime.contract.records.files import replace_text
def stop(descriptor):
    print("in the middle", flush=True)
    while True:  # a signal just before a long sleep would be seen after it
        time.sleep(0.05)
os.fsync = stop
replace_text(sys.argv[1], "new\\n" * 1000)
"""

# Writes two files of its own in turn, for ever.
WRITES_FOR_EVER = """
import sys
from protrain_runtime.contract.records.files import replace_text
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


def test_a_killed_writer_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("old\n")
    process = start(STOPS_IN_THE_MIDDLE, path)
    [leftover] = set(names(tmp_path)) - {"plan.yaml"}
    replace_text(path, "another\n")  # beside a living writer, whose file stays
    end(process, signal.SIGKILL)
    assert read_text(path) == "another\n"
    assert names(tmp_path) == [leftover, "plan.yaml"]


def test_an_interrupted_writer_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("old\n")
    process = start(STOPS_IN_THE_MIDDLE, path)
    end(process, signal.SIGINT)  # KeyboardInterrupt
    assert process.returncode != 0
    assert names(tmp_path) == ["plan.yaml"]
    assert read_text(path) == "old\n"


@pytest.mark.nightly
def test_a_file_is_whole_whenever_its_writer_is_killed(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("b" * 3_000_000)
    for milliseconds in (1, 5, 9, 14, 20):
        process = start(WRITES_FOR_EVER, path)
        time.sleep(milliseconds / 1000)
        end(process, signal.SIGKILL)
        assert path.read_text() in ("a" * 3_000_000, "b" * 3_000_000)


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
        tmp_path / "no.yaml": "no such file",
        tmp_path: "this is a directory, not a file",
        tmp_path / "bytes": "not UTF-8 text: the byte 0xff at 6",
        tmp_path / "loop": f"cannot be read: {os.strerror(40)}",
    }
    for path, message in cases.items():
        with pytest.raises(RecordError) as caught:
            read_text(path)
        assert str(caught.value) == f"{path}: {message}"


# --- what is no file of the disk, and what lies in the way ----------------------------------------


def test_a_device_is_written_into_and_stays(tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    try:
        link = tmp_path / "terminal"
        link.symlink_to(os.ttyname(theirs))
        for path in (Path(os.ttyname(theirs)), link):
            replace_text(path, "new\n")
            assert os.read(ours, 100) == b"new\r\n"
            assert stat.S_ISCHR(path.stat().st_mode)
        assert link.is_symlink()
    finally:
        os.close(ours)
        os.close(theirs)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may make devices")
def test_a_device_that_takes_nothing_is_an_error_and_stays(tmp_path: Path) -> None:
    for name, minor in (("null", 3), ("full", 7)):
        try:
            os.mknod(tmp_path / name, 0o666 | stat.S_IFCHR, os.makedev(1, minor))
        except PermissionError:
            pytest.skip("no devices may be made here")
    replace_text(tmp_path / "null", "new\n")
    with pytest.raises(RecordError, match="cannot be written: No space left on device"):
        replace_text(tmp_path / "full", "new\n")
    assert names(tmp_path) == ["full", "null"]
    assert all(stat.S_ISCHR(path.stat().st_mode) for path in tmp_path.iterdir())


def test_a_pipe_is_written_into_and_stays(tmp_path: Path) -> None:
    pipe, text = tmp_path / "pipe", "new\n" * 100_000  # more than a pipe holds
    os.mkfifo(pipe)
    with ThreadPoolExecutor() as pool:
        read = pool.submit(pipe.read_text)
        replace_text(pipe, text)
        assert read.result() == text
    assert stat.S_ISFIFO(pipe.stat().st_mode)
    assert names(tmp_path) == ["pipe"]


def test_an_open_descriptor_is_written_to_where_it_is(tmp_path: Path) -> None:
    """As a shell has redirected it: `>> file` appends, and nothing is replaced."""
    path, link = tmp_path / "file", tmp_path / "link"
    path.write_text("before\n")
    with path.open("a") as file:
        number = path.stat().st_ino
        descriptor = f"/dev/fd/{file.fileno()}"
        link.symlink_to(descriptor)
        for name in (descriptor, f"/proc/self/fd/{file.fileno()}", link):
            assert descriptor_of(name) == file.fileno()
            replace_text(name, "new\n")
    assert path.read_text() == "before\n" + 3 * "new\n"
    assert path.stat().st_ino == number
    assert names(tmp_path) == ["file", "link"]
    with pytest.raises(RecordError, match="cannot be written: Bad file descriptor"):
        replace_text(descriptor, "new\n")


def test_names_of_descriptors() -> None:
    assert descriptor_of("/dev/stdout") == descriptor_of("/dev/fd/1") == 1
    assert descriptor_of("/dev/../dev/stderr") == descriptor_of("/proc/self/fd/2") == 2
    for path in ("/dev/null", "/dev/fd", "/dev/fd/x", "1", "", "/proc/1/fd/1", "a\0b", "x" * 5000):
        assert descriptor_of(path) is None


def test_other_hard_links_keep_the_old_file(tmp_path: Path) -> None:
    path, other = tmp_path / "plan.yaml", tmp_path / "other.yaml"
    path.write_text("old\n")
    other.hardlink_to(path)
    replace_text(path, "new\n")
    assert (path.read_text(), other.read_text()) == ("new\n", "old\n")


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give files away")
def test_the_owner_stays_where_that_is_allowed(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("old\n")
    os.chown(path, 12345, 23456)
    path.chmod(0o640)
    replace_text(path, "new\n")
    found = path.stat()
    assert (found.st_uid, found.st_gid, found.st_mode & 0o777) == (12345, 23456, 0o640)


def test_what_is_no_text_is_an_error_and_the_old_file_stays(tmp_path: Path) -> None:
    path = tmp_path / "plan.yaml"
    path.write_text("old\n")
    with pytest.raises(RecordError, match="is not text"):
        replace_text(path, "name: \udcff\n")
    assert path.read_text() == "old\n"
    assert names(tmp_path) == ["plan.yaml"]

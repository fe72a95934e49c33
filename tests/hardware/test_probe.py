"""This machine, measured: values that any machine's must satisfy, and nothing left behind."""

import dataclasses
import json
import os
import shlex
import socket
import subprocess
from contextlib import closing
from pathlib import Path

import pytest
import torch

from protrain_plan.hardware.probe import ProbedFile, Watch, host_memory_bytes, observed, probe
from protrain_plan.hardware.speeds import Stepped, in_worker, update_speeds
from protrain_runtime.contract.errors import ProtrainError
from protrain_runtime.contract.records import read_hardware, read_profile, write_hardware
from protrain_runtime.contract.records.hardware import Hardware
from protrain_runtime.contract.records.profile import DType, Precision
from tests.support import forked
from tests.support.commands import PROTRAIN, Result, ran
from tests.support.messages import Speaker

HOW_TO = Path(__file__).parents[2] / "docs/how-to/several-gpus.md"
TORCHRUN = PROTRAIN.with_name("torchrun")
HERE = {"4": "2", "cuda": "cpu", "llama-3.1-8b": "tiny-llama"}  # what the how-to says, for CPUs


def how_to(words: str) -> list[str | Path]:
    """The command of the how-to with these words, on two ranks of this machine."""
    [line] = [line for line in HOW_TO.read_text().splitlines() if words in line and "-o" in line]
    named = {"protrain": PROTRAIN, "torchrun": TORCHRUN}
    return [
        named.get(word) or HERE.get(word, word)
        for word in shlex.split(line)
        if not word.startswith("OMP_NUM_THREADS=")
    ]


def run(*command: str | Path, folder: Path) -> Result:
    return ran(*command, folder=folder, OMP_NUM_THREADS="1")


def check_rates(hardware: Hardware) -> None:
    """Orders of magnitude that no machine leaves, however busy it is."""
    rates = hardware.rates
    assert rates is not None
    assert 1e7 < rates.float32_flops_per_s < 1e15
    assert 1e6 < rates.bfloat16_flops_per_s < 1e16
    assert 1e7 < rates.memory_bytes_per_s < 1e14
    assert 1e-8 < rates.operator_s < 1e-2
    assert 1e5 < rates.host_parameters_per_s < 1e12
    assert 0 < rates.host_piece_s < 1
    assert 0 <= hardware.move_s < 1
    assert (rates.compute_efficiency, rates.memory_efficiency) == (1, 1)
    assert hardware.sources == (f"measured on the machine itself, with torch {torch.__version__}",)


@pytest.mark.nightly
def test_this_machine_is_measured_and_left_clean(tmp_path: Path) -> None:
    num_threads = torch.get_num_threads()
    torch.manual_seed(5)
    state = torch.get_rng_state()
    shares: list[float] = []
    hardware = probe(
        "cpu",
        spill_directory=tmp_path,
        name="here",
        progress=lambda what, share: shares.append(share),
    )

    assert shares == sorted(shares)
    assert (shares[0], shares[-1]) == (0, 1)
    check_rates(hardware)
    write_hardware(hardware, tmp_path / "here.yaml")
    assert read_hardware(tmp_path / "here.yaml") == hardware
    (tmp_path / "here.yaml").unlink()
    assert hardware.name == "here"
    assert hardware.device.kind == "cpu"
    assert hardware.device.memory_bytes == host_memory_bytes()
    assert hardware.device.context_bytes > 0
    assert hardware.device.num_threads == num_threads == torch.get_num_threads()
    assert [tier.name for tier in hardware.tiers] == ["disk"]
    link = hardware.tier("disk").link
    assert hardware.tier("disk").capacity_bytes > 2**26
    assert 0 < link.read_bytes_per_s < 1e12
    assert 0 < link.write_bytes_per_s < 1e12
    assert link.latency_s > 0
    assert 0.5 <= link.duplex <= 1
    disk = hardware.tier("disk")
    assert disk.cached is not None
    assert 0 < disk.cached.link.read_bytes_per_s < 1e12
    if disk.observed is not None:  # the file system takes direct I/O
        assert 0 < disk.observed.seconds < 100
        assert disk.observed.written_bytes > 0
    for both in (hardware.read_contention, hardware.write_contention, hardware.update_contention):
        assert 0 < both.compute <= 1
        assert 0 < both.lane <= 1
    assert list(tmp_path.iterdir()) == []
    assert torch.equal(torch.get_rng_state(), state)


def test_the_disk_is_written_for_as_long_as_it_was_asked_for(tmp_path: Path) -> None:
    """Until one of both is over, and once in any case."""
    with closing(ProbedFile(tmp_path, torch.device("cpu"))) as file:
        if file.buffered:
            pytest.skip(file.buffered)
        once = file.num_bytes
        by_bytes = observed(file, Watch(seconds=1e9, num_bytes=5 * once))
        assert by_bytes.written_bytes == 5 * once
        assert min(by_bytes.first_bytes_per_s, by_bytes.last_bytes_per_s) > 0
        assert observed(file, Watch(seconds=0, num_bytes=10**12)).written_bytes == once
        by_time = observed(file, Watch(seconds=0.3, num_bytes=10**15))
        assert by_time.seconds >= 0.3
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_two_ranks_measure_what_joins_them(tmp_path: Path) -> None:
    """As the how-to says it, up to a plan for both; rank 0 alone writes and prints."""
    (tmp_path / "spill").mkdir()
    probing, profiling = how_to("hardware probe"), how_to("--interconnect my")
    options = ("--json", "--name", "here", "--spill-directory", "spill")
    result = run(*probing, *options, folder=tmp_path)
    assert (result.returncode, result.stderr) == (0, "")
    hardware = read_hardware(tmp_path / "my-machine.yaml")
    assert json.loads(result.stdout) == json.loads(json.dumps(dataclasses.asdict(hardware)))
    joined = hardware.interconnect
    assert joined is not None
    assert (joined.devices_per_node, joined.inter_node, joined.below) == (2, None, "of the node")
    assert 1e5 < joined.intra_node.gather_bytes_per_s < 1e12
    assert 1e5 < joined.intra_node.reduce_bytes_per_s < 1e12
    assert 0 < joined.intra_node.latency_s < 10
    assert 0 < joined.contention.compute <= 1
    assert 0 < joined.contention.lane <= 1
    assert 0.5 <= joined.link_share <= 1
    assert 0 <= joined.library_bytes < 2**30
    assert hardware.sources[1] == "interconnect: measured by 2 ranks, 2 in a node"
    assert list((tmp_path / "spill").iterdir()) == []
    sizes = ("--batch-size", "1", "--seq-len", "32", "--json")
    profiled = run(*profiling, *sizes, folder=tmp_path)
    assert (profiled.returncode, profiled.stderr) == (0, "")
    planned = run(PROTRAIN, "plan", "profile.yaml", "--num-devices", "2", folder=tmp_path)
    assert (planned.returncode, planned.stderr) == (0, "")
    assert "on 2 devices" in planned.stdout


@pytest.mark.slow
def test_nodes_of_one_rank_have_nothing_within(tmp_path: Path) -> None:
    """Two launchers, as on two nodes; what joins the nodes is written for both."""
    (tmp_path / "spill").mkdir()
    with socket.create_server(("localhost", 0)) as free:
        port = free.getsockname()[1]
    nodes = [
        subprocess.Popen(
            [
                *(TORCHRUN, "--nnodes", "2", "--node-rank", str(node), "--nproc-per-node", "1"),
                *("--master-addr", "localhost", "--master-port", str(port), "--no-python"),
                *(PROTRAIN, "hardware", "probe", "-o", f"{node}.yaml"),
                *("--spill-directory", "spill"),
            ],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for node in range(2)
    ]
    ended = [node.communicate(timeout=300) for node in nodes]
    assert [node.returncode for node in nodes] == [0, 0], ended
    assert not (tmp_path / "1.yaml").exists()
    hardware = read_hardware(tmp_path / "0.yaml")
    joined = hardware.interconnect
    assert joined is not None
    assert joined.devices_per_node == 1
    assert joined.intra_node == joined.inter_node
    assert 1e5 < joined.intra_node.gather_bytes_per_s < 1e12
    assert hardware.sources[1] == "interconnect: measured by 2 ranks, 1 in a node"


@pytest.mark.parametrize(
    ("dtype", "precision"),
    [("float32", "pure"), ("bfloat16", "pure"), ("bfloat16", "master"), ("bfloat16", "autocast")],
)
def test_update_speeds_are_those_of_a_machine(dtype: DType, precision: Precision) -> None:
    stepped = Stepped(dtype, precision=precision)
    lane, device = update_speeds(stepped, (torch.Size([64]), torch.Size([4096])))
    assert 0 < lane < 1e12
    assert 0 < device < 1e12


def test_a_lane_has_one_thread_and_later_threads_have_the_old_number() -> None:
    num_threads = torch.get_num_threads()
    assert in_worker(torch.get_num_threads) == 1
    assert torch.get_num_threads() == num_threads


def test_a_directory_that_is_not_there_is_an_error(tmp_path: Path, assert_says: Speaker) -> None:
    missing = tmp_path / "none"
    assert_says.refused(probe, "cpu", spill_directory=missing)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_a_device_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(ProtrainError) as caught:
        probe("cuda", spill_directory=tmp_path)
    # The emulated one, where others use it.
    here = torch.accelerator.current_accelerator(check_available=True)
    others = f", and has one of type '{here.type}'" if here else ""
    assert str(caught.value) == (
        f"this machine has no device of type 'cuda' that torch can use{others}\n"
        "  fix: a build of PyTorch for cuda on a machine that has one, or cpu"
    )


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_gpu_has_pinned_host_memory_below_it(tmp_path: Path) -> None:
    hardware = probe("cuda", spill_directory=tmp_path)
    assert [tier.name for tier in hardware.tiers] == ["host", "disk"]
    assert 1e9 < hardware.tier("host").link.read_bytes_per_s < 1e12


@pytest.mark.slow
def test_a_profile_writes_to_the_disk_for_as_long_as_it_was_asked_to(tmp_path: Path) -> None:
    size = ("--batch-size", 2, "--seq-len", 64, "--steps", 1, "--in-process")
    watch = ("--disk-seconds", 1000, "--disk-bytes", "400MiB")
    result = forked.protrain("profile", "tiny-llama", *size, *watch, folder=tmp_path)
    assert result.returncode == 0, result.stderr
    observed = read_profile(tmp_path / "profile.yaml").hardware.tier("disk").observed
    assert observed is not None
    assert 0 < observed.written_bytes <= 400 * 2**20

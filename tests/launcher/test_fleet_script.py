"""board.sh itself, run here in place of over ssh, with a `docker` that is a few lines of shell."""

from __future__ import annotations

import fcntl
import io
import json
import os
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from narrowgauge.cli.app import run_program
from narrowgauge.errors import Busy, DataCorrupt, NarrowgaugeError
from narrowgauge.fleet.errors import BoardUnfit, LinkCut
from narrowgauge.fleet.facts import Questions, ask_board
from narrowgauge.fleet.hosts import Board
from narrowgauge.fleet.leases import taken_error
from narrowgauge.fleet.link import Channel, Link
from narrowgauge.fleet.sending import sha256_bytes
from narrowgauge_contract.errors import ExitCode

ROOT = Path(__file__).parents[2]
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
    # The clock is read again, at the second command's own time.
    assert first is not None
    assert link.clock is not None
    assert link.clock.bound_s <= first.bound_s
    # Only one command follows; the next has its own.
    assert _run(link, words)[-1] == "bye"
    assert link.calls == 2


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
    with pytest.raises(Busy, match="measuring one, and nobody holds its lease"):
        _run(link, words)
    (engine / "ps").write_text("")
    assert _run(link, words)[0:2] == ["left", "cache"]
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

"""benchmarks/reference/take.py: lists, lanes, limits, resuming. Needs neither a GPU nor torch."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
import subprocess
import sys
import tarfile
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest

from narrowgauge_contract.job import parse_overrides, resolve, shard_rows
from narrowgauge_contract.record import load_host_note
from narrowgauge_contract.spec import load_spec

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "benchmarks" / "reference"


@pytest.fixture(scope="module")
def take() -> ModuleType:
    sys.path.insert(0, str(FOLDER))  # as where it is run as a script
    spec = importlib.util.spec_from_file_location("reference_take", FOLDER / "take.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def write_list(path: Path, jobs: dict[str, str], alone: str = "") -> Path:
    tables = []
    for name, code in jobs.items():
        tables.append(f"[[job]]\nname = {json.dumps(name)}\n")
        tables.append(f'command = ["python", "-c", {json.dumps(code)}]\n')
        tables.append("alone = true\n" if name == alone else "")
    path.write_text("".join(tables))
    return path


def ended(out: Path, name: str) -> dict[str, object]:
    body: dict[str, object] = json.loads((out / name / "ended.json").read_text())
    return body


def test_runs_each_job_once_in_its_own_folder(take: ModuleType, tmp_path: Path) -> None:
    mark = "import os, pathlib; p = pathlib.Path(os.environ['OUT'], 'mark'); "
    mark += "p.write_text(p.read_text() + 'x' if p.exists() else 'x')"
    jobs = write_list(tmp_path / "jobs.toml", {"a": mark, "b": mark, "c": mark})
    words = [str(jobs), "--out", str(tmp_path / "out"), "--gpus", "0,1"]
    assert take.main(words) == 0
    assert take.main(words) == 0
    assert [(tmp_path / "out" / name / "mark").read_text() for name in "abc"] == ["x"] * 3
    assert {ended(tmp_path / "out", name)["gpu"] for name in "abc"} <= {"0", "1"}


def test_a_job_whose_data_is_not_there_is_left_for_another_time(
    take: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It would end at once, and for good: what has ended is not done again."""
    jobs = write_list(tmp_path / "jobs.toml", {"plain": "print(7)", "reads": "print(8)"})
    jobs.write_text(jobs.read_text() + 'data = ["mnist", "here"]\n')
    (tmp_path / "data" / "here").mkdir(parents=True)
    words = [str(jobs), "--out", str(tmp_path / "out"), "--data", str(tmp_path / "data")]

    assert take.main(words) == 3
    said = capsys.readouterr().out
    assert "left: mnist not in --data" in said
    assert "1 left for want of data" in said
    assert not (tmp_path / "out/reads").exists()
    (tmp_path / "data" / "mnist").mkdir()
    assert take.main(words) == 0
    assert (tmp_path / "out/reads/log.txt").read_text() == "8\n"


def test_a_failure_is_the_exit_code_and_the_rest_goes_on(take: ModuleType, tmp_path: Path) -> None:
    jobs = write_list(tmp_path / "jobs.toml", {"bad": "raise SystemExit(3)", "good": "print(7)"})
    assert take.main([str(jobs), "--out", str(tmp_path / "out")]) == 1
    assert ended(tmp_path / "out", "bad")["exit_code"] == 3
    assert (tmp_path / "out/good/log.txt").read_text() == "7\n"


def test_a_program_that_is_not_there_costs_its_lane_nothing_else(
    take: ModuleType, tmp_path: Path
) -> None:
    jobs = tmp_path / "jobs.toml"
    jobs.write_text('[[job]]\nname = "lacking"\ncommand = ["no-such-program", "7"]\n')
    write_list(tmp_path / "more.toml", {"good": "print(7)"})
    out = tmp_path / "out"

    assert take.main([str(jobs), str(tmp_path / "more.toml"), "--out", str(out)]) == 1
    assert ended(out, "lacking")["exit_code"] == 127
    assert "no-such-program" in (out / "lacking/log.txt").read_text()
    assert (out / "good/log.txt").read_text() == "7\n"


@pytest.mark.parametrize("ignored", [False, True])
def test_what_is_cut_off_has_not_ended(
    ignored: bool, take: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also from the background of a shell, which has interrupts ignored."""
    before = signal.getsignal(signal.SIGINT)
    out = tmp_path / "out"
    begun = "import os, time; open(os.environ['OUT'] + '/begun', 'w'); time.sleep(60)"
    jobs = write_list(tmp_path / "jobs.toml", {"long": begun, "next": ""})
    # Time passes once it runs, however long this machine takes to start a Python.
    clock = SimpleNamespace(monotonic=lambda: 1e3 if (out / "long/begun").exists() else 0.0)
    monkeypatch.setattr(take, "time", clock)
    signal.signal(signal.SIGINT, signal.SIG_IGN if ignored else signal.default_int_handler)
    try:
        assert take.main([str(jobs), "--out", str(out), "--limit", "500"]) == 3
    finally:
        signal.signal(signal.SIGINT, before)
    assert "KeyboardInterrupt" in (out / "long/log.txt").read_text()
    assert not list(out.rglob("ended.json"))


def test_what_has_ended_in_the_meantime_is_not_cut_off(take: ModuleType, tmp_path: Path) -> None:
    child = subprocess.Popen(["sh", "-c", "exit 7"])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert take._wait(child, tmp_path, SimpleNamespace(until=0.0)) == 7


def test_what_is_alone_overlaps_with_nothing(take: ModuleType, tmp_path: Path) -> None:
    stamp = "import os, time; a = time.time(); time.sleep(0.3); open(os.environ['OUT'] + '/t', 'w')"
    stamp += ".write(f'{a} {time.time()}')"
    names = ["a", "b", "alone", "c", "d"]
    jobs = write_list(tmp_path / "jobs.toml", dict.fromkeys(names, stamp), alone="alone")
    assert take.main([str(jobs), "--out", str(tmp_path / "out"), "--gpus", "0,1"]) == 0
    times = {n: [float(t) for t in (tmp_path / "out" / n / "t").read_text().split()] for n in names}
    begin, end = times.pop("alone")
    assert all(t[1] <= begin or t[0] >= end for t in times.values())


@pytest.fixture
def control(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A stand-in of NVIDIA's MPS control, which tells its file what it was asked."""
    folder = tmp_path / "bin"
    folder.mkdir()
    said = tmp_path / "mps.txt"
    program = folder / "nvidia-cuda-mps-control"
    program.write_text(
        '#!/bin/sh\n[ "$1" = -d ] && { echo "-d" >> ' + str(said) + "; exit 0; }\n"
        f'echo "$(cat) $CUDA_MPS_PIPE_DIRECTORY" >> {said}\n'
    )
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{folder}:{os.environ['PATH']}")
    return said


def test_lanes_of_one_gpu_share_it_by_turns_and_others_are_alone(
    take: ModuleType, tmp_path: Path, control: Path
) -> None:
    told = "import json, os, time; a = time.time(); time.sleep(0.5); keys = ('NARROWGAUGE_TURNS', "
    told += (
        "'CUDA_MPS_PIPE_DIRECTORY', 'CUDA_VISIBLE_DEVICES'); open(os.environ['OUT'] + '/t', 'w')"
    )
    told += ".write(json.dumps([a, time.time(), [os.environ.get(k) for k in keys]]))"
    jobs = write_list(tmp_path / "jobs.toml", dict.fromkeys(["a", "b", "timed"], told))
    for name in "ab":
        text = jobs.read_text().replace(f'name = "{name}"', f'name = "{name}"\nshares = true')
        jobs.write_text(text)
    out = tmp_path / "out"

    assert take.main([str(jobs), "--out", str(out), "--gpus", "0,0"]) == 0
    seen = {name: json.loads((out / name / "t").read_text()) for name in ("a", "b", "timed")}
    assert max(seen["a"][0], seen["b"][0]) < min(seen["a"][1], seen["b"][1])
    assert seen["timed"][0] > max(seen["a"][1], seen["b"][1])
    pipe = seen["a"][2][1]
    assert seen["a"][2] == seen["b"][2] == [str(out / ".turns-0"), pipe, "0"]
    assert seen["timed"][2] == [None, None, "0"]
    assert control.read_text() == f"-d\nquit -t 10 {pipe}\n"
    assert not Path(pipe).exists()


@pytest.mark.parametrize(("gpus", "program"), [("0,1", ""), ("0,0", "exit 1"), ("0,0", None)])
def test_without_a_daemon_lanes_get_slices_of_time(
    gpus: str, program: str | None, take: ModuleType, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """It is not asked for where every lane has a GPU of its own."""
    if program is not None:
        control = tmp_path / "nvidia-cuda-mps-control"
        control.write_text(f"#!/bin/sh\necho asked\n{program}\n")
        control.chmod(0o755)
        monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    show = "import os; print(os.environ.get('CUDA_MPS_PIPE_DIRECTORY'))"
    jobs = write_list(tmp_path / "jobs.toml", {"a": show})
    jobs.write_text(jobs.read_text().replace('"a"\n', '"a"\nshares = true\n'))

    assert take.main([str(jobs), "--out", str(tmp_path / "out"), "--gpus", gpus]) == 0
    assert (tmp_path / "out/a/log.txt").read_text() == "None\n"
    said = capfd.readouterr().out
    assert ("asked" in said) is (gpus == "0,0" and program is not None)
    assert ("slices of time" in said) is (program is None)
    assert ("ended with 1: no MPS" in said) is (program == "exit 1")


def test_a_job_comes_after_another_and_reads_its_folder(take: ModuleType, tmp_path: Path) -> None:
    slow = "import os, time; time.sleep(0.5); open(os.environ['OUT'] + '/w', 'w').write('7')"
    read = "import os; print(open(os.environ['OUT'] + '/../first/w').read())"
    jobs = write_list(tmp_path / "jobs.toml", {"first": slow, "second": read, "third": ""})
    jobs.write_text(jobs.read_text().replace('"second"', '"second"\nafter = ["first"]'))
    out = tmp_path / "out"

    assert take.main([str(jobs), "--out", str(out), "--gpus", "0,1"]) == 0
    assert (out / "second/log.txt").read_text() == "7\n"
    # What waits keeps no lane from what does not.
    assert (out / "third/ended.json").stat().st_mtime < (out / "first/ended.json").stat().st_mtime


@pytest.mark.parametrize("only", ["", "sec"])
def test_what_comes_after_a_failure_is_left_and_said(
    only: str, take: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Or after what is not run at all."""
    names = {"first": "raise SystemExit(2)", "second": "", "second-too": "", "other": ""}
    jobs = write_list(tmp_path / "jobs.toml", names)
    text = jobs.read_text().replace('"second"', '"second"\nafter = ["first"]')
    jobs.write_text(text.replace('"second-too"', '"second-too"\nafter = ["second"]'))
    out = tmp_path / "out"

    assert take.main([str(jobs), "--out", str(out), "--gpus", "0,1", "--only", only]) == 1
    said = capsys.readouterr().out
    assert "left: it comes after first" in said
    assert "left: it comes after second" in said
    assert not (out / "second").exists()
    assert (out / "other/ended.json").exists() == (only == "")


def test_a_parameter_names_a_file_of_an_earlier_job(take: ModuleType, tmp_path: Path) -> None:
    job = take.Job(name="b", experiment="pruning", parameters=("weights={out}/a/row-0/w.pt",))

    words = take.words(job, tmp_path / "b", None)
    assert words[words.index("-p") + 1] == f"weights={tmp_path}/a/row-0/w.pt"
    copy = take.Job(name="c", command=("cp", "{out}/a/w.pt", "here"))
    assert take.words(copy, tmp_path / "c", None) == ["cp", f"{tmp_path}/a/w.pt", "here"]


def test_what_was_cut_off_goes_on_in_its_lane(take: ModuleType, tmp_path: Path) -> None:
    """CUDA_VISIBLE_DEVICES is one of the circumstances that a run is not resumed in others of."""
    out = tmp_path / "out"
    say = "import os; open(os.environ['OUT'] + '/gpu', 'w').write(os.environ"
    say += "['CUDA_VISIBLE_DEVICES'])"
    jobs = write_list(tmp_path / "jobs.toml", dict.fromkeys("abcd", say))
    for name, gpu in {"a": "1", "b": "1", "c": "0", "d": "7"}.items():
        (out / name).mkdir(parents=True)
        (out / name / "begun.json").write_text(json.dumps({"gpu": gpu}))
    (out / "d/begun.json").write_text("{")  # cut off while it was written

    assert take.main([str(jobs), "--out", str(out), "--gpus", "0,1"]) == 0

    ran = {name: (out / name / "gpu").read_text() for name in "abcd"}
    assert [ran[name] for name in "abc"] == ["1", "1", "0"]
    assert ran["d"] in {"0", "1"}


def test_a_lane_that_is_not_there_any_more_keeps_nobody_waiting(
    take: ModuleType, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    jobs = write_list(tmp_path / "jobs.toml", {"a": "print(1)"})
    (out / "a").mkdir(parents=True)
    (out / "a/begun.json").write_text('{"gpu": "5"}')

    assert take.main([str(jobs), "--out", str(out), "--gpus", "0,1"]) == 0
    assert ended(out, "a")["exit_code"] == 0


def test_what_lists_have_in_common_is_done_once(take: ModuleType) -> None:
    lists = sorted((FOLDER / "lists").glob("*.toml"))
    jobs = take.load_jobs([path for path in lists if path.stem in ("engines", "sparse")])
    names = [job.name for job in jobs]
    assert names.count("kernels") == 1
    assert {"vgg16-fp16", "layers-fp32"} <= set(names)


def test_what_all_need_is_first_whichever_are_named(take: ModuleType) -> None:
    lists = [FOLDER / "lists" / f"{name}.toml" for name in ("hetero", "anytime")]
    jobs = take.load_jobs(lists)

    names = [job.name for job in take.named(jobs, "wire,sact-1")]

    assert names == ["kernels", "wire", "sact-1"]
    assert [job.name for job in take.named(jobs, "wire,kernels")] == ["wire", "kernels"]
    assert take.named(jobs, "no-such-job") == []


def test_packs_what_a_reader_needs(take: ModuleType, tmp_path: Path) -> None:
    code = "import os; open(os.environ['OUT'] + '/record.json', 'w').write('{}')"
    code += "; open(os.environ['OUT'] + '/weights.pt', 'w').write('large')"
    jobs = write_list(tmp_path / "jobs.toml", {"a": code})
    words = [str(jobs), "--out", str(tmp_path / "out"), "--pack", str(tmp_path / "p.tar.gz")]
    assert take.main(words) == 0
    with tarfile.open(tmp_path / "p.tar.gz") as archive:
        assert set(archive.getnames()) == {"a/record.json", "a/ended.json", "a/log.txt"}


def test_events_come_back_until_there_is_a_record(take: ModuleType, tmp_path: Path) -> None:
    from packing import pack

    out = tmp_path / "out"
    for name in ("running", "recorded"):
        (out / name).mkdir(parents=True)
        (out / name / "events.jsonl").write_text("{}\n")
    (out / "recorded" / "record.json").write_text("{}")
    (out / "host.json").write_text("{}")
    pack(out, tmp_path / "p.tar.gz")
    with tarfile.open(tmp_path / "p.tar.gz") as archive:
        assert set(archive.getnames()) == {
            "host.json", "recorded/record.json", "running/events.jsonl",
        }  # fmt: skip


def test_arrays_come_back_in_archives_that_travel(take: ModuleType, tmp_path: Path) -> None:
    from packing import ARRAYS_BYTES, pack_arrays

    out = tmp_path / "out"
    for name, size in (("a", 9 << 20), ("b", 5 << 20), ("c", 9 << 20)):
        (out / name).mkdir(parents=True)
        (out / name / "logits.npz").write_bytes(bytes(size))
        (out / name / "weights.pt").write_bytes(b"large")

    made = pack_arrays(out, tmp_path / "arrays")

    assert [path.name for path in made] == ["arrays-0.tar", "arrays-1.tar"]
    assert all(path.stat().st_size <= ARRAYS_BYTES for path in made)
    found = []
    for path in made:
        with tarfile.open(path) as archive:
            found += archive.getnames()
    assert found == ["a/logits.npz", "b/logits.npz", "c/logits.npz"]
    assert pack_arrays(tmp_path / "nothing", tmp_path / "none") == []


def test_a_name_is_itself_before_it_is_a_part_of_others(take: ModuleType) -> None:
    jobs = [take.Job(name=name, command=("x",)) for name in ("tax", "tax-two", "plan", "tests")]

    def asked(words: str) -> list[str]:
        return [job.name for job in take.named(jobs, words)]

    assert asked("tax") == ["tax"]
    assert asked("tax-") == ["tax-two"]
    assert asked("ta,pl") == ["tax", "tax-two", "plan"]
    assert asked("pl,tax-two,ta") == ["plan", "tax-two", "tax"]  # the order is that of the words
    assert asked("") == [job.name for job in jobs]
    assert asked("none") == []


def test_a_job_that_is_named_brings_what_it_comes_after(take: ModuleType, tmp_path: Path) -> None:
    """Or it would be left undone, at the end of a lease."""
    jobs = tmp_path / "jobs.toml"
    command = 'command = ["true"]'
    jobs.write_text(
        f'[[job]]\nname = "train"\n{command}\n[[job]]\nname = "other"\n{command}\n'
        f'[[job]]\nname = "prune"\nafter = ["train"]\n{command}\n'
        f'[[job]]\nname = "time"\nafter = ["prune"]\n{command}\n'
    )

    asked = take.named(take.load_jobs([jobs]), "other,time,train")

    assert [job.name for job in asked] == ["other", "train", "prune", "time"]


def test_what_trainings_come_after_does_not_wait_for_trainings(take: ModuleType) -> None:
    """Among trainings that share a GPU tests would have it to themselves, once those had ended."""
    jobs = [
        take.Job(name="kernels", command=("x",), first=True),
        take.Job(name="tests", command=("x",)),
        take.Job(name="weights", command=("x",), shares=True),
        take.Job(name="short", command=("x",), shares=True),
        take.Job(name="long", command=("x",), shares=True, after=("tests", "weights")),
        take.Job(name="timed", command=("x",), after=("tests",)),
    ]

    def asked(words: str) -> list[str]:
        return [job.name for job in take.named(jobs, words)]

    assert asked("short,long") == ["kernels", "tests", "short", "weights", "long"]
    assert asked("short,tests,long") == ["kernels", "short", "tests", "weights", "long"]
    assert asked("short,timed") == ["kernels", "short", "tests", "timed"]
    assert asked("timed,long") == ["kernels", "tests", "timed", "weights", "long"]


def test_a_job_that_cannot_begin_fails_and_its_lane_goes_on(
    take: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """As where a disk is full: here a file lies where its folder should."""
    jobs = write_list(tmp_path / "jobs.toml", {"a": "pass", "b": "pass"})
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "a").touch()

    assert take.main([str(jobs), "--out", str(tmp_path / "out"), "--gpus", ""]) == 1

    assert "File exists" in capsys.readouterr().err
    assert (tmp_path / "out" / "b" / "ended.json").is_file()


def test_a_shard_is_a_part_of_the_rows(take: ModuleType, tmp_path: Path) -> None:
    (tmp_path / "jobs.toml").write_text(
        '[[job]]\nname = "a"\nexperiment = "mnist"\nshard = "2/3"\nparameters = { epochs = 1 }\n'
    )
    (job,) = take.load_jobs([tmp_path / "jobs.toml"])
    words = take.words(job, tmp_path, None)
    assert words[words.index("--shard") + 1] == "2/3"
    assert "--shard" not in take.words(take.Job(name="a", experiment="mnist"), tmp_path, None)


def test_a_run_that_was_begun_is_resumed(take: ModuleType, tmp_path: Path) -> None:
    job = take.Job(name="a", experiment="mnist", parameters=("epochs=1",))
    assert "--resume" not in take.words(job, tmp_path, None)
    (tmp_path / "job.json").write_text("{}")
    words = take.words(job, tmp_path, Path("/data"))
    assert words[-3:] == ["--data", "/data", "--resume"]
    assert words[words.index("-p") + 1] == "epochs=1"


def test_a_run_is_told_what_host_it_is_on(take: ModuleType, tmp_path: Path) -> None:
    note = take.describe_host(tmp_path)

    words = take.words(take.Job(name="a", experiment="mnist"), tmp_path, None, note)
    assert words[-2:] == ["--host-facts", str(note)]
    host = load_host_note(note)
    assert host.executor == "native"
    assert host.machine.cpu_count >= 1


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no [[job]]"),
        ('[[job]]\nname = "a"\n', "either 'experiment' or 'command'"),
        ('[[job]]\nname = "../a"\ncommand = ["x"]\n', "needs a name"),
        ('[[job]]\nname = "a"\ncommand = ["x"]\ncomand = 1\n', "unknown key 'comand'"),
        (
            '[[job]]\nname = "a"\ncommand = ["x"]\n[[job]]\nname = "a"\ncommand = ["y"]\n',
            "used twice",
        ),
        ('[[job]]\nname = "a"\ncommand = ["x"]\nafter = ["b"]\n', "no job before it"),
        ("[[job", ""),
    ],
)
def test_a_bad_list_is_refused(
    take: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str], text: str, why: str
) -> None:
    (tmp_path / "jobs.toml").write_text(text)
    assert take.main([str(tmp_path / "jobs.toml"), "--out", str(tmp_path / "out")]) == 2
    assert why in capsys.readouterr().err


@pytest.mark.parametrize("path", sorted((FOLDER / "lists").glob("*.toml")), ids=lambda p: p.stem)
def test_the_lists_ask_for_what_there_is(take: ModuleType, path: Path) -> None:
    for job in take.load_jobs([path]):
        if job.experiment:
            spec = load_spec(ROOT / "experiments" / job.experiment / "experiment.toml")
            chosen = parse_overrides(spec, job.parameters)
            where = {"target": "native", "seed": 0, "run_id": "r"}
            rows = resolve(spec, chosen, profile=job.profile, **where).rows
            assert rows
            if job.shard:
                part, of = map(int, job.shard.split("/"))
                assert shard_rows(rows, (part, of)), job.name
        for word in job.command:
            assert not word.endswith(".py") or (ROOT / word).is_file(), word


def test_a_package_that_is_missing_is_named_before_anything_runs(
    take: ModuleType, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    jobs = write_list(tmp_path / "jobs.toml", {"a": "pass"})
    jobs.write_text('needs = ["json", "no_such_package"]\n' + jobs.read_text())
    words = [str(jobs), "--out", str(tmp_path / "out")]

    assert take.main(words) == 2

    said = capsys.readouterr().err
    assert "no_such_package" in said
    assert "json" not in said
    assert not (tmp_path / "out").exists()
    assert take.main([*words, "--without", "no_such_package"]) == 0


def test_packages_beside_this_python_are_found_by_jobs(
    take: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "beside.py").write_text("")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    jobs = write_list(tmp_path / "jobs.toml", {"a": "import beside, narrowgauge_contract"})
    assert take.main([str(jobs), "--out", str(tmp_path / "out")]) == 0

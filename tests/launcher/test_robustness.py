"""The whole of it under attack: killed at any write, fed damaged records, then asked to go on."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import fake_lab
import pytest
from result_cases import recorded
from test_bundle import CLAIMS_TOML, TOY_TOML, outcome_of

from narrowgauge.bundle.verify import verify_bundle
from narrowgauge.checkout import Checkout
from narrowgauge.cli.app import run_program
from narrowgauge.judge.gather import judge_stored
from narrowgauge.store import RunFolder, Store
from narrowgauge_contract.claims import Verdict
from narrowgauge_contract.codec import dumps, write_json_atomic
from narrowgauge_contract.errors import ExitCode
from narrowgauge_contract.outcome import Status
from narrowgauge_contract.record import Record

SOURCE = Path(__file__).parents[2] / "src"
CLAIM = """
[[claim]]
id = "{name}"
text = "It loses one."
paper = "Table 1"
kind = "value"
metric = {{ operator = "value", of = ["loss{{width=0,epochs={epochs}}}"] }}
expected = {{ any = {{ figure = {figure}, tolerance = 0.1 }} }}
minimum_repeats = 1
profile = "smoke"
minutes = 20
disk_gb = 0.001
"""
#: Kills this process, as `kill -9` does, before the n-th thing that it does to the results folder.
#: Where n is 0 it only counts them, into a file.
PROGRAM = """
import os, signal, sys, threading
from pathlib import Path
from narrowgauge import environment
from narrowgauge.cli.app import run_program
results, fatal = sys.argv[1], int(sys.argv[2])
seen = 0

def watch(event, arguments):
    global seen
    if event == "open":
        touches = str(arguments[0]).startswith(results) and arguments[2] & (os.O_WRONLY | os.O_RDWR)
    elif event in ("os.rename", "os.mkdir", "os.remove", "os.chmod"):
        touches = str(arguments[0]).startswith(results)
    else:
        touches = event == "subprocess.Popen"
    if not touches:
        return
    seen += 1
    if seen == fatal:
        os.kill(os.getpid(), signal.SIGKILL)

environment.ensure_lab_python = lambda *a, **k: Path(sys.executable)
sys.addaudithook(watch)
code = run_program(sys.argv[3:], os.environ, sys.stderr)
if not fatal:
    print("touched", seen)
sys.exit(code)
"""


@dataclasses.dataclass(frozen=True)
class Site:
    """The tiny checkout, a stand-in lab, and `reproduce` on it in processes of its own."""

    root: Path
    lock: Path

    @property
    def results(self) -> Path:
        return self.root / "results"

    def run(self, fatal: int, *words: str) -> subprocess.CompletedProcess[str]:
        env = {
            **os.environ,
            "PYTHONPATH": str(SOURCE),
            "DOCKER_HOST": "unix:///nonexistent/docker.sock",
            "NARROWGAUGE_LOCK": str(self.lock),
        }
        command = [sys.executable, "-c", PROGRAM, str(self.results), str(fatal)]
        return subprocess.run(
            [*command, *words, "--project", str(self.root)],
            env=env, capture_output=True, text=True, timeout=120, check=False,
        )  # fmt: skip

    def begin(self, fatal: int) -> subprocess.CompletedProcess[str]:
        return self.run(fatal, "reproduce", "--all", *_NATIVE, "--order-seed", "1")

    def resume(self) -> subprocess.CompletedProcess[str]:
        """By name, since a kill at the very end leaves a finished one."""
        (plan,) = self.results.glob("reproduce/*/plan.json")
        return self.run(-1, "reproduce", "--resume", plan.parent.name)

    def records(self) -> dict[Path, str]:
        """Every record that is written, by its bytes."""
        found = self.results.glob("*/*/record.json")
        return {path: hashlib.sha256(path.read_bytes()).hexdigest() for path in found}

    def wait_for_labs(self) -> None:
        """Until what the killed launcher had started has ended."""
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            started = list(self.results.glob("*/*/out/events.jsonl"))
            if all((path.parent / "outcome.json").is_file() for path in started):
                return
            time.sleep(0.05)
        raise AssertionError("the stand-in lab did not end")


_NATIVE = ("--cooldown", "0", "--executor", "native")


@pytest.fixture
def site(tiny_checkout: Path, tmp_path: Path) -> Site:
    fake_lab.install(tmp_path / "fake")
    for name in ("lab", "contract"):
        target = tiny_checkout / "src" / f"narrowgauge_{name}"
        target.rmdir()
        target.symlink_to(tmp_path / "fake" / f"narrowgauge_{name}")
    # Each costs 20 minutes by its own word, so that they are not joined into one run.
    claims = [("one", 1, 1.0), ("two", 2, 1.0), ("three", 3, 9.0)]
    text = "".join(CLAIM.format(name=n, epochs=e, figure=f) for n, e, f in claims)
    (tiny_checkout / "experiments" / "tiny" / "claims.toml").write_text(text)
    return Site(tiny_checkout, tmp_path / "lock")


def _check_after(site: Site, kept: dict[Path, str]) -> None:
    """What every story must end in."""
    after = site.records()
    assert {path: after.get(path) for path in kept} == kept  # nothing finished was lost or changed
    store = Store(site.results)
    complete = [f for f in store.all() if f.recorded and f.record().status is Status.COMPLETE]
    judged = judge_stored(Checkout(site.root), store)
    assert {each.claim.id: each.verdict for each in judged.judgements} == {
        "one": Verdict.REPRODUCED, "two": Verdict.REPRODUCED, "three": Verdict.NOT_REPRODUCED,
    }  # fmt: skip
    assert len({dumps(folder.record().parameters) for folder in complete}) == len(complete)
    assert judged.refused == ()


def _story(site: Site, fatal: int) -> None:
    killed = site.begin(fatal)
    assert killed.returncode == -9, killed.stderr
    site.wait_for_labs()
    kept = site.records()
    planned = list(site.results.glob("reproduce/*/plan.json"))
    done = site.resume() if planned else site.begin(-1)

    assert done.returncode == ExitCode.OK, done.stderr
    _check_after(site, kept)


#: Three places of about sixty; `slow` takes all of them.
@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
def test_a_kill_anywhere_loses_no_finished_record(share: float, site: Site) -> None:
    _story(site, max(2, round(share * _TOUCHES)))


#: How often a whole `reproduce` of three runs touches its results, at the least.
_TOUCHES = 60


@pytest.mark.slow
def test_a_kill_at_every_single_write_loses_no_finished_record(site: Site) -> None:
    import shutil

    counted = site.begin(0)
    assert counted.returncode == ExitCode.OK, counted.stderr
    touches = int(counted.stdout.rpartition("touched")[2])
    assert touches >= _TOUCHES
    for fatal in range(1, touches + 1):
        shutil.rmtree(site.results, ignore_errors=True)
        _story(site, fatal)


def test_what_two_kills_leave_is_resumed_and_can_be_bundled(site: Site, tmp_path: Path) -> None:
    assert site.begin(20).returncode == -9
    site.wait_for_labs()
    again = site.run(25, "reproduce", "--resume")
    assert again.returncode == -9, again.stderr
    site.wait_for_labs()
    kept = site.records()
    done = site.resume()
    assert done.returncode == ExitCode.OK, done.stderr
    _check_after(site, kept)

    out = tmp_path / "after.zip"
    bundled = site.run(-1, "bundle", "--out", str(out))
    assert bundled.returncode == 0, bundled.stderr
    found = verify_bundle(out)
    assert found.whole, found.problems
    assert (found.runs, found.verdicts) == (len(site.records()), 3)


# Damaged records, and every command that reads them.


def _rewrite(folder: RunFolder, text: str) -> None:
    folder.record_path.chmod(0o644)
    folder.record_path.write_text(text)


@pytest.fixture
def damaged(tmp_path: Path) -> Checkout:
    """A checkout whose results hold one sound run among five that are not."""
    root = tmp_path / "checkout"
    for name in ("docker/targets.toml",):
        (root / name).parent.mkdir(parents=True)
        (root / name).write_text((SOURCE.parent / name).read_text())
    (root / "experiments/toy").mkdir(parents=True)
    (root / "experiments/toy/experiment.toml").write_text(TOY_TOML)
    (root / "experiments/toy/claims.toml").write_text(CLAIMS_TOML)
    results = root / "results"
    damages: list[Callable[[RunFolder], str]] = [
        lambda folder: folder.record_path.read_text()[:700],
        lambda folder: '{"format": 1, "of": "another program"}',
        lambda folder: dumps(dataclasses.replace(folder.record(), format=99)),
        lambda folder: "\x00\xff not text",
        _edited,
    ]
    for number, damage in enumerate(damages):
        # Newer than the sound one: each would be taken first.
        folder = recorded(results, f"20261121T10010{number}Z-toy-bad{number}00")
        _rewrite(folder, damage(folder))
    recorded(results)
    return Checkout(root)


def _edited(folder: RunFolder) -> str:
    """A record that says better than its run did."""
    record = folder.record()
    (folder.out / "outcome.json").write_text(dumps(outcome_of(record)))
    return dumps(_with_accuracy(record, (97.0, 98.0, 99.99)))


def _with_accuracy(record: Record, values: tuple[float, ...]) -> Record:
    """The record with other samples in the first row's accuracy."""
    first = record.rows[0]
    metrics = tuple(
        dataclasses.replace(metric, values=values) if metric.name == "accuracy" else metric
        for metric in first.metrics
    )
    rows = (dataclasses.replace(first, metrics=metrics), *record.rows[1:])
    return dataclasses.replace(record, rows=rows)


@pytest.mark.parametrize(
    "words",
    [
        ("results",), ("results", "--json"), ("replay",), ("explain", "toy/good"),
        ("report", "--format", "html", "--out", "-"),
        ("report", "--format", "markdown", "--out", "-"),
        ("report", "--format", "latex", "--out", "-"),
        ("report", "--format", "json", "--out", "-"),
        ("bundle", "--no-images", "--force", "--out", "OUT"), ("ae", "check", "R9"),
    ],
    ids=lambda words: "-".join(word for word in words[:3] if word[0] != "-"),
)  # fmt: skip
def test_damaged_records_are_refused_by_name_and_the_rest_goes_on(
    words: tuple[str, ...], damaged: Checkout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    errors = io.StringIO()
    given = [str(tmp_path / "out.zip") if word == "OUT" else word for word in words]
    code = run_program([*given, "--project", str(damaged.root)], {}, errors)
    captured = capsys.readouterr()
    told = captured.out + captured.err + errors.getvalue()
    flat = "".join(told.split())  # a console breaks long paths

    assert code in (0, ExitCode.CRITERION_UNMET), told
    assert "\x00" not in told
    assert "unexpected" not in told
    if "latex" in words:  # an appendix has no room for them
        assert "refused and left out: 5." in told
    elif words[0] == "ae":  # it asks whether records can be read, not whether they are true
        assert all(f"toy-bad{number}00" in flat for number in range(4)), told
    else:
        assert all(f"toy-bad{number}00" in flat for number in range(5)), told
    if words[0] in ("replay", "report", "explain"):
        assert "REPRODUCED" in told
        assert "99.99" not in told


# One stored sample, and the verdict that it should flip.


def _verdicts(checkout: Checkout) -> dict[str, Verdict]:
    judged = judge_stored(checkout, Store(checkout.results), replay=True)
    return {each.claim.id: each.verdict for each in judged.judgements}


@pytest.mark.parametrize(
    ("last", "flipped"),
    [
        (None, {}),
        (98.9, {}),
        (98.3, {"good": Verdict.UNSTABLE}),
        (90.0, {"good": Verdict.UNSTABLE, "order": Verdict.UNSTABLE}),
    ],
)
def test_one_changed_sample_flips_the_verdict_that_it_should_and_no_other(
    last: float | None, flipped: dict[str, Verdict], damaged: Checkout
) -> None:
    if last is not None:
        _change_a_sample(damaged, last)

    assert _verdicts(damaged) == {
        "good": Verdict.REPRODUCED, "order": Verdict.REPRODUCED, **flipped,
    }  # fmt: skip


def _change_a_sample(checkout: Checkout, last: float) -> None:
    folder = Store(checkout.results).find("20261121T100000Z-toy-aaaaaa")
    changed = _with_accuracy(folder.record(), (97.0, 98.0, last))
    write_json_atomic(folder.outcome_path, outcome_of(changed))
    _rewrite(folder, dumps(changed))


def test_a_sample_changed_after_it_was_judged_is_refused_and_flips_nothing(
    damaged: Checkout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(_verdicts(damaged).values()) == {Verdict.REPRODUCED}
    _change_a_sample(damaged, 90.0)

    assert set(_verdicts(damaged).values()) == {Verdict.SKIPPED}
    out = str(tmp_path / "out.zip")
    code = run_program(
        ["bundle", "--project", str(damaged.root), "--out", out], {}, errors := io.StringIO()
    )
    assert code == ExitCode.USAGE
    assert "no recorded run" in errors.getvalue()


def test_the_verdicts_do_not_depend_on_the_order_that_files_are_found_in(
    damaged: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = json.dumps(sorted(map(str, _verdicts(damaged).items())))
    walk = Path.iterdir
    monkeypatch.setattr(Path, "iterdir", lambda self: iter(sorted(walk(self), reverse=True)))

    assert json.dumps(sorted(map(str, _verdicts(damaged).items()))) == before

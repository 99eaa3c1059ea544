"""`narrowgauge report` and `serve` as a user types them."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import urllib.request
from io import StringIO
from pathlib import Path

import pytest
import report_cases as cases
from result_cases import recorded

from narrowgauge.cli.app import run_program
from narrowgauge.cli.options import checkout_of
from narrowgauge.judge.gather import (
    all_claims,
    choose_claims,
    judge_records,
    judge_with_records,
    read_stored,
)
from narrowgauge.noise import Floors
from narrowgauge.report.cards import card_of
from narrowgauge.report.content import build
from narrowgauge.report.markdown import markdown_block
from narrowgauge.store import Store
from narrowgauge_contract.claims import Verdict
from narrowgauge_contract.codec import dumps
from narrowgauge_contract.errors import ExitCode
from narrowgauge_contract.job import resolve
from narrowgauge_contract.outcome import Outcome
from narrowgauge_contract.record import compose, load_record
from narrowgauge_contract.spec import load_spec

ROOT = Path(__file__).parents[2]
#: What a command used. Begun by a small process: the peak of one that we began would be at least
#: ours, since it is counted from before the program is loaded.
_USED = """
import json, resource, subprocess, sys
code = subprocess.call(sys.argv[1:], stdout=subprocess.DEVNULL)
used = resource.getrusage(resource.RUSAGE_CHILDREN)
seconds = used.ru_utime + used.ru_stime
print(json.dumps({"code": code, "peak_kib": used.ru_maxrss, "seconds": seconds}))
"""


@pytest.fixture
def world(tmp_path: Path, tiny_checkout: Path) -> list[str]:
    """A checkout without claims and results with one run, as options."""
    recorded(tmp_path / "results")
    return ["--project", str(tiny_checkout), "--results", str(tmp_path / "results")]


def run(*words: str) -> tuple[int, str]:
    errors = StringIO()
    return run_program(list(words), os.environ, errors), errors.getvalue()


@pytest.mark.parametrize(
    ("form", "suffix", "begins"),
    [
        ("html", "html", "<!DOCTYPE html>"),
        ("markdown", "md", "# Verdicts on 8 claims"),
        ("latex", "tex", "% Artifact appendix"),
        ("csv", "csv", "verdict,experiment"),
        ("json", "json", "{"),
    ],
)
def test_each_format_is_written_beside_the_results(
    form: str, suffix: str, begins: str, world: list[str], tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    judged = tmp_path / "judged.json"
    judged.write_text(dumps(cases.judged()))
    code, errors = run("report", "--format", form, "--judged", str(judged), *world)
    path = tmp_path / "results" / f"report.{suffix}"
    said = capsys.readouterr()

    assert (code, errors) == (0, "")
    assert said.out.strip() == str(path)
    assert "2 REPRODUCED" in said.err
    assert path.read_text(encoding="utf-8").startswith(begins)


def test_a_report_goes_to_standard_output(
    world: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    judged = tmp_path / "judged.json"
    judged.write_text(dumps(cases.judged()))
    code, _ = run("report", "--format", "json", "--out", "-", "--judged", str(judged), *world)

    assert code == 0
    assert json.loads(capsys.readouterr().out)["counts"]["UNSTABLE"] == 1
    assert not (tmp_path / "results" / "report.json").exists()


def test_the_stored_records_are_judged_where_nothing_else_is_said(
    world: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, errors = run("report", *world)

    assert (code, errors) == (0, "")
    assert "Verdicts on 0 claims" in (tmp_path / "results" / "report.html").read_text()
    assert "report.html" in capsys.readouterr().out


def _many(results: Path, count: int) -> None:
    """Runs of mnist with 40 rows, their jobs and their outcomes, in the mould of its reference."""
    every = map(load_record, (ROOT / "experiments" / "mnist" / "reference").glob("*/*.json.gz"))
    whole = next(each for each in every if len(each.rows) == 40)
    outcome = Outcome(
        1, whole.run_id, whole.status, whole.exit_code, whole.rows, whole.inside,
        whole.hashes.source, whole.hashes.experiment, whole.started_utc or 0.0,
        whole.ended_utc or 0.0, whole.seconds or 0.0,
    )  # fmt: skip
    spec = load_spec(ROOT / "experiments" / "mnist" / "experiment.toml")
    plain = resolve(
        spec, {}, profile="paper", target=whole.target, seed=whole.seed, run_id=whole.run_id
    )
    job = dataclasses.replace(
        plain, profile=whole.profile, parameters=whole.parameters, synthetic=whole.synthetic,
        data_sets=whole.data_sets, spec=whole.spec, plan=whole.plan,
    )  # fmt: skip
    texts = {
        "job.json": dumps(job),
        "out/outcome.json": dumps(outcome),
        "record.json": dumps(compose(job, outcome, (), whole.host)),
    }
    for number in range(count):
        name = f"20260101T{number // 60:02}{number % 60:02}00Z-mnist-{number:06x}"
        folder = results / "mnist" / name
        (folder / "out").mkdir(parents=True)
        for file, text in texts.items():
            (folder / file).write_text(text.replace(whole.run_id, name))


def test_a_part_of_each_record_gives_the_verdicts_of_the_whole(tmp_path: Path) -> None:
    _many(tmp_path, 2)
    store, checkout = Store(tmp_path), checkout_of(ROOT)
    lean, records = judge_with_records(checkout, store, ["mnist"], clock=lambda: 0.0)
    chosen = choose_claims(all_claims(checkout.experiments), ["mnist"])
    read = read_stored(store, ["mnist"])
    whole = judge_records(chosen, read, lean.occasion, Floors.in_store(store))

    indexed, again = judge_with_records(checkout, store, ["mnist"], clock=lambda: 0.0)

    assert lean == whole == indexed
    assert records == again
    assert any(each.runs for each in lean.judgements)
    parts, entires = (each.by_experiment["mnist"] for each in (records, read))
    for part, entire in zip(parts, entires, strict=True):
        assert card_of(part) == card_of(entire)
        assert not part.spec
        assert len(dumps(part)) < len(dumps(entire))


@pytest.mark.parametrize("touched", [False, True])
def test_a_sample_edited_after_the_index_was_made_changes_no_verdict(
    tmp_path: Path, touched: bool
) -> None:
    """The record is refused by name, also where neither its size nor its time tells."""
    _many(tmp_path, 2)
    store, checkout = Store(tmp_path), checkout_of(ROOT)
    first, _ = judge_with_records(checkout, store, ["mnist"], clock=lambda: 0.0)
    victim = next(store.all())
    before = victim.record_path.stat()
    text = victim.record_path.read_text()
    assert "99.37" in text
    victim.record_path.write_text(text.replace("99.37", "11.37"))
    if not touched:
        os.utime(victim.record_path, ns=(before.st_atime_ns, before.st_mtime_ns))

    after, records = judge_with_records(checkout, store, ["mnist"], clock=lambda: 0.0)

    assert [each.path for each in after.refused] == [str(victim.record_path)]
    assert victim.name not in {record.run_id for record in records.by_experiment["mnist"]}
    assert [each.verdict for each in first.judgements] == [
        each.verdict for each in after.judgements
    ]


@pytest.mark.slow
def test_a_thousand_runs_of_forty_rows_are_reported_in_little_memory(tmp_path: Path) -> None:
    """The command itself, without an index and with it; by its own processor time, since others may
    share the machine. The bounds are twice what two busy cores took."""
    _many(tmp_path / "results", 1000)
    words = ["report", "--project", str(ROOT), "--results", str(tmp_path / "results")]
    pages = []
    for most_s in (20, 12):
        command = [sys.executable, "-m", "narrowgauge", *words]
        used = json.loads(subprocess.check_output([sys.executable, "-c", _USED, *command]))
        assert used["code"] == 0
        assert used["peak_kib"] < 500 * 1024
        assert used["seconds"] < most_s
        page = (tmp_path / "results" / "report.html").read_text()
        pages.append(re.sub(r"\d{4}-\d\d-\d\d \d\d:\d\d", "", page))

    assert pages[0] == pages[1]
    assert pages[0].count('class="card"') >= 1


def test_a_page_is_filled_and_checked(world: list[str], tmp_path: Path) -> None:
    judged, page = tmp_path / "judged.json", tmp_path / "ARTIFACT.md"
    judged.write_text(dumps(cases.judged()))
    page.write_text("<!-- verdicts -->\n<!-- /verdicts -->\n")
    words = ["report", "--judged", str(judged), "--into", str(page)]

    assert run(*words, "--check", *world)[0] != 0
    assert run(*words, *world)[0] == 0
    assert run(*words, "--check", *world)[0] == 0
    judged.write_text(dumps(cases.judged([cases.ordering()])))
    code, errors = run(*words, "--check", *world)
    assert code == ExitCode.USAGE
    assert "not those of the records" in errors


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (["--format", "htm"], "did you mean 'html'"),
        (["--check"], "--check needs a page"),
        (["--judged", "none.json", "--replay"], "two sources"),
        (["--judged", "none.json"], "none.json cannot be read"),
        (["--out", "/proc/none/report.html"], "cannot write"),
        (["--into", "none.md"], "cannot read none.md"),
    ],
)
def test_what_cannot_be_is_refused(words: list[str], why: str, world: list[str]) -> None:
    code, errors = run("report", *words, *world)

    assert code not in (0, ExitCode.INTERNAL)
    assert why in errors


def test_a_taken_port_is_refused(world: list[str]) -> None:
    from narrowgauge.serve.server import bind

    with bind(0) as listening:
        code, errors = run("serve", "--port", str(listening.getsockname()[1]), *world)

    assert code == ExitCode.USAGE
    assert "something else does already" in errors


def test_serving_begins_says_where_and_ends_by_ctrl_c(world: list[str], tmp_path: Path) -> None:
    child = subprocess.Popen(
        [sys.executable, "-m", "narrowgauge", "serve", "--port", "0", *world],
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")}, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert child.stderr is not None
    try:
        address = re.search(r"http://127\.0\.0\.1:\d+/", child.stderr.readline())
        assert address is not None
        with urllib.request.urlopen(address.group(), timeout=20) as answer:
            assert "20261121T100000Z-toy-aaaaaa" in answer.read().decode()
        with urllib.request.urlopen(f"{address.group()}report", timeout=20) as answer:
            assert "Verdicts on 0 claims" in answer.read().decode()
        child.send_signal(signal.SIGINT)
        _, rest = child.communicate(timeout=20)
    finally:
        child.kill()
        child.communicate()
    assert "Traceback" not in rest
    assert child.returncode in (0, ExitCode.INTERRUPTED)


def test_the_artifact_pages_verdicts_are_those_of_the_references() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "narrowgauge", "report", "--replay", "--check",
         "--into", "ARTIFACT.md"],
        cwd=ROOT, capture_output=True, text=True, check=False,
        env={**os.environ, "PYTHONPATH": str(ROOT / "src")},
    )  # fmt: skip

    assert done.returncode == 0, done.stderr


def test_what_was_measured_but_not_as_claimed_is_listed_with_its_figure() -> None:
    """A miss by a lesser recipe refutes nothing; among what nobody measured it would be hidden."""
    judged = cases.judged()
    (one, *_) = [each for each in judged.judgements if each.parts]
    reason = "87.31 of another recipe neither shows nor refutes it: epochs is 24"
    missed = dataclasses.replace(one, verdict=Verdict.SKIPPED, estimate=None, reason=reason)
    lacking = dataclasses.replace(missed, parts=(), reason="no run has measured it")

    listed = {}
    for each in (missed, lacking):
        page = markdown_block(build(dataclasses.replace(judged, judgements=(each,)), cases.cards()))
        listed[each.reason] = [line for line in page.splitlines() if line.startswith("| ")]

    assert any(reason in line for line in listed[reason])
    assert not any("| SKIPPED | 1 |" in line and "race" in line for line in listed[reason])
    assert not any("measured, but not" in line for line in listed["no run has measured it"])


@pytest.mark.slow
def test_the_appendix_compiles(tmp_path: Path) -> None:
    latex = shutil.which("pdflatex")
    if latex is None:
        pytest.skip("no pdflatex here: apt-get install texlive-latex-base")
    from narrowgauge.report.latex import latex_report

    for name, judged in (("plain", cases.judged()), ("hostile", cases.hostile_judged())):
        (tmp_path / f"{name}.tex").write_text(latex_report(build(judged, cases.cards())))
    (tmp_path / "page.tex").write_text(
        "\\documentclass[twocolumn]{article}\\usepackage[T1]{fontenc}\\begin{document}"
        "\\input{plain}\\input{hostile}\\end{document}\n"
    )
    done = subprocess.run(
        [latex, "-halt-on-error", "-interaction=nonstopmode", "-no-shell-escape", "page.tex"],
        cwd=tmp_path, capture_output=True, check=False, timeout=120,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout[-2000:]
    assert (tmp_path / "page.pdf").stat().st_size > 10_000

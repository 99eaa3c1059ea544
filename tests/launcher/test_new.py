"""`new`: the experiment that it makes is whole; names that cannot be one are refused."""

from __future__ import annotations

import ast
import io
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from narrowgauge.ae.artifact import gather
from narrowgauge.ae.findings import Standing
from narrowgauge.ae.report import examine
from narrowgauge.catalog import experiment_names
from narrowgauge.checkout import Checkout
from narrowgauge.cli.app import MODULES, run_program
from narrowgauge.errors import ResultsUnwritable, UsageError
from narrowgauge.judge.gather import all_claims
from narrowgauge.plan import NATIVE, JobRequest, plan_jobs
from narrowgauge.scaffold import create
from narrowgauge.scaffold.create import create_experiment
from narrowgauge.store import Store
from narrowgauge_contract.claims import load_claims
from narrowgauge_contract.spec import load_spec

ROOT = Path(__file__).parents[2]


@pytest.fixture
def checkout(tiny_checkout: Path) -> Checkout:
    return Checkout(tiny_checkout)


def test_what_it_makes_is_an_experiment_with_claims(checkout: Checkout) -> None:
    folder = create_experiment(checkout, "my-paper", "My paper")
    spec = load_spec(folder / "experiment.toml")
    claims = load_claims(folder / "claims.toml", spec)

    assert (spec.id, spec.title) == ("my-paper", "My paper")
    assert [claim.id for claim in claims] == ["bf16-error", "order", "eight-times"]
    for profile in spec.profiles:
        (job,) = plan_jobs(spec, JobRequest("my-paper", profile, (), 0), NATIVE)
        assert job.rows
    for claim in claims:
        assert spec.profiles[claim.profile].repeats >= claim.minimum_repeats
    assert "narrowgauge reproduce my-paper" in (folder / "README.md").read_text()
    assert "$" not in "".join(path.read_text() for path in folder.iterdir())
    names = {each.name for each in all_claims(checkout.experiments)}
    assert names == {"my-paper/bf16-error", "my-paper/order", "my-paper/eight-times"}


def test_what_it_makes_is_python_3_8_in_good_style(checkout: Checkout, tmp_path: Path) -> None:
    folder = create_experiment(checkout, "my-paper", "My paper")
    text = (folder / "run.py").read_text()
    ast.parse(text, feature_version=(3, 8))
    for word in (["check"], ["format", "--check"]):
        done = subprocess.run(
            [sys.executable, "-m", "ruff", *word, "--no-cache", "--config", ROOT / "pyproject.toml",
             folder / "run.py"],
            capture_output=True, text=True, check=False,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr


def test_a_new_experiment_meets_what_chairs_ask_of_one(checkout: Checkout, tmp_path: Path) -> None:
    create_experiment(checkout, "my-paper", "My paper")
    shutil.rmtree(checkout.experiments / "tiny")
    commands = frozenset(name for names in MODULES.values() for name in names)
    artifact = gather(checkout, Store(tmp_path / "none"), commands)
    found = {a.criterion.id: a.found for a in examine(artifact, ["F4", "F5", "F6", "F7", "R5"])}

    for name, each in found.items():
        assert each.standing is Standing.MET, f"{name}: {each.finding}"


@pytest.mark.parametrize(
    "name",
    ["My-Paper", "my_paper", "2fast", "", "a--b", "-a", "a-", "../evil", "a/b", "class", "latest",
     "all", "x" * 41, "naïve", "a b", "a\n"],
)  # fmt: skip
def test_a_name_that_cannot_be_one_is_refused(name: str, checkout: Checkout) -> None:
    before = sorted(checkout.root.rglob("*"))

    with pytest.raises(UsageError) as caught:
        create_experiment(checkout, name, "A title")
    assert caught.value.why
    assert sorted(checkout.root.rglob("*")) == before


def test_a_name_that_is_taken_is_refused_and_nothing_is_changed(checkout: Checkout) -> None:
    before = (checkout.experiments / "tiny/experiment.toml").read_text()

    with pytest.raises(UsageError, match="already"):
        create_experiment(checkout, "tiny", "A title")
    assert (checkout.experiments / "tiny/experiment.toml").read_text() == before
    (checkout.experiments / "half-made").mkdir()
    with pytest.raises(UsageError, match="already"):
        create_experiment(checkout, "half-made", "A title")


@pytest.mark.parametrize("title", ["", " ", 'a "quote"', "a\nb", "back\\slash", "\x1b[31m"])
def test_a_title_that_toml_cannot_hold_is_refused(title: str, checkout: Checkout) -> None:
    with pytest.raises(UsageError, match="title"):
        create_experiment(checkout, "my-paper", title)
    assert not (checkout.experiments / "my-paper").exists()


@given(st.text(max_size=30))
def test_any_title_makes_a_whole_experiment_or_none(title: str) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as scratch:
        checkout = Checkout(Path(scratch))
        checkout.experiments.mkdir()
        try:
            folder = create_experiment(checkout, "my-paper", title)
        except UsageError:
            assert list(checkout.experiments.iterdir()) == []
            return
        assert load_spec(folder / "experiment.toml").title == title


@pytest.mark.skipif(os.getuid() == 0, reason="root may write everywhere")
def test_a_folder_that_may_not_be_written_is_named(checkout: Checkout) -> None:
    checkout.experiments.chmod(0o555)
    try:
        with pytest.raises(ResultsUnwritable):
            create_experiment(checkout, "my-paper", "My paper")
    finally:
        checkout.experiments.chmod(0o755)


def test_a_disk_that_is_full_leaves_nothing(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("narrowgauge.scaffold.create.os.replace", full)
    with pytest.raises(ResultsUnwritable, match="my-paper"):
        create_experiment(checkout, "my-paper", "My paper")
    assert sorted(p.name for p in checkout.experiments.iterdir()) == ["tiny"]


def test_the_command(checkout: Checkout, capsys: pytest.CaptureFixture[str]) -> None:
    errors = io.StringIO()
    words = ["--project", str(checkout.root)]

    assert run_program(["new", "my-paper", *words], {}, errors) == 0
    told = capsys.readouterr().out
    assert "run.py" in told
    assert "narrowgauge run my-paper" in told
    spec = load_spec(checkout.experiments / "my-paper/experiment.toml")
    assert spec.title == "My paper"
    assert run_program(["new", "my-paper", *words], {}, errors) == 2
    assert "already" in errors.getvalue()


def test_a_hidden_folder_is_no_experiment_and_nothing_is_left_among_them(
    checkout: Checkout, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[set[str]] = []
    write = create._write

    def watched(folder: Path, name: str, title: str) -> None:
        write(folder, name, title)
        seen.append({path.name for path in checkout.experiments.iterdir()})

    before = {path.name for path in checkout.experiments.iterdir()}
    monkeypatch.setattr(create, "_write", watched)
    create_experiment(checkout, "my-paper", "My paper")
    assert seen == [before]
    assert not list(checkout.root.glob(".new-*"))
    shutil.copytree(checkout.experiments / "my-paper", checkout.experiments / ".new-killed")
    assert ".new-killed" not in experiment_names(checkout.experiments)

"""`sweep`, and `run` and `plan` for clusters, as typed: what is printed, and what is refused."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
import yaml

from narrowgauge.cli.app import run_program

ROOT = Path(__file__).parents[2]
IMAGE = "registry.example/narrowgauge@sha256:" + "ab" * 32


def typed(*words: str) -> tuple[int, str]:
    """The exit code, and what was complained of."""
    errors = io.StringIO()
    return run_program([*words, "--project", str(ROOT)], dict(os.environ), errors), (
        errors.getvalue()
    )


def test_a_sweep_is_planned_as_text_and_as_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "lr.toml"
    file.write_text('[sweep]\nexperiment = "mnist"\n[vary]\nlr = [0.5, 1.0]\n')
    assert typed("sweep", str(file), "--plan") == (0, "")
    assert capsys.readouterr().out.startswith("2 runs of mnist, grid\n")
    assert typed("sweep", str(file), "--plan", "--json") == (0, "")
    body = json.loads(capsys.readouterr().out)
    assert {point["values"]["lr"] for point in body["points"]} == {0.5, 1.0}
    assert typed("sweep", str(file), "--show", "--json", "--results", str(tmp_path)) == (0, "")
    assert json.loads(capsys.readouterr().out)["runs"] == []
    file.write_text('[sweep]\nexperiment = "mnits"\n[vary]\nlr = [0.5, 1.0]\n')
    code, said = typed("sweep", str(file), "--plan")
    assert code == 2
    assert "did you mean 'mnist'" in said


def test_manifests_are_planned(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "getuid", lambda: 1000)
    words = ["plan", "resnet", "--on", "cpu", "--executor", "kubernetes"]
    words += ["--kubernetes", f"image={IMAGE}", "--kubernetes", "results=r"]
    assert typed(*words, "--kubernetes", "data=d") == (0, "")
    text = capsys.readouterr().out
    assert "&id" not in text
    kinds = [each["kind"] for each in yaml.safe_load_all(text)]
    assert kinds == ["NetworkPolicy", "Job"]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("run", "mnist", "--slurm", "time=5"), "--slurm is for --executor slurm"),
        (("run", "mnist", "--kubernetes", "image=x"), "--kubernetes is for --executor kubernetes"),
        (("plan", "mnist", "--kubernetes", "image=x"), "--kubernetes is for"),
        (("run", "mnist", "--executor", "slurm", "--slurm", "tiem=5"), "did you mean 'time'"),
        (("plan", "mnist", "--executor", "kubernetes"), "needs to know the image"),
        (("run", "mnist", "--node", "2/2@h"), "2 machines are 0 to 1"),
        (("run", "mnist", "--node", "0/1@h"), "leave --node out on one machine"),
        (("run", "mnist", "--host", "b", "--slurm", "time=5"), "give both, or none"),
        (("run", "mnist", "--host", "b", "--kubernetes", "data=x"), "give both, or none"),
        (("run", "mnist", "--host", "b", "--lab-python", "x"), "stands in hosts.toml"),
        (("run", "mnist", "--host", "b", "--node", "0/2@h"), "on each machine by itself"),
        (("run", "mnist", "--all", "--label", "l"), "leave one of them out"),
        (("run", "mnist", "--all", "--host", "b"), "leave one of them out"),
        (("run", "mnist", "--executor", "slurm", "--node", "0/2@h"), "--slurm nodes=N"),
        (("run", "mnist", "--executor", "slurm", "--wait"), "--slurm patience=MINUTES"),
        (("run", "mnist", "--executor", "kubernetes", "--node", "0/2@h"), "--kubernetes nodes=N"),
        (("run", "mnist", "--executor", "kubernetes", "--results", "r"), "results=CLAIM"),
        (("run", "mnist", "--executor", "kubernetes", "--data", "d"), "--kubernetes data=CLAIM"),
        (("run", "mnist", "--executor", "kubernetes", "--wait"), "`kubectl wait` waits"),
        (("run", "mnist", "--executor", "kubernetes", "--json"), "plan --json"),
        (("run", "mnist", "--executor", "kubernetes", "--lab-python", "x"), "the image has its"),
        (("plan", "mnist", "--executor", "kubernetes", "--results", "r"), "results=CLAIM"),
        (("sweep", "x.toml", "--executor", "native", "--slurm", "time=5"), "give both, or none"),
        (("sweep", "x.toml", "--executor", "slurm", "--wait"), "--slurm patience=MINUTES"),
        (("run", "mnist", "--executor", "slurm", "--on", "cpu"), "images save cpu --out FILE"),
        (("run", "mnist", "--executor", "slurm", "--on", "cup"), "did you mean 'cpu'"),
    ],
)
def test_each_slip_of_a_command_is_named(words: tuple[str, ...], said: str) -> None:
    code, complaint = typed(*words)
    assert code == 2
    assert said in complaint


def test_a_sweep_on_slurm_names_a_target_with_its_image_only(tmp_path: Path) -> None:
    file = tmp_path / "lr.toml"
    file.write_text('[sweep]\nexperiment = "mnist"\n[vary]\nlr = [0.5, 1.0]\n')
    words = ("sweep", str(file), "--executor", "slurm", "--results", str(tmp_path / "r"))
    for target, said in (("cpu", "images save cpu --out FILE"), ("cup", "did you mean 'cpu'")):
        code, complaint = typed(*words, "--on", target)
        assert code == 2
        assert said in complaint
    assert not (tmp_path / "r").exists()


def test_a_host_without_slurm_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    code, said = typed("run", "mnist", "--executor", "slurm", "--results", str(tmp_path / "r"))
    assert code == 40
    assert "on this host" in said
    assert not (tmp_path / "r").exists()

"""`ae check`: every criterion is met, partly met and missing where it should be."""

from __future__ import annotations

import dataclasses
import io
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from result_cases import recorded

from narrowgauge.ae.artifact import Artifact, Citation, gather, parse_citation
from narrowgauge.ae.findings import Standing, listed
from narrowgauge.ae.report import CRITERIA, Answer, examine, exit_code, json_text, table
from narrowgauge.checkout import Checkout
from narrowgauge.cli.app import MODULES, run_program
from narrowgauge.store import Store
from narrowgauge_contract.errors import ExitCode
from narrowgauge_contract.record import load_record

ROOT = Path(__file__).parents[2]
COMMANDS = frozenset(name for names in MODULES.values() for name in names)
Change = Callable[[Artifact], Artifact]


@pytest.fixture(scope="module")
def own(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    """This checkout, with no results."""
    return gather(Checkout(ROOT), Store(tmp_path_factory.mktemp("none")), COMMANDS)


def _one(artifact: Artifact, name: str) -> Answer:
    (answer,) = examine(artifact, [name])
    return answer


def _part(of: Artifact, name: str, **changes: Any) -> Artifact:
    parts = tuple(
        dataclasses.replace(each, **changes) if each.name == name else each for each in of.parts
    )
    return dataclasses.replace(of, parts=parts)


def test_the_criteria_are_those_of_the_chairs_and_each_has_its_words() -> None:
    wanted = ["A1", *(f"F{n}" for n in range(1, 9)), *(f"R{n}" for n in range(1, 10))]

    assert [each.id for each in CRITERIA] == wanted
    assert all(each.asks and each.why and each.badge for each in CRITERIA)


def test_this_checkout_lacks_only_what_nobody_here_can_give(own: Artifact) -> None:
    """A DOI comes from an archive, digests from a registry, references from hardware."""
    standing = {a.criterion.id: a.found for a in examine(own)}
    lacking = {name for name, found in standing.items() if found.standing is Standing.MISSING}

    assert lacking == {"A1"}
    for name in ("F1", "F3", "F4", "F5", "F6", "F7", "F8", "R1", "R2", "R8"):
        assert standing[name].standing is Standing.MET, f"{name}: {standing[name].finding}"
    assert standing["R9"].standing is Standing.TO_JUDGE


def test_every_exit_code_is_explained_with_its_name() -> None:
    page = (ROOT / "docs/judging.md").read_text()

    for code in ExitCode:
        assert f"| {code.value} | {code.name} |" in page


GOOD_CITATION = """
cff-version: 1.2.0
title: "Narrowgauge: a platform"
doi: 10.5281/zenodo.1234567
license: Apache-2.0
preferred-citation:
  type: article
  title: "Training on two devices"
"""


def test_a_citation_is_read_as_written() -> None:
    said = parse_citation(GOOD_CITATION)
    assert said == Citation(
        "Narrowgauge: a platform", "Training on two devices", "10.5281/zenodo.1234567", "Apache-2.0"
    )
    listed_doi = "identifiers:\n  - type: url\n    value: x\n  - type: doi\n    value: 10.1/y\n"
    assert parse_citation(listed_doi).doi == "10.1/y"
    assert parse_citation("title: x # doi: 10.1/y").doi == ""


@given(st.text(max_size=200))
def test_any_text_is_some_citation(text: str) -> None:
    said = parse_citation(text)
    assert all(isinstance(value, str) for value in dataclasses.astuple(said))


@pytest.mark.parametrize(
    ("citation", "readme", "standing", "says"),
    [
        (GOOD_CITATION, "Of the paper Training on two devices.", Standing.MET, "10.5281"),
        (GOOD_CITATION, "Something else", Standing.PARTLY, "README.md does not name"),
        (GOOD_CITATION.replace("10.5281/", "zenodo/"), "Training on two devices", Standing.PARTLY,
         "not the form"),
        (GOOD_CITATION.replace("Apache-2.0", "MIT"), "Training on two devices", Standing.PARTLY,
         "not the text of MIT"),
        (GOOD_CITATION.replace("Apache-2.0", "Own"), "Training on two devices", Standing.PARTLY,
         "none that this knows"),
        ("", "", Standing.MISSING, "no DOI"),
    ],
)  # fmt: skip
def test_available(
    own: Artifact, citation: str, readme: str, standing: Standing, says: str
) -> None:
    pages = {**own.pages, "README.md": readme}
    found = _one(
        dataclasses.replace(own, citation=parse_citation(citation), pages=pages), "A1"
    ).found

    assert found.standing is standing
    assert says in found.finding
    assert bool(found.remedy) == (standing is not Standing.MET)


def _without_page(name: str) -> Change:
    return lambda of: dataclasses.replace(of, pages={**of.pages, name: ""})


def _without_commands(of: Artifact) -> Artifact:
    return dataclasses.replace(of, commands=frozenset())


def _own_path(of: Artifact) -> Artifact:
    line = 'DATA = "/home/anna/data"\n'
    return dataclasses.replace(of, scripts={**of.scripts, "experiments/mnist/run.py": line})


def _address(of: Artifact) -> Artifact:
    return dataclasses.replace(of, scripts={"scripts/x.sh": "ssh 192.168.17.4"})


def _harmless(of: Artifact) -> Artifact:
    text = 'URL = "https://x.org/home/y"; at = "127.0.0.1"; v = "1.2.3.4.5"; p = "$HOME/data"\n'
    return dataclasses.replace(of, scripts={"scripts/x.sh": text})


def _orphan(of: Artifact) -> Artifact:
    modules = {"run.py": "from . import used\n", "used.py": "", "left.py": ""}
    return _part(of, "mnist", modules=modules)


def _vendored(of: Artifact) -> Artifact:
    return dataclasses.replace(of, vendored={"src/vendor": False})


def _telemetry(of: Artifact) -> Artifact:
    return dataclasses.replace(of, sources={"src/x.py": "import wandb.sdk\n"})


def _comment_on_telemetry(of: Artifact) -> Artifact:
    return dataclasses.replace(of, sources={"src/x.py": "# not wandb\nfrom . import segment\n"})


def _no_claims(of: Artifact) -> Artifact:
    parts = tuple(dataclasses.replace(part, claims=()) for part in of.parts)
    return dataclasses.replace(of, parts=parts)


def _no_references(of: Artifact) -> Artifact:
    parts = tuple(dataclasses.replace(part, references=()) for part in of.parts)
    return dataclasses.replace(of, parts=parts)


def _broken_experiment(of: Artifact) -> Artifact:
    return _part(of, "mnist", spec=None, problem="mnist/experiment.toml is not valid TOML")


def _slow_reference(of: Artifact) -> Artifact:
    part = next(part for part in of.parts if part.name == "noise-floor")
    slow = tuple(
        dataclasses.replace(record, seconds=1e6, profile="short", parameters=_profile(part))
        for record in part.references[:1]
    )
    return _part(of, "noise-floor", references=slow)


def _profile(part: Any) -> dict[str, Any]:
    values = part.spec.profiles["short"].values
    return {name: list(value) for name, value in values.items()}


def _few_repeats(of: Artifact) -> Artifact:
    part = next(part for part in of.parts if part.name == "noise-floor")
    claims = tuple(dataclasses.replace(claim, minimum_repeats=1000) for claim in part.claims)
    return _part(of, "noise-floor", claims=claims)


def _no_lock(of: Artifact) -> Artifact:
    return dataclasses.replace(of, locks={**of.locks, "cpu": False})


def _stale(of: Artifact) -> Artifact:
    return dataclasses.replace(of, stale="generated files are not what docker/ gives")


@pytest.mark.parametrize(
    ("name", "change", "standing", "says"),
    [
        ("F1", _without_page("ARTIFACT.md"), Standing.MISSING, "no ARTIFACT.md"),
        ("F2", _no_lock, Standing.MISSING, "cpu"),
        ("F2", _stale, Standing.MISSING, "not what docker/ gives"),
        ("F3", _without_commands, Standing.MISSING, "kick"),
        ("F4", _slow_reference, Standing.PARTLY, "noise-floor short"),
        ("F5", _own_path, Standing.PARTLY, "experiments/mnist/run.py:1"),
        ("F5", _address, Standing.PARTLY, "scripts/x.sh:1"),
        ("F5", _harmless, Standing.MET, "none"),
        ("F6", _orphan, Standing.PARTLY, "mnist/left.py"),
        ("F6", _vendored, Standing.PARTLY, "src/vendor"),
        ("R1", _broken_experiment, Standing.MISSING, "not valid TOML"),
        ("R1", _without_page("docs/judging.md"), Standing.PARTLY, "exit codes"),
        ("R2", _without_commands, Standing.MISSING, "report"),
        ("R3", _no_claims, Standing.MISSING, "no claim"),
        ("R4", _no_references, Standing.MISSING, "no reference record"),
        ("R5", _few_repeats, Standing.MISSING, "noise-floor/power"),
        ("R6", _no_claims, Standing.MISSING, "0 of 0"),
        ("R8", _telemetry, Standing.MISSING, "wandb"),
        ("R8", _comment_on_telemetry, Standing.MET, "no package"),
        ("R9", _without_commands, Standing.MISSING, "reproduce"),
    ],
)
def test_what_lacks_is_found_and_has_a_remedy(
    own: Artifact, name: str, change: Change, standing: Standing, says: str
) -> None:
    found = _one(change(own), name).found

    assert found.standing is standing, found.finding
    assert says in found.finding
    assert bool(found.remedy) == (standing in (Standing.MISSING, Standing.PARTLY))


def test_runs_without_a_record_are_named(own: Artifact, tmp_path: Path) -> None:
    recorded(tmp_path)
    lost = recorded(tmp_path, "20261121T100001Z-toy-bbbbbb")
    lost.record_path.chmod(0o644)
    lost.record_path.write_text("{")
    artifact = gather(Checkout(ROOT), Store(tmp_path), COMMANDS)
    found = _one(artifact, "R9").found

    assert found.standing is Standing.PARTLY
    assert "20261121T100001Z-toy-bbbbbb" in found.finding
    assert "1 of 2" in found.finding
    only = dataclasses.replace(own, runs={"a": "complete", "b": "failed"})
    assert _one(only, "R9").found.standing is Standing.MET
    assert "1 failed" in _one(only, "R9").found.finding


def test_an_experiment_that_cannot_be_read_does_not_end_the_check(tmp_path: Path) -> None:
    import shutil

    root = tmp_path / "checkout"
    for name in ("docker", "images"):
        shutil.copytree(ROOT / name, root / name)
    (root / "experiments/bad").mkdir(parents=True)
    (root / "experiments/bad/experiment.toml").write_text("[experiment\n")
    artifact = gather(Checkout(root), Store(tmp_path / "none"), COMMANDS)
    answers = examine(artifact)

    assert len(answers) == len(CRITERIA)
    assert _one(artifact, "R1").found.standing is Standing.MISSING
    assert exit_code(answers) is ExitCode.CRITERION_UNMET


def test_nothing_in_a_finding_steers_a_terminal(own: Artifact) -> None:
    scripts = {"experiments/\x1b[31mred.py": '"/home/anna"'}
    answers = examine(dataclasses.replace(own, scripts=scripts), ["F5"])

    assert "\x1b" not in table(answers)
    assert json.loads(json_text(answers))["criteria"][0]["standing"] == "partly"


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    errors = io.StringIO()
    words = ["--project", str(ROOT), "--results", str(tmp_path)]

    assert run_program(["ae", "check", "F7", "A1", *words, "--json"], {}, errors) == 34
    body = json.loads(capsys.readouterr().out)
    assert [each["id"] for each in body["criteria"]] == ["A1", "F7"]
    assert body["counts"]["missing"] == 1
    assert run_program(["ae", "check", "--explain", "R8"], {}, errors) == 0
    assert "analytics" in capsys.readouterr().out
    assert run_program(["ae", "check", "--explain", "Z9"], {}, errors) == 2
    assert "Known: A1" in errors.getvalue()


def test_long_lists_are_counted() -> None:
    assert listed(["a", "b"]) == "a, b"
    assert listed([str(n) for n in range(9)]) == "0, 1, 2, 3, 4, 5 and 3 more"


def test_reference_records_are_read(own: Artifact) -> None:
    on_disk = sorted((ROOT / "experiments").glob("*/reference/*/*.json.gz"))

    assert sum(len(part.references) for part in own.parts) == len(on_disk) > 0
    assert load_record(on_disk[0]).run_id in {
        record.run_id for part in own.parts for record in part.references
    }


def test_others_code_with_its_origin_is_named_and_not_denied(own: Artifact) -> None:
    found = _one(dataclasses.replace(own, vendored={"src/vendor": True}), "F6").found

    assert found.standing is Standing.MET
    assert "src/vendor" in found.finding
    assert "nothing is vendored" not in found.finding
    assert "nothing is vendored" in _one(own, "F6").found.finding


def test_only_reference_runs_that_were_compared_are_counted(own: Artifact) -> None:
    part = next(each for each in own.parts if each.references)
    other = dataclasses.replace(part.references[0], profile="no-profile-of-today")

    def counted(of: Artifact) -> int:
        words = _one(of, "F4").found.finding.partition("; ")[2]
        return int(words.split()[0])

    few = dataclasses.replace(own, parts=(dataclasses.replace(part, references=(other,)),))
    assert counted(few) == 0
    assert 0 < counted(own) <= sum(len(each.references) for each in own.parts)

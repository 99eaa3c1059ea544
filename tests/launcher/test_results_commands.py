"""`results`, `show`, `compare`, `data` and `weights` as typed: exit codes and what is printed."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path

import pytest
from data_cases import GREY, dataset, idx_files, mirror, write
from result_cases import job, recorded

from narrowgauge.checkout import TARGETS_FILE
from narrowgauge.cli.app import run_program
from narrowgauge.store import Store
from narrowgauge_contract.datasets import DATA_SETS

ONE, TWO = "20261121T100000Z-toy-aaaaaa", "20261122T100000Z-toy-bbbbbb"


def _run(*words: object) -> tuple[int, str]:
    """The exit code, and what was said on the error stream."""
    errors = io.StringIO()
    code = run_program([str(word) for word in words], os.environ, errors)
    return code, errors.getvalue()


@pytest.fixture
def results(tmp_path: Path) -> Path:
    recorded(tmp_path / "results", ONE)
    recorded(tmp_path / "results", TWO, precision=["fp32"])
    return tmp_path / "results"


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A checkout with the page of the experiment."""
    made = tmp_path / "project"
    (made / "experiments" / "toy").mkdir(parents=True)
    (made / TARGETS_FILE).parent.mkdir()
    (made / TARGETS_FILE).touch()
    return made


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> None:
    """A declared set named `tiny`."""
    declared = dataset(GREY, mirror("https://127.0.0.1:1", list(idx_files()), "idx"))
    monkeypatch.setitem(DATA_SETS, "tiny", declared)


class TestResults:
    def test_the_list_and_its_json(self, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert _run("results", "--results", results)[0] == 0
        lines = [line for line in capsys.readouterr().out.splitlines() if "-toy-" in line]
        assert [line.split()[0] for line in lines] == [TWO, ONE]

        assert _run("results", "--results", results, "--json", "--limit", 1)[0] == 0
        [entry] = json.loads(capsys.readouterr().out)
        assert (entry["run_id"], entry["status"], entry["valid_rows"]) == (TWO, "complete", 3)

    @pytest.mark.parametrize(
        ("words", "count"),
        [
            (["--experiment", "toy"], 3), (["--experiment", "mnist"], 0), (["--status", "open"], 1),
            (["--status", "complete"], 2), (["--status", "damaged"], 0),
        ],
    )  # fmt: skip
    def test_filters(
        self,
        results: Path,
        capsys: pytest.CaptureFixture[str],
        words: list[str],
        count: int,
    ) -> None:
        Store(results).new_run(job("20261123T100000Z-toy-cccccc"))

        assert _run("results", "--results", results, "--json", *words)[0] == 0

        assert len(json.loads(capsys.readouterr().out)) == count

    def test_an_unknown_status_names_the_nearest(self, results: Path) -> None:
        code, errors = _run("results", "--results", results, "--status", "compleet")

        assert code == 2
        assert "did you mean 'complete'" in errors

    def test_show_is_the_latest_by_default(
        self, results: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert _run("show", "--results", results)[0] == 0
        assert TWO in capsys.readouterr().out
        assert _run("show", "aaaaaa", "--results", results, "--json")[0] == 0
        assert json.loads(capsys.readouterr().out)["run_id"] == ONE

    def test_pictures_are_drawn_again(
        self, results: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert _run("results", "draw", "latest", "--results", results)[0] == 0
        drawn = capsys.readouterr().out.split()

        assert drawn
        assert all(Path(path).is_file() for path in drawn)

    def test_show_of_an_unknown_run(self, results: Path) -> None:
        code, errors = _run("show", "nothing", "--results", results)

        assert code == 2
        assert ONE in errors

    def test_show_of_a_truncated_record_shows_what_is_left_and_fails(
        self, results: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        record = results / "toy" / ONE / "record.json"
        record.chmod(0o644)
        record.write_text(record.read_text()[:1000])

        code, errors = _run("show", ONE, "--results", results)

        assert code == 24
        assert "truncated or not JSON" in errors
        assert "A toy" in capsys.readouterr().out

    def test_compare_and_its_json(self, results: Path, capsys: pytest.CaptureFixture[str]) -> None:
        assert _run("compare", ONE, "latest", "--results", results)[0] == 0
        assert "not pooled" in capsys.readouterr().out
        assert _run("compare", ONE, "latest", "--results", results, "--json")[0] == 0
        assert json.loads(capsys.readouterr().out)["only_left"] == ["precision=bf16"]

    def test_export_copies_the_whole_record_and_never_over_another(
        self, results: Path, tmp_path: Path
    ) -> None:
        out = tmp_path / "copy.json"

        assert _run("results", "export", ONE, "--results", results, "--out", out)[0] == 0
        assert out.read_bytes() == (results / "toy" / ONE / "record.json").read_bytes()
        assert _run("results", "export", ONE, "--results", results, "--out", out)[0] == 2
        assert _run("results", "export", ONE, "--results", results)[0] == 2

    def test_a_reference_keeps_the_pictures_that_are_named(
        self, results: Path, project: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        page = project / "experiments" / "toy"
        words = ["results", "export", ONE, "--results", results, "--project", project]

        code, said = _run(*words, "--reference", "--picture", "speed", "--picture", "loss.jpg")
        assert code == 2
        assert f"{ONE} has no picture 'loss.jpg'" in said
        assert "loss, speed" in " ".join(said.split())
        assert not list(page.iterdir())

        names = ["--picture", "speed", "--picture", "loss.png"]
        assert _run(*words, "--reference", *names)[0] == 0
        told = capsys.readouterr()
        assert f"![speed of {ONE}](pictures/speed.svg)" in told.err
        assert f"![loss of {ONE}](pictures/loss.png)" in told.err
        assert told.out.strip().endswith(f"{ONE}.json.gz")
        derived = results / "toy" / ONE / "derived"
        kept = {path.name: path.read_bytes() for path in (page / "pictures").iterdir()}
        assert kept == {n: (derived / n).read_bytes() for n in ("speed.svg", "loss.png")}

    @pytest.mark.parametrize("change", ["missing", "altered"])
    def test_a_record_without_its_side_files_keeps_the_pictures_of_its_metrics(
        self, results: Path, project: Path, change: str
    ) -> None:
        page = project / "experiments" / "toy"
        words = ["results", "export", ONE, "--results", results, "--project", project]
        gone = list((results / "toy" / ONE).rglob("confusion.json"))
        assert gone
        for path in gone:
            path.unlink() if change == "missing" else path.write_text("{}")

        code, said = _run(*words, "--reference", "--picture", "confusion-precision-fp32")
        assert code == 24
        assert "row-0/confusion.json is missing or was changed" in said
        code, said = _run(*words, "--reference", "--picture", "losses")
        assert code == 2
        assert "has no picture 'losses'" in said
        assert not list(page.iterdir())
        assert _run(*words, "--reference", "--picture", "loss")[0] == 0
        assert (page / "pictures" / "loss.svg").is_file()

    def test_pictures_go_with_a_reference_alone(self, results: Path, tmp_path: Path) -> None:
        out = tmp_path / "copy.json"
        words = ["--results", results, "--out", out, "--picture", "loss"]

        code, said = _run("results", "export", ONE, *words)

        assert code == 2
        assert "--picture goes with --reference" in said
        assert not out.exists()


@pytest.mark.usefixtures("tiny")
class TestData:
    def test_by_hand_verify_pack_and_unpack(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        data, given = tmp_path / "data", write(tmp_path / "given", idx_files())

        assert _run("data", "verify", "tiny", "--data", data)[0] == 20
        assert _run("data", "fetch", "tiny", "--data", data, "--from", given)[0] == 0
        assert _run("data", "verify", "tiny", "--data", data)[0] == 0
        assert (
            _run("data", "pack", "tiny", "--data", data, "--out", tmp_path, "--max", "2MB")[0] == 0
        )
        assert "python3 -m narrowgauge_data join tiny" in capsys.readouterr().out
        part = tmp_path / "tiny.1-of-1.ngpack"
        assert _run("data", "unpack", part, "--data", tmp_path / "there")[0] == 0
        assert _run("data", "verify", "tiny", "--data", tmp_path / "there")[0] == 0

        wrong = tmp_path / "there" / "tiny" / "test-labels.u8"
        wrong.write_bytes(b"0" * 10)
        code, errors = _run("data", "verify", "tiny", "--data", tmp_path / "there")
        assert code == 21
        assert str(wrong) in errors
        assert errors.count("sha256") == 1
        assert "should be" in errors

    def test_no_source_is_exit_20_and_says_how_by_hand(self, tmp_path: Path) -> None:
        code, errors = _run("data", "fetch", "tiny", "--data", tmp_path / "data")

        assert code == 20
        assert "127.0.0.1:1: cannot reach" in errors
        assert "narrowgauge data fetch tiny --from FOLDER" in errors

    def test_repair_fetches_what_is_wrong(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        data, given = tmp_path / "data", write(tmp_path / "given", idx_files())
        _run("data", "fetch", "tiny", "--data", data, "--from", given)
        (data / "tiny" / "test-labels.u8").write_bytes(b"0" * 10)
        fetched = []
        monkeypatch.setattr(
            "narrowgauge_data.fetch.fetch", lambda dataset, *_: fetched.append(dataset.name)
        )

        assert _run("data", "verify", "tiny", "--data", data, "--repair")[0] == 21  # not mended

        assert fetched == ["tiny"]

    def test_verify_json_names_each_file(
        self, tmp_path: Path, capsys: pytest.CaptureFixture[str]
    ) -> None:
        assert _run("data", "verify", "tiny", "--data", tmp_path / "none", "--json")[0] == 20
        [report] = json.loads(capsys.readouterr().out)
        assert [state["problem"] for state in report["files"]] == ["missing"] * 4

    def test_an_unknown_set(self, tmp_path: Path) -> None:
        code, errors = _run("data", "fetch", "tinny", "--data", tmp_path)

        assert code == 2
        assert "did you mean 'tiny'" in errors


class TestWeights:
    def test_import_and_list(self, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
        store, file = tmp_path / "store", tmp_path / "w.pt"
        file.write_bytes(b"weights")
        words = ["--name", "w", "--recipe", "from the paper's page", "--store", store]

        assert _run("weights", "list", "--store", store)[0] == 0
        assert "no weights yet" in capsys.readouterr().out
        assert _run("weights", "import", file, *words)[0] == 0
        capsys.readouterr()
        assert _run("weights", "list", "--store", store, "--json")[0] == 0
        [entry] = json.loads(capsys.readouterr().out)
        assert entry["about"]["recipe"] == "from the paper's page"

    def test_training_for_results_that_cannot_be_kept_is_refused_before_anything_is_prepared(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        def prepared(*_: object) -> Path:
            raise AssertionError("an environment was made for a run that cannot be kept")

        monkeypatch.setattr("narrowgauge.environment.ensure_lab_python", prepared)
        (tmp_path / "file").touch()
        words = ["mnist", "--name", "w", "--executor", "native", "--store", tmp_path / "store"]
        code, told = _run("weights", "train", *words, "--results", tmp_path / "file" / "results")

        assert code == 23
        assert "is not a folder" in told

    def test_training_weights_that_nobody_saves_is_refused_at_once(
        self, tiny_checkout: Path, tmp_path: Path
    ) -> None:
        words = ["tiny", "--name", "w", "--project", tiny_checkout, "--store", tmp_path / "store"]

        code, errors = _run("weights", "train", *words)

        assert code == 2
        assert "does not save weights" in errors

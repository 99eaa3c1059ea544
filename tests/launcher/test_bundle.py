"""Bundles: what they hold, that one flipped bit is found, and that nothing hostile gets through."""

from __future__ import annotations

import dataclasses
import hashlib
import io
import json
import random
import stat
import subprocess
import tarfile
import zipfile
from pathlib import Path
from typing import Any

import pytest
from google.protobuf import json_format
from hypothesis import given, settings
from hypothesis import strategies as st
from result_cases import host, outcome_of, recorded

from narrowgauge.bundle.archive import open_shelf, write_archive
from narrowgauge.bundle.assemble import BundleRequest, Made, make_bundle
from narrowgauge.bundle.entries import Entry, hashed, name_problem, parse_sums
from narrowgauge.bundle.images import FREE_BASES, may_be_given, sboms_of
from narrowgauge.bundle.readme import readme_text
from narrowgauge.bundle.statement import test_result as build_statement
from narrowgauge.bundle.verify import verify_bundle
from narrowgauge.checkout import Checkout
from narrowgauge.cli.app import run_program
from narrowgauge.errors import BuildFailed, BundleDamaged, DiskFull, UsageError
from narrowgauge.images.client import BuildClient
from narrowgauge.judge.model import Judged
from narrowgauge.store import RunFolder, Store
from narrowgauge_contract.claims import Verdict
from narrowgauge_contract.codec import decode, dumps, encode
from narrowgauge_contract.hashing import sha256_file, tree_hash
from narrowgauge_contract.outcome import SideFile
from narrowgauge_contract.record import ImageFacts, MachineFacts, Record

MACHINE = MachineFacts("6.1", "x86_64", "Debian", "a CPU", 2, 1 << 30)
RUN = "20261121T100000Z-toy-aaaaaa"
NVIDIA = ImageFacts(
    "narrowgauge/desktop:0123", "sha256:" + "1" * 64, "nvcr.io/nvidia/tensorrt:21.07-py3",
    "sha256:" + "2" * 64, "0123",
)  # fmt: skip
FREE = ImageFacts(
    "narrowgauge/cpu:0456", "sha256:" + "3" * 64,
    "docker.io/library/python:3.11-slim-bookworm", None, "0456",
)  # fmt: skip


TOY_TOML = """
[experiment]
id = "toy"
title = "A toy"
summary = "For tests."
headline = ["accuracy"]

[parameters.precision]
type = "choice"
choices = ["fp32", "bf16", "fp16"]
default = "fp32"
axis = "row"
help = "What it computes in."

[parameters.epochs]
type = "int"
default = 3
axis = "run"
help = "Passes."

[profiles.short]
repeats = 3
precision = ["fp32", "bf16"]
"""
CLAIMS_TOML = """
[[claim]]
id = "good"
text = "float32 reaches 98.5 %."
paper = "Table 1"
kind = "bound"
metric = { operator = "value", of = ["accuracy{precision=fp32}"], statistic = "last" }
expected = { any = { minimum = 98.5 } }
profile = "short"
minutes = 1
disk_gb = 0.1

[[claim]]
id = "order"
text = "float32 is better than bfloat16."
paper = "Table 1"
kind = "ordering"
metric = { operator = "order", statistic = "last", of = [
  "accuracy{precision=bf16}", "accuracy{precision=fp32}",
] }
expected = { any = {} }
profile = "short"
minutes = 1
disk_gb = 0.1
"""


@pytest.fixture
def checkout(tmp_path: Path) -> Checkout:
    """A small checkout without git: one experiment, a Dockerfile, a lock."""
    root = tmp_path / "checkout"
    files = {
        "docker/targets.toml": "# none\n",
        "docker/locks/cpu.txt": "numpy==1.26.4\n",
        "images/cpu/Dockerfile": "FROM python\n",
        "experiments/toy/experiment.toml": TOY_TOML,
        "experiments/toy/run.py": "def run(ctx): ...\n",
        "experiments/toy/claims.toml": CLAIMS_TOML,
        "README.md": "# A paper\n",
    }
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return Checkout(root)


def _request(checkout: Checkout, results: Path, **changes: Any) -> BundleRequest:
    request = BundleRequest(
        checkout=checkout,
        results=results,
        stored=list(Store(results).entries()),
        kind="public",
        out=results.parent / "bundle.zip",
        machine=MACHINE,
        now=1_795_000_000.0,
    )
    return dataclasses.replace(request, **changes)


@pytest.fixture
def made(checkout: Checkout, tmp_path: Path) -> Made:
    recorded(tmp_path / "results")
    return make_bundle(_request(checkout, tmp_path / "results"), lambda _: None)


def _rewrite(folder: RunFolder, record: Record) -> None:
    """Another run in the same folder: its record, and what that was composed from."""
    planned = dataclasses.replace(folder.job(), run_id=record.run_id)
    folder.job_path.write_text(dumps(planned))
    folder.outcome_path.write_text(dumps(outcome_of(record)))
    _edit(folder, record)


def _edit(folder: RunFolder, record: Record) -> None:
    folder.record_path.chmod(0o644)
    folder.record_path.write_text(dumps(record))


def test_a_bundle_holds_what_another_needs_and_is_whole(made: Made) -> None:
    with zipfile.ZipFile(made.path) as archive:
        names = set(archive.namelist())
    place = f"runs/toy/{RUN}"
    wanted = {
        f"{place}/record.json", f"{place}/out/row-0/confusion.json", "bundle.json", "host.json",
        "data.json", "README.md", "SHA256SUMS", "ro-crate-metadata.json", "verdicts.json",
        "statement.intoto.json",
        "source/images/cpu/Dockerfile", "source/docker/locks/cpu.txt",
        "source/experiments/toy/claims.toml",
    }  # fmt: skip

    assert wanted <= names
    found = verify_bundle(made.path)
    assert found.whole, found.problems
    assert (found.sha256, found.runs, found.verdicts) == (made.sha256, 1, 2)
    assert found.manifest is not None
    assert found.manifest.kind == "public"


def test_the_same_inputs_give_the_same_bytes(checkout: Checkout, tmp_path: Path) -> None:
    recorded(tmp_path / "results")
    first = make_bundle(_request(checkout, tmp_path / "results"), lambda _: None)
    other = _request(checkout, tmp_path / "results", out=tmp_path / "other.zip")

    assert make_bundle(other, lambda _: None).sha256 == first.sha256


def test_sha256sum_and_unzip_need_nothing_of_ours(made: Made, tmp_path: Path) -> None:
    with zipfile.ZipFile(made.path) as archive:
        archive.extractall(tmp_path / "there")
    done = subprocess.run(
        ["sha256sum", "--check", "--strict", "--quiet", "SHA256SUMS"],
        cwd=tmp_path / "there", capture_output=True, text=True, check=False,
    )  # fmt: skip

    assert (done.returncode, done.stdout) == (0, "")
    assert verify_bundle(tmp_path / "there").whole


def test_one_flipped_bit_anywhere_is_found(made: Made) -> None:
    whole = made.path.read_bytes()
    chance = random.Random(11)
    ends = [*range(0, 120, 7), *range(len(whole) - 200, len(whole), 5)]
    places = {*chance.sample(range(len(whole)), 60), *ends}
    damaged = made.path.with_name("damaged.zip")
    unseen = []
    for place in sorted(places):
        content = bytearray(whole)
        content[place] ^= 1 << chance.randrange(8)
        damaged.write_bytes(content)
        try:
            found = verify_bundle(damaged).whole
        except BundleDamaged:
            found = False
        if found:
            unseen.append(place)

    assert unseen == []


def test_a_changed_sample_is_named_in_an_unpacked_bundle(made: Made, tmp_path: Path) -> None:
    there = tmp_path / "there"
    with zipfile.ZipFile(made.path) as archive:
        archive.extractall(there)
    path = there / f"runs/toy/{RUN}/record.json"
    path.write_text(path.read_text().replace("99.0", "99.1", 1))
    (there / "new.txt").write_text("added")
    (there / "host.json").unlink()

    problems = "\n".join(verify_bundle(there).problems)
    assert f"runs/toy/{RUN}/record.json was changed" in problems
    assert "new.txt is not in SHA256SUMS" in problems
    assert "host.json is missing" in problems


def test_a_forged_seal_does_not_hide_a_record_that_contradicts_the_rest(
    made: Made, tmp_path: Path
) -> None:
    """Who seals anew can make any bundle; one that says two things of a run is still refused."""
    with zipfile.ZipFile(made.path) as archive:
        contents = {name: archive.read(name) for name in archive.namelist()}
    place = f"runs/toy/{RUN}/record.json"
    record = json.loads(contents[place])
    contents[place] = json.dumps({**record, "status": "failed"}).encode()
    contents[f"runs/toy/{RUN}/out/row-0/confusion.json"] = b"{}"
    contents["source/experiments/toy/run.py"] = b"def run(ctx): cheat()\n"
    forged = _sealed(tmp_path / "forged.zip", contents)

    found = verify_bundle(forged, wanted=made.sha256)
    text = "\n".join(found.problems)
    assert "bundle.json says something else" in text
    assert "confusion.json is not the file that its record names" in text
    assert "it is not the file with sha256" in text


def _sealed(path: Path, contents: dict[str, bytes]) -> Path:
    """A bundle of these files, sealed as ours are."""
    listed = {name: content for name, content in contents.items() if name != "SHA256SUMS"}
    write_archive(path, hashed(Entry(name, "", content=c) for name, c in listed.items()))
    return path


def _keep_occasion(results: Path, judged: Judged, name: str = "20261121T1-aa") -> None:
    """What `reproduce` keeps of what it judged."""
    (results / "judged").mkdir(exist_ok=True)
    (results / "judged" / f"{name}.json").write_text(dumps(judged))


def _forged(made: Made, path: Path, name: str, old: str, new: str) -> tuple[str, ...]:
    """What verifying finds where `old` in one file of a bundle became `new`, sealed anew."""
    contents = _contents(made)
    text = contents[name].decode()
    assert old in text
    contents[name] = text.replace(old, new, 1).encode()
    return verify_bundle(_sealed(path, contents)).problems


def test_verdicts_are_had_again_and_must_be_those_that_were_said(
    made: Made, tmp_path: Path
) -> None:
    contents = _contents(made)
    said = json.loads(contents["verdicts.json"])
    for judgement in said["judgements"]:
        assert judgement["verdict"] == "REPRODUCED", judgement
    path = tmp_path / "other.zip"

    problems = _forged(made, path, "verdicts.json", '"REPRODUCED"', '"NOT-REPRODUCED"')
    assert problems == ("toy/good: NOT-REPRODUCED was said, records give REPRODUCED",)
    for key in ("figure", "low"):
        first = said["judgements"][0]
        body = {**said, "judgements": [{**first, "estimate": {**first["estimate"], key: 98.5001}},
                                       *said["judgements"][1:]]}  # fmt: skip
        contents["verdicts.json"] = json.dumps(body).encode()
        problems = verify_bundle(_sealed(path, contents)).problems
        assert problems[0].startswith(f"toy/good: {key} 98.5001 was said, records give {key} ")
    problems = _forged(made, path, "verdicts.json", f'"{RUN}"', '"another"')
    assert "toy/good: runs another was said" in problems[0]


def test_the_statement_and_the_page_must_be_what_the_records_give(
    made: Made, tmp_path: Path
) -> None:
    path = tmp_path / "other.zip"
    problems = _forged(made, path, "statement.intoto.json", '"WARNED"', '"PASSED"')
    assert problems == (
        "statement.intoto.json does not say what the records, claims and images give",
    )
    problems = _forged(made, path, "report.html", "REPRODUCED", "PERFECT")
    assert problems == ("report.html is not the page that the records give",)
    contents = _contents(made)
    del contents["verdicts.json"]
    assert verify_bundle(_sealed(path, contents)).problems == (
        "it holds no verdicts that can be read",
    )


def test_another_version_is_believed_only_where_the_whole_bundle_is_of_it(
    made: Made, tmp_path: Path
) -> None:
    contents = _contents(made)
    said, manifest = json.loads(contents["verdicts.json"]), json.loads(contents["bundle.json"])
    said["judgements"][0]["verdict"] = "NOT-REPRODUCED"
    said["occasion"]["version"] = "99.0"
    contents["verdicts.json"] = json.dumps(said).encode()
    found = verify_bundle(_sealed(tmp_path / "other.zip", contents))
    assert any("of another" in each for each in found.problems)
    assert any("NOT-REPRODUCED was said" in each for each in found.problems)

    manifest["version"] = "99.0"
    contents["bundle.json"] = json.dumps(manifest).encode()
    found = verify_bundle(_sealed(tmp_path / "newer.zip", contents))
    assert found.whole, found.problems
    assert any("NOT-REPRODUCED" in note and "99.0" in note for note in found.notes)


def test_runs_of_no_one_occasion_are_a_replay_and_never_passed(
    checkout: Checkout, tmp_path: Path
) -> None:
    results, other = tmp_path / "results", "20261121T100001Z-toy-bbbbbb"
    recorded(results)

    def bundled() -> tuple[bool, str, Made]:
        made = make_bundle(_request(checkout, results, force=True), lambda _: None)
        contents = _contents(made)
        replay = json.loads(contents["verdicts.json"])["occasion"]["replay"]
        result = json.loads(contents["statement.intoto.json"])["predicate"]["result"]
        assert (b"no reproduction" in contents["report.html"]) == replay
        return replay, result, made

    judged = decode(Judged, json.loads(_contents(bundled()[2])["verdicts.json"]))
    measured = dataclasses.replace(judged.occasion, replay=False)
    elsewhere = [dataclasses.replace(each, runs=("another",)) for each in judged.judgements]
    _keep_occasion(results, judged)  # itself a replay
    assert bundled()[:2] == (True, "WARNED")
    _keep_occasion(results, Judged(1, measured, tuple(elsewhere)))
    assert bundled()[:2] == (True, "WARNED")
    (results / "judged" / "20261121T0-aa.json").write_text("{")
    assert bundled()[:2] == (True, "WARNED")
    _keep_occasion(results, dataclasses.replace(judged, occasion=measured))
    replay, result, made = bundled()
    assert (replay, result) == (False, "PASSED")
    assert verify_bundle(made.path).problems == ()

    contents = _contents(made)
    del contents["occasions/20261121T1-aa/judged.json"]
    problems = verify_bundle(_sealed(tmp_path / "cut.zip", contents)).problems
    assert any("no occasion in here rests on all" in each for each in problems)
    recorded(results, other)
    assert bundled()[:2] == (True, "WARNED")


def test_the_statement_is_a_test_result_about_the_records(made: Made) -> None:
    from in_toto_attestation.predicates.test_result.v0 import test_result_pb2
    from in_toto_attestation.v1 import statement_pb2
    from in_toto_attestation.v1.statement import Statement

    with zipfile.ZipFile(made.path) as archive:
        text = archive.read("statement.intoto.json").decode()
        record = archive.read(f"runs/toy/{RUN}/record.json")
    parsed = json_format.Parse(text, statement_pb2.Statement())
    Statement.copy_from_pb(parsed).validate()
    result = json_format.ParseDict(json.loads(text)["predicate"], test_result_pb2.TestResult())

    assert parsed.predicate_type == "https://in-toto.io/attestation/test-result/v0.1"
    assert parsed.subject[0].digest["sha256"] == hashlib.sha256(record).hexdigest()
    assert result.result == "WARNED"  # no occasion made the run for this
    assert list(result.passed_tests) == ["toy/good", "toy/order"]
    assert result.configuration[0].name == "source/experiments/toy/claims.toml"


@pytest.mark.parametrize(
    ("verdicts", "replay", "wanted"),
    [
        (["REPRODUCED", "SKIPPED"], False, "PASSED"),
        (["REPRODUCED"], True, "WARNED"),
        (["REPRODUCED", "REPRODUCED-TREND"], False, "WARNED"),
        (["REPRODUCED", "NOT-REPRODUCED"], False, "FAILED"),
        (["INVALID"], False, "FAILED"),
        (["NOT-APPLICABLE"], False, "WARNED"),
    ],
)
def test_a_result_is_passed_only_where_nothing_is_in_doubt(
    verdicts: list[str], replay: bool, wanted: str, made: Made
) -> None:
    with zipfile.ZipFile(made.path) as archive:
        judged = decode(Judged, json.loads(archive.read("verdicts.json")))
    judged = dataclasses.replace(
        judged,
        occasion=dataclasses.replace(judged.occasion, replay=replay),
        judgements=tuple(
            dataclasses.replace(judged.judgements[0], verdict=Verdict(each)) for each in verdicts
        ),
    )

    said = build_statement(judged, {"record.json": "0" * 64}, {}, (FREE,), "verdicts.json")
    assert said["predicate"]["result"] == wanted
    assert said["subject"][-1]["digest"]["sha256"] == FREE.digest.removeprefix("sha256:")


def test_a_record_edited_by_hand_is_left_out(checkout: Checkout, tmp_path: Path) -> None:
    recorded(tmp_path / "results")
    edited = recorded(tmp_path / "results", "20261121T100001Z-toy-bbbbbb")
    record = edited.record()
    first = record.rows[0]
    better = dataclasses.replace(first.metrics[1], values=(99.0, 99.5, 99.9))
    metrics = (first.metrics[0], better, *first.metrics[2:])
    rows = (dataclasses.replace(first, metrics=metrics), *record.rows[1:])
    _edit(edited, dataclasses.replace(record, rows=rows))

    made = make_bundle(_request(checkout, tmp_path / "results"), lambda _: None)

    assert [run.run_id for run in made.manifest.runs] == [RUN]
    assert any("was edited" in left.why for left in made.manifest.left_out)


def test_sources_that_ran_are_told_from_sources_that_were_changed(
    checkout: Checkout, tmp_path: Path
) -> None:
    folder = recorded(tmp_path / "results")
    hashes = dataclasses.replace(
        folder.record().hashes, experiment=tree_hash([checkout.experiments / "toy"])
    )
    _rewrite(folder, dataclasses.replace(folder.record(), hashes=hashes))
    made = make_bundle(_request(checkout, tmp_path / "results"), lambda _: None)
    assert made.manifest.runs[0].same_experiment
    found = verify_bundle(made.path)
    assert (found.notes, found.problems) == ((), ())

    (checkout.experiments / "toy" / "run.py").write_text("def run(ctx): other()\n")
    again = make_bundle(_request(checkout, tmp_path / "results", force=True), lambda _: None)
    assert not again.manifest.runs[0].same_experiment
    assert any("ran other sources" in note for note in verify_bundle(again.path).notes)


def test_damaged_open_and_hostile_runs_are_left_out_by_name(
    checkout: Checkout, tmp_path: Path
) -> None:
    results = tmp_path / "results"
    recorded(results)
    cut = recorded(results, "20261121T100001Z-toy-bbbbbb")
    cut.record_path.chmod(0o644)
    cut.record_path.write_text(cut.record_path.read_text()[:500])
    newer = recorded(results, "20261121T100002Z-toy-cccccc")
    _edit(newer, dataclasses.replace(newer.record(), format=99))
    unfinished = recorded(results, "20261121T100003Z-toy-dddddd")
    (unfinished.path / "job.json").write_text(dumps({}))
    unfinished.record_path.unlink()
    lost = recorded(results, "20261121T100004Z-toy-eeeeee")
    _rewrite(lost, dataclasses.replace(lost.record(), run_id="../../../etc/cron.d/x"))

    made = make_bundle(_request(checkout, results), lambda _: None)

    assert [run.run_id for run in made.manifest.runs] == [RUN]
    said = {left.what: left.why for left in made.manifest.left_out}
    for name in ("bbbbbb", "cccccc", "dddddd", "eeeeee"):
        assert any(name in what for what in said), name
    assert any("leads out of its folder" in why for why in said.values())
    assert verify_bundle(made.path).whole


@pytest.mark.parametrize("kind", ["traversal", "link", "changed"])
def test_a_hostile_side_file_is_left_out_and_the_run_is_kept(
    kind: str, checkout: Checkout, tmp_path: Path
) -> None:
    secret = tmp_path / "secret"
    secret.write_text("not yours")
    folder = recorded(tmp_path / "results")
    record = folder.record()
    side = SideFile("row-0/confusion.json", sha256_file(secret), 9)
    path = folder.out / side.path
    if kind == "traversal":
        side = dataclasses.replace(side, path="../../../../secret")
    elif kind == "link":
        path.unlink()
        path.symlink_to(secret)
    first, *others = record.rows
    others = [dataclasses.replace(row, side_files=()) for row in others]
    rows = (dataclasses.replace(first, side_files=(side,)), *others)
    _rewrite(folder, dataclasses.replace(record, rows=rows, side_files=(side,)))

    made = make_bundle(_request(checkout, tmp_path / "results"), lambda _: None)

    assert [run.run_id for run in made.manifest.runs] == [RUN]
    assert any("side file" in left.what for left in made.manifest.left_out)
    with zipfile.ZipFile(made.path) as archive:
        assert not any(b"not yours" in archive.read(name) for name in archive.namelist())
    assert verify_bundle(made.path).whole


def test_hostile_text_in_a_record_is_inert_in_what_is_made_of_it(
    checkout: Checkout, tmp_path: Path
) -> None:
    bad = "x`\n# <script>alert(1)</script> \x1b[31m](javascript:1)"
    image = dataclasses.replace(NVIDIA, name=bad, base=bad)
    folder = recorded(tmp_path / "results")
    record = folder.record()
    hashes = dataclasses.replace(record.hashes, image=image.digest)
    _rewrite(folder, dataclasses.replace(record, host=host(image=image), hashes=hashes))

    made = make_bundle(_request(checkout, tmp_path / "results", client=_no_engine), lambda _: None)
    text = readme_text(made.manifest)

    assert "\x1b" not in text
    assert not any(line.startswith("# <script>") for line in text.splitlines())
    for line in text.splitlines():
        if "script" in line:
            assert line.count("`") % 2 == 0
    assert verify_bundle(made.path).whole


def _no_engine() -> BuildClient:
    raise AssertionError("no image was to be saved")


@dataclasses.dataclass(frozen=True)
class FakeDocker(BuildClient):
    """An engine that has the images it is told of, and saves a tar archive of each."""

    images: dict[str, bytes] = dataclasses.field(default_factory=dict)

    def inspect(self, name: str) -> Any:
        found = self.images.get(name)
        labels = {"Config": {"Labels": {}}, "Architecture": "amd64"}
        return None if found is None else {"Id": name, "Size": len(found), **labels}

    def run(self, words: Any, timeout_s: float | None = 30.0) -> Any:
        _, _, file, name = words
        Path(file).write_bytes(self.images[name])
        return subprocess.CompletedProcess(words, 0, "", "")


def _oci(predicate: Any = None) -> bytes:
    """An OCI layout as a containerd store saves it, with an attestation or not."""
    files: dict[str, bytes] = {}

    def blob(body: Any) -> str:
        content = json.dumps(body).encode()
        digest = hashlib.sha256(content).hexdigest()
        files[f"blobs/sha256/{digest}"] = content
        return f"sha256:{digest}"

    manifests = []
    if predicate is not None:
        layer = {
            "digest": blob({"predicate": predicate}),
            "annotations": {"in-toto.io/predicate-type": "https://spdx.dev/Document"},
        }
        attestation = {
            "digest": blob({"layers": [layer]}),
            "annotations": {"vnd.docker.reference.type": "attestation-manifest"},
        }
        inner = blob({"manifests": [attestation]})
        kind = "application/vnd.oci.image.index.v1+json"
        manifests = [{"mediaType": kind, "digest": inner}]
    files["index.json"] = json.dumps({"manifests": manifests}).encode()
    stream = io.BytesIO()
    with tarfile.open(fileobj=stream, mode="w") as archive:
        for name, content in files.items():
            info = tarfile.TarInfo(name)
            info.size = len(content)
            archive.addfile(info, io.BytesIO(content))
    return stream.getvalue()


def _with_image(results: Path, facts: ImageFacts) -> None:
    folder = recorded(results)
    record = folder.record()
    hashes = dataclasses.replace(record.hashes, image=facts.digest)
    _rewrite(folder, dataclasses.replace(record, host=host(image=facts), hashes=hashes))


def test_public_leaves_out_what_nvidia_keeps_and_says_so(
    checkout: Checkout, tmp_path: Path
) -> None:
    _with_image(tmp_path / "results", NVIDIA)
    made = make_bundle(_request(checkout, tmp_path / "results", client=_no_engine), lambda _: None)

    with zipfile.ZipFile(made.path) as archive:
        assert not [name for name in archive.namelist() if name.endswith(".tar")]
        assert "NVIDIA's licence" in archive.read("README.md").decode()
    assert made.manifest.images[0].facts == NVIDIA
    assert made.manifest.images[0].archive == ""


@pytest.mark.parametrize(("kind", "facts"), [("full", NVIDIA), ("public", FREE)])
def test_an_image_that_may_be_in_it_is_with_its_sbom(
    kind: str, facts: ImageFacts, checkout: Checkout, tmp_path: Path
) -> None:
    _with_image(tmp_path / "results", facts)
    spdx = {"spdxVersion": "SPDX-2.3", "packages": [{"name": "numpy"}]}
    engine = FakeDocker("docker", True, {}, {facts.digest: _oci(spdx)})
    request = _request(checkout, tmp_path / "results", kind=kind, client=lambda: engine)
    made = make_bundle(request, lambda _: None)
    image = made.manifest.images[0]

    with zipfile.ZipFile(made.path) as archive:
        assert archive.read(image.archive) == engine.images[facts.digest]
        assert json.loads(archive.read(image.sboms[0])) == spdx
    assert verify_bundle(made.path).whole
    assert not list(tmp_path.glob(".narrowgauge-bundle-*"))


def test_full_fails_without_the_image_and_public_says_that_it_is_not_here(
    checkout: Checkout, tmp_path: Path
) -> None:
    _with_image(tmp_path / "results", FREE)
    request = _request(
        checkout, tmp_path / "results", client=lambda: FakeDocker("docker", True, {})
    )
    made = make_bundle(request, lambda _: None)

    assert any("there is no image" in left.why for left in made.manifest.left_out)
    with pytest.raises(UsageError, match="there is no image"):
        make_bundle(dataclasses.replace(request, kind="full", force=True), lambda _: None)


def test_only_bases_known_to_be_free_may_be_given() -> None:
    assert may_be_given(FREE)
    for base in ("nvcr.io/nvidia/l4t-ml:r35.2.1-py3", "narrowgauge-standin:cpu", "unknown", ""):
        assert not may_be_given(dataclasses.replace(FREE, base=base)), base
    assert all(base.endswith("/") for base in FREE_BASES)


def test_an_image_without_attestations_has_no_sbom_and_a_damaged_one_is_refused(
    tmp_path: Path,
) -> None:
    file = tmp_path / "image.tar"
    file.write_bytes(_oci())
    assert sboms_of(file) == ()
    file.write_bytes(b"no tar")
    with pytest.raises(BuildFailed):
        sboms_of(file)


def test_nothing_to_bundle_a_file_in_the_way_and_a_full_disk(
    checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(UsageError, match="no recorded run"):
        make_bundle(_request(checkout, tmp_path / "results"), lambda _: None)
    recorded(tmp_path / "results")
    request = _request(checkout, tmp_path / "results")
    request.out.write_text("mine")
    with pytest.raises(UsageError, match="exists"):
        make_bundle(request, lambda _: None)
    assert request.out.read_text() == "mine"

    def full(*_: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("narrowgauge.bundle.archive._seal", full)
    with pytest.raises(DiskFull):
        make_bundle(dataclasses.replace(request, force=True), lambda _: None)
    assert request.out.read_text() == "mine"
    assert not list(tmp_path.glob(".*partial"))


def _hostile_zip(path: Path, name: str, *, mode: int = stat.S_IFREG | 0o644) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        info = zipfile.ZipInfo("placeholder")
        info.filename = info.orig_filename = name
        info.external_attr = mode << 16
        archive.writestr(info, b"x")


@pytest.mark.parametrize(
    "name",
    ["../evil", "/etc/passwd", "a/../../b", "C:/x", "a\\..\\b", "a/./b", "nul", "x\x1b[2J", "a/ ",
     "a//b", "dir/"],
)  # fmt: skip
def test_zip_slip_and_odd_names_are_refused_before_anything_is_read(
    name: str, tmp_path: Path
) -> None:
    _hostile_zip(tmp_path / "evil.zip", name)

    with pytest.raises(BundleDamaged) as caught:
        verify_bundle(tmp_path / "evil.zip")
    assert "\x1b" not in str(caught.value)
    assert not (tmp_path.parent / "evil").exists()


def test_links_duplicates_and_bombs_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "evil.zip"
    _hostile_zip(path, "link", mode=stat.S_IFLNK | 0o777)
    with pytest.raises(BundleDamaged, match="no bundle has"):
        verify_bundle(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("A", b"1")
        archive.writestr("a", b"2")
    with pytest.raises(BundleDamaged, match="'a'"):
        verify_bundle(path)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("A", b"1")
    content = path.read_bytes()
    central = content.rindex(b"PK\x01\x02")
    path.write_bytes(content[: central + 24] + b"\xff\xff\xff\x7f" + content[central + 28 :])
    with pytest.raises(BundleDamaged, match="no bundle has"):
        verify_bundle(path)


def test_a_link_in_an_unpacked_bundle_is_refused(made: Made, tmp_path: Path) -> None:
    there = tmp_path / "there"
    with zipfile.ZipFile(made.path) as archive:
        archive.extractall(there)
    (there / "host.json").unlink()
    (there / "host.json").symlink_to("/etc/passwd")

    with pytest.raises(BundleDamaged, match="link"):
        verify_bundle(there)


def test_what_is_no_bundle_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError):
        verify_bundle(tmp_path / "nowhere.zip")
    (tmp_path / "text.zip").write_text("hello")
    with pytest.raises(BundleDamaged, match="not a bundle"):
        verify_bundle(tmp_path / "text.zip")
    with zipfile.ZipFile(tmp_path / "other.zip", "w") as archive:
        archive.writestr("hello.txt", b"hello")
    with pytest.raises(BundleDamaged, match="SHA256SUMS"):
        verify_bundle(tmp_path / "other.zip")


@settings(max_examples=60)
@given(st.text(max_size=40))
def test_a_name_that_is_allowed_stays_below_its_folder(name: str) -> None:
    if name_problem(name):
        return
    root = Path("/root/folder")
    assert (root / name).is_relative_to(root)
    assert ".." not in Path(name).parts
    assert name.isprintable()


@settings(max_examples=60)
@given(st.text(max_size=200))
def test_sums_parse_or_are_refused(text: str) -> None:
    try:
        sums = parse_sums(text)
    except BundleDamaged:
        return
    assert all(not name_problem(name) and len(digest) == 64 for name, digest in sums.items())


@settings(max_examples=40)
@given(st.binary(max_size=300))
def test_any_bytes_are_a_bundle_or_refused(content: bytes) -> None:
    import tempfile

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "x.zip")
        path.write_bytes(content)
        with pytest.raises(BundleDamaged), open_shelf(path):
            pass


def test_the_crate_is_a_process_run_crate_with_an_action_for_each_run(
    checkout: Checkout, tmp_path: Path
) -> None:
    from rocrate.rocrate import ROCrate

    _with_image(tmp_path / "results", NVIDIA)
    made = make_bundle(_request(checkout, tmp_path / "results"), lambda _: None)
    there = tmp_path / "there"
    with zipfile.ZipFile(made.path) as archive:
        archive.extractall(there)
    crate = ROCrate(there)
    action = crate.dereference(f"#{RUN}")

    assert action.type == "CreateAction"
    assert crate.root_dataset["conformsTo"].id == "https://w3id.org/ro/wfrun/process/0.5"
    assert crate.root_dataset["mentions"].id == action.id
    assert action["containerImage"]["sha256"] == NVIDIA.digest.removeprefix("sha256:")
    results = {entity.id for entity in action["result"]}
    assert f"runs/toy/{RUN}/record.json" in results
    files = {entity.id for entity in crate.data_entities if entity.type == "File"}
    on_disk = {p.relative_to(there).as_posix() for p in there.rglob("*") if p.is_file()}
    assert on_disk - files == {"SHA256SUMS", "ro-crate-metadata.json"}


def test_the_commands_bundle_and_verify(
    checkout: Checkout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path / "results")
    out = tmp_path / "b.zip"
    words = ["--project", str(checkout.root), "--results", str(tmp_path / "results")]
    errors = io.StringIO()

    assert run_program(["bundle", *words, "--no-images", "--out", str(out)], {}, errors) == 0
    told = capsys.readouterr().out
    sha256 = sha256_file(out)
    assert sha256 in told
    assert "left out:" in told
    assert run_program(["verify-bundle", str(out), "--sha256", sha256], {}, errors) == 0
    assert capsys.readouterr().out.splitlines()[-1] == "whole"

    content = bytearray(out.read_bytes())
    content[len(content) // 2] ^= 4
    out.write_bytes(content)
    assert run_program(["verify-bundle", str(out), "--json"], {}, errors) == 21
    body = json.loads(capsys.readouterr().out)
    assert body["whole"] is False
    assert "error: " in errors.getvalue()
    assert run_program(["bundle", *words, "--public", "--full"], {}, errors) == 2


def test_a_damaged_list_of_sums_is_told_of_the_bundle_and_what_to_do(made: Made) -> None:
    """Nothing can be held against it, so it is not one of many findings."""
    with zipfile.ZipFile(made.path) as archive:
        info = archive.getinfo("SHA256SUMS")
    content = bytearray(made.path.read_bytes())
    content[info.header_offset + 30 + len(info.filename) + info.compress_size // 2] ^= 1
    made.path.write_bytes(content)
    errors = io.StringIO()

    assert run_program(["verify-bundle", str(made.path)], {}, errors) == 21
    said = " ".join(errors.getvalue().split())
    assert f"{made.path} is not the bundle that was made: SHA256SUMS cannot be read" in said
    assert "next: copy or download it again; do not use what it says" in said


def test_one_run_by_name_and_an_unknown_one(
    checkout: Checkout, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recorded(tmp_path / "results")
    recorded(tmp_path / "results", "20261121T100001Z-toy-bbbbbb")
    words = ["--project", str(checkout.root), "--results", str(tmp_path / "results"), "--json"]
    out = ["--out", str(tmp_path / "b.zip")]
    errors = io.StringIO()

    assert run_program(["bundle", "bbbbbb", *words, *out], {}, errors) == 0
    runs = json.loads(capsys.readouterr().out)["manifest"]["runs"]
    assert [run["run_id"] for run in runs] == ["20261121T100001Z-toy-bbbbbb"]
    assert run_program(["bundle", "nothing", *words, *out], {}, errors) == 2


def test_occasions_of_its_runs_are_in_it_with_their_seed(
    made: Made, checkout: Checkout, tmp_path: Path
) -> None:
    with zipfile.ZipFile(made.path) as archive:
        judged = decode(Judged, json.loads(archive.read("verdicts.json")))
    results = tmp_path / "results"
    (results / "judged").mkdir()
    for name, runs in (("20261121T1-aa", (RUN,)), ("20261121T2-bb", ("another",))):
        judgement = dataclasses.replace(judged.judgements[0], runs=runs)
        body = dataclasses.replace(judged, judgements=(judgement,))
        (results / "judged" / f"{name}.json").write_text(dumps(body))
        (results / "reproduce" / name).mkdir(parents=True)
        (results / "reproduce" / name / "plan.json").write_text('{"order_seed": 7}')
    (results / "judged" / "20261121T3-cc.json").write_text("{")
    again = make_bundle(_request(checkout, results, force=True), lambda _: None)

    with zipfile.ZipFile(again.path) as archive:
        found = [name for name in archive.namelist() if name.startswith("occasions/")]
    assert found == ["occasions/20261121T1-aa/judged.json", "occasions/20261121T1-aa/plan.json"]
    assert any("20261121T3-cc" in left.what for left in again.manifest.left_out)
    assert verify_bundle(again.path).whole


def test_git_state_and_what_differs_from_it(checkout: Checkout, tmp_path: Path) -> None:
    def git(*words: str) -> None:
        identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
        subprocess.run(
            ["git", *identity, *words], cwd=checkout.root, check=True, capture_output=True
        )

    git("init", "-q")
    (checkout.root / ".gitignore").write_text("secret.txt\n")
    git("add", "-A")
    git("commit", "-qm", "first")
    (checkout.root / "README.md").write_text("# Another paper\n")
    (checkout.root / "secret.txt").write_text("ignored")
    (checkout.root / "experiments/toy/new.py").write_text("# not committed\n")
    recorded(tmp_path / "results")
    made = make_bundle(_request(checkout, tmp_path / "results"), lambda _: None)

    with zipfile.ZipFile(made.path) as archive:
        names = archive.namelist()
        assert json.loads(archive.read("git.json"))["dirty"] is True
        assert b"+# Another paper" in archive.read("git.diff")
    assert "source/experiments/toy/new.py" in names
    assert "source/secret.txt" not in names
    assert encode(made.manifest.git)["commit"] in readme_text(made.manifest)


def _git(root: Path, *words: str) -> None:
    identity = ["-c", "user.name=t", "-c", "user.email=t@example.org"]
    subprocess.run(["git", *identity, *words], cwd=root, check=True, capture_output=True)


def _sources(made: Made) -> set[str]:
    with zipfile.ZipFile(made.path) as archive:
        names = archive.namelist()
    return {name.removeprefix("source/") for name in names if name.startswith("source/")}


def test_in_a_git_checkout_a_public_bundle_holds_no_scratch_earlier_bundle_or_stray_file(
    checkout: Checkout, tmp_path: Path
) -> None:
    root, results = checkout.root, checkout.root / "results"
    (root / ".gitignore").write_text("ignored\n")
    _git(root, "init", "-q")
    _git(root, "add", "-A")
    _git(root, "commit", "-qm", "first")
    tracked = set(subprocess.check_output(["git", "ls-files"], cwd=root, text=True).split())
    _with_image(results, FREE)
    for name in ("key.pem", "old.tar.gz", "docs/draft.md", "experiments/toy/more.py",
                 "experiments/other/mine.py", "experiments/toy/data.zip",
                 ".narrowgauge-bundle-killed/image-0.tar"):  # fmt: skip
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text("private")
    engine = FakeDocker("docker", True, {}, {FREE.digest: _oci()})
    full = _request(checkout, results, kind="full", out=root / "full.zip", client=lambda: engine)
    public = dataclasses.replace(full, kind="public", out=root / "public.zip")

    first = make_bundle(full, lambda _: None)
    again = make_bundle(dataclasses.replace(full, force=True), lambda _: None)
    assert again.sha256 == first.sha256
    assert _sources(again) == tracked | {
        "key.pem", "docs/draft.md", "experiments/toy/more.py", "experiments/other/mine.py",
    }  # fmt: skip

    made = make_bundle(public, lambda _: None)
    again = make_bundle(dataclasses.replace(public, force=True), lambda _: None)
    assert again.sha256 == made.sha256
    assert _sources(made) == tracked | {"experiments/toy/more.py"}
    said = {left.what: left.why for left in made.manifest.left_out}
    for name in ("key.pem", "docs/draft.md", "experiments/other/mine.py"):
        assert "commit what belongs here" in said[f"the source file '{name}'"]
    for name in ("full.zip", "old.tar.gz", "experiments/toy/data.zip"):
        assert "archive" in said[f"the source file '{name}'"]
    assert verify_bundle(made.path).whole


def test_without_git_no_archive_and_no_bundle_is_source(checkout: Checkout, tmp_path: Path) -> None:
    recorded(tmp_path / "results")
    (checkout.root / "old.tgz").write_text("images")
    request = _request(checkout, tmp_path / "results", out=checkout.root / "mine.zip")
    first = make_bundle(request, lambda _: None)
    again = make_bundle(dataclasses.replace(request, force=True), lambda _: None)

    assert again.sha256 == first.sha256
    assert not {name for name in _sources(again) if name.endswith((".zip", ".tgz"))}


@pytest.mark.parametrize("experiment", ["/", "..", "a/b", "../../escaped", "", "other"])
def test_a_record_whose_experiment_is_a_path_writes_nowhere(
    experiment: str, made: Made, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Path] = []
    write = Path.write_bytes
    monkeypatch.setattr(Path, "write_bytes", lambda at, to: (written.append(at), write(at, to))[1])
    contents = _contents(made)
    place = f"runs/toy/{RUN}/record.json"
    record = {**json.loads(contents[place]), "experiment": experiment}
    contents[place] = json.dumps(record).encode()
    contents["source/experiments/escaped/experiment.toml"] = b"mine"
    contents[f"source/experiments/{'a/b' if experiment == 'a/b' else 'toy'}/x.py"] = b"mine"
    forged = _sealed(tmp_path / "forged.zip", contents)
    written.clear()

    found = verify_bundle(forged)
    assert any(f"of the experiment {experiment!a}" in each for each in found.problems)
    assert written == []


def _contents(made: Made) -> dict[str, bytes]:
    with zipfile.ZipFile(made.path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def test_only_a_full_disk_is_called_one(
    checkout: Checkout, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorded(tmp_path / "results")

    def refused(*_: object) -> None:
        raise PermissionError(13, "Permission denied", "image-0.tar")

    monkeypatch.setattr("narrowgauge.bundle.archive._seal", refused)
    with pytest.raises(UsageError, match="cannot write the bundle") as caught:
        make_bundle(_request(checkout, tmp_path / "results"), lambda _: None)
    assert "image-0.tar" in str(caught.value)


def test_files_that_share_bytes_and_too_many_bytes_in_all_are_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "evil.zip"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", b"1" * 500)
        archive.writestr("b", b"2" * 500)
    with open_shelf(path) as shelf:
        assert shelf.names == ("a", "b")
    content = bytearray(path.read_bytes())
    second = content.rindex(b"PK\x01\x02")
    content[second + 42 : second + 46] = (20).to_bytes(4, "little")  # where its bytes begin
    path.write_bytes(content)
    with pytest.raises(BundleDamaged) as caught, open_shelf(path):
        pass
    assert "shares bytes" in str(caught.value)

    monkeypatch.setattr("narrowgauge.bundle.archive._MOST_BYTES", 999)
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a", b"1" * 500)
        archive.writestr("b", b"2" * 500)
    with pytest.raises(BundleDamaged) as caught, open_shelf(path):
        pass
    assert "unpacks to more than" in str(caught.value)


def test_names_that_cannot_be_together_on_a_disk_are_refused(made: Made, tmp_path: Path) -> None:
    contents = _contents(made)
    contents["source/experiments/toy/a"] = b"a file"
    contents["source/experiments/toy/a/b"] = b"and a folder"
    with pytest.raises(BundleDamaged, match="cannot be written to a disk"):
        verify_bundle(_sealed(tmp_path / "odd.zip", contents))

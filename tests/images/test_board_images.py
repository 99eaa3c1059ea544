"""The image and the data that scripts/jetson.sh and desktop.sh find, build, load or fetch."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest
from board import ROOT, Board

from narrowgauge.images.content import content_tag
from narrowgauge.targets import TARGETS_FILE, load_targets
from narrowgauge_contract.errors import ExitCode


def test_an_image_that_is_not_there_is_built_and_checked(board: Board) -> None:
    (board.fake / "there").unlink()

    done = board.run("jetson.sh")

    assert done.returncode == 0, done.stderr
    built = next(call for call in board.calls() if call[0] == "build")
    assert built[-1] == str(board.checkout)
    assert "--no-cache" not in built
    assert ["pull", "nvcr.io/nvidia/l4t-ml:r35.2.1-py3"] in board.calls()
    assert "org.opencontainers.image.base.digest=sha256:ba5e" in built
    tag = content_tag(board.checkout, load_targets(ROOT / TARGETS_FILE)["jetson"])
    assert f"io.narrowgauge.content={tag}" in built
    checked = board.runs()[0]
    assert "/opt/narrowgauge/verify" in checked
    assert checked[checked.index("--runtime") + 1] == "nvidia"
    name = f"narrowgauge/jetson:{tag}"
    after = board.calls()[board.calls().index(checked) :]
    assert [call for call in board.calls() if call[0] == "tag"] == [
        call for call in after if call[0] == "tag"
    ]
    assert ["tag", f"{name}-unchecked", name] in after
    assert ["tag", f"{name}-unchecked", "narrowgauge/jetson:local"] in after
    assert "l4t-ml:r35.2.1-py3" in done.stderr
    assert "unresolved pins: base" in done.stderr
    assert " GB" in done.stderr


def test_a_newer_client_builds_with_buildx(board: Board) -> None:
    (board.fake / "there").unlink()
    board.answer("buildx")

    assert board.run("jetson.sh", "--build").returncode == 0
    (built,) = (call for call in board.calls() if call[:3] == ["buildx", "build", "--load"])
    assert "--no-cache" in built


@pytest.mark.parametrize(
    ("name", "text", "code", "said"),
    [
        ("pull.fail", "", ExitCode.BASE_UNREACHABLE, "--load FILE"),
        ("build.fail", "", ExitCode.BUILD_FAILED, "--load FILE"),
        ("verify.code", "1\n", ExitCode.BUILD_FAILED, "--build"),
        ("version", "Docker version 28.2.2, build e6\n", ExitCode.TOOLCHAIN_MISSING, "buildx"),
    ],
)
def test_a_build_or_a_check_that_fails(
    board: Board, name: str, text: str, code: ExitCode, said: str
) -> None:
    (board.fake / "there").unlink()
    board.answer(name, text)

    for _ in range(2):  # what failed once is not taken for an image the second time
        done = board.run("jetson.sh")
        assert done.returncode == code
        assert said in done.stderr
    assert not any("tag" in call for call in board.calls())
    assert not any("/host.json" in word for call in board.runs() for word in call)


def test_a_base_that_is_here_is_not_pulled(dash: Board) -> None:
    (dash.fake / "there").unlink()
    dash.answer("base")

    assert dash.run("jetson.sh").returncode == 0
    assert not any("pull" in call for call in dash.calls())


def test_an_image_of_another_target_or_machine_is_refused(board: Board) -> None:
    for kind in ("desktop|arm64\n", "jetson|amd64\n", "|arm64\n"):
        board.answer("kind", kind)
        done = board.run("jetson.sh", "--image", "some/image:1", "mnist")
        assert done.returncode == ExitCode.NOT_APPLICABLE
        assert "not for this host" in done.stderr
    assert board.runs() == []


def archive(board: Board, content: str = "layers") -> Path:
    file = board.folder / "jetson.tar"
    file.write_text(content)
    digest = subprocess.run(
        ["sha256sum", str(file)], capture_output=True, text=True, check=True
    ).stdout.split()[0]
    body = {"image": "narrowgauge/jetson:feed", "sha256": digest, "content": "feed", "bytes": 6}
    Path(f"{file}.json").write_text(json.dumps(body, indent=1))
    return file


def test_an_archive_is_checked_and_loaded(board: Board) -> None:
    file = archive(board)

    done = board.run("jetson.sh", "--load", str(file), "mnist")

    assert done.returncode == 0, done.stderr
    assert ["load", "--input", str(file)] in board.calls()
    assert ["tag", "narrowgauge/jetson:feed", "narrowgauge/jetson:local"] in board.calls()
    (words,) = board.runs()
    assert "narrowgauge/jetson:feed" in words


def test_an_archive_that_changed_is_not_loaded(board: Board) -> None:
    file = archive(board)
    file.write_text("layerz")
    done = board.run("jetson.sh", "--load", str(file))
    assert done.returncode == ExitCode.DATA_CORRUPT

    Path(f"{file}.json").unlink()
    done = board.run("jetson.sh", "--load", str(file))
    assert done.returncode == ExitCode.USAGE
    assert not any(call[0] == "load" for call in board.calls())


def test_data_is_fetched_by_the_container_where_it_is_missing(board: Board) -> None:
    shutil.rmtree(board.data / "cifar10")

    assert board.run("jetson.sh", "resnet").returncode == 0

    fetching, _ = board.runs()
    assert fetching[-2:] == ["fetch", "cifar10"]
    assert f"type=bind,source={board.data},target=/data" in fetching
    assert "--network" not in fetching
    assert "--runtime" not in fetching


@pytest.mark.parametrize(
    ("words", "fetched"),
    [
        (["-p", "data=synthetic"], []),
        (["-p", "data=fashion-mnist"], ["fashion-mnist"]),
        (["-pdata=fashion-mnist"], ["fashion-mnist"]),
        (["--parameter=data=fashion-mnist"], ["fashion-mnist"]),
        (["--parameter", "data=fashion-mnist"], ["fashion-mnist"]),
        (["--profile", "paper"], ["fashion-mnist"]),
        (["--profile=paper", "-p", "data=synthetic"], []),
        (["-p", "lr=1", "--profile", "smoke"], []),
    ],
)
def test_the_parameter_or_the_profile_says_which_data(
    board: Board, words: list[str], fetched: list[str]
) -> None:
    """MNIST, the default, is there."""
    spec = board.checkout / "experiments/mnist/experiment.toml"
    text = spec.read_text()
    spec.write_text(text.replace("[profiles.paper]", '[profiles.paper]\ndata = "fashion-mnist"'))

    assert board.run("jetson.sh", "mnist", *words).returncode == 0

    assert [call[-1] for call in board.runs() if "fetch" in call] == fetched


def test_a_fetching_container_that_does_not_start(dash: Board) -> None:
    shutil.rmtree(dash.data / "mnist")
    dash.answer("fetch.code", "125\n")

    assert dash.run("jetson.sh").returncode == ExitCode.CONTAINER_REFUSED


def test_data_that_cannot_be_had_ends_it_with_its_own_code(board: Board) -> None:
    shutil.rmtree(board.data / "mnist")
    board.answer("fetch.code", "20\n")

    done = board.run("jetson.sh")

    assert done.returncode == ExitCode.DATA_UNAVAILABLE
    assert "data=synthetic" in done.stderr
    assert len(board.runs()) == 1


def test_an_archive_of_another_target_does_not_take_the_name(board: Board) -> None:
    board.answer("kind", "jetson-next|arm64\n")

    done = board.run("jetson.sh", "--load", str(archive(board)))

    assert done.returncode == ExitCode.NOT_APPLICABLE
    assert not any(call[0] == "tag" for call in board.calls())

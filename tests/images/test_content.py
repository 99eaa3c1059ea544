"""The content tag: it changes with what an image holds, and with nothing else."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.errors import StaleGenerated
from narrowgauge.images.content import content_tag, image_name, source_hash, standin_name
from narrowgauge.images.inspect import facts_of, find_image
from narrowgauge.targets import Target

ROOT = Path(__file__).parents[2]


def described(tag: str, *, standin: str, base: str = "debian:test") -> Mapping[str, Any]:
    """What the engine says of an image of ours."""
    labels = {
        "io.narrowgauge.content": tag,
        "io.narrowgauge.standin": standin,
        "org.opencontainers.image.base.digest": "sha256:base",
        "org.opencontainers.image.base.name": base,
    }
    return {"Id": "sha256:image", "Config": {"Labels": labels}}


@pytest.mark.parametrize(
    "path",
    [
        "images/cpu/Dockerfile",
        "images/cpu/verify",
        "docker/locks/cpu.txt",
        "docker/entrypoint.sh",
        "src/narrowgauge_contract/job.py",
        "src/narrowgauge_kernels/linear.py",
        "src/narrowgauge_scores/areas.py",
    ],
)
def test_the_tag_changes_with_what_the_image_holds(
    path: str, checkout: Path, targets: dict[str, Target]
) -> None:
    before = content_tag(checkout, targets["cpu"])
    with (checkout / path).open("a", encoding="utf-8") as stream:
        stream.write("# one more line\n")

    assert content_tag(checkout, targets["cpu"]) != before


def test_the_tag_does_not_change_with_experiments_or_the_launcher(
    checkout: Path, targets: dict[str, Target]
) -> None:
    before = content_tag(checkout, targets["cpu"])
    (checkout / "experiments/more").mkdir()
    (checkout / "experiments/more/run.py").write_text("x = 1\n", encoding="utf-8")
    (checkout / "src/narrowgauge/more.py").write_text("x = 1\n", encoding="utf-8")
    (checkout / "src/narrowgauge_kernels/__pycache__").mkdir(exist_ok=True)
    (checkout / "src/narrowgauge_kernels/__pycache__/a.py").write_text("", encoding="utf-8")

    assert content_tag(checkout, targets["cpu"]) == before


def test_the_same_tree_elsewhere_has_the_same_tag(
    checkout: Path, targets: dict[str, Target]
) -> None:
    assert content_tag(checkout, targets["cpu"]) == content_tag(ROOT, targets["cpu"])
    assert source_hash(checkout) == source_hash(ROOT)


def test_a_stand_in_never_has_the_tag_of_the_true_image(targets: dict[str, Target]) -> None:
    cpu = targets["cpu"]
    tags = {
        content_tag(ROOT, cpu),
        content_tag(ROOT, cpu, standin_base="a", standin_digest="1"),
        content_tag(ROOT, cpu, standin_base="a", standin_digest="2"),
        content_tag(ROOT, cpu, standin_base="b", standin_digest="1"),
    }

    assert len(tags) == 4


def test_without_a_rendered_dockerfile_there_is_no_tag(
    checkout: Path, targets: dict[str, Target]
) -> None:
    (checkout / "images/cpu/Dockerfile").unlink()

    with pytest.raises(StaleGenerated, match="Dockerfile is missing") as raised:
        content_tag(checkout, targets["cpu"])
    assert "images render" in raised.value.next_step


def test_the_image_on_the_true_base_comes_first(targets: dict[str, Target]) -> None:
    cpu = targets["cpu"]
    tag = content_tag(ROOT, cpu)
    standin = content_tag(ROOT, cpu, standin_base="debian:test", standin_digest="sha256:base")
    images = {
        image_name(cpu, tag): described(tag, standin="false", base=cpu.base.reference),
        standin_name(ROOT, cpu): described(standin, standin="true"),
    }

    found = find_image(images.get, ROOT, cpu)

    assert found is not None
    assert found.name == image_name(cpu, tag)
    assert found.digest == "sha256:image"
    assert not found.stand_in


def test_a_stand_in_that_is_up_to_date_counts_and_says_so(targets: dict[str, Target]) -> None:
    cpu = targets["cpu"]
    tag = content_tag(ROOT, cpu, standin_base="debian:test", standin_digest="sha256:base")

    found = find_image({standin_name(ROOT, cpu): described(tag, standin="true")}.get, ROOT, cpu)

    assert found is not None
    assert found.stand_in
    assert found.content_tag == tag
    assert (found.base, found.base_digest) == ("debian:test", "sha256:base")


def test_an_outdated_stand_in_must_be_built_again(targets: dict[str, Target]) -> None:
    cpu = targets["cpu"]

    assert (
        find_image({standin_name(ROOT, cpu): described("old", standin="true")}.get, ROOT, cpu)
        is None
    )


def test_the_alias_is_never_taken_for_its_content(targets: dict[str, Target]) -> None:
    cpu = targets["cpu"]
    name = standin_name(ROOT, cpu)

    assert find_image({name: described("old", standin="false")}.get, ROOT, cpu) is None
    assert find_image({name: {"Id": "sha256:x", "Config": {}}}.get, ROOT, cpu) is None


def test_a_stand_in_of_another_checkout_is_not_this_ones(
    checkout: Path, targets: dict[str, Target]
) -> None:
    """What the test suite leaves in an engine must not become what a user's runs are made with."""
    cpu = targets["cpu"]
    tag = content_tag(ROOT, cpu, standin_base="debian:test", standin_digest="sha256:base")
    image = described(tag, standin="true")
    images = dict.fromkeys((cpu.alias, standin_name(ROOT, cpu), image_name(cpu, tag)), image)

    assert find_image(images.get, ROOT, cpu) is not None
    assert find_image(images.get, checkout, cpu) is None


def test_an_image_that_does_not_say_what_it_stands_on_is_a_stand_in() -> None:
    facts = facts_of("x", {"Id": "sha256:x", "Config": {"Labels": None}})

    assert facts.stand_in
    assert facts.base == "unknown"
    assert facts.base_digest is None


def test_finding_an_image_imports_no_template_engine_and_no_sdk() -> None:
    """`narrowgauge run` has 40 ms beyond its imports; jinja2 alone takes as much."""
    code = (
        "import sys, narrowgauge.images.inspect, narrowgauge.targets\n"
        "print([m for m in ('docker', 'jinja2', 'pydantic', 'rich') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "[]\n"

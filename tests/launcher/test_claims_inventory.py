"""docs/claims-inventory.toml: every published figure has a claim, or the reason why it has none."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from narrowgauge.judge.gather import Claimed, all_claims
from narrowgauge_contract.spec import load_toml

ROOT = Path(__file__).parents[2]
#: Claims of this project's own, which nobody has published.
OWN = re.compile(
    r"(this project's own|the project's own|measured with this project|not a figure)", re.I
)
NOT_HERE = "experiment not here yet"
#: Fewer claims than these, and some have been lost.
LEAST_CLAIMS = 60
NUMBER = re.compile(r"\d+(?:[.,]\d+)*")


def _sources() -> list[dict[str, Any]]:
    document = load_toml(ROOT / "docs" / "claims-inventory.toml")
    assert list(document) == ["source"]
    listed: list[dict[str, Any]] = document["source"]
    return listed


SOURCES = _sources()
CLAIMS = {each.name: each for each in all_claims(ROOT / "experiments")}
FIGURES = [(source["id"], figure) for source in SOURCES for figure in source["figures"]]


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: str(source["id"]))
def test_a_source_has_all_its_figures(source: dict[str, Any]) -> None:
    assert set(source) == {"id", "title", "count", "figures"}
    assert source["title"]
    assert len(source["figures"]) == source["count"]
    texts = [figure["figure"] for figure in source["figures"]]
    assert len(set(texts)) == len(texts)


def test_sources_are_named_once() -> None:
    ids = [source["id"] for source in SOURCES]
    assert len(set(ids)) == len(ids)


def test_a_figure_has_claims_or_a_reason() -> None:
    for source, figure in FIGURES:
        keys = set(figure)
        assert keys in ({"figure", "claims"}, {"figure", "reason"}), f"{source}: {figure}"
        assert figure["figure"]
        if "reason" in figure:
            assert len(figure["reason"].split()) >= 4
        else:
            assert figure["claims"]


def test_every_claim_that_is_named_is_here() -> None:
    named = {name for _, figure in FIGURES for name in figure.get("claims", ())}

    assert named <= set(CLAIMS)
    assert len(named) >= LEAST_CLAIMS


def test_every_claim_of_a_published_figure_is_named() -> None:
    named = {name for _, figure in FIGURES for name in figure.get("claims", ())}
    published = {name for name, each in CLAIMS.items() if not OWN.match(each.claim.paper)}

    assert published <= named, f"missing: {sorted(published - named)[:5]}"


def _numbers(text: str) -> set[str]:
    return set(NUMBER.findall(text))


def _numbers_of(each: Claimed) -> set[str]:
    claim = each.claim
    return _numbers(" ".join((claim.text, claim.paper, claim.measured_on)))


def test_a_claim_says_the_numbers_that_were_published() -> None:
    for source, figure in FIGURES:
        for name in figure.get("claims", ()):
            missing = _numbers(figure["figure"]) - _numbers_of(CLAIMS[name])
            assert not missing, f"{source}: {name} does not say {sorted(missing)}"


def test_a_figure_that_lacks_its_experiment_is_of_one_that_is_not_here() -> None:
    """The reason goes away with the experiment that makes it untrue."""
    waiting = {source for source, figure in FIGURES if figure.get("reason") == NOT_HERE}
    experiments = {path.name for path in (ROOT / "experiments").iterdir()}

    assert not waiting & experiments


def test_the_test_would_see_a_figure_that_is_missing() -> None:
    source = dict(SOURCES[0], figures=SOURCES[0]["figures"][1:])
    with pytest.raises(AssertionError):
        test_a_source_has_all_its_figures(source)

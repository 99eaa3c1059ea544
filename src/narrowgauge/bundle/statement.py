"""The verdicts as an in-toto statement: predicate `test-result/v0.1`, about records and images.

Not signed: whoever publishes a bundle signs it with tools of their own (cosign, gpg).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from narrowgauge.bundle.entries import VERDICTS_FILE
from narrowgauge.bundle.source import SOURCE_FOLDER
from narrowgauge.judge.model import Judged, Judgement
from narrowgauge_contract.claims import Verdict
from narrowgauge_contract.record import ImageFacts

__all__ = ["PREDICATE_TYPE", "STATEMENT_TYPE", "statement_of", "test_result"]

STATEMENT_TYPE = "https://in-toto.io/Statement/v1"
PREDICATE_TYPE = "https://in-toto.io/attestation/test-result/v0.1"

Verdicts = tuple[Verdict, ...]

_PASSED: Verdicts = (Verdict.REPRODUCED,)
#: REPRODUCED-TREND is more than nothing and less than the claim; UNSTABLE is no answer.
_WARNED: Verdicts = (Verdict.REPRODUCED_TREND, Verdict.UNSTABLE)
_FAILED: Verdicts = (Verdict.NOT_REPRODUCED, Verdict.INVALID)
_SHA256 = "sha256:"
_CLAIMS_FOLDER = f"{SOURCE_FOLDER}/experiments/"


def statement_of(
    judged: Judged,
    digests: Mapping[str, str],
    folders: Iterable[str],
    images: Sequence[ImageFacts],
) -> dict[str, Any]:
    """The statement of a bundle, by the sha256 of each of its files: about the records in `folders`
    and the images, judged by the claims among its sources."""
    records = {f"{folder}/record.json" for folder in folders}
    return test_result(
        judged,
        {name: digest for name, digest in digests.items() if name in records},
        {
            name: digest
            for name, digest in digests.items()
            if name.startswith(_CLAIMS_FOLDER) and name.endswith("/claims.toml")
        },
        images,
        VERDICTS_FILE,
    )


def test_result(
    judged: Judged,
    records: Mapping[str, str],
    configuration: Mapping[str, str],
    images: Sequence[ImageFacts],
    url: str,
) -> dict[str, Any]:
    """The statement as JSON. `records` and `configuration` map names in the bundle to sha256.

    The result is PASSED only where every claim that could be judged was reproduced on the hardware
    it is of, from runs made for it: a replay of stored records is WARNED at best.
    """
    by_verdict = {kind: _names(judged, kind) for kind in (_PASSED, _WARNED, _FAILED)}
    return {
        "_type": STATEMENT_TYPE,
        "subject": [*_descriptors(records), *_image_descriptors(images)],
        "predicateType": PREDICATE_TYPE,
        "predicate": {
            "result": _result(judged, by_verdict),
            "configuration": _descriptors(configuration),
            "url": url,
            "passedTests": by_verdict[_PASSED],
            "warnedTests": by_verdict[_WARNED],
            "failedTests": by_verdict[_FAILED],
        },
    }


def _result(judged: Judged, by_verdict: Mapping[Verdicts, list[str]]) -> str:
    if by_verdict[_FAILED]:
        return "FAILED"
    if by_verdict[_WARNED] or judged.occasion.replay or not by_verdict[_PASSED]:
        return "WARNED"
    return "PASSED"


def _names(judged: Judged, verdicts: Verdicts) -> list[str]:
    return [_name(each) for each in judged.judgements if each.verdict in verdicts]


def _name(judgement: Judgement) -> str:
    return f"{judgement.experiment}/{judgement.claim.id}"


def _descriptors(digests: Mapping[str, str]) -> list[dict[str, Any]]:
    return [{"name": name, "digest": {"sha256": digests[name]}} for name in sorted(digests)]


def _image_descriptors(images: Iterable[ImageFacts]) -> list[dict[str, Any]]:
    return [
        {"name": image.name, "digest": {"sha256": image.digest.removeprefix(_SHA256)}}
        for image in images
        if image.digest.startswith(_SHA256)
    ]

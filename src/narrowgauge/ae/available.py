"""Badge Available: an archive with a DOI, a licence, a page that names the paper."""

from __future__ import annotations

import re

from narrowgauge.ae.artifact import Artifact
from narrowgauge.ae.findings import Criterion, Finding, met, missing, partly

__all__ = ["CRITERIA"]

_DOI = re.compile(r"^(https://doi\.org/)?10\.\d{4,9}/[-._;()/:A-Za-z0-9]+$")
#: What the text of a licence begins with, by its SPDX id.
_LICENCES = {
    "Apache-2.0": "Apache License",
    "BSD-2-Clause": "Redistribution and use in source and binary forms",
    "BSD-3-Clause": "Redistribution and use in source and binary forms",
    "GPL-2.0-only": "GNU GENERAL PUBLIC LICENSE",
    "GPL-3.0-only": "GNU GENERAL PUBLIC LICENSE",
    "GPL-3.0-or-later": "GNU GENERAL PUBLIC LICENSE",
    "MIT": "Permission is hereby granted, free of charge",
    "MPL-2.0": "Mozilla Public License",
}


def _available(of: Artifact) -> Finding:
    said = of.citation
    problems = []
    if not said.doi:
        problems.append("CITATION.cff gives no DOI")
    elif not _DOI.match(said.doi):
        problems.append(f"'{said.doi}' in CITATION.cff has not the form of a DOI")
    problems += _licence_problems(of)
    title = said.paper or said.title
    if not title:
        problems.append("CITATION.cff gives no title")
    elif not _names(of.pages["README.md"], title):
        problems.append(f"README.md does not name '{title}'")
    if not problems:
        return met(f"DOI {said.doi}, licence {said.licence}; that the DOI resolves was not tried")
    remedy = (
        "narrowgauge bundle --public; deposit it where versions stay (Zenodo, not GitHub); write"
        " its `doi:` into CITATION.cff, and the paper's title into README.md"
    )
    found = "; ".join(problems)
    return missing(found, remedy) if not said.doi else partly(found, remedy)


def _licence_problems(of: Artifact) -> list[str]:
    text, said = of.pages["LICENSE"], of.citation.licence
    if not text:
        return ["there is no LICENSE"]
    if said not in _LICENCES:
        known = ", ".join(sorted(_LICENCES))
        return [f"the licence '{said}' of CITATION.cff is none that this knows ({known})"]
    return [] if _LICENCES[said] in text else [f"LICENSE is not the text of {said}"]


def _names(page: str, title: str) -> bool:
    """Whether the page has the title, or what stands before its colon."""
    words = " ".join(page.split()).casefold()
    short = title.partition(":")[0]
    return any(" ".join(each.split()).casefold() in words for each in (title, short))


CRITERIA = (
    Criterion(
        "A1",
        "Available",
        "an archive with a DOI, a licence, and the paper named",
        "ACM v1.1 and sysartifacts: a repository whose versions cannot be revoked, with a licence"
        " that lets others compare and extend, and a README that says which paper it is of.",
        _available,
    ),
)

"""Texts of records made inert: each format's escapes, in one place.

Whatever comes from a record, a claim or a folder's name passes `clean` when the view is made, and
the format's own escape when it is written. HTML is escaped by jinja2.
"""

from __future__ import annotations

import re
import unicodedata

__all__ = ["clean", "code_block", "csv_cell", "label", "latex", "markdown"]

#: Longer texts are cut: a report is read by people, and the record keeps the whole.
MOST_CHARACTERS = 4000
#: What names something is cut earlier: TeX has no wider box, and no table a wider column.
MOST_OF_A_LABEL = 160
#: Controls (C0, C1, with it every ANSI sequence), format characters (with them those that turn
#: the direction of text around), surrogates, private use, line and paragraph separators.
_ACTING = frozenset(("Cc", "Cf", "Cs", "Co", "Cn", "Zl", "Zp"))
_MARKDOWN = re.compile(r"([\\`*_{}\[\]<>#|~$&@])")
#: What GitHub makes a link of without brackets, and where a backslash keeps it from that.
_AUTOLINK = re.compile(r"(?i)\b((?:https?|ftp|mailto|xmpp)(?=:)|www(?=\.))")
#: What makes a list, a heading or a rule where a line begins with it.
_BEGINNING = re.compile(r"^(\d*)(?:([.)])(?=\s|$)|(?<!\d)([-+=]))")
_LATEX = {
    "\\": r"\textbackslash{}",
    "{": r"\{",
    "}": r"\}",
    "$": r"\$",
    "&": r"\&",
    "#": r"\#",
    "%": r"\%",
    "_": r"\_",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "<": r"\textless{}",
    ">": r"\textgreater{}",
    "|": r"\textbar{}",
    '"': r"\textquotedbl{}",
    "`": r"\textasciigrave{}",
    "-": "-{}",
    "–": "--",
    "—": "---",
    "−": "$-$",
    "×": r"$\times$",
    "·": r"$\cdot$",
    "±": r"$\pm$",
    "≤": r"$\leq$",
    "≥": r"$\geq$",
    "≠": r"$\neq$",
    "≈": r"$\approx$",
    "µ": r"$\mu$",
    "μ": r"$\mu$",
    "…": r"\ldots{}",
    "→": r"$\rightarrow$",
    "’": "'",
    "“": "``",
    "”": "''",
}
#: With what a spreadsheet begins a formula.
_FORMULA = ("=", "+", "-", "@", "\t", "\r")


def clean(value: object, *, lines: bool = False) -> str:
    """A text without what acts instead of being read; with `lines`, line breaks stay.

    What is taken out is shown as U+FFFD, so that a reader sees that there was something.
    """
    text = str(value)
    if text.isascii() and text.isprintable() and len(text) <= MOST_CHARACTERS:
        return text  # most of all texts, of which a report has hundreds of thousands
    text = text.replace("\r\n", "\n")
    kept = []
    for letter in text[:MOST_CHARACTERS]:
        if letter == "\n" and lines:
            kept.append(letter)
        elif letter in "\n\t":
            kept.append(" ")
        else:
            kept.append("\N{REPLACEMENT CHARACTER}" if _acts(letter) else letter)
    return "".join(kept) + ("…" if len(text) > MOST_CHARACTERS else "")


def label(value: object) -> str:
    """A name, clean and of a length that headings and tables take."""
    text = clean(value)
    return text if len(text) <= MOST_OF_A_LABEL else f"{text[: MOST_OF_A_LABEL - 1]}…"


def _acts(letter: str) -> bool:
    if letter.isascii():
        return not letter.isprintable()
    return unicodedata.category(letter) in _ACTING


def markdown(value: object) -> str:
    """A text as running Markdown, also in a table's cell: no markup, HTML or link."""
    escaped = _MARKDOWN.sub(r"\\\1", clean(value).strip())
    escaped = _AUTOLINK.sub(r"\1\\", escaped)
    return _BEGINNING.sub(r"\1\\\2\3", escaped)


def code_block(value: object, language: str = "sh") -> str:
    """A fenced block that its content cannot close."""
    text = clean(value, lines=True)
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language}\n{text}\n{fence}"


def latex(value: object) -> str:
    """A text as LaTeX that sets these characters and runs nothing; those that pdfLaTeX does not
    have become question marks."""
    return "".join(_LATEX.get(letter) or _latin(letter) for letter in clean(value))


def _latin(letter: str) -> str:
    if letter.isascii() or (letter.isalpha() and ord(letter) < 0x180):
        return letter
    return "?"


def csv_cell(value: object) -> str:
    """A text for a spreadsheet: one that would begin a formula has an apostrophe before it."""
    text = clean(value)
    return f"'{text}" if text.lstrip().startswith(_FORMULA) else text

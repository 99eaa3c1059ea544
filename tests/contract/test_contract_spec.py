"""experiment.toml: what it may say, and how what it may not say is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Dict

import pytest
from contract_cases import document, spec

from narrowgauge_contract.errors import (
    BadValueError,
    ExitCode,
    ExperimentFileError,
    UnknownNameError,
)
from narrowgauge_contract.outcome import Row, Status, Validity
from narrowgauge_contract.spec import headline_of, load_spec, parse_spec


def _with(path: str, value: Any) -> Dict[str, Any]:
    """The toy's document with one thing replaced; `...` removes it."""
    changed = document()
    *places, last = path.split("/")
    table: Any = changed
    for place in places:
        table = table[int(place)] if isinstance(table, list) else table[place]
    if value is ...:
        del table[last]
    else:
        table[last] = value
    return changed


def test_the_toy_is_read_as_it_stands() -> None:
    toy = spec()

    assert list(toy.parameters) == ["precision", "width", "lr", "flip", "note", "data"]
    assert toy.profiles["short"].repeats == 2
    assert toy.profiles["short"].values == {"width": (4, 8)}
    assert toy.profiles["paper"].repeats == 10
    assert toy.parameters["lr"].default == 0.1
    assert toy.drawings[0].metrics == ("accuracy",)
    assert toy.requires_torch == ">=1.8"


@pytest.mark.parametrize(
    ("path", "value", "named"),
    [
        ("experiment/headline", ["accuracy", "loss"], ("accuracy", "loss")),
        ("experiment/headline", ("accuracy",), ("accuracy",)),
        ("experiment/an_older_key", "kept", ("accuracy",)),
        ("experiment/headline", ["accuracy", 3, None], ("accuracy",)),
        ("experiment/headline", "accuracy", ()),
        ("experiment/headline", None, ()),
        ("experiment/headline", ..., ()),
        ("experiment", ["headline"], ()),
        ("experiment", ..., ()),
    ],
)
def test_the_headline_is_read_of_any_declaration(path: str, value: Any, named: Any) -> None:
    assert headline_of(_with(path, value)) == named


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("experiment", ..., r"lacks the table \[experiment\]"),
        ("experiment/title", "", "lacks the text 'title'"),
        ("experiment/summary", ..., "lacks the text 'summary'"),
        ("experiment/headlin", ["x"], "unknown key 'headlin'"),
        ("experiment/headline", "accuracy", "'headline' should be a list of names"),
        ("experiments", {}, "unknown key 'experiments'"),
        ("parameters/width/type", "integer", "type 'integer' is not one of"),
        ("parameters/width/axis", "column", "axis 'column' is not one of"),
        ("parameters/width/help", ..., "lacks the text 'help'"),
        ("parameters/width/default", ..., "lacks 'default'"),
        ("parameters/width/minimum", 3, "unknown key 'minimum'"),
        ("parameters/width/choices", ["a"], "'choices' and type"),
        ("parameters/precision/choices", [], "'choices' and type"),
        ("parameters/width/aliases", "w", "'aliases' should be a list of names"),
        ("parameters/width/aliases", [7], "'aliases' should be a list of names"),
        ("parameters/width/recipe", "yes", "'recipe' should be true or false"),
        ("parameters/width/any_value", 1, "'any_value' should be true or false"),
        ("parameters/note/commas", "yes", "'commas' should be true or false"),
        ("parameters/width/commas", True, "'commas' is of type = \"str\" only"),
        ("parameters/note/pattern", "", "lacks the text 'pattern'"),
        ("parameters/note/pattern", "(a", "pattern '\\(a' is no regular expression"),
        ("parameters/width/pattern", "a", "'pattern' is of type = \"str\" only"),
        ("parameters/width/aliases", ["lr"], "alias 'lr' already means 'lr'"),
        ("parameters/width/aliases", ["width"], "alias 'width' already means 'width'"),
        ("parameters/width/aliases", ["w", "w"], "alias 'w' already means 'width'"),
        ("parameters/lr/aliases", ["w"], "alias 'w' already means 'width'"),
        ("parameters/width/aliases", ["a=b"], "alias 'a=b' is not a name"),
        ("parameters/width/aliases", [""], "alias '' is not a name"),
        (
            "parameters/width",
            {
                "type": "int",
                "default": 8,
                "axis": "row",
                "help": "h",
                "recipe": True,
                "any_value": True,
            },
            "'recipe' and 'any_value' exclude each other",
        ),
        ("parameters/width", 8, "should be a table"),
        ("parameters", [], "should be a table"),
        ("profiles/medium", {}, "a profile is one of"),
        ("profiles/short/widht", 4, "unknown key 'widht'"),
        ("profiles/short/repeats", "two", "repeats should be a whole number"),
        ("profiles/short/repeats", 0, "repeats should be a whole number"),
        ("data/parameter", "datum", "no parameter 'datum'"),
        ("data/sets", "mnist", "'sets' should be a list of names"),
        ("requires", {"cuda": "12"}, "unknown key 'cuda'"),
        ("draw/0/kind", "pie", "kind is one of"),
        ("draw/0/title", ..., "lacks the text 'title'"),
        ("draw/0/colour", "red", "unknown key 'colour'"),
        ("draw", {"name": "x"}, "should be a list of tables"),
    ],
)
def test_each_mistake_in_the_file_is_named(path: str, value: Any, message: str) -> None:
    with pytest.raises((ExperimentFileError, UnknownNameError), match=message) as caught:
        parse_spec(_with(path, value))

    assert caught.value.exit_code is ExitCode.USAGE


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("parameters/width/default", 65),
        ("parameters/width/default", "8"),
        ("parameters/width/default", True),
        ("parameters/precision/default", "fp31"),
        ("profiles/short/width", [4, 0]),
        ("profiles/short/width", 4.5),
    ],
)
def test_a_value_against_its_declaration_shows_it(path: str, value: Any) -> None:
    with pytest.raises(BadValueError) as caught:
        parse_spec(_with(path, value))

    assert "axis row" in caught.value.next_step


def test_a_default_that_is_not_of_the_declared_form_is_a_mistake_in_the_file() -> None:
    with pytest.raises(BadValueError, match="'note' does not take ''"):
        parse_spec(_with("parameters/note/pattern", "a+"))


def test_an_unknown_key_names_the_nearest() -> None:
    with pytest.raises(ExperimentFileError, match="did you mean 'summary'"):
        parse_spec(_with("experiment/sumary", "x"))


@pytest.mark.parametrize(
    ("name", "text", "value"),
    [
        ("width", " 12 ", 12),
        ("lr", "1e-3", 0.001),
        ("lr", "3", 3.0),
        ("flip", "True", True),
        ("flip", "0", False),
        ("precision", "bf16", "bf16"),
        ("note", "a,b=c", "a,b=c"),
    ],
)
def test_words_become_values(name: str, text: str, value: Any) -> None:
    parsed = spec().parameter(name).parse(text)

    assert parsed == value
    assert type(parsed) is type(value)


@pytest.mark.parametrize(
    ("name", "text", "why"),
    [
        ("width", "1.5", "not of type int"),
        ("width", "", "not of type int"),
        ("width", "0", "below 1"),
        ("width", "65", "above 64"),
        ("lr", "nan", "not a number"),
        ("lr", "-0.1", "below 0"),
        ("lr", "fast", "not of type float"),
        ("flip", "yes", "true or false"),
        ("precision", "bf61", "did you mean 'bf16'?"),
        ("precision", "q", "not a known value"),
    ],
)
def test_a_bad_word_shows_why_and_the_declaration(name: str, text: str, why: str) -> None:
    parameter = spec().parameter(name)

    with pytest.raises(BadValueError) as caught:
        parameter.parse(text)

    assert caught.value.why == why
    assert caught.value.next_step == parameter.declaration()


def test_an_unknown_parameter_lists_the_known() -> None:
    with pytest.raises(UnknownNameError, match="unknown parameter 'widht' of 'toy'") as caught:
        spec().parameter("widht")

    assert "did you mean 'width'?" in caught.value.next_step
    assert "precision" in caught.value.next_step


def test_an_alias_means_its_parameter_and_is_shown() -> None:
    toy = spec()

    assert toy.parameter("w") is toy.parameter("breadth") is toy.parameter("width")
    assert list(toy.parameters) == ["precision", "width", "lr", "flip", "note", "data"]
    assert toy.parameter("w").declaration().startswith("width (or breadth, w): int >= 1 <= 64")
    assert toy.parameter("lr").declaration().startswith("lr: float")


def test_an_unknown_parameter_may_be_nearest_to_an_alias() -> None:
    with pytest.raises(UnknownNameError, match="unknown parameter 'breath'") as caught:
        spec().parameter("breath")

    assert "did you mean 'breadth'?" in caught.value.next_step
    assert "Known: breadth, data, " in caught.value.next_step


def test_a_profile_names_parameters_by_their_true_names() -> None:
    with pytest.raises(ExperimentFileError, match="unknown key 'w'"):
        parse_spec(_with("profiles/short/w", 4))


def test_the_folder_is_the_id(tmp_path: Path) -> None:
    path = tmp_path / "other" / "experiment.toml"
    path.parent.mkdir()
    path.write_text('[experiment]\nid = "toy"\ntitle = "T"\nsummary = "S"\n')

    with pytest.raises(ExperimentFileError, match="id is 'toy' but the folder is 'other'"):
        load_spec(path)


@pytest.mark.parametrize(
    "lines",
    ['default = "a,b"', 'default = ""\n[profiles.short]\nmemo = "a,b"'],
    ids=["default", "profile"],
)
def test_a_file_says_so_where_a_text_of_its_own_has_commas(tmp_path: Path, lines: str) -> None:
    path = tmp_path / "toy" / "experiment.toml"
    path.parent.mkdir()
    head = '[experiment]\nid = "toy"\ntitle = "T"\nsummary = "S"\n'
    declared = '[parameters.memo]\ntype = "str"\naxis = "row"\nhelp = "N"\n'
    path.write_text(head + declared + lines + "\n")

    with pytest.raises(ExperimentFileError, match=r"memo.*'a,b' would be a list"):
        load_spec(path)
    path.write_text(head + declared + "commas = true\n" + lines + "\n")
    assert load_spec(path).parameters["memo"].parse_list("c,d") == ("c,d",)


@pytest.mark.parametrize(
    ("content", "message"),
    [(None, "does not exist"), (b"[experiment", "not valid TOML"), (b"\xff", "not valid TOML")],
)
def test_a_file_that_is_no_toml_is_named(tmp_path: Path, content: Any, message: str) -> None:
    path = tmp_path / "toy" / "experiment.toml"
    path.parent.mkdir()
    if content is not None:
        path.write_bytes(content)

    with pytest.raises(ExperimentFileError, match=message):
        load_spec(path)


LADDER: Dict[str, Any] = {
    "name": "l", "kind": "ladder", "title": "L", "parameter": "precision", "metric": "seconds",
    "order": ["fp32", "bf16"], "ends": ["fp16", "fp8"], "names": {"bf16": "half"},
}  # fmt: skip


def _ladder(**changes: Any) -> Dict[str, Any]:
    body = {key: value for key, value in {**LADDER, **changes}.items() if value is not ...}
    changed = _with("parameters/precision/choices", ["fp32", "bf16", "fp16", "fp8"])
    return {**changed, "draw": [body]}


def test_a_ladder_is_read_with_its_values_checked() -> None:
    (drawing,) = parse_spec(_ladder()).drawings

    assert drawing.ladder is not None
    assert drawing.ladder.order == ("fp32", "bf16")
    assert drawing.ladder.ends == ("fp16", "fp8")
    assert drawing.ladder.names == {"bf16": "half"}
    (widths,) = parse_spec(
        _ladder(parameter="width", order=[1, 2], ends=[3, 4], names={"1": "one"})
    ).drawings
    assert widths.ladder is not None
    assert widths.ladder.names == {1: "one"}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parameter": "precisoin"}, "no parameter 'precisoin'"),
        ({"parameter": "data"}, "makes runs, not rows"),
        ({"metric": ...}, "lacks the text 'metric'"),
        ({"order": "fp32"}, "'order' should be a list of values"),
        ({"order": ["fp32"]}, "two or more different values"),
        ({"order": ["fp32", "fp32"]}, "two or more different values"),
        ({"ends": ...}, "'ends' should be a list of values"),
        ({"ends": ["fp16"]}, "two different values"),
        ({"ends": ["fp16", "fp16"]}, "two different values"),
        ({"ends": ["fp32", "fp16"]}, "'ends' and 'order' share fp32"),
        ({"metrics": ["seconds"]}, "unknown key 'metrics'"),
        ({"kind": "curve"}, "unknown key 'metric'"),
        ({"kind": "bar"}, "unknown key 'parameter'"),
        ({"names": ["x"]}, "'names' should be a table"),
    ],
)
def test_each_mistake_in_a_ladder_is_named(changes: Dict[str, Any], message: str) -> None:
    with pytest.raises(ExperimentFileError, match=message):
        parse_spec(_ladder(**changes))


def test_a_rung_that_the_parameter_does_not_take_is_refused() -> None:
    with pytest.raises(BadValueError):
        parse_spec(_ladder(order=["fp32", "fp4"]))


def _curve(**changes: Any) -> Dict[str, Any]:
    """Of the ladder's experiment, with a curve of some of its rows."""
    drawing = {
        "name": "c", "kind": "curve", "title": "C", "metrics": ["seconds"],
        "parameter": "precision", "values": ["fp32", "bf16"], **changes,
    }  # fmt: skip
    return {**_ladder(), "draw": [{k: v for k, v in drawing.items() if v is not ...}]}


def test_a_curve_may_be_of_some_rows() -> None:
    (some,) = parse_spec(_curve()).drawings
    (every,) = parse_spec(_curve(parameter=..., values=...)).drawings

    assert some.shows({"precision": "bf16", "width": 1})
    assert not some.shows({"precision": "fp16", "width": 1})
    assert every.shows({"precision": "fp16", "width": 1})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"parameter": "precisoin"}, "no parameter 'precisoin'"),
        ({"parameter": "data"}, "makes runs, not rows"),
        ({"parameter": ...}, "lacks the text 'parameter'"),
        ({"values": ...}, "'values' should be a list of values"),
        ({"values": []}, "'values' is empty"),
    ],
)
def test_each_mistake_in_a_curve_of_some_rows_is_named(
    changes: Dict[str, Any], message: str
) -> None:
    with pytest.raises(ExperimentFileError, match=message):
        parse_spec(_curve(**changes))


def test_a_curve_of_a_value_that_the_parameter_does_not_take_is_refused() -> None:
    with pytest.raises(BadValueError):
        parse_spec(_curve(values=["fp4"]))


def _ticks(ticks: Any, **changes: Any) -> Dict[str, Any]:
    """The curve's experiment, with a parameter that is a list."""
    body = _curve(ticks=ticks, **changes)
    share = {"type": "str", "commas": True, "default": "0.1,0.5", "axis": "run", "help": "H."}
    return {**body, "parameters": {**body["parameters"], "shares": share}}


def test_the_places_of_a_curve_have_names_of_the_row() -> None:
    row = Row(0, 0, 0, {"shares": "0.1, 0.5"}, Status.COMPLETE, Validity(True),
              facts={"layers": ["a", 2, 0.25], "deep": [["a"]], "flag": [True], "one": "abc"},
              )  # fmt: skip

    def names(ticks: Any) -> Any:
        (drawing,) = parse_spec(_ticks(ticks)).drawings
        assert drawing.ticks is not None
        return drawing.ticks.names_of(row)

    assert names({"parameter": "shares"}) == ("0.1", "0.5")
    assert names({"fact": "layers"}) == ("a", "2", "0.25")
    for unfit in ("deep", "flag", "one", "unknown"):
        assert names({"fact": unfit}) is None
    assert parse_spec(_curve()).drawings[0].ticks is None


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"ticks": {"parameter": "shraes"}}, "ticks: no parameter 'shraes'"),
        ({"ticks": {"parameter": "precision"}}, "'precision' is no list"),
        ({"ticks": {"facts": "layers"}}, "unknown key 'facts'"),
        ({"ticks": {"fact": ""}}, "lacks the text 'fact'"),
        ({"ticks": {}}, "one fact or one parameter"),
        ({"ticks": {"fact": "layers", "parameter": "shares"}}, "one fact or one parameter"),
        ({"ticks": "layers"}, "should be a table"),
        ({"ticks": {"fact": "layers"}, "kind": "bar", "parameter": ..., "values": ...},
         "unknown key 'ticks'"),
    ],
)  # fmt: skip
def test_each_mistake_in_the_names_of_places_is_named(
    changes: Dict[str, Any], message: str
) -> None:
    with pytest.raises(ExperimentFileError, match=message):
        parse_spec(_ticks(**changes))


def test_only_parts_of_torch_can_be_preloaded() -> None:
    assert parse_spec(_with("requires", {"preload": ["torch._dynamo"]})).preload == (
        "torch._dynamo",
    )
    with pytest.raises(ExperimentFileError, match="modules of torch"):
        parse_spec(_with("requires", {"preload": ["numpy"]}))

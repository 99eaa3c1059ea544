"""`narrowgauge placement`, what `list` and `plan` say of placement plans, and their TOML."""

from __future__ import annotations

import io
import json
import os
import re
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from launching import TINY_TOML

from narrowgauge.cli.app import run_program
from narrowgauge.placement_toml import plan_toml
from narrowgauge_contract.errors import ExitCode
from narrowgauge_contract.job import load_job
from narrowgauge_contract.placement import (
    BACKENDS,
    BUILTIN,
    DEVICES,
    ELSEWHERE,
    POLICIES,
    PRECISIONS,
    WEIGHTS,
    WIRES,
    LayerPlacement,
    PassPlacement,
    PlacementPlan,
    Transfers,
    parse_plan,
    plan_document,
    plan_value,
)
from narrowgauge_contract.placement_files import load_plan

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_PARAMETER = """
[parameters.plan]
type = "plan"
axis = "row"
default = "none"
help = "Where passes run."
"""
_MINE = """
[plan]
name = "mine"
elsewhere = "cpu"
[passes]
device = "accelerator"
precision = "int8"
[passes.weight_grad]
precision = "bf16"
[transfer]
weights = "each-call"
resident = false
[transfer.wire]
input = "int8"
[layers."[fc]*"]
device = "cpu"
precision = "fp32"
"""


class Cli:
    """Runs command lines in this process; gives the exit code and what was printed where."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def __call__(self, *words: str) -> tuple[int, str, str]:
        errors = io.StringIO()
        self._capture.readouterr()
        code = run_program(words, os.environ, errors)
        return code, self._capture.readouterr().out, errors.getvalue()


@pytest.fixture
def cli(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Cli:
    """In a folder of its own, in which `mine.toml` lies."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "200")
    (tmp_path / "mine.toml").write_text(_MINE)
    return Cli(capsys)


def _cells(text: str) -> list[list[str]]:
    return [line.split() for line in text.splitlines()]


def test_the_list_has_a_line_per_plan(cli: Cli) -> None:
    code, out, _ = cli("placement", "list")

    lines = {line[0]: line for line in _cells(out) if line}
    assert code == 0
    assert set(BUILTIN) <= set(lines)
    assert lines["hetero-int8"][1:] == ["cpu", "accelerator", "int8", "torch", "overlapped", "int8"]
    assert lines["cpu"][1:] == ["cpu", "cpu", "fp32", "torch", "none"]
    assert "fp16 input, grad_output; fp32 output, grad_input" in out
    code, out, _ = cli("placement", "list", "--json")
    assert {each["plan"]["name"]: each for each in json.loads(out)} == BUILTIN


def _documented() -> str:
    page = Path(__file__).parents[2] / "experiments" / "hetero-plan" / "README.md"
    (block,) = re.findall(r"```toml\n(.*?)```", page.read_text(encoding="utf-8"), re.DOTALL)
    return str(block)


def test_the_documented_plan_is_one_and_names_every_key_and_word(cli: Cli) -> None:
    text = _documented()
    Path("documented.toml").write_text(text, encoding="utf-8")
    plan = load_plan(Path("documented.toml"))

    code, out, _ = cli("placement", "show", "documented.toml", "--toml")
    assert code == 0
    assert parse_plan(tomllib.loads(out), "shown") == plan
    assert cli("placement", "show", "documented.toml")[0] == 0

    words = {key: _words_after(text, key) for key in ("elsewhere", "device", "precision")}
    words.update({key: _words_after(text, key) for key in ("backend", "policy", "weights")})
    known = {
        "elsewhere": ELSEWHERE, "device": DEVICES, "precision": PRECISIONS, "backend": BACKENDS,
        "policy": POLICIES, "weights": WEIGHTS,
    }  # fmt: skip
    for key, each in known.items():
        assert set(each) <= words[key], key
    (wires,) = re.findall(r"^\[transfer\.wire\] +# (.*?):", text, re.MULTILINE)
    assert set(wires.split(", ")) == set(WIRES)
    keys = _keys(plan_document(plan)) - {"layers", "default"}
    assert keys <= set(re.findall(r"[a-z_]+", text))


def _words_after(text: str, key: str) -> set[str]:
    """The words of the first line that gives the key."""
    found = re.search(rf"^{key} = .*# (.*)$", text, re.MULTILINE)
    assert found is not None, key
    return set(re.findall(r"[a-z0-9-]+", found[1]))


def _keys(document: dict[str, object]) -> set[str]:
    """Of the tables, and of the tables in them."""
    found = set(document)
    for each in document.values():
        if isinstance(each, dict):
            found |= _keys(each)
    return found


@pytest.mark.parametrize(
    ("right", "wrong"),
    [("\nprecision =", "\nprecison ="), ('policy = "overlapped"', 'policy = "sometimes"')],
)
def test_what_is_not_documented_does_not_parse(cli: Cli, right: str, wrong: str) -> None:
    """Or the test above would say yes to anything."""
    text = _documented()
    assert right in text
    Path("wrong.toml").write_text(text.replace(right, wrong, 1), encoding="utf-8")
    assert cli("placement", "show", "wrong.toml")[0] == ExitCode.USAGE


def test_a_plan_of_a_file_is_shown_with_every_pass_and_transfer(cli: Cli) -> None:
    code, out, _ = cli("placement", "show", "mine.toml")

    cells = _cells(out)
    assert code == 0
    assert f"rows call it {plan_value(load_plan(Path('mine.toml')))}" in out
    assert "elsewhere: cpu" in out
    for line in (
        ["every", "layer", "forward", "accelerator", "int8", "torch"],
        ["weight_grad", "accelerator", "bf16", "torch"],
        ["[fc]*", "all", "cpu", "fp32", "torch"],
        ["policy", "overlapped"],
        ["inputs", "sent", "again", "between", "forward", "and", "backward"],
        ["weights", "sent", "each", "call"],
        ["pieces", "as", "the", "layer", "chooses"],
        ["input", "on", "the", "wire", "int8"],
        ["grad_input", "on", "the", "wire", "fp32"],
    ):
        assert line in cells
    assert "the last one counts" in out
    assert "elsewhere_by" not in out
    assert (
        "elsewhere_by: kernels (batch normalisation" in cli("placement", "show", "hetero-fp32")[1]
    )


def test_a_plan_on_one_device_says_that_nothing_travels(cli: Cli) -> None:
    _, out, _ = cli("placement", "show", "accelerator-bf16")

    assert "built in" in out
    assert "all is on one device: accelerator" in out
    assert "on the wire" not in out


def test_the_bug_of_the_original_is_told(cli: Cli) -> None:
    _, text, _ = cli("placement", "show", "original-fp16", "--toml")
    Path("bug.toml").write_text(text.replace("[passes]", "stride_bug = true\n[passes]", 1))

    _, out, _ = cli("placement", "show", "bug.toml")
    assert "wrong weight gradient at stride 2" in out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("show", "hetro-int8"), "did you mean 'hetero-int8'?"),
        (("show", "missing.toml"), "there is no placement plan 'missing.toml'"),
        (("show", "."), "there is no placement plan '.'|cannot be read"),
        (("show", "broken.toml"), "unknown key 'passe'"),
        (("show", "cpu", "--toml", "--json"), "--toml and --json do not go together"),
    ],
)
def test_what_is_no_plan_is_told(cli: Cli, words: tuple[str, ...], said: str) -> None:
    Path("broken.toml").write_text(_MINE.replace("[passes]", "[passe]"))

    code, _, errors = cli("placement", *words)

    assert code == ExitCode.USAGE
    assert any(part in errors for part in said.split("|")), errors


def test_json_has_the_document_and_what_rows_call_it(cli: Cli) -> None:
    plan = load_plan(Path("mine.toml"))

    _, out, _ = cli("placement", "show", "mine.toml", "--json")
    assert json.loads(out) == {"value": plan_value(plan), "document": plan_document(plan)}
    _, out, _ = cli("placement", "show", "hetero-fp8", "--json")
    assert json.loads(out)["value"] == "hetero-fp8"


@pytest.mark.parametrize("name", BUILTIN)
def test_the_toml_of_a_plan_is_that_plan(name: str, tmp_path: Path) -> None:
    plan = parse_plan(BUILTIN[name], name)
    (tmp_path / "x.toml").write_text(plan_toml(plan), encoding="utf-8")

    assert load_plan(tmp_path / "x.toml") == plan


_INT8 = PassPlacement("accelerator", "int8")
_FP32 = PassPlacement("cpu", "fp32")
_FAITHFUL = PassPlacement("accelerator", "fp16", "faithful")
_PASSES = st.sampled_from([_INT8, _FP32, _FAITHFUL])


@given(
    st.dictionaries(
        st.text(min_size=1).filter(str.strip),
        st.builds(LayerPlacement, _PASSES, _PASSES, _PASSES),
        min_size=1,
        max_size=3,
    ),
    st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_pattern_survives_toml(layers: dict[str, LayerPlacement], resident: bool) -> None:
    plan = PlacementPlan(
        "mine",
        "cpu",
        tuple(layers.items()),
        LayerPlacement(_INT8, _FP32, _FAITHFUL),
        Transfers(resident=resident, pieces=3, wire={"output": "bf16"}),
        convolutions_only=resident,
        stride_bug=True,
        elsewhere_by="kernels" if resident else "torch",
    )

    assert parse_plan(tomllib.loads(plan_toml(plan)), "x") == plan


@pytest.fixture
def planned(tiny_checkout: Path) -> Path:
    """The tiny checkout, whose experiment takes a plan."""
    text = TINY_TOML.replace("[profiles.smoke]", f"{_PARAMETER}\n[profiles.smoke]")
    (tiny_checkout / "experiments" / "tiny" / "experiment.toml").write_text(text)
    return tiny_checkout


@pytest.mark.parametrize("executor", ["docker", "native"])
def test_the_plan_of_a_run_has_the_plans_file_in_it(cli: Cli, planned: Path, executor: str) -> None:
    words = ("--on", "cpu", "--executor", executor, "--project", str(planned))

    code, out, errors = cli("plan", "tiny", "-p", "plan=mine.toml,cpu", *words, "--json")

    assert code == 0, errors
    [found] = json.loads(out)
    value, builtin = found["job"]["parameters"]["plan"]
    mine = plan_document(load_plan(Path("mine.toml")))
    assert builtin == "cpu"
    assert found["job"]["plan"] == {value: mine, "cpu": BUILTIN["cpu"]}
    assert [row["parameters"]["plan"] for row in found["job"]["rows"]][:2] == [value, "cpu"]
    # Nothing of the file is mounted, or even named.
    assert "mine.toml" not in out
    Path("job.json").write_text(json.dumps(found["job"]))
    Path("mine.toml").unlink()
    assert (load_job(Path("job.json")).plan or {})[value] == mine
    code, out, _ = cli("plan", "tiny", "-p", "plan=hetero-bf16", *words)
    assert code == 0
    assert '"name": "hetero-bf16"' in out


def test_a_plan_that_is_not_there_stops_a_run_before_it_starts(cli: Cli, planned: Path) -> None:
    for command in ("run", "plan"):
        words = ("-p", "plan=theirs.toml", "--project", str(planned))
        code, _, errors = cli(command, "tiny", *words)

        assert code == ExitCode.USAGE
        assert "there is no placement plan 'theirs.toml'" in errors
        assert "built in: cpu, accelerator," in errors


def test_the_listing_and_the_help_name_what_is_built_in(cli: Cli, planned: Path) -> None:
    _, out, _ = cli("list", "--project", str(planned))
    joined = " ".join(out.split())
    assert "tiny -p plan=PLAN: a TOML file, or cpu, accelerator," in joined
    assert all(name in joined for name in BUILTIN)
    _, out, _ = cli("list", "--json", "--project", str(planned))
    [tiny] = json.loads(out)["experiments"]
    assert tiny["parameters"]["plan"]["choices"] == [*BUILTIN, "none"]
    _, out, _ = cli("run", "--help")
    helped = "".join(out.split())
    assert all(name in helped for name in BUILTIN)

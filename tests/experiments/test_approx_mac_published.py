"""Published kernels as peers: tables in their order, what they take, what is missing.

Their own kernels are stood in for by what their sources say they compute; the slow tier's test
compiles the real ones where the user has placed them.
"""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any, List

import pytest
import torch
from one_row import CPU, Rows
from torch.nn import functional

from narrowgauge_contract.errors import NotApplicableError
from narrowgauge_lab.layers.manual.settings import settings_of
from narrowgauge_lab.networks.layer_shapes import LayerShape, product

module = Rows("approx-mac", ()).module
LAYER = LayerShape(4, 10, kernel=3, stride=2, size=9, padding=1)


def subject(policy: str, shape: LayerShape = LAYER) -> Any:
    drawn = module("operands").Drawn(CPU, 3, False, False)
    return module("subject").subject_of(settings_of(policy), shape, 2, drawn)


def looked_up(table: torch.Tensor, one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    """[…, M, K] by [N, K] as bytes: int32 [..., M, N]."""
    rows, columns = (codes.view(torch.uint8).long() for codes in (one, other))
    return table[rows[..., :, None, :], columns].sum(-1, dtype=torch.int32)


def stand_in_torchapprox(*_of: Any) -> Any:
    def matmul_cpu(a: torch.Tensor, b: torch.Tensor, lut: torch.Tensor, res: torch.Tensor) -> None:
        res.copy_(looked_up(lut, a, b))

    return SimpleNamespace(matmul_cpu=matmul_cpu)


def stand_in_adapt(name: str, _files: Any, flags: List[str], _link: Any) -> Any:
    """Reads the header that would be compiled in; weights come first in its look-ups."""
    folder = next(flag[2:] for flag in flags if flag.startswith("-I"))
    (header,) = Path(folder, "axx_mults").glob("*.h")
    assert f"-DAXX_MULT={header.stem}" in flags
    assert name == f"adapt_{header.stem}"
    numbers = [int(n) for n in re.findall(r"-?\d+", header.read_text().split("=", 1)[1])]
    table = torch.tensor(numbers, dtype=torch.int32).view(256, 256)

    def forward(
        x: torch.Tensor, w: torch.Tensor, kernel: List[int], stride: List[int], pad: List[int]
    ) -> torch.Tensor:
        taps = functional.unfold(x.float(), kernel, padding=pad, stride=stride).to(torch.int8)
        sums = looked_up(
            table, w.reshape(len(w), -1), taps.transpose(1, 2).reshape(-1, w[0].numel())
        )
        side = (x.shape[2] + 2 * pad[0] - kernel[0]) // stride[0] + 1
        return sums.view(len(w), len(x), side, side).transpose(0, 1)

    return SimpleNamespace(forward=forward)


@pytest.fixture
def placed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Both checkouts, with what their sources compute."""
    published = module("published")
    for name, part in (published._TORCHAPPROX, published._ADAPT):
        path = tmp_path / name / part
        path.parent.mkdir(parents=True)
        path.touch()
    monkeypatch.setattr(published, "FOLDER", tmp_path)
    monkeypatch.setattr(published, "_torchapprox_module", stand_in_torchapprox)
    monkeypatch.setattr(published, "_compiled", stand_in_adapt)
    return published


@pytest.mark.parametrize(
    ("policy", "shape", "found"),
    [
        ("lut8x8:mitchell-signed", LAYER, {"torchapprox", "adapt"}),
        ("lut8x8:bam-2-4-signed", product(0, 23, 35), {"torchapprox"}),
        ("lut8x8:mitchell", LAYER, {"torchapprox"}),
    ],
)
def test_a_placed_kernel_gets_the_table_in_its_own_order(
    placed: Any, policy: str, shape: LayerShape, found: set
) -> None:
    """Tables whose operands do not commute would come out wrong turned around."""
    which = subject(policy, shape)

    peers, missing = module("peers").peers_of(which, "all")

    of = {peer.name: peer for peer in peers if peer.name in ("torchapprox", "adapt")}
    assert set(of) == found
    for peer in of.values():
        assert torch.equal(peer.sampled(peer.call()).long(), peer.wanted)
    assert ("adapt" in missing) is ("adapt" not in found)


def test_a_table_beyond_16_bits_is_none_of_adapts(placed: Any) -> None:
    table = torch.zeros(256, 256, dtype=torch.int32)
    table[3, 4] = 40_000
    with pytest.raises(NotApplicableError, match="int16"):
        placed.adapt(subject("lut8x8:mitchell-signed").operands, table)


def test_without_a_checkout_it_is_missing_and_says_where_it_belongs() -> None:
    _, missing = module("peers").peers_of(subject("lut8x8:mitchell-signed"), "all")

    assert missing["torchapprox"].endswith("published/torch-approx")
    assert missing["adapt"].endswith("published/adapt")


# What torch 1.8 loads for its extension loader.
@pytest.mark.filterwarnings("ignore:the imp module is deprecated:DeprecationWarning")
def test_what_does_not_compile_is_missing_with_the_compilers_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from torch.utils import cpp_extension

    def load(*_words: Any, **_options: Any) -> Any:
        raise RuntimeError("Error building\nx.cpp:3:1: error: no such thing\nmore")

    monkeypatch.setattr(cpp_extension, "load", load)
    with pytest.raises(NotApplicableError) as caught:
        module("published")._compiled("torchapprox_cpu", [tmp_path / "x.cpp"], [], [])
    assert "torchapprox_cpu does not compile" in caught.value.what
    assert caught.value.why == "x.cpp:3:1: error: no such thing"


@pytest.mark.slow
def test_the_real_kernels_agree_with_the_table() -> None:
    folder = module("published").FOLDER
    here = [name for name in ("torchapprox", "adapt") if (folder / DIRECTORY[name]).is_dir()]
    if not here:
        pytest.skip(f"no checkout in {folder}")
    peers, missing = module("peers").peers_of(subject("lut8x8:mitchell-signed"), "all")
    of = {peer.name: peer for peer in peers}
    for name in here:
        assert name in of, missing[name]
        assert torch.equal(of[name].sampled(of[name].call()).long(), of[name].wanted)


DIRECTORY = {"torchapprox": "torch-approx", "adapt": "adapt"}

"""The network of the original's manual layers, and its files."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, Dict

import pytest
import torch

from narrowgauge_lab.errors import DataCorruptError, DataUnavailableError
from narrowgauge_lab.layers.manual.convert import convert
from narrowgauge_lab.networks.manual_mnist import ManualNet, load_pth

State = Dict[str, Any]


def _renamed(state: State) -> State:
    return {name.replace("fc_", "fc"): tensor for name, tensor in state.items()}


class TestNetwork:
    def test_it_is_the_originals(self) -> None:
        model = ManualNet()

        assert sum(each.numel() for each in model.parameters()) == 18_224
        assert model(torch.zeros(2, 1, 28, 28)).shape == (2, 10)
        assert list(model.state_dict()) == [
            f"{layer}.{kind}" for layer in ("conv_1", "conv_2", "fc_1", "fc_2")
            for kind in ("weight", "bias")
        ]  # fmt: skip

    @pytest.mark.parametrize("policy", ["exact_fp32", "exact_int8"])
    def test_exact_policies_see_the_same_classes(self, policy: str) -> None:
        torch.manual_seed(0)
        model, x = ManualNet().eval(), torch.randn(20, 1, 28, 28)

        exact, manual = model(x), convert(model, policy).model(x)

        tolerance = 1e-5 if policy == "exact_fp32" else 0.02
        assert bool(((exact - manual).abs() <= tolerance).all())


class TestFiles:
    def test_weights_come_back(self, tmp_path: Path) -> None:
        torch.manual_seed(1)
        saved, model = ManualNet(), ManualNet()
        torch.save(saved.state_dict(), tmp_path / "net.pth")

        load_pth(model, tmp_path / "net.pth")
        manual = convert(ManualNet(), "mitchell").model
        load_pth(manual, tmp_path / "net.pth")

        for name, tensor in saved.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor)
            assert torch.equal(manual.state_dict()[name], tensor)

    @pytest.mark.parametrize(
        ("change", "why"),
        [
            (_renamed, "names are not the network's: fc1.bias"),
            (
                lambda state: {**state, "fc_2.bias": torch.zeros(9)},
                r"fc_2.bias is torch.float32 \[9\]",
            ),
            (lambda state: {**state, "fc_2.bias": torch.zeros(10).half()}, "torch.float16"),
            (lambda state: {**state, "fc_2.bias": 3}, "fc_2.bias is a int"),
            (lambda state: list(state), "it holds a list"),
        ],
    )
    def test_other_weights_are_refused(
        self, change: Callable[[State], Any], why: str, tmp_path: Path
    ) -> None:
        model = ManualNet()
        before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        torch.save(change(dict(model.state_dict())), tmp_path / "net.pth")

        with pytest.raises(DataCorruptError, match=why):
            load_pth(model, tmp_path / "net.pth")

        for name, tensor in model.state_dict().items():
            assert torch.equal(tensor, before[name])

    def test_what_is_no_file_of_torchs(self, tmp_path: Path) -> None:
        (tmp_path / "net.pth").write_bytes(b"weights")

        with pytest.raises(DataCorruptError, match="torch does not read it"):
            load_pth(ManualNet(), tmp_path / "net.pth")
        with pytest.raises(DataUnavailableError, match="no weights in"):
            load_pth(ManualNet(), tmp_path / "none.pth")

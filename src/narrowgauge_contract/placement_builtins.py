"""The placement plans that have names, as documents; `placement.parse_plan` reads them."""

from __future__ import annotations

from typing import Any, Dict, Mapping

__all__ = ["BUILTIN"]

_TENSORS = ("input", "output", "grad_output", "grad_input")


def _document(
    name: str,
    passes: Mapping[str, str],
    transfer: Mapping[str, Any],
    wire: Mapping[str, str],
    elsewhere: str = "cpu",
    convolutions_only: bool = False,
    elsewhere_by: str = "torch",
) -> Dict[str, Any]:
    by = {} if elsewhere_by == "torch" else {"elsewhere_by": elsewhere_by}
    return {
        "plan": {
            "name": name,
            "elsewhere": elsewhere,
            "convolutions_only": convolutions_only,
            "stride_bug": False,
            **by,
        },
        "passes": {each: dict(passes) for each in ("forward", "input_grad", "weight_grad")},
        "transfer": {**transfer, "wire": {each: wire.get(each, "fp32") for each in _TENSORS}},
        "layers": [],
    }


def _one_device(name: str, device: str, precision: str) -> Dict[str, Any]:
    """Everything on one device: nothing travels, whatever the transfers say."""
    passes = {"device": device, "precision": precision, "backend": "torch"}
    return _document(name, passes, _BEST, {}, elsewhere=device)


def _hetero(precision: str, wire: str) -> Dict[str, Any]:
    """The convolution and linear passes on the accelerator and all else on the CPU."""
    passes = {"device": "accelerator", "precision": precision, "backend": "torch"}
    wires = dict.fromkeys(_TENSORS, wire)
    return _document(f"hetero-{precision}", passes, _BEST, wires, elsewhere_by="kernels")


def _original(precision: str) -> Dict[str, Any]:
    """As the original did it: its engines took the precision and gave fp32 back, and linear layers
    stayed on the CPU."""
    passes = {"device": "accelerator", "precision": precision, "backend": "faithful"}
    sent = {"input": precision, "grad_output": precision}
    return _document(
        f"original-{precision}", passes, _AS_THE_ORIGINAL, sent, convolutions_only=True
    )


def _tensorrt(precision: str) -> Dict[str, Any]:
    """One engine per layer and pass, refitted only where the weights changed. Its tensors travel in
    the type that it takes."""
    passes = {"device": "accelerator", "precision": precision, "backend": "tensorrt"}
    wires = dict.fromkeys(_TENSORS, precision)
    return _document(f"tensorrt-{precision}", passes, _PER_CALL, wires, elsewhere_by="kernels")


_BEST = {"policy": "overlapped", "resident": True, "weights": "dirty", "pieces": 0}
_AS_THE_ORIGINAL = {"policy": "pageable", "resident": False, "weights": "each-call", "pieces": 0}
#: An engine takes its operands from the host at every call.
_PER_CALL = {"policy": "pinned", "resident": False, "weights": "dirty", "pieces": 0}

#: name -> document, in the form that `placement.plan_document` gives.
BUILTIN: Dict[str, Dict[str, Any]] = {
    document["plan"]["name"]: document
    for document in (
        _one_device("cpu", "cpu", "fp32"),
        _one_device("accelerator", "accelerator", "fp32"),
        _one_device("accelerator-tf32", "accelerator", "tf32"),
        _one_device("accelerator-bf16", "accelerator", "bf16"),
        _one_device("accelerator-fp16", "accelerator", "fp16"),
        _one_device("accelerator-int8", "accelerator", "int8"),
        _one_device("accelerator-fp8", "accelerator", "fp8"),
        _original("fp32"),
        _original("fp16"),
        _hetero("fp32", "fp32"),
        _hetero("tf32", "fp32"),
        _hetero("bf16", "bf16"),
        _hetero("fp16", "fp16"),
        _hetero("int8", "int8"),
        _hetero("fp8", "int8"),
        _tensorrt("fp32"),
        _tensorrt("fp16"),
    )
}

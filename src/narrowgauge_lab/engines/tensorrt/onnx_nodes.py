"""Names and operators of the nodes of an ONNX file, read without onnx, which not every image has.

TensorRT 8 says which node it refuses by its number only. The format is protobuf's: fields of a
number and a wire type in one varint, then a varint, 8 bytes, a length and that many bytes, or 4.
"""

from __future__ import annotations

from typing import Iterator, List, Tuple, Union

__all__ = ["node_inputs", "node_names"]

_MODEL_GRAPH = 7
_GRAPH_NODE = 1
_NODE_INPUT, _NODE_OUTPUT, _NODE_NAME, _NODE_OPERATOR = 1, 2, 3, 4


def node_names(model: bytes) -> List[Tuple[str, str]]:
    """(name, operator) of each node, in the file's order. A node without a name is called by its
    first output. Raises ValueError where the bytes are no protobuf."""
    nodes = []
    for graph in _all(memoryview(model), _MODEL_GRAPH):
        for node in _all(graph, _GRAPH_NODE):
            name, operator, output = (
                next((bytes(each).decode() for each in _all(node, field)), "")
                for field in (_NODE_NAME, _NODE_OPERATOR, _NODE_OUTPUT)
            )
            nodes.append((name or output, operator))
    return nodes


def node_inputs(model: bytes) -> List[Tuple[str, ...]]:
    """What each node reads, by name, in the file's order. Raises as `node_names`."""
    return [
        tuple(bytes(each).decode() for each in _all(node, _NODE_INPUT))
        for graph in _all(memoryview(model), _MODEL_GRAPH)
        for node in _all(graph, _GRAPH_NODE)
    ]


def _all(message: memoryview, wanted: int) -> Iterator[memoryview]:
    for number, value in _fields(message):
        if number == wanted and isinstance(value, memoryview):
            yield value


def _fields(message: memoryview) -> Iterator[Tuple[int, Union[int, memoryview]]]:
    at = 0
    while at < len(message):
        key, at = _varint(message, at)
        number, kind = key >> 3, key & 7
        if kind == 0:
            value, at = _varint(message, at)
            yield number, value
            continue
        if kind == 2:
            length, at = _varint(message, at)
        elif kind in (1, 5):
            length = 8 if kind == 1 else 4
        else:
            raise ValueError(f"wire type {kind} at byte {at}")
        if at + length > len(message):
            raise ValueError(f"a field of {length} bytes at byte {at} of {len(message)}")
        yield number, message[at : at + length]
        at += length


def _varint(message: memoryview, at: int) -> Tuple[int, int]:
    """Seven bits a byte, the lowest first; the number and where it ends."""
    value = shift = 0
    while at < len(message):
        byte = message[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
    raise ValueError("the bytes end within a number")

"""An encoder as a graph of ONNX Runtime: its products of matrices in 8 bits, or all of it in float32.

The graph takes the tokens of all rows as one long row, as the packed encoder does, and pads inside of attention only.
Weights have a scale for each output, and each token has a scale of its own. A token's numbers thus do not depend on the
tokens beside it, and a text's vector does not depend on the texts of its batch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from luminosity.extras import require
from luminosity.inference.handlers.text.packed.families import Shape

__all__ = ["Balance", "encoder_graph", "product_graph"]

_OPSET, _IR = 17, 8  # what ONNX Runtime 1.18 reads
_CONTRIB = "com.microsoft"
_BELOW = 0.17  # GELU is never less than -0.17
_TINY = 1e-12  # the least scale: no division by zero
_MOST_BYTES = 2_000_000_000  # in a file of ONNX
_INPUTS: dict[str, list[str | int]] = {
    "ids": ["tokens"],
    "positions": ["tokens"],
    "queries": ["rows", "heads", "longest"],
    "back": ["tokens", "heads"],
    "mask": ["rows", 1, "longest", "longest"],
    "distances": ["longest", "longest"],
}
"""The inputs of graphs and their sizes. All are whole numbers, but for the mask, which is added to scores.

``queries`` and ``back`` are numbers of heads: each token has those of its query, of its key and of its value."""

Array = npt.NDArray[Any]
Tensors = Mapping[str, Array]


@dataclass(frozen=True)
class Balance:
    """What is taken from the channels of states before their 8 bits, and put into the weights that follow.

    Few channels of an encoder have numbers far larger than all others, and mostly of one sign: without a balance, these
    alone would decide the scale of a token.
    """

    centre: Array
    spread: Array
    """The channels are divided by it."""

    @classmethod
    def none(cls, width: int) -> Balance:
        """Return the balance that changes nothing."""
        return cls(np.zeros(width, np.float32), np.ones(width, np.float32))


def encoder_graph(
    shape: Shape, common: Tensors, layers: Sequence[Tensors], balances: Sequence[Balance], largest: int | None
) -> bytes:
    """Return the model of an encoder with these weights, those of ``Weights.load``.

    ``balances``: one for each norm but the last. ``largest``: the largest weight in 8 bits, or None for float32.
    """
    graph = _Graph(largest)
    graph.inputs = ["ids", "queries", "back", "mask", *(["positions"] if "positions" in common else [])]
    words = common["words"] + common["types"][0] if "types" in common else common["words"]
    states = graph.node("Gather", graph.constant(words), "ids")
    if "positions" in common:
        states = graph.node("Add", states, graph.node("Gather", graph.constant(common["positions"]), "positions"))
    attention = _Attention(graph, shape, common.get("distances"))
    found = [*balances, Balance.none(shape.width)]
    states = graph.norm(states, common, "norm", found[0], shape.epsilon)
    for number, layer in enumerate(layers):
        before, between, after = found[2 * number : 2 * number + 3]
        joined, bias = graph.linear(states, *_moved(layer, "joined", before))
        attended = attention(graph.node("Add", joined, graph.constant(bias)))
        out, bias = graph.linear(attended, layer["out.weight"], layer["out.bias"])
        states = graph.sum(states, before, out, bias)
        states = graph.norm(states, layer, "norm", between, shape.epsilon)
        up, bias = graph.linear(states, *_moved(layer, "up", between))
        inside = graph.node("BiasGelu", up, graph.constant(bias), domain=_CONTRIB)
        down, bias = graph.linear(inside, layer["down.weight"], layer["down.bias"], is_gelu=True)
        states = graph.sum(states, between, down, bias)
        states = graph.norm(states, layer, "last", after, shape.epsilon)
    return graph.model(states)


def product_graph(rows: Array, weight: Array) -> bytes:
    """Return the model of one product: of rows of 8 bits without signs, and of a weight of 8 bits with signs."""
    graph = _Graph(None)
    scales = (graph.constant(np.float32(1)), graph.constant(np.ones(weight.shape[1], np.float32)))
    given = (graph.constant(rows), graph.constant(weight), *scales)
    return graph.model(graph.node("MatMulIntegerToFloat", *given, domain=_CONTRIB))


def _moved(layer: Tensors, name: str, balance: Balance) -> tuple[Array, Array]:
    """Return the weight and bias that give the same for balanced states as the layer's own for the whole ones."""
    weight = layer[f"{name}.weight"]
    return weight * balance.spread, layer[f"{name}.bias"] + weight @ balance.centre


def _types() -> Any:
    return require("onnx", "onnx").TensorProto


class _Graph:
    """The nodes of a graph and its constants."""

    def __init__(self, largest: int | None) -> None:
        self._helper = require("onnx.helper", "onnx")
        self._largest = largest
        self._nodes: list[Any] = []
        self._constants: list[Any] = []
        self._bytes = 0
        self._quantized: dict[str, tuple[str, str, str]] = {}
        self._middles = ""
        self.inputs: list[str] = []

    def node(self, kind: str, *inputs: str, domain: str = "", **attributes: Any) -> str:
        """Add a node and return the name of its output."""
        name = f"{kind}_{len(self._nodes)}"
        self._nodes.append(self._helper.make_node(kind, inputs, [name], name=name, domain=domain, **attributes))
        return name

    def constant(self, value: Array | np.generic) -> str:
        """Add a constant and return its name. Numbers of Python's are to be converted before."""
        array = np.ascontiguousarray(value) if np.ndim(value) else np.asarray(value)
        array = array.astype(np.float32) if array.dtype == np.float64 else array
        name = f"constant_{len(self._constants)}"
        self._constants.append(require("onnx.numpy_helper", "onnx").from_array(array, name))
        self._bytes += array.nbytes
        return name

    def whole(self, *numbers: int) -> str:
        """Add whole numbers, such as a shape."""
        return self.constant(np.array(numbers, np.int64))

    def norm(self, states: str, weights: Tensors, name: str, balance: Balance, epsilon: float) -> str:
        """Add a norm over the channels, with what it gives balanced."""
        scale = weights[f"{name}.weight"] / balance.spread
        bias = (weights[f"{name}.bias"] - balance.centre) / balance.spread
        given = (states, self.constant(scale), self.constant(bias))
        return self.node("LayerNormalization", *given, axis=-1, epsilon=epsilon)

    def sum(self, states: str, balance: Balance, others: str, bias: Array) -> str:
        """Add the sum of states that are balanced, of others, and of a bias."""
        whole = self.node("Mul", states, self.constant(balance.spread))
        return self.node("Add", self.node("Add", whole, others), self.constant(bias + balance.centre))

    def linear(self, states: str, weight: Array, bias: Array, is_gelu: bool = False) -> tuple[str, Array]:
        """Add a product and return what is still to be added to it. ``is_gelu``: the states are those after GELU."""
        if self._largest is None:
            return self.node("MatMul", states, self.constant(weight.T)), bias
        scales = np.abs(weight).max(axis=1) / self._largest
        scales[scales == 0] = 1
        whole = np.round(weight / scales[:, np.newaxis]).astype(np.int8)
        if states not in self._quantized:
            self._quantized[states] = self._rows_after_gelu(states) if is_gelu else self._rows(states)
        rows, scale, beyond = self._quantized[states]
        given = (rows, self.constant(whole.T), self.constant(np.float32(1)), self.constant(scales))
        zero = self.constant(np.uint8(0 if is_gelu else 128))
        product = self.node("Mul", self.node("MatMulIntegerToFloat", *given, zero, domain=_CONTRIB), scale)
        if not is_gelu:
            return product, bias
        below = scales * whole.sum(axis=1, dtype=np.int32)
        return self.node("Sub", product, self.node("Mul", beyond, self.constant(below))), bias - _BELOW * below

    def _rows(self, states: str) -> tuple[str, str, str]:
        """Add 8 bits around 128 for each token's states, and their scales."""
        if not self._middles:
            middle = self._helper.make_tensor("middle", _types().UINT8, [1], [128])
            self._middles = self.node("ConstantOfShape", self.node("Shape", "ids"), value=middle)
        least = self.node("Neg", self.node("ReduceMin", states, axes=[1], keepdims=1))
        most = self.node("Max", self.node("ReduceMax", states, axes=[1], keepdims=1), least)
        scale = self.node("Mul", most, self.constant(np.float32(1 / 127)))
        return *self._with_scale(states, self.node("Max", scale, self.constant(np.float32(_TINY))), self._middles), ""

    def _rows_after_gelu(self, states: str) -> tuple[str, str, str]:
        """Add 8 bits from -0.17 on. This is a whole number of steps, so that it can be taken away after the product.

        Where states are so large that one step is more than 0.17, the third name is by how much.
        """
        below = self.constant(np.float32(_BELOW))
        span = self.node("Add", self.node("ReduceMax", states, axes=[1], keepdims=1), below)
        steps = self.node("Floor", self.node("Div", self.constant(np.float32(255 * _BELOW)), span))
        steps = self.node("Max", steps, self.constant(np.float32(1)))
        steps = self.node("Min", steps, self.constant(np.float32(255)))
        widest = self.node("Mul", span, self.constant(np.float32(1 / 255)))
        scale = self.node("Max", self.node("Div", below, steps), widest)
        zeros = self.node("Cast", self.node("Reshape", steps, self.whole(-1)), to=_types().UINT8)
        beyond = self.node("Sub", self.node("Mul", steps, scale), below)
        return *self._with_scale(states, scale, zeros), beyond

    def _with_scale(self, states: str, scale: str, zeros: str) -> tuple[str, str]:
        flat = self.node("Reshape", scale, self.whole(-1))
        return self.node("QuantizeLinear", states, flat, zeros, axis=0), scale

    def model(self, states: str) -> bytes:
        """Return the model whose output are these states."""
        if self._bytes > _MOST_BYTES:
            raise OverflowError(f"a file of ONNX holds {_MOST_BYTES:,} bytes of weights, the model has {self._bytes:,}")
        helper, types = self._helper, _types()
        self._nodes.append(helper.make_node("Identity", [states], ["states"]))
        kinds = {name: types.FLOAT if name == "mask" else types.INT32 for name in self.inputs}
        inputs = [helper.make_tensor_value_info(name, kind, _INPUTS[name]) for name, kind in kinds.items()]
        output = helper.make_tensor_value_info("states", types.FLOAT, ["tokens", "width"])
        graph = helper.make_graph(self._nodes, "encoder", inputs, [output], self._constants)
        opsets = [helper.make_opsetid("", _OPSET), helper.make_opsetid(_CONTRIB, 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=_IR).SerializeToString()


class _Attention:
    """Attention within rows: heads are gathered into padded rows, and back."""

    def __init__(self, graph: _Graph, shape: Shape, distances: Array | None) -> None:
        self._graph = graph
        self._shape = shape
        heads = graph.constant(np.int32(shape.heads))
        keys = graph.node("Add", "queries", heads)
        self._places = ("queries", keys, graph.node("Add", keys, heads))
        self._mask = "mask"
        if distances is not None:
            graph.inputs.append("distances")
            biases = graph.node("Gather", graph.constant(distances), "distances")
            self._mask = graph.node("Add", "mask", graph.node("Transpose", biases, perm=[2, 0, 1]))

    def __call__(self, joined: str) -> str:
        """Add the attended values of each token."""
        graph, shape = self._graph, self._shape
        node, heads = graph.node, graph.whole(-1, shape.head_size)
        joined = node("Reshape", joined, heads)
        queries, keys, values = (node("Gather", joined, places) for places in self._places)
        scores = node("FusedMatMul", queries, keys, domain=_CONTRIB, alpha=shape.head_size**-0.5, transB=1)
        shares = node("Softmax", node("Add", scores, self._mask), axis=-1)
        attended = node("Reshape", node("MatMul", shares, values), heads)
        return node("Reshape", node("Gather", attended, "back"), graph.whole(-1, shape.width))

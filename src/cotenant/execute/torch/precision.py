"""Mixed precision: runs a program that was exported in FP32 in FP16 or BF16, with casts between operators.

1. Operators of `_SHORT` (products, convolutions, attention) run in the short type, with weights cast at opening.
2. Operators of `_EITHER` run in it if one of their inputs is short and none is full.
3. All others run in FP32: they need its range or digits (exp, pow, sums, boxes), or are not known to do without.

A tensor is full if such an operator, a number or a cast made it.
"""

from __future__ import annotations

from typing import Any, Literal

import torch
from torch import fx

from cotenant.execute.torch.fold import new_weight
from cotenant.graph.errors import GraphError
from cotenant.graph.torch_lower import Lowered, aten_name

SHORT = {"fp16": torch.float16, "bf16": torch.bfloat16}
"""By precision: the element type in place of FP32."""

Kind = Literal["short", "soft", "full"]
"""Of a tensor that was FP32: now short; still FP32, but cast beside a short input; FP32 in any case."""


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


_SHORT = _names(
    """
    conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d convolution
    linear addmm addbmm baddbmm mm bmm mv dot matmul einsum scaled_dot_product_attention
    embedding embedding_bag lstm gru rnn_tanh rnn_relu lstm_cell gru_cell
    """
)
_EITHER = _names(
    """
    add sub rsub mul div neg abs maximum minimum clamp clamp_min clamp_max where masked_fill lerp
    relu relu6 hardtanh leaky_relu prelu elu selu celu gelu silu mish hardswish hardsigmoid sigmoid tanh glu
    batch_norm layer_norm group_norm instance_norm rms_norm native_layer_norm softmax _softmax
    max_pool1d max_pool2d max_pool3d max_pool2d_with_indices avg_pool1d avg_pool2d avg_pool3d mean amax amin
    adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d _adaptive_avg_pool2d adaptive_max_pool2d
    max min argmax argmin topk sort argsort eq ne lt le gt ge isnan isinf isfinite
    cat concat stack hstack vstack chunk split split_with_sizes unbind tensor_split meshgrid
    view reshape _unsafe_view view_as flatten unflatten permute transpose t numpy_T mT movedim squeeze unsqueeze
    expand expand_as broadcast_to repeat tile repeat_interleave slice select narrow diagonal flip roll unfold
    index index_select gather take_along_dim triu tril pad constant_pad_nd reflection_pad1d reflection_pad2d
    replication_pad2d upsample_nearest1d upsample_nearest2d upsample_linear1d upsample_bilinear2d pixel_shuffle
    pixel_unshuffle clone contiguous to _to_copy type_as
    zeros_like ones_like full_like empty_like new_zeros new_ones new_full new_empty
    """
)
"""Operators with kernels that compute sums and powers in FP32 inside, or that compute none."""


def shorten(lowered: Lowered, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
    """Cast a functional FP32 program to `dtype`, in place; its inputs and outputs keep their declared types.

    Adds weights in `dtype` to `weights`, by full name, and removes those that are no longer read. Raises GraphError,
    which names the operator, when the program cannot be cast.
    """
    if lowered.trouble:
        raise GraphError(f"{lowered.trouble}, and cannot be cast")
    cast = _Caster(lowered, weights, dtype)
    for node in list(lowered.graph.nodes):
        if _is_fp32(node.meta.get("val")) or node.op == "call_function":
            cast.take(node)
    cast.end()


class _Caster:
    def __init__(self, lowered: Lowered, weights: dict[str, torch.Tensor], dtype: torch.dtype) -> None:
        self._lowered = lowered
        self._weights = weights
        self._dtype = dtype
        self._most = torch.finfo(dtype).max
        self._kinds: dict[fx.Node, Kind] = {}
        self._cast: dict[tuple[fx.Node, torch.dtype, bool], fx.Node] = {}

    def take(self, node: fx.Node) -> None:
        """Choose the type of a node, and cast its inputs. Nodes come in the order of the program."""
        if node.op != "call_function":
            self._kinds[node] = "soft"
            return
        read = {self._kinds[each] for each in node.all_input_nodes if each in self._kinds}
        if not _has_tensor(node.meta.get("val")):  # a size, or a number read from a tensor
            return
        if not read:  # made of numbers
            kind: Kind = "full"
        elif not isinstance(node.target, torch._ops.OpOverload):
            if aten_name(node) != "getitem":
                raise GraphError(f"its operator {aten_name(node)!r} cannot be cast; leave its precision at 'tf32'")
            (kind,) = read
        elif aten_name(node) in _SHORT:
            kind = "short"
        elif aten_name(node) not in _EITHER:
            kind = "full"
        elif torch.float32 in (*node.args, *node.kwargs.values()):
            self._kinds[node] = "full"
            return
        else:
            kind = "full" if "full" in read else "short" if "short" in read else "soft"
        if kind != "soft" and aten_name(node) != "getitem":
            self._feed(node, self._dtype if kind == "short" else torch.float32)
        if _is_fp32(node.meta["val"]):
            self._kinds[node] = kind
            if kind == "short":
                node.meta["val"] = _shortened(node.meta["val"], self._dtype)

    def end(self) -> None:
        """Cast outputs to their declared types, and remove replaced weights."""
        graph, lowered = self._lowered.graph, self._lowered
        last = next(iter(reversed(graph.nodes)))
        lowered.outputs = tuple(self._in(node, torch.float32) for node in lowered.outputs)
        last.args = (lowered.outputs,)
        for node in [node for node in lowered.weights if not node.users]:
            graph.erase_node(node)
            self._weights.pop(lowered.weights.pop(node), None)

    def _feed(self, node: fx.Node, dtype: torch.dtype) -> None:
        is_mask = aten_name(node) == "scaled_dot_product_attention"
        mask = (node.args[3] if len(node.args) > 3 else node.kwargs.get("attn_mask")) if is_mask else None

        def given(value: Any) -> Any:
            if isinstance(value, fx.Node):
                return self._in(value, dtype, value is mask)
            if dtype is self._dtype and isinstance(value, float) and self._most < abs(value) < float("inf"):
                return self._most if value > 0 else -self._most  # a large negative number in a mask
            return value

        if aten_name(node) == "batch_norm":  # its statistics stay in FP32, as kernels of GPUs require
            node.args = (given(node.args[0]), *node.args[1:])
            return
        node.args = fx.node.map_aggregate(node.args, given)
        node.kwargs = fx.node.map_aggregate(node.kwargs, given)

    def _in(self, node: fx.Node, dtype: torch.dtype, bounded: bool = False) -> fx.Node:
        """A tensor in a type: itself, its weight in that type, or a cast. With `bounded`, values are clamped first."""
        if node not in self._kinds or (self._kinds[node] == "short") == (dtype is self._dtype):
            return node
        key = node, dtype, bounded
        if key in self._cast:
            return self._cast[key]
        if node in self._lowered.weights:
            value = self._weights[self._lowered.weights[node]].clamp(-self._most, self._most).to(dtype)
            made = new_weight(self._lowered, self._weights, f"{node.name}_short", value)
            made.meta = {"val": _shortened(node.meta["val"], dtype)}
        else:
            made = node
            if bounded:
                made = self._after(
                    made, torch.ops.aten.clamp.default, (made, -self._most, self._most), node.meta["val"]
                )
            made = self._after(made, torch.ops.aten.to.dtype, (made, dtype), node.meta["val"].to(dtype))
        self._cast[key] = made
        return made

    def _after(self, node: fx.Node, target: Any, arguments: tuple[Any, ...], value: Any) -> fx.Node:
        with self._lowered.graph.inserting_after(node):
            made = self._lowered.graph.call_function(target, arguments)
        made.meta = {"val": value}
        return made


def lay_out(lowered: Lowered, weights: dict[str, torch.Tensor]) -> None:
    """Store the kernels of 2-d convolutions channels last; the tensors around them then follow that layout.

    Raises GraphError when the program depends on the memory layout of a tensor.
    """
    for node in lowered.graph.nodes:
        if node.op != "call_function":
            continue
        name = aten_name(node)
        if name == "as_strided":
            raise GraphError(
                "its operator 'as_strided' needs the exported memory layout of tensors: leave channels_last out"
            )
        if name in ("view", "_unsafe_view") and node.target._overloadname == "default":
            node.target = torch.ops.aten.reshape.default
        kernel = node.args[1] if name in ("conv2d", "conv_transpose2d") and len(node.args) > 1 else None
        if kernel in lowered.weights:
            full = lowered.weights[kernel]
            weights[full] = weights[full].contiguous(memory_format=torch.channels_last)


def _is_fp32(value: Any) -> bool:
    if isinstance(value, list | tuple):
        return any(map(_is_fp32, value))
    return isinstance(value, torch.Tensor) and value.dtype is torch.float32


def _has_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or (isinstance(value, list | tuple) and any(map(_has_tensor, value)))


def _shortened(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_shortened(each, dtype) for each in value)
    return value.to(dtype) if _is_fp32(value) else value

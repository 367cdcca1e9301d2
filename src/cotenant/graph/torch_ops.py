"""ONNX operator types and costs of torch's operators: tables and rules, without torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import prod
from typing import Any

from cotenant.graph.costs import CostedNode, Shape, count_macs

_GROUPS = {
    "Conv": "conv1d conv2d conv3d convolution _convolution mkldnn_convolution cudnn_convolution",
    "ConvTranspose": "conv_transpose1d conv_transpose2d conv_transpose3d",
    "Gemm": "linear addmm",
    "MatMul": "matmul mm bmm baddbmm addbmm mv dot",
    "Einsum": "einsum",
    "Attention": "scaled_dot_product_attention _scaled_dot_product_flash_attention "
    "_scaled_dot_product_flash_attention_for_cpu _scaled_dot_product_efficient_attention",
    "LSTM": "lstm",
    "GRU": "gru",
    "RNN": "rnn_tanh rnn_relu",
    "Gather": "embedding index index_select gather take take_along_dim",
    "EmbeddingBag": "embedding_bag _embedding_bag",
    "MaxPool": "max_pool1d max_pool2d max_pool3d max_pool2d_with_indices adaptive_max_pool2d",
    "AveragePool": "avg_pool1d avg_pool2d avg_pool3d adaptive_avg_pool1d adaptive_avg_pool2d adaptive_avg_pool3d "
    "_adaptive_avg_pool2d",
    "Concat": "cat concat stack hstack vstack",
    "Split": "chunk split split_with_sizes unbind tensor_split",
    "TopK": "topk sort argsort",
    "ReduceSum": "sum",
    "ReduceMean": "mean",
    "ReduceMax": "amax max",
    "ReduceMin": "amin min",
    "ReduceProd": "prod",
    "ArgMax": "argmax",
    "ArgMin": "argmin",
    "CumSum": "cumsum",
    "Resize": "upsample_nearest2d upsample_bilinear2d upsample_nearest1d upsample_linear1d upsample_bicubic2d",
    "DepthToSpace": "pixel_shuffle",
    "If": "cond",
    "BatchNormalization": "batch_norm _native_batch_norm_legit_no_training cudnn_batch_norm native_batch_norm",
    "LayerNormalization": "layer_norm native_layer_norm",
    "RMSNormalization": "rms_norm _fused_rms_norm",
    "GroupNormalization": "group_norm native_group_norm",
    "InstanceNormalization": "instance_norm",
    "Softmax": "softmax _softmax",
    "LogSoftmax": "log_softmax _log_softmax",
    "Relu": "relu",
    "Clip": "clamp clamp_min clamp_max clip hardtanh relu6",
    "LeakyRelu": "leaky_relu",
    "PRelu": "prelu _prelu_kernel",
    "Elu": "elu",
    "Selu": "selu",
    "Celu": "celu",
    "Gelu": "gelu",
    "Swish": "silu",
    "Mish": "mish",
    "HardSwish": "hardswish",
    "HardSigmoid": "hardsigmoid",
    "Sigmoid": "sigmoid",
    "Softplus": "softplus",
    "Softsign": "softsign",
    "Tanh": "tanh",
    "Erf": "erf",
    "Exp": "exp expm1",
    "Log": "log log1p log2",
    "Sqrt": "sqrt rsqrt",
    "Reciprocal": "reciprocal",
    "Sin": "sin",
    "Cos": "cos",
    "Abs": "abs",
    "Neg": "neg",
    "Floor": "floor",
    "Ceil": "ceil",
    "Round": "round",
    "Sign": "sign",
    "Add": "add",
    "Sub": "sub rsub",
    "Mul": "mul square",
    "Div": "div floor_divide true_divide",
    "Mod": "remainder fmod",
    "Pow": "pow",
    "Max": "maximum",
    "Min": "minimum",
    "Equal": "eq ne",
    "Less": "lt",
    "LessOrEqual": "le",
    "Greater": "gt",
    "GreaterOrEqual": "ge",
    "And": "logical_and bitwise_and __and__",
    "Or": "logical_or bitwise_or __or__",
    "Xor": "logical_xor bitwise_xor",
    "Not": "logical_not bitwise_not",
    "IsNaN": "isnan",
    "Where": "where masked_fill triu tril",
    "Cast": "to _to_copy type_as",
    "Reshape": "view reshape _unsafe_view view_as unflatten pixel_unshuffle as_strided",
    "Flatten": "flatten",
    "Transpose": "permute transpose t numpy_T movedim swapaxes mT adjoint",
    "Squeeze": "squeeze",
    "Unsqueeze": "unsqueeze",
    "Expand": "expand expand_as broadcast_to",
    "Tile": "repeat tile",
    "Slice": "slice select narrow diagonal",
    "Pad": "pad constant_pad_nd reflection_pad2d replication_pad2d",
    "Identity": "clone contiguous alias detach copy _assert_tensor_metadata",
    "ConstantOfShape": "zeros ones full empty zeros_like ones_like full_like empty_like new_zeros new_ones new_full "
    "new_empty scalar_tensor fill zero",
    "Range": "arange linspace",
}
OP_TYPES: dict[str, str] = {name: op_type for op_type, names in _GROUPS.items() for name in names.split()}
"""ONNX's type by the name of an aten operator without its overload; `graph.units` lists the light ones."""


def op_type_of(name: str) -> str:
    """ONNX's operator type of an aten operator; its own name if there is none, which counts as heavy."""
    return OP_TYPES.get(name, name)


def macs_of(
    name: str, arguments: Mapping[str, Any], tensors: Mapping[str, Sequence[Shape]], outputs: Sequence[Shape]
) -> int | None:
    """MACs of an aten operator; None when a required shape is unknown.

    `arguments` are by the names of its schema, `tensors` the shapes of arguments that are tensors or lists of tensors.
    """
    op_type = op_type_of(name)
    order = {"Gemm": ("mat1", "mat2"), "Attention": ("query", "key", "value")}.get(op_type, ())
    if name == "linear":
        order = ("input", "weight")
    if name in ("baddbmm", "addbmm"):
        order = ("batch1", "batch2")
    if op_type in ("LSTM", "GRU", "RNN"):
        return _recurrent(arguments, tensors)
    if name in ("convolution", "_convolution") and arguments.get("transposed"):
        op_type = "ConvTranspose"
    named = [shape for key in order for shape in tensors.get(key, ())]
    shapes = named or [shape for each in tensors.values() for shape in each]
    equation = {"equation": arguments["equation"]} if "equation" in arguments else {}
    if op_type == "MatMul" and any(shape is not None and not shape for shape in shapes):
        return None
    return count_macs(CostedNode(op_type, equation, shapes, outputs))


def _recurrent(arguments: Mapping[str, Any], tensors: Mapping[str, Sequence[Shape]]) -> int | None:
    """Every weight matrix is applied once for each step and row."""
    (entered,), weights = tensors.get("input", (None,)), tensors.get("params", ())
    if entered is None or any(shape is None for shape in weights):
        return None
    rows = prod(entered[:-1])  # steps times batch, in either order
    return rows * sum(prod(shape) for shape in weights if shape is not None and len(shape) == 2)

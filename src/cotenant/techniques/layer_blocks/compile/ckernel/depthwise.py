"""C code of kernels for depthwise convolutions."""

from __future__ import annotations

from itertools import product

from cotenant.techniques.layer_blocks.compile.ckernel.dense import KERNEL, _sizes, input_strides, output_strides
from cotenant.techniques.layer_blocks.compile.ckernel.prelude import EXP, activation, head
from cotenant.techniques.layer_blocks.compile.knobs import Knobs
from cotenant.techniques.layer_blocks.compile.packing import blocks_of
from cotenant.techniques.layer_blocks.compile.problem import Problem
from cotenant.techniques.layer_blocks.compile.target import Target


def source(problem: Problem, knobs: Knobs, target: Target) -> str:
    """As `dense.source`. A tile is rows x columns of one block of channels; all taps are unrolled."""
    lanes, (high, wide), (down, right) = target.lanes, problem.kernel, problem.stride
    dilation = problem.dilation
    read = input_strides(problem, lanes)
    write = output_strides(problem, problem.out_halo, lanes)
    add = output_strides(problem, problem.add_halo, lanes)
    columns = min(knobs.columns, problem.out_width)
    heights, widths = _sizes(problem.out_height, knobs.rows), _sizes(problem.out_width, columns)
    parts = [head(target), EXP, activation(problem.activation)]
    for h, c in product(heights, widths):
        cells = list(product(range(h), range(c)))
        lines = [
            f"static void tile_{h}_{c}(const float *x, const float *w, const float *bias, const float *add, float *out)"
            " {",
            f"  vec {', '.join(f'a{i}_{j} = *(const vec *)bias' for i, j in cells)};",
        ]
        for r, s in product(range(high), range(wide)):
            lines.append(f"  {{ const vec k = *(const vec *)(w + {(r * wide + s) * lanes});")
            for i, j in cells:
                at = (i * down + r * dilation[0]) * read.row + (j * right + s * dilation[1]) * lanes
                lines.append(f"    a{i}_{j} += k * *(const vec *)(x + {at});")
            lines.append("  }")
        for i, j in cells:
            plus = f" + *(const vec *)(add + {i * add.row + j * lanes})" if problem.adds else ""
            lines.append(f"  *(vec *)(out + {i * write.row + j * lanes}) = act(a{i}_{j}{plus});")
        parts.append("\n".join([*lines, "}"]) + "\n")
    for h in heights:
        call = f"tile_{h}_{{}}(x + c * {right * lanes}, w, bias, add + c * V, out + c * V);"
        parts.append(
            f"static void row_{h}(const float *x, const float *w, const float *bias, const float *add, float *out) {{\n"
            f"  long c = 0;\n"
            f"  for (; c + {columns} <= {problem.out_width}; c += {columns}) {call.format(columns)}\n"
            + (f"  {call.format(problem.out_width % columns)}\n" if problem.out_width % columns else "")
            + "}\n"
        )
    tall, count = -(-problem.out_height // knobs.rows), blocks_of(problem.channels, lanes)
    row_tasks, block_tasks = -(-tall // knobs.row_tiles), -(-count // knobs.block_tiles)
    if knobs.axis == "filters":
        split = f"rt = t % {row_tasks}; image = t / {row_tasks} % images; bt = t / {row_tasks} / images;"
    else:
        split = f"bt = t % {block_tasks}; rt = t / {block_tasks} % {row_tasks}; image = t / {block_tasks * row_tasks};"
    loops = ["for (long b = b0; b < b1; b++)", "for (long y = y0; y < y1; y++)"]
    first, second = loops if knobs.order == "weights" else loops[::-1]
    calls = " else ".join(f"if (high == {h}) row_{h}(x, w, bias, add, out);" for h in heights)
    add_line = (
        f"(const float *)s->p[3] + image * s->n[2] + b * {add.block} + line * {add.row} + {add.base}"
        if problem.adds
        else "bias"
    )
    parts.append(f"""\
void {KERNEL}(const step *s, long part, long parts) {{
  const long images = s->n[0], total = images * {row_tasks * block_tasks}, end = total * (part + 1) / parts;
  for (long t = total * part / parts; t < end; t++) {{
    long rt, bt, image; {split}
    const long b0 = bt * {knobs.block_tiles}, y0 = rt * {knobs.row_tiles};
    const long b1 = b0 + {knobs.block_tiles} < {count} ? b0 + {knobs.block_tiles} : {count};
    const long y1 = y0 + {knobs.row_tiles} < {tall} ? y0 + {knobs.row_tiles} : {tall};
    {first} {second} {{
      const long line = y * {knobs.rows}, under = {problem.out_height} - line;
      const long high = under < {knobs.rows} ? under : {knobs.rows};
      const float *x = (const float *)s->p[0] + image * s->n[1] + b * {read.block} + line * {down * read.row}
        + {read.base};
      const float *w = (const float *)s->p[1] + b * {high * wide * lanes};
      const float *bias = (const float *)s->p[2] + b * V;
      const float *add = {add_line};
      float *out = (float *)s->p[4] + image * s->n[3] + b * {write.block} + line * {write.row} + {write.base};
      {calls}
    }}
  }}
}}
""")
    return "".join(parts)

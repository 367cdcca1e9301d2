"""C code of kernels for convolutions (but depthwise ones) and matrix products."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import product
from math import gcd

from cotenant.techniques.layer_blocks.compile.ckernel.prelude import EXP, activation, head
from cotenant.techniques.layer_blocks.compile.knobs import Knobs, block_tiles
from cotenant.techniques.layer_blocks.compile.packing import blocks_of, mixes_groups, spans_of
from cotenant.techniques.layer_blocks.compile.problem import Problem
from cotenant.techniques.layer_blocks.compile.target import Target

KERNEL = "kernel"
"""Name of the function in every library. Pointers of its step: input, packed weights, packed bias, added tensor,
output. Numbers: images, then the strides of images in the input, the added tensor and the output."""


@dataclass(frozen=True, slots=True)
class _Strides:
    """Strides of blocks, rows and columns, in numbers; `base` is the offset of the first pixel."""

    base: int
    block: int
    row: int
    column: int


def _blocked(height: int, width: int, halo: int, lanes: int) -> _Strides:
    row = (width + 2 * halo) * lanes
    return _Strides(halo * (row + lanes), (height + 2 * halo) * row, row, lanes)


def input_strides(problem: Problem, lanes: int) -> _Strides:
    """Strides of the input; `base` is the offset of the padded input."""
    halo, (top, left) = problem.in_halo, problem.pads[:2]
    if problem.pixels:
        row = (problem.width + 2 * halo) * problem.channels
        return _Strides((halo - top) * row + (halo - left) * problem.channels, 0, row, problem.channels)
    made = _blocked(problem.height, problem.width, halo, lanes)
    return _Strides((halo - top) * made.row + (halo - left) * lanes, made.block, made.row, lanes)


def output_strides(problem: Problem, halo: int, lanes: int) -> _Strides:
    """Strides of the output and of the added tensor."""
    if problem.rows:
        return _Strides(0, lanes, 0, problem.filters)
    return _blocked(problem.out_height, problem.out_width, halo, lanes)


def source(problem: Problem, knobs: Knobs, target: Target) -> str:
    """The text of a library with a function `KERNEL` that computes the problem with these knobs."""
    return _Dense(problem, knobs, target).text()


class _Dense:
    def __init__(self, problem: Problem, knobs: Knobs, target: Target) -> None:
        self.problem, self.knobs, self.target = problem, knobs, target
        self.lanes = lanes = target.lanes
        self.span = 1 if problem.pixels else spans_of(problem, lanes)[1]
        self.depth = problem.kernel[1] * problem.channels if problem.pixels else lanes
        self.taps = (problem.kernel[0], 1 if problem.pixels else problem.kernel[1])
        self.read = input_strides(problem, lanes)
        self.write = output_strides(problem, problem.out_halo, lanes)
        self.add = output_strides(problem, problem.add_halo, lanes)
        self.weight_block = self.span * self.taps[0] * self.taps[1] * self.depth * lanes
        self.tail = problem.filters % lanes if problem.rows else 0
        self.tiles = block_tiles(problem, knobs.blocks, lanes)
        self.is_mixed = mixes_groups(problem, lanes)
        self.passes = self.span if self.is_mixed else min(knobs.pass_blocks or self.span, self.span)
        left = problem.channels % lanes if problem.groups == 1 and not problem.pixels else 0
        self.left = left  # padding of the last block is not read: it may be infinity times 0
        self.unroll = gcd(knobs.unroll, left) if left else knobs.unroll
        self.vector = "uvec" if problem.rows else "vec"

    def text(self) -> str:
        problem, knobs = self.problem, self.knobs
        counts = sorted({count for _, count, _ in self.tiles})
        heights = _sizes(problem.out_height, knobs.rows)
        widths = _sizes(problem.out_width, knobs.columns)
        is_cut = self.passes < self.span
        parts = [head(self.target), EXP, activation(problem.activation)]
        parts += [self._tile(*size) for size in product(counts, heights, widths)]
        parts += [self._row(count, height) for count, height in product(counts, heights)]
        parts.append(self._kernel(counts, heights, is_cut))
        return "".join(parts)

    def _tile(self, count: int, height: int, width: int) -> str:
        """Accumulators of one tile in registers, over some blocks of channels."""
        cells = list(product(range(count), range(height), range(width)))
        names = {cell: "a{}_{}_{}".format(*cell) for cell in cells}
        is_cut = self.passes < self.span
        lines = [
            f"static void tile_{count}_{height}_{width}(const float *x, const float *w, const float *bias,",
            "    const float *add, float *out, long blocks, long left, long first, long last, long tail) {",
            f"  vec {', '.join(names.values())};",
        ]
        init = [f"    {name} = *(const vec *)(bias + {o * self.lanes});" for (o, _, _), name in names.items()]
        if is_cut:
            load = [
                f"    {name} = *({self.vector} *)(out + {self._at(self.write, cell)});" for cell, name in names.items()
            ]
            lines += ["  if (first) {", *init, "  } else {", *load, "  }"]
        else:
            lines += init
        lines += self._sums(names, count, is_masked=False)
        if self.is_mixed:  # a NaN may be infinity of another group times 0: repeat with masks
            is_nan = " | ".join(f"({name} != {name})" for name in names.values())
            lines += [f"  if (is_any({is_nan})) {{", *init, *self._sums(names, count, is_masked=True), "  }"]
        lines += [*self._end(names, count, is_cut), "}"]
        return "\n".join(line for line in lines if line) + "\n"

    def _sums(self, names: dict[tuple[int, int, int], str], count: int, *, is_masked: bool) -> list[str]:
        """Loops over channels and taps; with `is_masked` they skip weights of other groups."""
        down, right = self.problem.dilation
        return [
            "  for (long i = 0; i < blocks; i++) {",
            f"    const long depth = i == blocks - 1 ? left : {self.depth};" if self.left else "",
            f"    for (long r = 0; r < {self.taps[0]}; r++) for (long s = 0; s < {self.taps[1]}; s++) {{",
            f"      const float *p = x + i * {self.read.block} + r * {down * self.read.row}"
            f" + s * {right * self.read.column};",
            f"      const float *q = w + ((i * {self.taps[0]} + r) * {self.taps[1]} + s) * {self.depth * self.lanes};",
            *self._body(names, count, is_masked),
            "    }",
            "  }",
        ]

    def _body(self, names: dict[tuple[int, int, int], str], count: int, is_masked: bool) -> list[str]:
        unroll = self.unroll
        limit = "depth" if self.left else str(self.depth)
        lines = [f"      for (long l = 0; l < {limit}; l += {unroll}, p += {unroll}, q += {unroll * self.lanes}) {{"]
        pixels = dict.fromkeys((h, c) for _, h, c in names)
        for lane in range(unroll):
            weights = [f"k{o} = *(const vec *)(q + {o * self.weight_block + lane * self.lanes})" for o in range(count)]
            lines.append(f"        {{ const vec {', '.join(weights)};")
            if is_masked:
                masks = [f"m{o} = (ivec)k{o} != (int)0x80000000" for o in range(count)]
                lines.append(f"          const ivec {', '.join(masks)};")
            for h, c in pixels:
                at = h * self.problem.stride[0] * self.read.row + c * self.problem.stride[1] * self.read.column + lane
                factor = "(vec)((ivec)all(x_) & m{})" if is_masked else "x_"
                sums = " ".join(f"{names[o, h, c]} += k{o} * {factor.format(o)};" for o in range(count))
                lines.append(f"          {{ const float x_ = p[{at}]; {sums} }}")
            lines.append("        }")
        return [*lines, "      }"]

    def _end(self, names: dict[tuple[int, int, int], str], count: int, is_cut: bool) -> list[str]:
        done, kept = [], []
        for cell, name in names.items():
            at = self._at(self.write, cell)
            partial = self.tail and cell[0] == count - 1
            plus = ""
            if self.problem.adds:
                source = f"add + {self._at(self.add, cell)}"
                plus = f" + *(const {self.vector} *)({source})"
                if partial:
                    done.append(f"    {{ vec t_ = {{0}}; __builtin_memcpy(&t_, {source}, tail * 4); {name} += t_; }}")
                    plus = ""
            if partial:
                done.append(f"    {name} = act({name}); __builtin_memcpy(out + {at}, &{name}, tail * 4);")
            else:
                done.append(f"    *({self.vector} *)(out + {at}) = act({name}{plus});")
            kept.append(f"    *({self.vector} *)(out + {at}) = {name};")
        return ["  if (last) {", *done, "  } else {", *kept, "  }"] if is_cut else done

    def _at(self, strides: _Strides, cell: tuple[int, int, int]) -> int:
        return cell[0] * strides.block + cell[1] * strides.row + cell[2] * strides.column

    def _row(self, count: int, height: int) -> str:
        """All columns of a row of tiles."""
        width, step = self.problem.out_width, min(self.knobs.columns, self.problem.out_width)
        moves = self.problem.stride[1] * self.read.column
        call = "tile_{}_{}_{}(x + c * {}, w, bias, add + c * {}, out + c * {}, blocks, left, first, last, tail)"
        lines = [
            f"static void row_{count}_{height}(const float *x, const float *w, const float *bias, const float *add,",
            "    float *out, long blocks, long left, long first, long last, long tail) {",
            "  long c = 0;",
            f"  for (; c + {step} <= {width}; c += {step})",
            f"    {call.format(count, height, step, moves, self.add.column, self.write.column)};",
        ]
        if width % step:
            lines.append(f"  {call.format(count, height, width % step, moves, self.add.column, self.write.column)};")
        return "\n".join([*lines, "}"]) + "\n"

    def _kernel(self, counts: list[int], heights: list[int], is_cut: bool) -> str:
        problem, knobs = self.problem, self.knobs
        tall = -(-problem.out_height // knobs.rows)
        wide = len(self.tiles)
        row_tasks, block_tasks = -(-tall // knobs.row_tiles), -(-wide // knobs.block_tiles)
        table = ", ".join(f"{{{first}, {count}, {low}}}" for first, count, low in self.tiles)
        if knobs.axis == "filters":
            split = f"rt = t % {row_tasks}; image = t / {row_tasks} % images; bt = t / {row_tasks} / images;"
        else:
            split = (
                f"bt = t % {block_tasks}; rt = t / {block_tasks} % {row_tasks}; image = t / {block_tasks * row_tasks};"
            )
        over_blocks = "for (long b = b0; b < b1; b++)"
        over_rows = "for (long y = y0; y < y1; y++)"
        loops = (over_blocks, over_rows) if knobs.order == "weights" else (over_rows, over_blocks)
        span, block_taps = self.span, self.taps[0] * self.taps[1] * self.depth * self.lanes
        calls = [
            f"          {'' if not at else 'else '}if (count == {count} && high == {height}) row_{count}_{height}"
            "(x, w, bias, add, out, blocks, left, k == 0, k + blocks == SPAN, tail);"
            for at, (count, height) in enumerate(product(counts, heights))
        ]
        left = f"k + blocks == SPAN ? {self.left} : {self.depth}" if self.left else str(self.depth)
        last = blocks_of(problem.filters, self.lanes)
        tail = f"at + count == {last} ? {self.tail} : V" if self.tail else "V"
        lines = [
            f"#define SPAN {span}",
            f"static const int tiles[{wide}][3] = {{{table}}};",
            f"void {KERNEL}(const step *s, long part, long parts) {{",
            "  const long images = s->n[0];",
            f"  const long total = images * {row_tasks * block_tasks};",
            "  const long end = total * (part + 1) / parts;",
            "  for (long t = total * part / parts; t < end; t++) {",
            f"    long rt, bt, image; {split}",
            f"    const long b0 = bt * {knobs.block_tiles}, y0 = rt * {knobs.row_tiles};",
            f"    const long b1 = b0 + {knobs.block_tiles} < {wide} ? b0 + {knobs.block_tiles} : {wide};",
            f"    const long y1 = y0 + {knobs.row_tiles} < {tall} ? y0 + {knobs.row_tiles} : {tall};",
            f"    const float *x0 = (const float *)s->p[0] + image * s->n[1] + {self.read.base};",
            f"    const float *add0 = (const float *)s->p[3] + image * s->n[2] + {self.add.base};"
            if problem.adds
            else "    const float *add0 = (const float *)s->p[2];",
            f"    float *out0 = (float *)s->p[4] + image * s->n[3] + {self.write.base};",
            f"    for (long k = 0; k < SPAN; k += {self.passes})" if is_cut else "    { const long k = 0;",
            f"      {loops[0]} {loops[1]} {{",
            "        const long at = tiles[b][0], count = tiles[b][1];",
            f"        const long line = y * {knobs.rows}, under = {problem.out_height} - line;",
            f"        const long high = under < {knobs.rows} ? under : {knobs.rows};",
            f"        const long blocks = SPAN - k < {self.passes} ? SPAN - k : {self.passes};",
            f"        const long left = {left}, tail = {tail};",
            f"        const float *x = x0 + (tiles[b][2] + k) * {self.read.block}"
            f" + line * {problem.stride[0] * self.read.row};",
            f"        const float *w = (const float *)s->p[1] + at * {self.weight_block} + k * {block_taps};",
            "        const float *bias = (const float *)s->p[2] + at * V;",
            f"        const float *add = add0 + at * {self.add.block} + line * {self.add.row};"
            if problem.adds
            else "        const float *add = add0;",
            f"        float *out = out0 + at * {self.write.block} + line * {self.write.row};",
            *calls,
            "      }",
            "" if is_cut else "    }",
            "  }",
            "}",
        ]
        return "\n".join(line for line in lines if line) + "\n"


def _sizes(extent: int, tile: int) -> list[int]:
    """Sizes of the tiles that cover an extent: the whole one and the one at the end."""
    tile = min(tile, extent)
    return sorted({tile, *([extent % tile] if extent % tile else [])}, reverse=True)

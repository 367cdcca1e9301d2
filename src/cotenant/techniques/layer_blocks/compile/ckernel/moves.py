"""C code of steps without weights: layout changes, pooling, sums, products, activations. Sizes are in the step.

Pointers of a step: 0 and 3 are inputs, 4 is the output. Numbers:

- 0: images; 1, 2, 3: strides of images of pointers 0, 3 and 4
- 4: blocks (or channels, for a plain tensor), 5: rows, 6: columns
- 7, 8, 10: borders of pointers 0, 4 and 3; 9: activation; from 11 on as each function says
"""

from __future__ import annotations

from cotenant.techniques.layer_blocks.compile.problem import ACTIVATIONS

MOVES = (
    """\
#define RANGE(total) const long all_ = (total), end_ = all_ * (part + 1) / parts; \\
  for (long t = all_ * part / parts; t < end_; t++)
#define ROW(base, image, stride, block, rows, columns, rim, row) \\
  ((float *)(base) + (image) * (stride) + (((block) * ((rows) + 2 * (rim)) + (row) + (rim)) * ((columns) + 2 * (rim)) \\
    + (rim)) * V)

static vec change(vec x, const step *s) {
  switch (s->n[9]) {
"""
    + "".join(
        f"    case {number}: return {body};\n"
        for number, body in enumerate(
            {
                "": "x",
                "relu": "most((vec){0}, x)",
                "clip": "least(all(s->f[1]), most(all(s->f[0]), x))",
                "leaky": "most(all(0.0f), x) + s->f[0] * least(all(0.0f), x)",
                "sigmoid": "sigmoidv(x)",
                "silu": "x * sigmoidv(s->f[0] * x)",
                "hard_sigmoid": "least(all(1.0f), most(all(0.0f), s->f[0] * x + s->f[1]))",
                "hard_swish": "x * least(all(6.0f), most(all(0.0f), x + 3.0f)) * 0.166666667f",
                "tanh": "tanhv(x)",
                "gelu": "0.5f * x * (1.0f + erfv(x * 0.707106781f))",
            }.values()
        )
    )
    + """\
  }
  return x;
}

/* A plain picture to channels last: 4 channels. */
void pixels_in(const step *s, long part, long parts) {
  const long C = s->n[4], H = s->n[5], W = s->n[6], rim = s->n[8];
  RANGE(s->n[0] * H) {
    const long image = t / H, y = t % H;
    const float *in = (const float *)s->p[0] + image * s->n[1] + y * W;
    float *out = (float *)s->p[4] + image * s->n[3] + ((y + rim) * (W + 2 * rim) + rim) * C;
    for (long x = 0; x < W; x++) for (long c = 0; c < C; c++) out[x * C + c] = in[c * H * W + x];
  }
}

/* A plain tensor to blocks: 4 channels. */
void blocks_in(const step *s, long part, long parts) {
  const long C = s->n[4], H = s->n[5], W = s->n[6], rim = s->n[8], B = (C + V - 1) / V;
  RANGE(s->n[0] * B * H) {
    const long image = t / (B * H), b = t / H % B, y = t % H, many = C - b * V < V ? C - b * V : V;
    const float *in = (const float *)s->p[0] + image * s->n[1] + (b * V * H + y) * W;
    float *out = ROW(s->p[4], image, s->n[3], b, H, W, rim, y);
    if (many < V) memset(out, 0, W * V * 4);
    for (long x = 0; x < W; x++) for (long c = 0; c < many; c++) out[x * V + c] = in[c * H * W + x];
  }
}

/* The reverse. */
void blocks_out(const step *s, long part, long parts) {
  const long C = s->n[4], H = s->n[5], W = s->n[6], rim = s->n[7], B = (C + V - 1) / V;
  RANGE(s->n[0] * B * H) {
    const long image = t / (B * H), b = t / H % B, y = t % H, many = C - b * V < V ? C - b * V : V;
    const float *in = ROW(s->p[0], image, s->n[1], b, H, W, rim, y);
    float *out = (float *)s->p[4] + image * s->n[3] + (b * V * H + y) * W;
    for (long c = 0; c < many; c++) for (long x = 0; x < W; x++) out[c * H * W + x] = in[x * V + c];
  }
}

/* Rows of numbers to blocks, one column per row: 4 numbers of a row, 6 rows. */
void rows_in(const step *s, long part, long parts) {
  const long K = s->n[4], M = s->n[6], B = (K + V - 1) / V;
  const long T = (M + 7) / 8;  /* eight rows at a time: lines of both sides are used whole while they are near */
  RANGE(s->n[0] * T) {
    const long image = t / T, m0 = t % T * 8, m1 = m0 + 8 < M ? m0 + 8 : M;
    const float *in = (const float *)s->p[0] + image * s->n[1];
    float *out = (float *)s->p[4] + image * s->n[3];
    for (long b = 0; b < B; b++) {
      const long many = K - b * V < V ? K - b * V : V;
      for (long m = m0; m < m1; m++) {
        float *to = out + (b * M + m) * V;
        if (many == V) *(vec *)to = *(const uvec *)(in + m * K + b * V);
        else for (long c = 0; c < V; c++) to[c] = c < many ? in[m * K + b * V + c] : 0;
      }
    }
  }
}

/* The largest of rows y0 to y1 and columns x0 to x1. `odd` is set where a NaN or an infinity is there; the second
   function gives NaN where one is. */
#define LARGEST(each) \\
  vec a = all(-__builtin_inff()); \\
  for (long i = y0; i < y1; i++) { \\
    const float *in = first + i * row; \\
    for (long j = x0; j < x1; j++) { const vec x_ = *(const vec *)(in + j * V); a = most(a, x_); each; } \\
  }
static inline vec largest(const float *first, long row, long y0, long y1, long x0, long x1, ivec *odd) {
  vec sum = {0};
  LARGEST(sum += x_ * 0.0f)
  *odd |= sum != sum;
  return a;
}
static vec largest_or_nan(const float *first, long row, long y0, long y1, long x0, long x1) {
  ivec nan = {0};
  LARGEST(nan |= x_ != x_)
  return (vec)((ivec)a | nan);
}
static inline vec total(const float *first, long row, long y0, long y1, long x0, long x1) {
  vec a = {0};
  for (long i = y0; i < y1; i++) for (long j = x0; j < x1; j++) a += *(const vec *)(first + i * row + j * V);
  return a;
}

/* 11, 12 rows and columns of the output; 13, 14 of the window; 15, 16 stride; 17, 18 padding above and before;
   19: 0 the maximum, NaN if there is one, 1 the mean without padding, 2 the mean with padding. */
void pool(const step *s, long part, long parts) {
  const long B = s->n[4], H = s->n[5], W = s->n[6], OH = s->n[11], OW = s->n[12], row = (W + 2 * s->n[7]) * V;
  RANGE(s->n[0] * B * OH) {
    const long image = t / (B * OH), b = t / OH % B, y = t % OH, top = y * s->n[15] - s->n[17];
    const long y0 = top < 0 ? 0 : top, y1 = top + s->n[13] < H ? top + s->n[13] : H;
    const float *first = ROW(s->p[0], image, s->n[1], b, H, W, s->n[7], 0);
    float *out = ROW(s->p[4], image, s->n[3], b, OH, OW, s->n[8], y);
    ivec odd = {0};
    for (long again = 0; again < 2; again++) {  /* a second time only where NaN may be */
      for (long x = 0; x < OW; x++) {
        const long left = x * s->n[16] - s->n[18];
        const long x0 = left < 0 ? 0 : left, x1 = left + s->n[14] < W ? left + s->n[14] : W;
        vec a;
        if (s->n[19])
          a = total(first, row, y0, y1, x0, x1)
            * (1.0f / (s->n[19] == 1 ? (y1 - y0) * (x1 - x0) : s->n[13] * s->n[14]));
        else if (again) a = largest_or_nan(first, row, y0, y1, x0, x1);
        else a = largest(first, row, y0, y1, x0, x1, &odd);
        *(vec *)(out + x * V) = a;
      }
      if (!is_any(odd)) break;
    }
  }
}

/* The mean of each channel. */
void mean(const step *s, long part, long parts) {
  const long B = s->n[4], H = s->n[5], W = s->n[6];
  RANGE(s->n[0] * B) {
    const long image = t / B, b = t % B;
    vec a = all(0.0f);
    for (long y = 0; y < H; y++) {
      const float *in = ROW(s->p[0], image, s->n[1], b, H, W, s->n[7], y);
      vec r = all(0.0f);
      for (long x = 0; x < W; x++) r += *(const vec *)(in + x * V);
      a += r;
    }
    *(vec *)ROW(s->p[4], image, s->n[3], b, 1, 1, s->n[8], 0) = change(a * (1.0f / (H * W)), s);
  }
}

#define EACH(what) \\
  const long B = s->n[4], H = s->n[5], W = s->n[6]; \\
  RANGE(s->n[0] * B * H) { \\
    const long image = t / (B * H), b = t / H % B, y = t % H; \\
    const float *in = ROW(s->p[0], image, s->n[1], b, H, W, s->n[7], y); \\
    float *out = ROW(s->p[4], image, s->n[3], b, H, W, s->n[8], y); \\
    what \\
  }

void copy(const step *s, long part, long parts) { EACH(memcpy(out, in, W * V * 4);) }

void apply(const step *s, long part, long parts) {
  EACH(for (long x = 0; x < W; x++) *(vec *)(out + x * V) = change(*(const vec *)(in + x * V), s);)
}

void add(const step *s, long part, long parts) {
  EACH(const float *more = ROW(s->p[3], image, s->n[2], b, H, W, s->n[10], y);
    for (long x = 0; x < W; x++)
      *(vec *)(out + x * V) = change(*(const vec *)(in + x * V) + *(const vec *)(more + x * V), s);)
}

void multiply(const step *s, long part, long parts) {
  EACH(const float *more = ROW(s->p[3], image, s->n[2], b, H, W, s->n[10], y);
    for (long x = 0; x < W; x++)
      *(vec *)(out + x * V) = change(*(const vec *)(in + x * V) * *(const vec *)(more + x * V), s);)
}

/* By one number a channel. */
void scale(const step *s, long part, long parts) {
  EACH(const vec k = *(const vec *)ROW(s->p[3], image, s->n[2], b, 1, 1, s->n[10], 0);
    for (long x = 0; x < W; x++) *(vec *)(out + x * V) = change(*(const vec *)(in + x * V) * k, s);)
}
"""
)

NUMBER_OF = {kind: number for number, kind in enumerate(ACTIVATIONS)}
"""The number of an activation in a step without weights."""

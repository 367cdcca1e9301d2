"""The common start of all kernels: the step struct, vectors, and activations of vectors."""

from __future__ import annotations

from cotenant.techniques.layer_blocks.compile.problem import Activation
from cotenant.techniques.layer_blocks.compile.target import Target

POINTERS, NUMBERS = 6, 20
"""Pointers and numbers of a step."""

STEP = f"""\
typedef struct step step;
struct step {{
  void (*run)(const step *, long part, long parts);
  void *p[{POINTERS}];
  long n[{NUMBERS}];
  float f[4];
}};
"""
"""One call of a kernel: pointers, and sizes that are not in its code. It runs part `part` of `parts` of its tasks."""


def head(target: Target) -> str:
    """Vector types of the target: `vec`, `ivec`, and `uvec` without alignment."""
    size = 4 * target.lanes
    return (
        f"#define V {target.lanes}\n"
        f"typedef float vec __attribute__((vector_size({size}), may_alias));\n"
        f"typedef float uvec __attribute__((vector_size({size}), aligned(4), may_alias));\n"
        f"typedef int ivec __attribute__((vector_size({size}), may_alias));\n" + STEP
    )


EXP = """\
/* Of two numbers; the second one where either is NaN, as the processor has it. So bounds come first. */
#if !defined(__clang__) && defined(__AVX512F__) && V == 16
static inline vec most(vec a, vec b) { return __builtin_ia32_maxps512_mask(a, b, a, (unsigned short)-1, 4); }
static inline vec least(vec a, vec b) { return __builtin_ia32_minps512_mask(a, b, a, (unsigned short)-1, 4); }
#else
static inline vec most(vec a, vec b) { ivec m = a > b; return (vec)(((ivec)a & m) | ((ivec)b & ~m)); }
static inline vec least(vec a, vec b) { ivec m = a < b; return (vec)(((ivec)a & m) | ((ivec)b & ~m)); }
#endif
static inline int is_any(ivec m) { int r = 0; for (int i = 0; i < V; i++) r |= m[i]; return r; }
static inline vec all(float x) { vec v = {0}; return v + x; }
static inline vec expv(vec x) {
  x = least(all(89.0f), most(all(-87.0f), x));
  vec t = x * 1.44269504f + 12582912.0f;
  ivec k = (ivec)t;
  vec n = t - 12582912.0f;
  vec r = x - n * 0.693359375f;
  r = r + n * 2.12194440e-4f;
  vec p = r * 1.9875691500e-4f + 1.3981999507e-3f;
  p = p * r + 8.3334519073e-3f;
  p = p * r + 4.1665795894e-2f;
  p = p * r + 1.6666665459e-1f;
  p = p * r + 5.0000001201e-1f;
  p = p * r * r + r + 1.0f;
  return p * (vec)((k + 127) << 23);  /* a product: NaN stays NaN; above 88.3 an infinity */
}
static inline vec sigmoidv(vec x) { return 1.0f / (1.0f + expv(-x)); }
static inline vec tanhv(vec x) {
  ivec sign = (ivec)x & (int)0x80000000;
  vec a = (vec)((ivec)x ^ sign);
  vec far = 1.0f - 2.0f / (expv(a + a) + 1.0f);
  vec y = a * a;
  vec near = a * (1.0f + y * (-0.333333333f + y * (0.133333333f + y * (-0.0539682540f + y * 0.0218694885f))));
  ivec m = a < 0.25f;
  return (vec)((((ivec)near & m) | ((ivec)far & ~m)) ^ sign);
}
static inline vec erfv(vec x) {
  ivec sign = (ivec)x & (int)0x80000000;
  vec a = (vec)((ivec)x ^ sign);
  vec t = 1.0f / (1.0f + 0.3275911f * a);
  vec p = t * (0.254829592f + t * (-0.284496736f + t * (1.421413741f + t * (-1.453152027f + t * 1.061405429f))));
  vec far = 1.0f - p * expv(-a * a);
  vec y = a * a;
  vec near = a * (1.12837917f + y * (-0.376126389f + y * (0.112837917f + y * (-0.0268661706f + y * 5.22397763e-3f))));
  ivec m = a < 0.3f;
  return (vec)((((ivec)near & m) | ((ivec)far & ~m)) ^ sign);
}
"""
"""exp by powers of two and a polynomial (relative error 2e-7), and functions of it (1e-6; erf 3e-7 absolute)."""


def number(value: float) -> str:
    """A finite number in C."""
    return f"{float(value)!r}f"


def activation(function: Activation) -> str:
    """An activation of vectors, as the C function `act`. NaN stays NaN."""
    given = [None if each is None else number(each) for each in function.parameters]
    match function.kind:
        case "":
            body = "x"
        case "relu":
            body = "most((vec){0}, x)"
        case "clip":
            body = "x" if given[0] is None else f"most(all({given[0]}), x)"
            body = body if given[1] is None else f"least(all({given[1]}), {body})"
        case "leaky":
            body = f"most(all(0.0f), x) + {given[0]} * least(all(0.0f), x)"
        case "sigmoid":
            body = "sigmoidv(x)"
        case "silu":
            body = f"x * sigmoidv({given[0]} * x)"
        case "hard_sigmoid":
            body = f"least(all(1.0f), most(all(0.0f), {given[0]} * x + {given[1]}))"
        case "hard_swish":
            body = "x * least(all(6.0f), most(all(0.0f), x + 3.0f)) * 0.166666667f"
        case "tanh":
            body = "tanhv(x)"
        case _:
            body = "0.5f * x * (1.0f + erfv(x * 0.707106781f))"
    return f"static inline vec act(vec x) {{ return {body}; }}\n"

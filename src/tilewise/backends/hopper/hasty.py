"""ALiBi in the exponents of hasty forward kernels (``LEAN``), where the other forms add it by one more product."""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl


@gluon.constexpr_function
def _leaning_text(outputs, inputs):
    (out,) = outputs
    s, pivot, (first,), (slope,), (scale,) = inputs
    lines = [f"{{ .reg .f32 b0, b1, d, n; neg.f32 n, {pivot[0]};"]
    for at in range(0, len(s), 4):  # eight columns: two of the first row of a thread, and the same two of the second
        lines.append(f"add.f32 d, {first}, {2.0 * at}; fma.rn.f32 b0, {slope}, d, n; add.f32 b1, b0, {slope};")
        lines += [f"fma.rn.f32 {out[n]}, {s[n]}, {scale}, b{n & 1};" for n in range(at, at + 4)]
    return "\n".join(lines) + "}"


@gluon.jit
def leaning(s, pivot, qk_scale2, lean):
    """``s qk_scale2 + slope (first + column) - pivot``, with ``lean = (slope, first)``, where rows r and r + 8 of every 16 have one
    pivot: then a thread adds one number for each column to the scores of both its rows.

    It is rounded once in every other column and twice in the rest, and it is small where the weights are large.
    """
    y = s.reshape([s.shape[0], s.shape[1] // 8, 4, 2])
    quad = gl.arange(0, 4, gl.SliceLayout(0, gl.SliceLayout(1, gl.SliceLayout(3, y.type.layout))))
    first = (lean[1] + quad * 2).to(gl.float32)
    inputs = [s, pivot, first, lean[0], qk_scale2]
    return gl.inline_asm(_leaning_text, ("=&f", "f", "f", "f", "f", "f"), inputs, s.type, is_pure=True)


@gluon.jit
def paired(m):
    """The larger one of rows r and r + 8 of every 16, for both: a thread holds them."""
    x = m.reshape([m.shape[0] // 16, 2, 8])
    x = gl.max(x, 1, keep_dims=True) + gl.zeros_like(x)
    return gl.convert_layout(x.reshape([m.shape[0]]), m.type.layout, assert_trivial=True)

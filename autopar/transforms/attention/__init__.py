"""Fused attention: find softmax(QK^T)V in a trace, and replace it by a fused kernel, forward and backward.

1. `sections`: straight-line parts of a trace, and values that residuals carry from a forward to a backward loop
2. `cones`: the equations between the matmuls of an attention
3. `roles`: which matmul is which
4. `formula`: what a cone computes, checked by numbers: its scale, mask, bias, and gradients
5. `rewrite`: the trace with kernels instead

In: a trace.
Out: the rewritten trace, and why some attention stays as written.
Imported by: `transforms.program`, planner.
"""

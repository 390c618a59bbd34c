"""Predict the step time of a compiled program by replaying its scheduled HLO on a model of the hardware.

In: a compiled or lowered JAX program, a hardware profile and its rates (`cost_models/replay`).
Out: step time, exposed communication, a table of operations, a trace.
Imported by: verification.

Its formulas and constants are independent of the planner's: no module here imports `autopar.cost` or
`autopar.xla_model`.
"""

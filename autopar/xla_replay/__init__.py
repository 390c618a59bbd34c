"""Replay XLA's compiled program by the device's rates: an estimate that shares no formula with the planner.

In: the optimized, scheduled HLO; the rates of a device.
Out: step time, exposed communication by kind, time per operation, a timeline.
Imported by: verification, calibration, cli.
"""

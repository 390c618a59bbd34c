"""Place many models on one cluster: which devices run which models, chosen by a simulation of the engines' schedulers.

In: models with their latency bounds, traffic, a hardware profile, a number of devices.
Out: `Placement`s with goodput and utilization.
Imported by: serving, cli.
"""

from autopar.placement.layouts import Layout as Layout
from autopar.placement.layouts import StepTimes as StepTimes
from autopar.placement.placements import Group as Group
from autopar.placement.placements import ModelSpec as ModelSpec
from autopar.placement.placements import Placement as Placement
from autopar.placement.placements import Slo as Slo
from autopar.placement.search import Found as Found
from autopar.placement.search import place as place
from autopar.placement.simulate import Outcome as Outcome
from autopar.placement.simulate import simulate as simulate
from autopar.placement.traces import Trace as Trace
from autopar.placement.traces import Traffic as Traffic
from autopar.placement.traces import synthetic_trace as synthetic_trace

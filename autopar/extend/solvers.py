"""The optimization problem of a plan, and its solver."""

from autopar.solve.ilp import Ilp as Ilp
from autopar.solve.problem import Problem as Problem
from autopar.solve.problem import Solution as Solution

"""Sharding rules as named factors: `NodeView`, the input of a rule, and `Rule`, its output."""

from autopar.rules.factors import Factor as Factor
from autopar.rules.factors import Rule as Rule
from autopar.rules.factors import build_rule as build_rule
from autopar.rules.node_view import NodeView as NodeView
from autopar.rules.traits import Traits as Traits
from autopar.rules.user_rules import register_rule as register_rule

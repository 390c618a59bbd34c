"""Layouts of versioned stores: which server has which keys and rows, from sizes, links and rates."""

from autopar.versions.layout.layout import Layout as Layout
from autopar.versions.layout.layout import Piece as Piece
from autopar.versions.layout.plan import ArraySize as ArraySize
from autopar.versions.layout.plan import plan_layout as plan_layout
from autopar.versions.layout.servers import Server as Server

"""Vector search: indexes as compiled programs, laid over the mesh by the planner."""

from autopar.vector_search.build import Kind as Kind
from autopar.vector_search.build import build as build
from autopar.vector_search.build import load as load
from autopar.vector_search.data.index import Found as Found
from autopar.vector_search.data.index import Index as Index
from autopar.vector_search.data.index import IndexStats as IndexStats

"""Vector search: indexes as planned programs over a mesh.

In: vectors, a metric, a recall target.
Out: an `Index` that is searched, saved and loaded.
Imported by: cli.
"""

from autopar.vector_search.build import Kind as Kind
from autopar.vector_search.build import build as build
from autopar.vector_search.build import load as load
from autopar.vector_search.data.index import Found as Found
from autopar.vector_search.data.index import Index as Index
from autopar.vector_search.data.index import IndexStats as IndexStats

"""Vector search: build, save, load and search nearest-neighbour indexes as planned programs on a mesh.

In: vectors, a metric, a recall target.
Out: an `Index` with search, save and load.
Imported by: cli.
"""

from autopar.vector_search.build import Kind as Kind
from autopar.vector_search.build import build as build
from autopar.vector_search.build import load as load
from autopar.vector_search.data.index import Found as Found
from autopar.vector_search.data.index import Index as Index
from autopar.vector_search.data.index import IndexStats as IndexStats
from autopar.vector_search.graph_on_disk.build_graph_on_disk import build_graph_on_disk as build_graph_on_disk
from autopar.vector_search.graph_on_disk.index import GraphDiskIndex as GraphDiskIndex
from autopar.vector_search.on_disk.build_on_disk import build_on_disk as build_on_disk
from autopar.vector_search.on_disk.index import DiskIndex as DiskIndex
from autopar.vector_search.on_disk.index import Reads as Reads
from autopar.vector_search.servers.divide import divide as divide
from autopar.vector_search.servers.router import Answers as Answers
from autopar.vector_search.servers.router import ServedIndex as ServedIndex
from autopar.vector_search.updates.create import create_updatable as create_updatable
from autopar.vector_search.updates.create import make_updatable as make_updatable
from autopar.vector_search.updates.index import UpdatableIndex as UpdatableIndex

"""Parts of a vector index: a `Method` that `ApproximateIndex` runs, and its entry, a `Kind`."""

from autopar.vector_search.build import Kind as Kind
from autopar.vector_search.data.build_request import BuildRequest as BuildRequest
from autopar.vector_search.data.index_file import Saved as Saved
from autopar.vector_search.data.metrics import scores as scores
from autopar.vector_search.data.metrics import worst_score as worst_score
from autopar.vector_search.data.placement import Place as Place
from autopar.vector_search.frame.approximate_index import ApproximateIndex as ApproximateIndex
from autopar.vector_search.frame.recall_tuning import Measured as Measured
from autopar.vector_search.frame.recall_tuning import in_steps as in_steps
from autopar.vector_search.frame.search_method import Method as Method
from autopar.vector_search.kernels.top_k_merge import Best as Best

"""Serve decoder-only language models with planned programs: paged KV cache, continuous batching, speculative decoding.

In: a model's folder, requests.
Out: tokens and text; plans and predicted figures of an engine on absent devices.
Imported by: placement, serving, cli.
"""

from autopar.inference.model.checkpoint import Checkpoint as Checkpoint
from autopar.inference.model.checkpoint import write_checkpoint as write_checkpoint
from autopar.inference.model.config import DecoderConfig as DecoderConfig
from autopar.inference.model.decoder import Decoder as Decoder
from autopar.inference.model.tokenizer import load_tokenizer as load_tokenizer
from autopar.inference.schedule.requests import Options as Options
from autopar.inference.serve.best_of import Answers as Answers
from autopar.inference.serve.best_of import best_of as best_of
from autopar.inference.serve.chains import Chain as Chain
from autopar.inference.serve.engine import Engine as Engine
from autopar.inference.serve.engine import Serving as Serving
from autopar.inference.serve.generation import Generation as Generation
from autopar.inference.serve.generation import Piece as Piece
from autopar.inference.serve.kv_pool import KVPool as KVPool
from autopar.inference.serve.stats import Stats as Stats
from autopar.inference.serve.verifiers import asking as asking
from autopar.inference.step.sampling_params import SamplingOptions as SamplingOptions

"""autopar: decorate a train step, and it runs sharded on every device, by a plan you can read.

Names are imported when they are first used (PEP 562), so `import autopar` loads neither JAX nor the planner.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

from autopar.system.moved_modules import install
from autopar.version import __version__ as __version__

if TYPE_CHECKING:
    from autopar import errors as errors
    from autopar import inference as inference
    from autopar import vector_search as vector_search
    from autopar.api.checkpoint.checkpoints import Checkpoints as Checkpoints
    from autopar.api.checkpoint.store_checkpoints import StoreCheckpoints as StoreCheckpoints
    from autopar.api.elastic.run import ElasticRun as ElasticRun
    from autopar.api.elastic.run import join as join
    from autopar.api.make_plan import plan as plan
    from autopar.api.microbatched_step import MicrobatchedStep as MicrobatchedStep
    from autopar.api.parallel_step import ParallelStep as ParallelStep
    from autopar.api.parallelize import parallelize as parallelize
    from autopar.api.pipeline_templates import plan_templates as plan_templates
    from autopar.api.step_report import StepReport as StepReport
    from autopar.api.streamed_step import StreamedStep as StreamedStep
    from autopar.api.workers.step import WorkersStep as WorkersStep
    from autopar.code_export.export import export as export
    from autopar.diagnosis.diagnose import diagnose as diagnose
    from autopar.diagnosis.diagnosis import Diagnosis as Diagnosis
    from autopar.pipeline.plan import PipelinePlan as PipelinePlan
    from autopar.pipeline.plan_files import load_plan as load_plan
    from autopar.pipeline.templates.templates import PipelineTemplates as PipelineTemplates
    from autopar.plans.plan import Plan as Plan
    from autopar.plans.workers_plan import WorkersPlan as WorkersPlan
    from autopar.report.diff import PlanDiff as PlanDiff
    from autopar.report.diff import diff as diff
    from autopar.report.explain import explain as explain
    from autopar.report.html.document import write_report as write_report
    from autopar.report.workers import WorkersReport as WorkersReport
    from autopar.rules.user_rules import register_rule as register_rule
    from autopar.runtime.distributed.cpu_transport import let_arrays_pass as let_arrays_pass
    from autopar.runtime.distributed.watchdog import Watch as Watch
    from autopar.runtime.distributed.watchdog import watch as watch
    from autopar.verification.verification import Verification as Verification
    from autopar.verification.verify import verify as verify
    from autopar.versions.elastic.keeper import StoreKeeper as StoreKeeper
    from autopar.versions.elastic.server import serve_replica as serve_replica
    from autopar.versions.elastic.worker import ElasticWorker as ElasticWorker
    from autopar.versions.factors import SufficientFactors as SufficientFactors
    from autopar.versions.gossip.client import GossipClient as GossipClient
    from autopar.versions.gossip.store import GossipStore as GossipStore
    from autopar.versions.host_memory.stream import stream_parameters as stream_parameters
    from autopar.versions.remote.client import StoreClient as StoreClient
    from autopar.versions.store import VersionedStore as VersionedStore
    from autopar.xla_replay.replay import Replay as Replay
    from autopar.xla_replay.run import replay as replay

#: Where each public name is defined; checked against the imports above by `tests/test_facade.py`.
_DEFINED_IN = {
    "Checkpoints": "autopar.api.checkpoint.checkpoints",
    "diagnose": "autopar.diagnosis.diagnose",
    "Diagnosis": "autopar.diagnosis.diagnosis",
    "diff": "autopar.report.diff",
    "ElasticRun": "autopar.api.elastic.run",
    "ElasticWorker": "autopar.versions.elastic.worker",
    "explain": "autopar.report.explain",
    "export": "autopar.code_export.export",
    "GossipClient": "autopar.versions.gossip.client",
    "GossipStore": "autopar.versions.gossip.store",
    "join": "autopar.api.elastic.run",
    "let_arrays_pass": "autopar.runtime.distributed.cpu_transport",
    "load_plan": "autopar.pipeline.plan_files",
    "parallelize": "autopar.api.parallelize",
    "MicrobatchedStep": "autopar.api.microbatched_step",
    "ParallelStep": "autopar.api.parallel_step",
    "PipelinePlan": "autopar.pipeline.plan",
    "PipelineTemplates": "autopar.pipeline.templates.templates",
    "plan": "autopar.api.make_plan",
    "plan_templates": "autopar.api.pipeline_templates",
    "Plan": "autopar.plans.plan",
    "PlanDiff": "autopar.report.diff",
    "register_rule": "autopar.rules.user_rules",
    "replay": "autopar.xla_replay.run",
    "Replay": "autopar.xla_replay.replay",
    "StepReport": "autopar.api.step_report",
    "StoreCheckpoints": "autopar.api.checkpoint.store_checkpoints",
    "serve_replica": "autopar.versions.elastic.server",
    "StoreKeeper": "autopar.versions.elastic.keeper",
    "StoreClient": "autopar.versions.remote.client",
    "stream_parameters": "autopar.versions.host_memory.stream",
    "SufficientFactors": "autopar.versions.factors",
    "Verification": "autopar.verification.verification",
    "verify": "autopar.verification.verify",
    "VersionedStore": "autopar.versions.store",
    "Watch": "autopar.runtime.distributed.watchdog",
    "watch": "autopar.runtime.distributed.watchdog",
    "WorkersPlan": "autopar.plans.workers_plan",
    "WorkersReport": "autopar.report.workers",
    "StreamedStep": "autopar.api.streamed_step",
    "WorkersStep": "autopar.api.workers.step",
    "write_report": "autopar.report.html.document",
}
_PACKAGES = ("errors", "inference", "vector_search")


def __getattr__(name: str) -> Any:
    if name in _DEFINED_IN:
        value = getattr(import_module(_DEFINED_IN[name]), name)
    elif name in _PACKAGES:
        value = import_module(f"autopar.{name}")
    else:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}")
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_DEFINED_IN, *_PACKAGES})


install()
del install

"""autopar: decorate a train step, and it runs sharded on every device, by a plan you can read."""

from autopar import vector_search as vector_search
from autopar.api.checkpoint.checkpoints import Checkpoints as Checkpoints
from autopar.api.make_plan import plan as plan
from autopar.api.parallelize import ParallelStep as ParallelStep
from autopar.api.parallelize import parallelize as parallelize
from autopar.api.step_report import StepReport as StepReport
from autopar.code_export.export import export as export
from autopar.diagnosis.diagnose import diagnose as diagnose
from autopar.diagnosis.diagnosis import Diagnosis as Diagnosis
from autopar.pipeline.plan import PipelinePlan as PipelinePlan
from autopar.pipeline.plan_files import load_plan as load_plan
from autopar.plans.plan import Plan as Plan
from autopar.report.diff import PlanDiff as PlanDiff
from autopar.report.diff import diff as diff
from autopar.report.explain import explain as explain
from autopar.report.html.document import write_report as write_report
from autopar.rules.user_rules import register_rule as register_rule
from autopar.runtime.distributed.cpu_transport import let_arrays_pass as let_arrays_pass
from autopar.runtime.distributed.watchdog import Watch as Watch
from autopar.runtime.distributed.watchdog import watch as watch
from autopar.verification.verification import Verification as Verification
from autopar.verification.verify import verify as verify
from autopar.version import __version__ as __version__

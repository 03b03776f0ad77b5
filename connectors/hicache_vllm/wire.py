"""Our plans and reports as vLLM's own types, which it carries between processes."""

from __future__ import annotations

from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorMetadata, KVConnectorWorkerMetadata

from hicache_vllm.plans import Report, StepPlan

__all__ = ["PlanMetadata", "ReportMetadata"]


class PlanMetadata(KVConnectorMetadata):  # type: ignore[misc]  # vLLM is not installed where types are checked
    """A step's plan, from the scheduler to every worker."""

    def __init__(self, plan: StepPlan) -> None:
        self.plan = plan


class ReportMetadata(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """What workers have done, from them to the scheduler."""

    def __init__(self, report: Report) -> None:
        self.report = report

    def aggregate(self, other: ReportMetadata) -> ReportMetadata:
        """Both together."""
        self.report.add(other.report)
        return self

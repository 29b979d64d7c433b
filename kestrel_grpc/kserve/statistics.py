"""The statistics of ModelStatistics, from the counts of all calls for inference, by any protocol."""

from __future__ import annotations

from kestrel_client._pb.inference import grpc_service_pb2 as pb

from ..monitoring.call_statistics import CallStatistics
from .model import NAME, VERSION


def model_statistics(calls: CallStatistics) -> pb.ModelStatistics:
    """Each request counts as one inference and one execution, because a batch changes at every step of the engine."""
    counts = calls.methods.values()
    ok = sum(each.ok for each in counts)

    def spent(seconds: float, count: int = ok) -> pb.StatisticDuration:
        return pb.StatisticDuration(count=count, ns=round(1e9 * seconds))

    return pb.ModelStatistics(
        name=NAME,
        version=VERSION,
        last_inference=0 if calls.last_at is None else round(1e3 * calls.last_at),
        inference_count=ok,
        execution_count=ok,
        inference_stats=pb.InferStatistics(
            success=spent(sum(each.total_s for each in counts)),
            fail=spent(
                sum(each.failed_s for each in counts),
                sum(each.failed + each.cancelled + each.refused for each in counts),
            ),
            queue=spent(sum(each.queue_s for each in counts)),
            compute_input=spent(sum(each.preprocess_s for each in counts)),
            compute_infer=spent(sum(each.prefill_s + each.decode_s for each in counts)),
            compute_output=spent(0.0),
        ),
    )

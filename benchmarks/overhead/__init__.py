"""The parts of benchmarks.grpc_overhead: servers, engines and callers whose difference is the cost of a layer."""

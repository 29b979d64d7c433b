"""What a layer costs: servers, engines and callers to compare. Its program is through_grpc."""

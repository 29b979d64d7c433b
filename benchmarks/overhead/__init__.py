"""What a layer costs: servers, engines and callers to compare. Its programs are through_grpc and through_http."""

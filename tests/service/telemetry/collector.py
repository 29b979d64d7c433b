"""A process that receives OTLP as a collector does, over gRPC and HTTP, and passes on what it was sent.

python collector.py: writes a line with its two ports, then one for each export: the signal and its request in base64.
Ends when its standard input is closed.
"""

import base64
import gzip
import http.server
import sys
import threading
from concurrent import futures

import grpc
from opentelemetry.proto.collector.metrics.v1 import metrics_service_pb2, metrics_service_pb2_grpc
from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

_writing = threading.Lock()


def tell(signal: str, data: bytes) -> None:
    with _writing:
        print(signal, base64.b64encode(data).decode(), flush=True)


class Traces(trace_service_pb2_grpc.TraceServiceServicer):
    def Export(self, request, context):
        tell("grpc-traces", request.SerializeToString())
        return trace_service_pb2.ExportTraceServiceResponse()


class Metrics(metrics_service_pb2_grpc.MetricsServiceServicer):
    def Export(self, request, context):
        tell("grpc-metrics", request.SerializeToString())
        return metrics_service_pb2.ExportMetricsServiceResponse()


class Http(http.server.BaseHTTPRequestHandler):
    def do_POST(self):
        data = self.rfile.read(int(self.headers["content-length"]))
        if self.headers.get("content-encoding") == "gzip":
            data = gzip.decompress(data)
        tell("http-" + self.path.rpartition("/")[2], data)
        self.send_response(200)
        self.send_header("content-type", "application/x-protobuf")
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, *args):
        pass


def main() -> None:
    server = grpc.server(futures.ThreadPoolExecutor(2))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Traces(), server)
    metrics_service_pb2_grpc.add_MetricsServiceServicer_to_server(Metrics(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    web = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Http)
    threading.Thread(target=web.serve_forever, daemon=True).start()
    print(port, web.server_port, flush=True)
    sys.stdin.read()
    server.stop(None)
    web.shutdown()


if __name__ == "__main__":
    main()

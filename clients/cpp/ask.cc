// Prints the boxes of an object, then the answer to a question while it is generated: ask ADDRESS IMAGE
#include <grpcpp/grpcpp.h>

#include <fstream>
#include <iostream>
#include <iterator>

#include "kestrel/v1/vision_service.grpc.pb.h"

int main(int argc, char** argv) {
  if (argc != 3) return 2;
  auto client = kestrel::v1::VisionService::NewStub(
      grpc::CreateChannel(argv[1], grpc::InsecureChannelCredentials()));
  std::ifstream file(argv[2], std::ios::binary);
  std::string encoded((std::istreambuf_iterator<char>(file)), std::istreambuf_iterator<char>());

  kestrel::v1::DetectRequest wanted;
  wanted.mutable_image()->set_encoded(encoded);
  wanted.set_object("green crescent");
  kestrel::v1::DetectResponse found;
  grpc::ClientContext unary;
  grpc::Status status = client->Detect(&unary, wanted, &found);
  for (const auto& box : found.objects())
    std::cout << "box " << box.x_min() << " " << box.y_min() << " " << box.x_max() << " " << box.y_max() << "\n";

  if (status.ok()) {
    kestrel::v1::StreamQueryRequest request;
    request.mutable_request()->mutable_image()->set_encoded(encoded);
    request.mutable_request()->set_question("How many green crescents are there?");
    request.mutable_request()->mutable_sampling()->set_temperature(0);
    grpc::ClientContext streaming;
    auto stream = client->StreamQuery(&streaming, request);
    kestrel::v1::StreamQueryResponse message;
    while (stream->Read(&message))
      if (message.has_text_delta()) std::cout << message.text_delta().text() << std::flush;
    status = stream->Finish();
  }
  if (!status.ok()) std::cerr << status.error_message() << std::endl;
  return status.ok() ? 0 : 1;
}

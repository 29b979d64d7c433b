// Asks a question, finds points, and prints a description while it is generated: ask ADDRESS IMAGE
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

  kestrel::v1::QueryRequest question;
  question.add_images()->set_encoded(encoded);
  question.mutable_query()->set_question("How many green crescents are there?");
  question.mutable_query()->mutable_sampling()->set_temperature(0);
  kestrel::v1::QueryResponse asked;
  grpc::ClientContext asking;
  grpc::Status status = client->Query(&asking, question, &asked);
  if (status.ok()) std::cout << "answer " << asked.answers(0).text() << "\n";

  if (status.ok()) {
    kestrel::v1::PointRequest wanted;
    wanted.mutable_image()->set_encoded(encoded);
    wanted.mutable_point()->add_objects("green crescent");
    kestrel::v1::PointResponse found;
    grpc::ClientContext pointing;
    status = client->Point(&pointing, wanted, &found);
    for (const auto& each : found.detections())
      std::cout << "point " << each.point().x() << " " << each.point().y() << "\n";
  }

  if (status.ok()) {
    kestrel::v1::CaptionRequest request;
    request.mutable_image()->set_encoded(encoded);
    request.mutable_caption()->set_length(kestrel::v1::CAPTION_LENGTH_SHORT);
    request.mutable_caption()->mutable_sampling()->set_temperature(0);
    grpc::ClientContext streaming;
    auto stream = client->StreamCaption(&streaming, request);
    kestrel::v1::StreamCaptionResponse message;
    while (stream->Read(&message))
      if (message.has_text_delta()) std::cout << message.text_delta().text() << std::flush;
    std::cout << std::endl;
    status = stream->Finish();
  }
  if (!status.ok()) std::cerr << status.error_message() << std::endl;
  return status.ok() ? 0 : 1;
}

/** All messages and services of kestrel.v1, as protobuf-es makes them. */
export * from "./gen/kestrel/v1/admin_service_pb.js";
export * from "./gen/kestrel/v1/batch_service_pb.js";
export * from "./gen/kestrel/v1/common_pb.js";
export * from "./gen/kestrel/v1/image_service_pb.js";
export * from "./gen/kestrel/v1/model_service_pb.js";
export * from "./gen/kestrel/v1/vision_service_pb.js";

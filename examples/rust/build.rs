//! Generates the messages of kestrel.v1, and a client for each service, from the descriptors that buf wrote.
use prost_build::{Config, Service, ServiceGenerator};

struct Clients;

impl ServiceGenerator for Clients {
    fn generate(&mut self, service: Service, code: &mut String) {
        let name = format!("{}Client", service.name);
        code.push_str(&format!("pub struct {name}(pub crate::grpc::Channel);\n\nimpl {name} {{\n"));
        for method in service.methods.iter().filter(|method| !method.client_streaming) {
            let (way, answer) = match method.server_streaming {
                true => ("stream", format!("crate::grpc::Messages<{}>", method.output_type)),
                false => ("unary", method.output_type.clone()),
            };
            let path = format!("/{}.{}/{}", service.package, service.proto_name, method.proto_name);
            code.push_str(&format!(
                "    pub async fn {}(&self, request: {}) -> Result<{answer}, crate::grpc::Error> {{\n        \
                 self.0.{way}(\"{path}\", request).await\n    }}\n\n",
                method.name, method.input_type,
            ));
        }
        code.push_str("}\n\n");
    }
}

fn main() -> std::io::Result<()> {
    println!("cargo:rerun-if-changed=descriptors.binpb");
    Config::new()
        .service_generator(Box::new(Clients))
        .include_file("protos.rs")
        .skip_protoc_run()
        .file_descriptor_set_path("descriptors.binpb")
        .compile_protos(&[] as &[&str], &[] as &[&str])
}

//! Prints the boxes of an object, then the answer to a question while it is generated: ask ADDRESS IMAGE
mod grpc;
mod kestrel {
    #![allow(dead_code)]
    include!(concat!(env!("OUT_DIR"), "/kestrel.v1.rs"));
}

use kestrel::stream_query_response::Event;
use kestrel::{image, DetectRequest, Image, QueryRequest, Sampling, StreamQueryRequest, VisionServiceClient};
use std::io::Write;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), grpc::Error> {
    let arguments: Vec<String> = std::env::args().collect();
    let client = VisionServiceClient(grpc::Channel::connect(&arguments[1]).await?);
    let encoded = std::fs::read(&arguments[2])?;
    let image = Image { source: Some(image::Source::Encoded(encoded)), ..Default::default() };

    let found = client
        .detect(DetectRequest {
            image: Some(image.clone()),
            object: "green crescent".into(),
            ..Default::default()
        })
        .await?;
    for found in found.objects {
        println!("box {} {} {} {}", found.x_min, found.y_min, found.x_max, found.y_max);
    }

    let question = QueryRequest {
        image: Some(image),
        question: "How many green crescents are there?".into(),
        sampling: Some(Sampling { temperature: Some(0.0), ..Default::default() }),
        ..Default::default()
    };
    let mut events = client.stream_query(StreamQueryRequest { request: Some(question) }).await?;
    while let Some(response) = events.next().await? {
        if let Some(Event::TextDelta(delta)) = response.event {
            print!("{}", delta.text);
            std::io::stdout().flush()?;
        }
    }
    Ok(())
}

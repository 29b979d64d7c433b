//! Asks a question, finds points, and prints a description while it is generated: ask ADDRESS IMAGE
mod grpc;
mod kestrel {
    #![allow(dead_code)]
    include!(concat!(env!("OUT_DIR"), "/kestrel.v1.rs"));
}

use kestrel::stream_caption_response::Event;
use kestrel::{image, CaptionLength, CaptionRequest, Image, PointRequest, QueryRequest, Sampling, VisionServiceClient};
use std::io::Write;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), grpc::Error> {
    let arguments: Vec<String> = std::env::args().collect();
    let client = VisionServiceClient(grpc::Channel::connect(&arguments[1]).await?);
    let encoded = std::fs::read(&arguments[2])?;
    let image = Image { source: Some(image::Source::Encoded(encoded)), ..Default::default() };

    let greedy = Sampling { temperature: Some(0.0), ..Default::default() };

    let question = QueryRequest {
        image: Some(image.clone()),
        question: "How many green crescents are there?".into(),
        sampling: Some(greedy.clone()),
        ..Default::default()
    };
    println!("answer {}", client.query(question).await?.answer);

    let wanted = PointRequest {
        image: Some(image.clone()),
        object: "green crescent".into(),
        ..Default::default()
    };
    for point in client.point(wanted).await?.points {
        println!("point {} {}", point.x, point.y);
    }

    let caption = CaptionRequest {
        image: Some(image),
        length: CaptionLength::Short as i32,
        sampling: Some(greedy),
        ..Default::default()
    };
    let mut events = client.stream_caption(caption).await?;
    while let Some(response) = events.next().await? {
        if let Some(Event::TextDelta(delta)) = response.event {
            print!("{}", delta.text);
            std::io::stdout().flush()?;
        }
    }
    println!();
    Ok(())
}

//! Asks a question, finds points, and prints a description while it is generated: ask ADDRESS IMAGE
mod grpc;
mod protos {
    #![allow(dead_code)]
    include!(concat!(env!("OUT_DIR"), "/protos.rs"));
}

use protos::kestrel::v1::stream_caption_response::Event;
use protos::kestrel::v1::{
    image, CaptionLength, CaptionRequest, CaptionTask, Image, PointRequest, PointTask, QueryRequest, QueryTask, Sampling,
    VisionServiceClient,
};
use std::io::Write;

#[tokio::main(flavor = "current_thread")]
async fn main() -> Result<(), grpc::Error> {
    let arguments: Vec<String> = std::env::args().collect();
    let client = VisionServiceClient(grpc::Channel::connect(&arguments[1]).await?);
    let encoded = std::fs::read(&arguments[2])?;
    let image = Image { source: Some(image::Source::Encoded(encoded)), ..Default::default() };

    let greedy = Sampling { temperature: Some(0.0), ..Default::default() };

    let question = QueryTask {
        question: "How many green crescents are there?".into(),
        sampling: Some(greedy.clone()),
        ..Default::default()
    };
    let request = QueryRequest { images: vec![image.clone()], query: Some(question), ..Default::default() };
    println!("answer {}", client.query(request).await?.answers[0].text);

    let crescents = PointTask { objects: vec!["green crescent".into()], ..Default::default() };
    let request = PointRequest { image: Some(image.clone()), point: Some(crescents), ..Default::default() };
    for point in client.point(request).await?.detections.into_iter().filter_map(|each| each.point) {
        println!("point {} {}", point.x, point.y);
    }

    let caption = CaptionTask {
        length: CaptionLength::Short as i32,
        sampling: Some(greedy),
        ..Default::default()
    };
    let request = CaptionRequest { image: Some(image), caption: Some(caption), ..Default::default() };
    let mut events = client.stream_caption(request).await?;
    while let Some(response) = events.next().await? {
        if let Some(Event::TextDelta(delta)) = response.event {
            print!("{}", delta.text);
            std::io::stdout().flush()?;
        }
    }
    println!();
    Ok(())
}

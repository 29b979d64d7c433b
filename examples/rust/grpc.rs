//! gRPC over one HTTP/2 connection without TLS.
use bytes::{Buf, BufMut, Bytes, BytesMut};
use prost::Message;
use std::marker::PhantomData;

pub type Error = Box<dyn std::error::Error>;

pub struct Channel {
    sender: h2::client::SendRequest<Bytes>,
    address: String,
}

impl Channel {
    pub async fn connect(address: &str) -> Result<Self, Error> {
        let socket = tokio::net::TcpStream::connect(address).await?;
        let (sender, connection) = h2::client::handshake(socket).await?;
        tokio::spawn(connection);
        Ok(Self { sender, address: address.to_string() })
    }

    pub async fn unary<A: Message + Default>(&self, path: &str, request: impl Message) -> Result<A, Error> {
        let mut messages = self.stream(path, request).await?;
        let answer = messages.next().await?.ok_or("there is no response")?;
        messages.next().await?; // The status follows the response.
        Ok(answer)
    }

    pub async fn stream<A: Message + Default>(
        &self,
        path: &str,
        request: impl Message,
    ) -> Result<Messages<A>, Error> {
        let head = http::Request::post(format!("http://{}{path}", self.address))
            .header("content-type", "application/grpc")
            .header("te", "trailers")
            .body(())?;
        let (response, mut body) = self.sender.clone().ready().await?.send_request(head, false)?;
        let mut frame = BytesMut::new();
        frame.put_u8(0); // not compressed
        frame.put_u32(request.encoded_len() as u32);
        request.encode(&mut frame)?;
        body.send_data(frame.freeze(), true)?;
        let (head, body) = response.await?.into_parts();
        check(&head.headers)?; // A call that fails at once has its status here.
        Ok(Messages { body, buffer: BytesMut::new(), kind: PhantomData })
    }
}

/// The responses of a call.
pub struct Messages<A> {
    body: h2::RecvStream,
    buffer: BytesMut,
    kind: PhantomData<A>,
}

impl<A: Message + Default> Messages<A> {
    /// The next response. None after the last, if the status is OK.
    pub async fn next(&mut self) -> Result<Option<A>, Error> {
        loop {
            if self.buffer.len() >= 5 {
                let length = (&self.buffer[1..5]).get_u32() as usize;
                if self.buffer.len() >= 5 + length {
                    self.buffer.advance(5);
                    return Ok(Some(A::decode(self.buffer.split_to(length))?));
                }
            }
            match self.body.data().await {
                Some(chunk) => {
                    let chunk = chunk?;
                    self.body.flow_control().release_capacity(chunk.len())?;
                    self.buffer.extend_from_slice(&chunk);
                }
                None => {
                    check(&self.body.trailers().await?.ok_or("the call has no status")?)?;
                    return Ok(None);
                }
            }
        }
    }
}

fn check(headers: &http::HeaderMap) -> Result<(), Error> {
    let text = |name| headers.get(name).map_or("", |value| value.to_str().unwrap_or(""));
    match text("grpc-status") {
        "" | "0" => Ok(()),
        code => Err(format!("status {code}: {}", text("grpc-message")).into()),
    }
}

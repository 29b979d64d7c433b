// Asks a question, finds points, and prints a description while it is generated: Ask ADDRESS IMAGE
import com.google.protobuf.ByteString;
import com.kestrel.v1.CaptionLength;
import com.kestrel.v1.CaptionRequest;
import com.kestrel.v1.Image;
import com.kestrel.v1.Point;
import com.kestrel.v1.PointRequest;
import com.kestrel.v1.QueryRequest;
import com.kestrel.v1.Sampling;
import com.kestrel.v1.VisionServiceGrpc;
import io.grpc.ManagedChannel;
import io.grpc.ManagedChannelBuilder;
import java.nio.file.Files;
import java.nio.file.Path;

public class Ask {
  public static void main(String[] arguments) throws Exception {
    ManagedChannel channel = ManagedChannelBuilder.forTarget(arguments[0]).usePlaintext().build();
    var client = VisionServiceGrpc.newBlockingStub(channel);
    var image = Image.newBuilder()
        .setEncoded(ByteString.copyFrom(Files.readAllBytes(Path.of(arguments[1]))))
        .build();

    var greedy = Sampling.newBuilder().setTemperature(0).build();

    var question = QueryRequest.newBuilder()
        .setImage(image)
        .setQuestion("How many green crescents are there?")
        .setSampling(greedy)
        .build();
    System.out.println("answer " + client.query(question).getAnswer());

    var wanted = PointRequest.newBuilder().setImage(image).setObject("green crescent").build();
    for (Point point : client.point(wanted).getPointsList()) {
      System.out.println("point " + point.getX() + " " + point.getY());
    }

    var caption = CaptionRequest.newBuilder()
        .setImage(image)
        .setLength(CaptionLength.CAPTION_LENGTH_SHORT)
        .setSampling(greedy)
        .build();
    client.streamCaption(caption)
        .forEachRemaining(message -> System.out.print(message.getTextDelta().getText()));
    System.out.println();
    channel.shutdownNow();
  }
}

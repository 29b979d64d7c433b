// Asks a question, finds points, and prints a description while it is generated: Ask ADDRESS IMAGE
import com.google.protobuf.ByteString;
import com.kestrel.v1.CaptionLength;
import com.kestrel.v1.CaptionRequest;
import com.kestrel.v1.CaptionTask;
import com.kestrel.v1.Detection;
import com.kestrel.v1.Image;
import com.kestrel.v1.PointRequest;
import com.kestrel.v1.PointTask;
import com.kestrel.v1.QueryRequest;
import com.kestrel.v1.QueryTask;
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

    var question = QueryTask.newBuilder()
        .setQuestion("How many green crescents are there?")
        .setSampling(greedy);
    var asked = client.query(QueryRequest.newBuilder().addImages(image).setQuery(question).build());
    System.out.println("answer " + asked.getAnswers(0).getText());

    var crescents = PointTask.newBuilder().addObjects("green crescent");
    var found = client.point(PointRequest.newBuilder().setImage(image).setPoint(crescents).build());
    for (Detection each : found.getDetectionsList()) {
      System.out.println("point " + each.getPoint().getX() + " " + each.getPoint().getY());
    }

    var caption = CaptionTask.newBuilder()
        .setLength(CaptionLength.CAPTION_LENGTH_SHORT)
        .setSampling(greedy);
    client.streamCaption(CaptionRequest.newBuilder().setImage(image).setCaption(caption).build())
        .forEachRemaining(message -> System.out.print(message.getTextDelta().getText()));
    System.out.println();
    channel.shutdownNow();
  }
}

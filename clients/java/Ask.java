// Prints the boxes of an object, then the answer to a question while it is generated: Ask ADDRESS IMAGE
import com.google.protobuf.ByteString;
import dev.kestrel.v1.Box;
import dev.kestrel.v1.DetectRequest;
import dev.kestrel.v1.Image;
import dev.kestrel.v1.QueryRequest;
import dev.kestrel.v1.Sampling;
import dev.kestrel.v1.StreamQueryRequest;
import dev.kestrel.v1.VisionServiceGrpc;
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

    var request = DetectRequest.newBuilder().setImage(image).setObject("green crescent").build();
    for (Box box : client.detect(request).getObjectsList()) {
      System.out.println(
          "box " + box.getXMin() + " " + box.getYMin() + " " + box.getXMax() + " " + box.getYMax());
    }

    var question = QueryRequest.newBuilder()
        .setImage(image)
        .setQuestion("How many green crescents are there?")
        .setSampling(Sampling.newBuilder().setTemperature(0));
    client.streamQuery(StreamQueryRequest.newBuilder().setRequest(question).build())
        .forEachRemaining(message -> System.out.print(message.getTextDelta().getText()));
    System.out.flush();
    channel.shutdownNow();
  }
}

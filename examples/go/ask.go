// Asks a question, finds points, and prints a description while it is generated: ask ADDRESS IMAGE
package main

import (
	"context"
	"fmt"
	"io"
	"log"
	"os"

	pb "example.org/gen/go/kestrel/v1"
	"google.golang.org/grpc"
)

func main() {
	connection, err := grpc.Dial(os.Args[1], grpc.WithInsecure())
	check(err)
	defer connection.Close()
	encoded, err := os.ReadFile(os.Args[2])
	check(err)
	client := pb.NewVisionServiceClient(connection)
	image := &pb.Image{Source: &pb.Image_Encoded{Encoded: encoded}}

	temperature := 0.0
	greedy := &pb.Sampling{Temperature: &temperature}
	question := &pb.QueryTask{Question: "How many green crescents are there?", Sampling: greedy}
	asked, err := client.Query(context.Background(), &pb.QueryRequest{Images: []*pb.Image{image}, Query: question})
	check(err)
	fmt.Println("answer", asked.Answers[0].Text)

	crescents := &pb.PointTask{Objects: []string{"green crescent"}}
	found, err := client.Point(context.Background(), &pb.PointRequest{Image: image, Point: crescents})
	check(err)
	for _, each := range found.Detections {
		fmt.Println("point", each.Point.X, each.Point.Y)
	}

	short := &pb.CaptionTask{Length: pb.CaptionLength_CAPTION_LENGTH_SHORT, Sampling: greedy}
	stream, err := client.StreamCaption(context.Background(), &pb.CaptionRequest{Image: image, Caption: short})
	check(err)
	for {
		message, err := stream.Recv()
		if err == io.EOF {
			fmt.Println()
			return
		}
		check(err)
		fmt.Print(message.GetTextDelta().GetText())
	}
}

func check(err error) {
	if err != nil {
		log.Fatal(err)
	}
}

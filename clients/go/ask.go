// Prints the boxes of an object, then the answer to a question while it is generated: ask ADDRESS IMAGE
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

	found, err := client.Detect(context.Background(), &pb.DetectRequest{Image: image, Object: "green crescent"})
	check(err)
	for _, box := range found.Objects {
		fmt.Println("box", box.XMin, box.YMin, box.XMax, box.YMax)
	}

	temperature := 0.0
	stream, err := client.StreamQuery(context.Background(), &pb.StreamQueryRequest{Request: &pb.QueryRequest{
		Image:    image,
		Question: "How many green crescents are there?",
		Sampling: &pb.Sampling{Temperature: &temperature},
	}})
	check(err)
	for {
		message, err := stream.Recv()
		if err == io.EOF {
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
